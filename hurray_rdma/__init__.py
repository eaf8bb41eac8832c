"""A zero-copy transfer engine for paged LLM KV caches.

Hurray block-paged descriptors (ADR-024) travel over a small control channel, page bytes by one-sided UCX RMA straight
from the source pages into pages of a registered receive pool. Names are imported at first use: UCX is loaded when a
pool or an engine is made, not by ``import hurray_rdma``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hurray_rdma import errors as _errors
from hurray_rdma.errors import *  # noqa: F403 - that room has the list of them

if TYPE_CHECKING:
    from hurray_rdma.cache import CacheSpec, PagePool, PoolGroups, Snapshot, SnapshotGroups, snapshot_keys
    from hurray_rdma.engine import (
        Arrival,
        DeviceUnavailableError,
        Engine,
        EngineCollector,
        EngineStats,
        ExposedError,
        FetchedSnapshot,
        NotPublishedError,
        Peer,
        PeerBusyError,
        Placement,
        Shortage,
        StaleGenerationError,
        Tls,
        Transfer,
        TransferStats,
    )

__all__ = [
    "Arrival",
    "CacheSpec",
    "DeviceUnavailableError",
    "Engine",
    "EngineCollector",
    "EngineStats",
    "ExposedError",
    "FetchedSnapshot",
    "NotPublishedError",
    "PagePool",
    "Peer",
    "PeerBusyError",
    "Placement",
    "PoolGroups",
    "Shortage",
    "Snapshot",
    "SnapshotGroups",
    "StaleGenerationError",
    "Tls",
    "Transfer",
    "TransferStats",
    "snapshot_keys",
]
__all__ += _errors.__all__


def __getattr__(name: str) -> object:
    if name in __all__:
        for room in ("hurray_rdma.cache", "hurray_rdma.engine"):
            module = importlib.import_module(room)
            if name in module.__all__:
                value = globals()[name] = getattr(module, name)
                return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
