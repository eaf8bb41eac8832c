"""Numbers of the control protocol: message types, error codes, capabilities, and how errors cross the wire.

This module knows which typed error belongs to which ERROR code and back. It knows neither bytes nor states. Codes below
0xF0 are the Hurray format's own, 0xF0..0xFE are this implementation's (WIRE.md, message 9).
"""

from __future__ import annotations

from enum import IntEnum, IntFlag

from hurray_rdma.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    DescriptorError,
    GeometryError,
    HurrayError,
    LeaseExpiredError,
    PeerLostError,
    PoolExhaustedError,
    ProtocolError,
    RegistrationError,
    TransferAbortedError,
    TransportError,
)

__all__ = [
    "Capability",
    "DeviceUnavailableError",
    "ErrorCode",
    "LocalProtocolError",
    "MessageType",
    "NotPublishedError",
    "PeerBusyError",
    "StaleGenerationError",
    "error_code",
    "error_from_code",
]

_MAX_PEER_TEXT_CHARS = 2000


class LocalProtocolError(HurrayError, RuntimeError):
    """This side asked a session for something its state does not allow; nothing was sent."""


class DeviceUnavailableError(GeometryError):
    """Pages are in memory of a kind of device that one of the two sides cannot move bytes into or out of."""


class NotPublishedError(HurrayError, LookupError):
    """The peer has no snapshot published under this key (for this peer)."""


class PeerBusyError(PoolExhaustedError):
    """The peer's queue is full; the same offer may be accepted later."""


class StaleGenerationError(TransferAbortedError):
    """The pool was registered anew since the offer; offer again against its present generation."""


class MessageType(IntEnum):
    """Message types of the Hurray network framing; 0xF0 and above are private to this implementation."""

    CLIENT_HELLO = 1
    SERVER_HELLO = 2
    TENSOR_REQUEST = 3
    TENSOR_DESCRIPTOR = 4
    TENSOR_DATA = 5
    TENSOR_DATA_END = 6
    TENSOR_PUT = 7
    TENSOR_PUT_ACK = 8
    ERROR = 9
    PING = 10
    PONG = 11
    RDMA_REGISTER = 12
    RDMA_READY = 13
    SESSION = 0xF0
    POOL = 0xF1
    OFFER = 0xF2
    GRANT = 0xF3
    ABORT = 0xF4
    QUIET = 0xF5
    FETCH = 0xF6
    PUBLISHED = 0xF7
    RESERVE = 0xF8
    COMMIT = 0xF9
    RENEW = 0xFA
    TAKE = 0xFB
    ENDED = 0xFC
    PREPARE = 0xFD


class Capability(IntFlag):
    """``capability_flags`` of a HELLO."""

    TRANSCODING = 1
    PARALLEL_STREAMS = 2
    RDMA_DATA_PLANE = 4
    RDMA_GPUDIRECT = 8


class ErrorCode(IntEnum):
    """``error_code`` of ERROR and ABORT messages."""

    PROTOCOL_VERSION_MISMATCH = 1
    UNKNOWN_TENSOR = 2
    LAYOUT_UNAVAILABLE = 3
    TRANSCODE_LIMIT_EXCEEDED = 4
    DEVICE_UNAVAILABLE = 5
    INVALID_MESSAGE = 6
    MESSAGE_TOO_LARGE = 7
    SHARD_MISMATCH = 8
    POOL_EXHAUSTED = 0xF0
    GEOMETRY = 0xF1
    STALE_GENERATION = 0xF2
    DEADLINE = 0xF3
    BUSY = 0xF4
    AUTHENTICATION = 0xF5
    ABORTED = 0xF6
    DESCRIPTOR = 0xF7
    LEASE_EXPIRED = 0xF8
    REGISTRATION = 0xF9
    TRANSPORT = 0xFA
    PEER_LOST = 0xFB
    CONFIG = 0xFC
    UNREAD = 0xFD
    """ABORT of a reader that only wanted the snapshot's lease to begin anew."""
    INTERNAL = 0xFE
    DECLINED = 0x100
    """ABORT of a reader that needs nothing of the snapshot. (ABORT is a message of ours: it may have codes of its own.)
    """


_KINDS: dict[ErrorCode, type[HurrayError]] = {
    ErrorCode.UNKNOWN_TENSOR: NotPublishedError,
    ErrorCode.DEVICE_UNAVAILABLE: DeviceUnavailableError,
    ErrorCode.POOL_EXHAUSTED: PoolExhaustedError,
    ErrorCode.GEOMETRY: GeometryError,
    ErrorCode.STALE_GENERATION: StaleGenerationError,
    ErrorCode.DEADLINE: DeadlineExceededError,
    ErrorCode.BUSY: PeerBusyError,
    ErrorCode.AUTHENTICATION: AuthenticationError,
    ErrorCode.ABORTED: TransferAbortedError,
    ErrorCode.DESCRIPTOR: DescriptorError,
    ErrorCode.LEASE_EXPIRED: LeaseExpiredError,
    ErrorCode.REGISTRATION: RegistrationError,
    ErrorCode.TRANSPORT: TransportError,
    ErrorCode.PEER_LOST: PeerLostError,
    ErrorCode.CONFIG: ConfigError,
    ErrorCode.INTERNAL: HurrayError,
}
_CODES: dict[type[BaseException], ErrorCode] = {kind: code for code, kind in _KINDS.items()}


def error_code(error: HurrayError) -> int:
    """The ERROR code that tells the peer about ``error``: that of its nearest known class."""
    if isinstance(error, ProtocolError):
        return error.code
    return next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)


def error_from_code(code: int, text: str) -> HurrayError:
    """The typed error that an ERROR or ABORT message of the peer stands for.

    Codes that stand for no other class become :class:`ProtocolError` with that ``code``, and are named: of the others
    the class tells. The peer's text is cut to 2000 characters, and what cannot be printed is replaced, so that it is
    safe to log or to show.
    """
    shown = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[:_MAX_PEER_TEXT_CHARS])
    try:
        known = ErrorCode(code)
    except ValueError:
        return ProtocolError(f"the peer reports error 0x{code:X}: {shown}", code=code)
    kind = _KINDS.get(known)
    if kind is None:
        return ProtocolError(f"the peer reports {known.name}: {shown}", code=code)
    return kind(f"the peer says: {shown}")
