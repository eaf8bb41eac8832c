"""A transfer that leaves layer by layer while the next layer is being computed, as a prefill worker does it.

The computing is real: a thread of the sending process, on another core, derives a key for each layer, in one call that
holds no GIL, as the libraries do that compute a layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import statistics
import threading
import time
from collections.abc import Sequence

import numpy as np

from hurray_rdma.bench.messages import RanLayers, RunLayers
from hurray_rdma.cache import Snapshot
from hurray_rdma.engine import Peer

__all__ = ["lost_seconds", "ran_seconds", "run_layers", "unit_seconds"]

_UNITS_TIMED = 1000


def unit_seconds() -> float:
    """What one unit of computing takes, the best of many."""
    best = 1.0
    for _ in range(50):
        started = time.perf_counter()
        _compute(_UNITS_TIMED)
        best = min(best, (time.perf_counter() - started) / _UNITS_TIMED)
    return best


def _compute(units: int) -> None:
    """Keeps a core busy and hardly touches memory."""
    if units:
        hashlib.pbkdf2_hmac("sha256", b"layer", b"salt", units)


class _Computing:
    """The thread: computes layer after layer and tells the event loop of each."""

    def __init__(self, num_layers: int, request: RunLayers) -> None:
        self.times_ns = np.zeros((num_layers, 2), np.int64)
        self._work, self._core = request.work, request.core
        self._loop = asyncio.get_running_loop()
        self._done = [asyncio.Event() for _ in range(num_layers)]
        self._thread = threading.Thread(target=self._run)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(threading.get_native_id(), {self._core})
        for layer, done in enumerate(self._done):
            self.times_ns[layer, 0] = time.monotonic_ns()
            _compute(self._work)
            self.times_ns[layer, 1] = time.monotonic_ns()
            self._loop.call_soon_threadsafe(done.set)

    async def wait(self, layer: int) -> None:
        """Until the layer is computed."""
        await self._done[layer].wait()

    def join(self) -> None:
        self._thread.join()


async def run_layers(peer: Peer, snapshot: Snapshot, request: RunLayers) -> RanLayers:
    """One round: computing, sending, or both together.

    Args:
        peer: to send to.
        snapshot: all its layers are sent.
        request: what to do.
    """
    num_layers = snapshot.pool.spec.num_layers
    computing = _Computing(num_layers, request)
    sent_ns = np.zeros((num_layers, 2), np.int64)
    async with contextlib.AsyncExitStack() as ending:
        started_ns = time.monotonic_ns()
        computing.start()  # before pages are asked for: a prefill worker does not wait for them either
        transfer = await ending.enter_async_context(peer.begin(snapshot, key="layers")) if request.transfer else None
        for layer in range(num_layers):
            await computing.wait(layer)
            if transfer is not None:
                sent_ns[layer, 0] = time.monotonic_ns()
                await transfer.send_layer(layer)
                sent_ns[layer, 1] = time.monotonic_ns()
    ended_ns = time.monotonic_ns()
    await asyncio.to_thread(computing.join)
    return RanLayers(started_ns, ended_ns, computing.times_ns, sent_ns)


def lost_seconds(together: Sequence[RanLayers], alone: Sequence[RanLayers]) -> float:
    """How much longer computing and sending take together than computing alone.

    That is little beside what a machine's pace varies by from one moment to the next. So each run is held against those
    right before and after it, and the median is taken.

    Args:
        together: at least one.
        alone: one before the first of these, and one after each.
    """
    own = [*map(ran_seconds, alone)]
    return statistics.median(
        ran_seconds(both) - (before + after) / 2
        for both, before, after in zip(together, own[:-1], own[1:], strict=True)
    )


def ran_seconds(ran: RanLayers) -> float:
    """All of it."""
    return (ran.ended_ns - ran.started_ns) / 1e9
