"""A zero-copy transfer engine for paged LLM KV caches.

Hurray block-paged descriptors (ADR-024) travel over a small control channel, page bytes by one-sided UCX RMA straight
from the source pages into pages of a registered receive pool. Names are imported at first use: UCX is loaded when a
pool or an engine is made, not by ``import hurray_rdma``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
    from hurray_rdma.engine import (
        Arrival,
        Engine,
        EngineCollector,
        EngineStats,
        FetchedSnapshot,
        NotPublishedError,
        Peer,
        Placement,
        Tls,
        Transfer,
        TransferStats,
    )

__all__ = [
    "Arrival",
    "AuthenticationError",
    "CacheSpec",
    "ConfigError",
    "DeadlineExceededError",
    "DescriptorError",
    "Engine",
    "EngineCollector",
    "EngineStats",
    "FetchedSnapshot",
    "GeometryError",
    "HurrayError",
    "LeaseExpiredError",
    "NotPublishedError",
    "PagePool",
    "Peer",
    "PeerLostError",
    "Placement",
    "PoolExhaustedError",
    "ProtocolError",
    "RegistrationError",
    "Snapshot",
    "Tls",
    "Transfer",
    "TransferAbortedError",
    "TransferStats",
    "TransportError",
]

_ROOMS = dict.fromkeys(("CacheSpec", "PagePool", "Snapshot"), "hurray_rdma.cache") | dict.fromkeys(
    (
        "Arrival",
        "Engine",
        "EngineCollector",
        "EngineStats",
        "FetchedSnapshot",
        "NotPublishedError",
        "Peer",
        "Placement",
        "Tls",
        "Transfer",
        "TransferStats",
    ),
    "hurray_rdma.engine",
)


def __getattr__(name: str) -> object:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_ROOMS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
