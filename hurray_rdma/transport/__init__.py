"""UCX: memory, registration, endpoints, lanes, and moving a plan. Knows nothing of pages, sequences or the format.

The layers, top down: `context` (registration), `endpoint` and `remote` (moving), `binding` (all of ucxx), ``_ucx`` (the
native module: RMA calls and the posting loops). Beside them `page_streams`, connections for pages where UCX has only
tcp; and `cuda` (the driver's calls), `devices` and `streams` (what follows from them: CUDA's streams), which are not
used where all pages are in host memory.
"""

from hurray_rdma.transport.bells import Bell, Bells
from hurray_rdma.transport.context import Context, default_context
from hurray_rdma.transport.devices import Backing
from hurray_rdma.transport.endpoint import Endpoint, Worker
from hurray_rdma.transport.lanes import Lane, LaneReport
from hurray_rdma.transport.memory import Memory, Region, RemoteRegion, copy_local
from hurray_rdma.transport.page_streams import Guest, PageStream, PageStreamListener, Permits, unpace
from hurray_rdma.transport.remote import Moved, Path, RemoteMemory, StopFlag
from hurray_rdma.transport.streams import Gate, stream_device, stream_handle

__all__ = [
    "Backing",
    "Bell",
    "Bells",
    "Context",
    "Endpoint",
    "Gate",
    "Guest",
    "Lane",
    "LaneReport",
    "Memory",
    "Moved",
    "PageStream",
    "PageStreamListener",
    "Path",
    "Permits",
    "Region",
    "RemoteMemory",
    "RemoteRegion",
    "StopFlag",
    "Worker",
    "copy_local",
    "default_context",
    "stream_device",
    "stream_handle",
    "unpace",
]
