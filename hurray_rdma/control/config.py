"""Settings of a session and what it learns about its peer, as checked values.

This module knows which settings a session has and their ranges. It knows no bytes and no states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from hurray_rdma.control.codes import Capability
from hurray_rdma.errors import ConfigError

__all__ = [
    "DIALECT_TAGS",
    "MIN_MESSAGE_NBYTES",
    "PRIVATE_LAYOUT",
    "PeerInfo",
    "SessionConfig",
    "dialects_of",
    "private_names",
]

DIALECT_TAGS: dict[str, int] = {"adr-024": 0x0B, "hurray-0.2": 0x0A}
"""Layout tag that announces each dialect of the block-paged descriptor in a HELLO."""


PRIVATE_LAYOUT = (0xF0, b"hurray_rdma/9")
"""Layout entry of a HELLO that says: I speak the private messages, in the ninth version of their layout.

Both sides must name the same one. It goes up whenever a private message changes: what it carries, how that lies in
bytes, or what follows from it."""


def private_names(layouts: tuple[tuple[int, bytes], ...]) -> str:
    """The private messages that the layout entries of a HELLO name, to be shown."""
    names = [name[:40].decode("ascii", "replace") for tag, name in layouts[:8] if tag == PRIVATE_LAYOUT[0]]
    return " and ".join(map(ascii, names)) or "only the plain Hurray messages"


def dialects_of(layouts: tuple[tuple[int, bytes], ...]) -> str:
    """The dialects that the layout entries of a HELLO name, to be shown: ``"adr-024, hurray-0.2"``, or ``"none"``."""
    tags = [tag for tag, _ in layouts]
    return ", ".join(dialect for dialect, tag in DIALECT_TAGS.items() if tag in tags) or "none"


MIN_MESSAGE_NBYTES = 64 * 1024
"""Smallest maximum a side may ask for, and the largest payload accepted before a peer is authenticated."""


_MAX_TENANT_CHARS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """Settings of one side of a session.

    Raises:
        ConfigError: a value is out of range, or contradicts another.
    """

    engine_name: str
    token: str | None = field(default=None, repr=False)
    """Shared secret: sent by the client, compared by the server in constant time; None or "" asks for none."""
    tenants: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    """Server: further secrets by the name of the tenant whose peers send them. A live view: read at each handshake."""
    host_id: bytes
    """Same on both sides if they run on the same host."""
    process_id: bytes = b""
    """Tells processes of one host apart; opaque, at most 128 bytes."""
    session_id: bytes = field(default=b"", repr=False)
    """Client: as of SESSION; empty, or 16 to 64 bytes."""
    quiet_sessions: tuple[bytes, ...] = field(default=(), repr=False)
    """Client: as of SESSION; at most 64, of 16 to 64 bytes each."""
    worker_address: bytes | None = field(repr=False)
    """UCX worker address. Server: None is one for each client, which the session asks for by `Introduced`."""
    dialects: tuple[str, ...] = ("adr-024", "hurray-0.2")
    """In order of preference."""
    devices: tuple[int, ...] = (0,)
    """device_tag values of the memory that this side can move bytes into and out of, its own and the peer's."""
    memory_classes: tuple[int, ...] = (0,)
    capabilities: Capability = Capability.RDMA_DATA_PLANE
    max_message_nbytes: int = 64 * 1024 * 1024
    """Largest payload this side accepts; the peer's own limit holds the other way."""
    heartbeat_s: float = 0.25
    """After this long without a word from the peer it is pinged."""
    peer_timeout_s: float = 5.0
    """After this long without a word from the peer it is lost (a closed connection is noticed at once)."""
    hello_timeout_s: float = 5.0
    """Budget for the whole handshake."""
    max_open_transfers: int = 1024
    """Server: further offers are refused as busy."""

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "peer_timeout_s", "hello_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError("must be a number of seconds above 0", field=name, value=value)
        if self.peer_timeout_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"must be at least twice heartbeat_s = {self.heartbeat_s}",
                field="peer_timeout_s",
                value=self.peer_timeout_s,
            )
        if not MIN_MESSAGE_NBYTES <= self.max_message_nbytes < 2**32:
            raise ConfigError(
                f"must be {MIN_MESSAGE_NBYTES} to {2**32 - 1}",
                field="max_message_nbytes",
                value=self.max_message_nbytes,
            )
        self._check_tenants()
        unknown = [dialect for dialect in self.dialects if dialect not in DIALECT_TAGS]
        if unknown or not self.dialects or len(set(self.dialects)) != len(self.dialects):
            raise ConfigError(
                f"must name one or more of {', '.join(DIALECT_TAGS)}, each once", field="dialects", value=self.dialects
            )
        for name in ("devices", "memory_classes"):
            value = getattr(self, name)
            if not value or not all(0 <= tag <= 0xFE for tag in value):
                raise ConfigError("must hold one or more tags from 0 to 0xFE", field=name, value=value)
        if not 1 <= self.max_open_transfers <= 2**20:
            raise ConfigError("must be 1 to 1048576", field="max_open_transfers", value=self.max_open_transfers)

    def _check_tenants(self) -> None:
        owners = {self.token: "the engine"} if self.token else {}
        for name, token in list(self.tenants.items()):
            if not 1 <= len(name) <= _MAX_TENANT_CHARS:
                rule = f"the name of a tenant must have 1 to {_MAX_TENANT_CHARS} characters"
                raise ConfigError(rule, field="tenants", value=name[:40])
            if not token:
                raise ConfigError(f"tenant {name!r} needs a token")
            if token in owners:
                raise ConfigError(f"tenant {name!r} has the token of {owners[token]}: nobody could tell them apart")
            owners[token] = f"tenant {name!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerInfo:
    """What an open session knows about its peer."""

    engine_name: str
    host_id: bytes
    process_id: bytes
    worker_address: bytes = field(repr=False)
    session_id: bytes = field(default=b"", repr=False)
    """Server: what the client calls this session; empty, which is in no ``quiet_sessions``, or 16 to 64 bytes."""
    quiet_sessions: tuple[bytes, ...] = field(default=(), repr=False)
    """Server: earlier ones of which nothing is in flight any more."""
    tenant: str = ""
    """Server: whose token the peer sent; "" is the engine's own, or none where none is asked for."""
    dialect: str
    """The dialect both sides agreed on."""
    devices: tuple[int, ...]
    """device_tag values that the peer's HELLO named. Who moves the bytes must name both ends' devices."""
    capabilities: Capability
    """Capabilities both sides have; told, and nothing rests on it yet: without RDMA there is no lane, and frames go."""
    max_message_nbytes: int
    """Largest payload the peer accepts."""
    heartbeat_s: float
    """After how long a silence the peer pings; told, and nothing rests on it: each side pings by its own."""
    pages_port: int = 0
    """Client: as of SESSION."""
    pages_ticket: bytes = field(default=b"", repr=False)
    """Client: as of SESSION."""
