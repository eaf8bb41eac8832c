"""All names of `hurray_rdma`, without asyncio: `Engine`, `Peer`, `Transfer` and `Arrival` block, the rest is the same.

::

    with Engine(pool) as engine, engine.connect("decode-3:7400") as peer:
        stats = peer.send(snapshot, key="req-17")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.engine import EngineStats, FetchedSnapshot, NotPublishedError, Placement, Tls, TransferStats
from hurray_rdma.engine.sync import Arrival, Engine, Peer, Transfer
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
    from hurray_rdma.engine import EngineCollector

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


def __getattr__(name: str) -> object:
    if name == "EngineCollector":
        from hurray_rdma.engine import EngineCollector  # noqa: PLC0415 - it brings prometheus-client along

        return EngineCollector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
