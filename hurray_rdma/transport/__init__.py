"""UCX: memory, registration, endpoints, lanes, and moving a plan. Knows nothing of pages, sequences or the format.

The layers, top down: `context` (registration), `endpoint` and `remote` (moving), `binding` (all of ucxx), ``_ucx`` (the
native module: RMA calls and the posting loops).
"""

from hurray_rdma.transport.context import Context, default_context
from hurray_rdma.transport.endpoint import Endpoint, Worker
from hurray_rdma.transport.lanes import Lane, LaneReport
from hurray_rdma.transport.memory import Region, RemoteRegion, copy_local
from hurray_rdma.transport.remote import Moved, Path, RemoteMemory, StopFlag

__all__ = [
    "Context",
    "Endpoint",
    "Lane",
    "LaneReport",
    "Moved",
    "Path",
    "Region",
    "RemoteMemory",
    "RemoteRegion",
    "StopFlag",
    "Worker",
    "copy_local",
    "default_context",
]
