"""The engine: the rooms below joined to sends and arrivals. See `Engine`.

`EngineCollector` is imported at first use: with it comes prometheus-client, which is of no use to who is not scraped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hurray_rdma.control import (
    DeviceUnavailableError,
    ExposedError,
    NotPublishedError,
    PeerBusyError,
    StaleGenerationError,
    Tls,
)
from hurray_rdma.engine.arrival import Arrival, ArrivalState
from hurray_rdma.engine.engine import Engine
from hurray_rdma.engine.fetching import FetchedSnapshot
from hurray_rdma.engine.logs import JsonFormatter
from hurray_rdma.engine.peer import Peer
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.shortages import Shortage
from hurray_rdma.engine.stats import DirectionStats, EngineStats, Histogram, LaneStats, TransferStats
from hurray_rdma.engine.transfer import Transfer

if TYPE_CHECKING:
    from hurray_rdma.engine.metrics import EngineCollector

__all__ = [
    "Arrival",
    "ArrivalState",
    "DeviceUnavailableError",
    "DirectionStats",
    "Engine",
    "EngineCollector",
    "EngineStats",
    "ExposedError",
    "FetchedSnapshot",
    "Histogram",
    "JsonFormatter",
    "LaneStats",
    "NotPublishedError",
    "Peer",
    "PeerBusyError",
    "Placement",
    "Shortage",
    "StaleGenerationError",
    "Tls",
    "Transfer",
    "TransferStats",
]


def __getattr__(name: str) -> object:
    if name == "EngineCollector":
        from hurray_rdma.engine.metrics import EngineCollector  # noqa: PLC0415

        return EngineCollector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
