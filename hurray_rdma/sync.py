"""All names of `hurray_rdma`, without asyncio: `Engine`, `Peer`, `Transfer` and `Arrival` block, the rest is the same.

::

    with Engine(pool) as engine, engine.connect("decode-3:7400") as peer:
        stats = peer.send(snapshot, key="req-17")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hurray_rdma import errors as _errors
from hurray_rdma.cache import CacheSpec, PagePool, PoolGroups, Snapshot, SnapshotGroups, snapshot_keys
from hurray_rdma.engine import (
    DeviceUnavailableError,
    EngineStats,
    ExposedError,
    FetchedSnapshot,
    NotPublishedError,
    PeerBusyError,
    Placement,
    Shortage,
    StaleGenerationError,
    Tls,
    TransferStats,
)
from hurray_rdma.engine import sync as _sync
from hurray_rdma.engine.sync import *  # noqa: F403 - the classes that block
from hurray_rdma.errors import *  # noqa: F403 - that room has the list of them

if TYPE_CHECKING:
    from hurray_rdma.engine import EngineCollector

__all__ = [
    "CacheSpec",
    "DeviceUnavailableError",
    "EngineCollector",
    "EngineStats",
    "ExposedError",
    "FetchedSnapshot",
    "NotPublishedError",
    "PagePool",
    "PeerBusyError",
    "Placement",
    "PoolGroups",
    "Shortage",
    "Snapshot",
    "SnapshotGroups",
    "StaleGenerationError",
    "Tls",
    "TransferStats",
    "snapshot_keys",
]
__all__ += _sync.__all__
__all__ += _errors.__all__


def __getattr__(name: str) -> object:
    if name == "EngineCollector":
        from hurray_rdma.engine import EngineCollector  # noqa: PLC0415 - it brings prometheus-client along

        return EngineCollector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
