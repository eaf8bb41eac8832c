"""The engine: the rooms below joined to sends and arrivals. See `Engine`."""

from hurray_rdma.engine.arrival import Arrival, ArrivalState
from hurray_rdma.engine.engine import Engine
from hurray_rdma.engine.peer import Peer
from hurray_rdma.engine.stats import TransferStats
from hurray_rdma.engine.transfer import Transfer

__all__ = ["Arrival", "ArrivalState", "Engine", "Peer", "Transfer", "TransferStats"]
