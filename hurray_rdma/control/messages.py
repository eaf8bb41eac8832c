"""The control messages as values: one frozen dataclass per message of the format, and the union of all.

This module knows what each message carries. It knows neither how a message is laid out in bytes (fixed.py, private.py,
framing.py) nor when it may be said (states.py). The private messages, with rules of their own, are in exchange.py,
pools.py and offers.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from hurray_rdma.control.codes import Capability
from hurray_rdma.control.exchange import Abort, Ended, Quiet, Renew, SessionMessage
from hurray_rdma.control.offers import Commit, Fetch, Grant, Offer, Prepare, Published, Reserve, Take
from hurray_rdma.control.pools import Pool
from hurray_rdma.errors import ProtocolError

__all__ = [
    "ClientHello",
    "ErrorMessage",
    "Hello",
    "Malformed",
    "Message",
    "Ping",
    "Pong",
    "RdmaReady",
    "RdmaRegister",
    "ServerHello",
    "TensorDataEndMessage",
    "TensorDataMessage",
    "TensorDescriptorMessage",
    "TensorPut",
    "TensorPutAck",
    "TensorRequest",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """What both HELLO messages say (WIRE.md, messages 1 and 2)."""

    protocol_version: int = 1
    max_message_nbytes: int
    """Largest payload its sender accepts, bytes."""
    capabilities: Capability = Capability.RDMA_DATA_PLANE
    layouts: tuple[tuple[int, bytes], ...]
    """(layout tag, private bytes); the bytes are empty except for tags 0xF0..0xFE."""
    devices: tuple[int, ...] = (0,)
    memory_classes: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHello(Hello):
    """CLIENT_HELLO: first message of the connecting side; layouts in order of preference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHello(Hello):
    """SERVER_HELLO: its answer; layouts holds only what was picked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRequest:
    """TENSOR_REQUEST: ask for the tensor known as ``key``."""

    key: str
    layouts: tuple[tuple[int, bytes], ...]
    preferred_device: int = 0
    min_alignment: int = 64
    request_flags: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDescriptorMessage:
    """TENSOR_DESCRIPTOR: one encoded Hurray descriptor, before its data."""

    descriptor: bytes
    total_data_nbytes: int
    shard_index: int = 0
    total_shards: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDataMessage:
    """TENSOR_DATA: bytes of a buffer from ``offset_nbytes`` on. ``data`` is a view; nothing was copied."""

    offset_nbytes: int
    data: memoryview | bytes


@dataclass(frozen=True, slots=True)
class TensorDataEndMessage:
    """TENSOR_DATA_END: every byte of this stream's tensor is complete at the receiver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorPut:
    """TENSOR_PUT of the plain format (this implementation offers with OFFER)."""

    key: str
    descriptor: bytes
    total_data_nbytes: int


@dataclass(frozen=True, slots=True)
class TensorPutAck:
    """TENSOR_PUT_ACK: the receiver has the whole tensor or, on a transfer's own stream, the whole snapshot."""


@dataclass(frozen=True, slots=True)
class ErrorMessage:
    """ERROR: ``code`` is an :class:`~hurray_rdma.control.codes.ErrorCode` or a number this side does not know."""

    code: int
    text: str


@dataclass(frozen=True, slots=True)
class Ping:
    """PING."""


@dataclass(frozen=True, slots=True)
class Pong:
    """PONG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaRegister:
    """RDMA_REGISTER of the plain format: one region and its packed rkey."""

    remote_addr: int
    nbytes: int
    rkey: bytes


@dataclass(frozen=True, slots=True)
class RdmaReady:
    """RDMA_READY of the plain format."""


@dataclass(frozen=True, slots=True)
class Malformed:
    """A frame whose payload breaks a rule; the frames after it can still be read."""

    message_type: int
    error: ProtocolError


Message: TypeAlias = (
    ClientHello
    | ServerHello
    | TensorRequest
    | TensorDescriptorMessage
    | TensorDataMessage
    | TensorDataEndMessage
    | TensorPut
    | TensorPutAck
    | ErrorMessage
    | Ping
    | Pong
    | RdmaRegister
    | RdmaReady
    | SessionMessage
    | Pool
    | Offer
    | Grant
    | Fetch
    | Published
    | Take
    | Reserve
    | Commit
    | Prepare
    | Abort
    | Quiet
    | Renew
    | Ended
    | Malformed
)
