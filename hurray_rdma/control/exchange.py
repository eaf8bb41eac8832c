"""The private messages about a session and about the life of a transfer as values: SESSION, ABORT, QUIET, RENEW,
ENDED.

This module knows what these messages may say, and checks it when one is made; so do, for the others, pools.py (POOL)
and offers.py (OFFER, FETCH, RESERVE and what answers them). It knows neither bytes nor order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hurray_rdma.control.checks import MAX_NAME_CHARS, U32_MAX, at_most, between, seconds

__all__ = ["MAX_DESCRIPTORS", "MAX_QUIET_SESSIONS", "Abort", "Ended", "Quiet", "Renew", "SessionMessage"]

_MAX_TOKEN_CHARS = 4096
_MAX_HOST_ID_NBYTES = 256
_MAX_PROCESS_ID_NBYTES = 128
_MAX_ADDRESS_NBYTES = 32 * 1024
_MAX_REASON_CHARS = 4096
_MIN_SESSION_ID_NBYTES, _MAX_SESSION_ID_NBYTES = 16, 64
_MAX_TICKET_NBYTES = 64
MAX_QUIET_SESSIONS = 64
MAX_DESCRIPTORS = 4096
"""Of one snapshot. There is one for each role of each layer: a model of 128 layers has 256."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMessage:
    """SESSION (0xF0): who speaks. ``token`` is set by the client only, and never shown by ``repr``."""

    engine_name: str
    token: str = field(default="", repr=False)
    host_id: bytes
    process_id: bytes = b""
    worker_address: bytes
    """UCX worker address; opaque here."""
    heartbeat_s: float
    session_id: bytes = field(default=b"", repr=False)
    """Client: a name for this session that nobody can guess, 16 to 64 bytes; empty is none."""
    quiet_sessions: tuple[bytes, ...] = field(default=(), repr=False)
    """Client: earlier sessions that broke, and of which nothing is in flight any more; at most 64, each
    of 16 to 64 bytes, so that a session without a name is never among them."""
    pages_port: int = 0
    """Server: TCP port, beside its own on the same address, of connections for page bytes; 0 is none."""
    pages_ticket: bytes = field(default=b"", repr=False)
    """Server: the key that this client proves to have there, once and soon; a secret of at most 64 bytes."""

    def __post_init__(self) -> None:
        at_most("engine_name", self.engine_name, MAX_NAME_CHARS)
        at_most("token", self.token, _MAX_TOKEN_CHARS)
        at_most("host_id", self.host_id, _MAX_HOST_ID_NBYTES)
        at_most("process_id", self.process_id, _MAX_PROCESS_ID_NBYTES)
        at_most("worker_address", self.worker_address, _MAX_ADDRESS_NBYTES)
        seconds("heartbeat_s", self.heartbeat_s)
        between("len(quiet_sessions)", len(self.quiet_sessions), 0, MAX_QUIET_SESSIONS)
        for index, session_id in enumerate(self.quiet_sessions):
            _check_session_id(f"quiet_sessions[{index}]", session_id)
        if self.session_id:
            _check_session_id("session_id", self.session_id)
        between("pages_port", self.pages_port, 0, 65535)
        between("len(pages_ticket)", len(self.pages_ticket), 0, _MAX_TICKET_NBYTES)


def _check_session_id(name: str, session_id: bytes) -> None:
    # The bytes themselves are a secret.
    between(f"len({name})", len(session_id), _MIN_SESSION_ID_NBYTES, _MAX_SESSION_ID_NBYTES)


@dataclass(frozen=True, slots=True)
class Abort:
    """ABORT (0xF4), either way: the transfer is to end; the client answers with QUIET."""

    code: int
    reason: str

    def __post_init__(self) -> None:
        between("code", self.code, 0, U32_MAX)
        at_most("reason", self.reason, _MAX_REASON_CHARS)


@dataclass(frozen=True, slots=True)
class Quiet:
    """QUIET (0xF5), from the client: nothing of this transfer is in flight any more, nor will be."""


@dataclass(frozen=True, slots=True)
class Renew:
    """RENEW (0xFA), from the client: this push or pull goes on, however long its next layer, or its reading, takes."""


@dataclass(frozen=True, slots=True)
class Ended:
    """ENDED (0xFC), from the client: these descriptors of a push are complete, all at once; as one TENSOR_DATA_END for
    each would say it.

    Raises:
        ConfigError: there is none, or too many, or an index that no offer can have.
    """

    descriptor_indices: tuple[int, ...]

    def __post_init__(self) -> None:
        between("len(descriptor_indices)", len(self.descriptor_indices), 1, MAX_DESCRIPTORS)
        between("min(descriptor_indices)", min(self.descriptor_indices), 0, MAX_DESCRIPTORS - 1)
        between("max(descriptor_indices)", max(self.descriptor_indices), 0, MAX_DESCRIPTORS - 1)
