"""The transfers of one session: which stream belongs to which, where each stands, and when each is next due.

This module knows stream numbering (a push T owns T, and T + 1 + i for descriptor i, and so does a pull for as many as
its FETCH says; a reservation T) and walks the state table. It sends nothing, and does not know which side it plays.
Ended transfers are remembered for a while, so that late messages are told from wrong ones.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from hurray_rdma.control.codes import ErrorCode, LocalProtocolError
from hurray_rdma.control.exchange import Abort
from hurray_rdma.control.offers import Fetch, Offer, Request, Reserve
from hurray_rdma.control.states import HARMLESS_STEPS, OPEN_STATES, TRANSFER_STEPS, Step, TransferKind, TransferState
from hurray_rdma.errors import ProtocolError

__all__ = ["FIRST_TRANSFER_ID", "LAST_STREAM_ID", "Transfer", "TransferBook", "every_index"]

FIRST_TRANSFER_ID = 2
LAST_STREAM_ID = 2**32 - 1
_NUM_REMEMBERED = 1024


@dataclass(slots=True)
class Transfer:
    """One transfer as one side sees it."""

    transfer_id: int
    kind: TransferKind
    num_descriptors: int
    """Streams after its own: one for each descriptor of a push, as many as a pull keeps, none of a reservation."""
    request: Request | None = None
    """What opened it, while it is open; a push's until it is to end."""
    nbytes: int = 0
    """What is kept of its tables."""
    state: TransferState = TransferState.OFFERED
    granted: bool = False
    ended: bytearray = field(init=False)
    """1 per descriptor whose end was told; empty once the transfer has ended."""
    num_ended: int = 0
    num_published: int = 0
    """Pull: descriptors of what was published."""
    taken: bool = False
    """Pull: the pages come from the server in frames."""
    next_offsets: dict[int, int] = field(default_factory=dict)
    """Fallback only: end of the TENSOR_DATA bytes so far, by descriptor."""
    stop: Abort | None = None
    """The ABORT this side sent, to be repeated until QUIET."""
    commit: tuple[bytes | memoryview, ...] = ()
    """Client: the COMMIT of a reservation in its frame, to be repeated until ACKNOWLEDGE."""
    due: float | None = None
    timeout_s: float = math.inf
    """Client: the time that it was given."""
    until: float = math.inf
    """Client: the end of that."""
    renew_s: float = 0.0
    """Client: how often a lease of what was granted is to be renewed."""
    num_said_ends: int = 0
    """How often all ends of this side were said."""
    said_in: int = -1
    """The batch of what is to be sent that has what was said last: ABORT, or the ends, or COMMIT."""

    def __post_init__(self) -> None:
        self.ended = bytearray(self.num_descriptors)

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_STATES

    @classmethod
    def of(cls, transfer_id: int, request: Request) -> Transfer:
        """The transfer that this request opens."""
        match request:
            case Offer():
                return cls(transfer_id, TransferKind.PUSH, request.num_descriptors, request, nbytes=request.nbytes)
            case Fetch():
                return cls(transfer_id, TransferKind.PULL, request.num_streams, request)
            case Reserve():
                return cls(transfer_id, TransferKind.RESERVATION, 0, request)

    @property
    def last_stream_id(self) -> int:
        return self.transfer_id + self.num_descriptors

    def require(self, *kinds: TransferKind) -> None:
        """Raise LocalProtocolError unless the transfer is of one of these kinds."""
        if self.kind not in kinds:
            names = " or a ".join(kind.name for kind in kinds)
            raise LocalProtocolError(
                f"transfer {self.transfer_id} is a {self.kind.name}; this is possible with a {names} only"
            )

    @property
    def num_carried(self) -> int:
        """Descriptors that one side writes, or sends in frames."""
        return self.num_descriptors if self.kind is TransferKind.PUSH else self.num_published if self.taken else 0

    @property
    def all_ended(self) -> bool:
        """Whether all of those have ended."""
        return self.num_ended == self.num_carried

    def not_ended(self, descriptor_indices: tuple[int, ...]) -> tuple[int, ...]:
        """Those that have not ended before, each once; none if the whole transfer has."""
        if not self.is_open:
            return ()
        if not self.num_ended and descriptor_indices == every_index(self.num_descriptors):
            return descriptor_indices
        return tuple([index for index in dict.fromkeys(descriptor_indices) if not self.ended[index]])

    def end_step(self, count: int) -> Step:
        """The step that the end of so many more descriptors is."""
        last = self.kind is TransferKind.PUSH and self.num_ended + count == self.num_descriptors
        return Step.LAST_END if last else Step.END

    def mark_ended(self, descriptor_indices: tuple[int, ...]) -> None:
        count = len(descriptor_indices)
        if count == self.num_descriptors:
            self.ended = bytearray(b"\1") * count
        else:
            for index in descriptor_indices:
                self.ended[index] = 1
        self.num_ended += count


@lru_cache(maxsize=64)
def every_index(num_descriptors: int) -> tuple[int, ...]:
    """Those of all descriptors of a snapshot."""
    return tuple(range(num_descriptors))


class TransferBook:
    """All transfers of a session, open ones and the last 1024 that ended."""

    def __init__(self) -> None:
        self._by_id: dict[int, Transfer] = {}
        self._ids: list[int] = []
        self._finished: deque[int] = deque()
        self._timers: list[tuple[float, int]] = []
        self.next_id = FIRST_TRANSFER_ID
        """Lowest stream_id that no transfer has owned yet."""
        self.open_nbytes = 0
        """What the tables of open transfers take."""
        self.rescheduled = False
        """Whether something was scheduled that is due before what `look_from_now_on` was told."""
        self._looked_at = math.inf

    @property
    def num_open(self) -> int:
        return len(self._by_id) - len(self._finished)

    def open_transfers(self) -> Iterator[Transfer]:
        """Open transfers, oldest first."""
        return (self._by_id[i] for i in list(self._ids) if self._by_id[i].is_open)

    def add(self, transfer: Transfer) -> None:
        insort(self._ids, transfer.transfer_id)
        self._by_id[transfer.transfer_id] = transfer
        self.open_nbytes += transfer.nbytes
        self.next_id = max(self.next_id, transfer.last_stream_id + 1)

    def hold(self, transfer: Transfer, nbytes: int) -> None:
        """So many bytes more are kept of an open transfer."""
        transfer.nbytes += nbytes
        self.open_nbytes += nbytes

    def find(self, stream_id: int) -> tuple[Transfer, int | None] | None:
        """The transfer that owns the stream, and the descriptor's index on its own stream; None if none is known."""
        own = self._by_id.get(stream_id)
        if own is not None:
            return own, None
        if stream_id >= self.next_id:
            return None
        at = bisect_right(self._ids, stream_id)
        if not at:
            return None
        transfer = self._by_id[self._ids[at - 1]]
        index = stream_id - transfer.transfer_id - 1
        if index >= transfer.num_descriptors:
            return None
        return transfer, None if index < 0 else index

    def get(self, transfer_id: int) -> Transfer | None:
        """The transfer of that id, None if it was forgotten.

        Raises:
            LocalProtocolError: there never was one.
        """
        transfer = self._by_id.get(transfer_id)
        if transfer is None and transfer_id >= self.next_id:
            raise LocalProtocolError("no transfer has this id yet", field="transfer_id", value=transfer_id)
        return transfer

    def hear(self, transfer: Transfer, step: Step) -> bool:
        """Take a step the peer made. False: it came late or twice, and nothing changed.

        Raises:
            ProtocolError: the step is in no row of the table.
        """
        after = TRANSFER_STEPS[transfer.state].get(step)
        if after is None:
            if step in HARMLESS_STEPS[transfer.state]:
                return False
            raise ProtocolError(
                f"{step.name} cannot follow in state {transfer.state.name} of transfer {transfer.transfer_id}",
                code=ErrorCode.INVALID_MESSAGE,
            )
        self._move(transfer, after)
        return True

    def say(self, transfer: Transfer | None, step: Step) -> bool:
        """Take a step of this side. False: the transfer is ending or has ended, so nothing is to be sent.

        Raises:
            LocalProtocolError: the step is in no row of the table.
        """
        if transfer is None:
            return False
        after = TRANSFER_STEPS[transfer.state].get(step)
        if after is None:
            if transfer.state is TransferState.STOPPING or not transfer.is_open:
                return False
            raise LocalProtocolError(
                f"{step.name} is not possible in state {transfer.state.name} of transfer {transfer.transfer_id}"
            )
        self._move(transfer, after)
        return True

    def _move(self, transfer: Transfer, state: TransferState) -> None:
        if state is transfer.state:
            return
        transfer.state = state
        transfer.due = None
        if state is TransferState.GRANTED:
            transfer.granted = True
        if transfer.is_open:
            if state is TransferState.STOPPING and transfer.kind is TransferKind.PUSH:
                self._let_go(transfer)  # its QUIET may never come
            return
        self._let_go(transfer)
        transfer.stop = None
        transfer.ended = bytearray()
        transfer.commit = ()
        transfer.next_offsets.clear()
        self._finished.append(transfer.transfer_id)
        if len(self._finished) > _NUM_REMEMBERED:
            forgotten = self._finished.popleft()
            del self._by_id[forgotten]
            del self._ids[bisect_right(self._ids, forgotten) - 1]

    def let_go_all(self) -> None:
        """The session is closed: nobody asks for the tables of its transfers any more."""
        for transfer in self.open_transfers():
            self._let_go(transfer)

    def _let_go(self, transfer: Transfer) -> None:
        self.open_nbytes -= transfer.nbytes
        transfer.nbytes = 0
        transfer.request = None

    def schedule(self, transfer: Transfer, due: float) -> None:
        """Have ``pop_due`` give the transfer at this time, unless its state changes before."""
        transfer.due = due
        if due < self._looked_at:
            self.rescheduled = True
        heapq.heappush(self._timers, (due, transfer.transfer_id))

    def look_from_now_on(self, when: float | None) -> None:
        """Somebody will call ``next_due`` again at that time, whatever happens; None is never."""
        self.rescheduled = False
        self._looked_at = math.inf if when is None else when

    def next_due(self) -> float | None:
        """When ``pop_due`` next has something to give."""
        while self._timers and not self._is_current(*self._timers[0]):
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def pop_due(self, now: float) -> list[Transfer]:
        """The transfers whose time has come."""
        due = []
        while (when := self.next_due()) is not None and when <= now:
            transfer = self._by_id[heapq.heappop(self._timers)[1]]
            transfer.due = None
            due.append(transfer)
        return due

    def _is_current(self, due: float, transfer_id: int) -> bool:
        transfer = self._by_id.get(transfer_id)
        return transfer is not None and transfer.due == due
