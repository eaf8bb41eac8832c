"""The engine's blocking face: `Engine`, `Peer`, `Transfer` and `Arrival` once more, for callers without asyncio.

Knows the asynchronous classes beside it and adds nothing to what they do: each call runs on the event loop of a thread
that the engine owns, and its caller waits. The asynchronous objects are touched on that loop only, so that any thread
may call. Errors are those of the asynchronous side. What the engine's end interrupts, and what is called after it,
raises `TransferAbortedError`.
"""

from __future__ import annotations

from hurray_rdma.engine.sync.arrival import Arrival
from hurray_rdma.engine.sync.engine import Engine
from hurray_rdma.engine.sync.peer import Peer
from hurray_rdma.engine.sync.transfer import Transfer

__all__ = ["Arrival", "Engine", "Peer", "Transfer"]
