"""The life of a session and of a transfer, as tables; nothing else in this room decides what may follow what.

This module knows states and steps. It does not know which side it plays, and it knows neither bytes nor time: both
sides walk the same table, each with the steps it takes and the steps it hears of, and every crossing of messages on the
way is a row of it.

A transfer, seen from either side::

    OFFERED --GRANT--> GRANTED --(TAKE, PREPARE, DATA, END, RENEW)--> GRANTED --LAST_END--> ENDED --ACKNOWLEDGE--> DONE
       |                  |                                                          |
       +--REFUSE--> REFUSED       any of the three --ABORT--> STOPPING --QUIET--> STOPPED

All kinds walk the same way. In a pull PUBLISHED is the GRANT and the reader's END is the LAST_END, and what is said
here of writing holds for reading: the server's source pages are under lease from GRANT to ACKNOWLEDGE or QUIET. A
reader without a lane says TAKE, and DATA and END come from the server. A reservation is granted before there is
anything to send; its COMMIT, which tells what was written, is the LAST_END. PREPARE says the same before it is written,
and a bell in shared memory that rings after it (`ServerSession.hear_bell`) is then as good as the COMMIT.

Once both sides have seen GRANT, pages may be written at any time until QUIET or ACKNOWLEDGE. So an ERROR after a grant
(REFUSE in GRANTED or ENDED) leads to STOPPING like an abort does, and a QUIET whose ABORT was lost counts for both.
"""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["HARMLESS_STEPS", "OPEN_STATES", "TRANSFER_STEPS", "SessionState", "Step", "TransferKind", "TransferState"]


class SessionState(Enum):
    """HELLO: waiting for the peer's HELLO. SESSION: for its SESSION. OPEN, CLOSED: what they say."""

    HELLO = auto()
    SESSION = auto()
    OPEN = auto()
    CLOSED = auto()


class TransferKind(Enum):
    """PUSH: the client writes what it offered. PULL: it reads what it fetches. RESERVATION: it writes what it says only
    once it is written, into pages that it was granted ahead."""

    __hash__ = object.__hash__  # Enum's own is a Python function, and tables are looked into for every message.

    PUSH = auto()
    PULL = auto()
    RESERVATION = auto()


class TransferState(Enum):
    """Where a transfer stands; STOPPING still may have writes or reads in flight, the last three have none."""

    __hash__ = object.__hash__

    OFFERED = auto()
    GRANTED = auto()
    ENDED = auto()
    STOPPING = auto()
    DONE = auto()
    REFUSED = auto()
    STOPPED = auto()


class Step(Enum):
    """What moves a transfer on, said or heard."""

    __hash__ = object.__hash__

    GRANT = auto()
    REFUSE = auto()
    TAKE = auto()
    PREPARE = auto()
    DATA = auto()
    END = auto()
    LAST_END = auto()
    ACKNOWLEDGE = auto()
    ABORT = auto()
    QUIET = auto()
    RENEW = auto()


OPEN_STATES = frozenset(
    {TransferState.OFFERED, TransferState.GRANTED, TransferState.ENDED, TransferState.STOPPING},
)
"""States in which a transfer still needs something from someone."""

TRANSFER_STEPS: dict[TransferState, dict[Step, TransferState]] = {
    TransferState.OFFERED: {
        Step.GRANT: TransferState.GRANTED,
        Step.REFUSE: TransferState.REFUSED,
        Step.ABORT: TransferState.STOPPING,
        Step.QUIET: TransferState.STOPPED,
    },
    TransferState.GRANTED: {
        Step.TAKE: TransferState.GRANTED,
        Step.PREPARE: TransferState.GRANTED,
        Step.DATA: TransferState.GRANTED,
        Step.END: TransferState.GRANTED,
        Step.RENEW: TransferState.GRANTED,
        Step.LAST_END: TransferState.ENDED,
        Step.REFUSE: TransferState.STOPPING,
        Step.ABORT: TransferState.STOPPING,
        Step.QUIET: TransferState.STOPPED,
    },
    TransferState.ENDED: {
        Step.ACKNOWLEDGE: TransferState.DONE,
        Step.REFUSE: TransferState.STOPPING,
        Step.ABORT: TransferState.STOPPING,
        Step.QUIET: TransferState.STOPPED,
    },
    TransferState.STOPPING: {Step.QUIET: TransferState.STOPPED},
    TransferState.DONE: {},
    TransferState.REFUSED: {},
    TransferState.STOPPED: {},
}

HARMLESS_STEPS: dict[TransferState, frozenset[Step]] = {
    TransferState.OFFERED: frozenset(),
    TransferState.GRANTED: frozenset({Step.GRANT}),
    TransferState.ENDED: frozenset(
        {Step.GRANT, Step.TAKE, Step.PREPARE, Step.DATA, Step.END, Step.LAST_END, Step.RENEW}
    ),
    TransferState.STOPPING: frozenset(Step) - {Step.QUIET},
    TransferState.DONE: frozenset(Step),
    TransferState.REFUSED: frozenset(Step),
    TransferState.STOPPED: frozenset(Step),
}
"""Steps heard late or twice: nothing happens. A step that is in neither table breaks the protocol."""
