"""A transfer that leaves layer by layer while the next layer is being computed, as a prefill worker does it.

The computing is real: another process, on another core, derives a key for each layer.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.bench import computing
from hurray_rdma.bench.computing import TIMES, compute
from hurray_rdma.bench.messages import RanLayers, RunLayers
from hurray_rdma.cache import Snapshot
from hurray_rdma.engine import Peer

__all__ = ["LayersMover", "by_engine", "lost_seconds", "ran_seconds", "run_layers", "unit_seconds"]

_UNITS_TIMED = 1000

LayersMover: TypeAlias = AbstractAsyncContextManager[Callable[[int], Awaitable[object]]]
"""All layers; what it opens moves the one of that number."""


def unit_seconds() -> float:
    """What one unit of computing takes, the best of many."""
    best = 1.0
    for _ in range(50):
        started = time.perf_counter()
        compute(_UNITS_TIMED)
        best = min(best, (time.perf_counter() - started) / _UNITS_TIMED)
    return best


class _Computing:
    """The process, as whoever sends knows it."""

    def __init__(self, said: asyncio.StreamReader, told: asyncio.StreamWriter) -> None:
        self._said, self._told = said, told

    def start(self) -> None:
        self._told.write(b"\0")

    async def layer(self) -> tuple[int, int]:
        """The next layer, once it is computed: begin and end, nanoseconds."""
        began_ns, ended_ns = TIMES.unpack(await self._said.readexactly(TIMES.size))
        return began_ns, ended_ns


@contextlib.asynccontextmanager
async def _computing(num_layers: int, request: RunLayers) -> AsyncIterator[_Computing]:
    """Ready to start; ends with the block."""
    numbers = (num_layers, request.work, -1 if request.core is None else request.core)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        computing.__file__,
        *map(str, numbers),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        await process.stdout.readexactly(1)
        yield _Computing(process.stdout, process.stdin)
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise
    finally:
        await process.wait()  # else it has ended by itself, with its last layer


@contextlib.asynccontextmanager
async def by_engine(peer: Peer, snapshot: Snapshot) -> AsyncIterator[Callable[[int], Awaitable[object]]]:
    """Sends the layers of a snapshot."""
    async with peer.begin(snapshot, key="layers") as transfer:
        yield transfer.send_layer


async def run_layers(mover: LayersMover | None, num_layers: int, request: RunLayers) -> RanLayers:
    """One round: computing, moving, or both together.

    Args:
        mover: of the layers; None moves nothing.
        num_layers: how many there are.
        request: what to do.
    """
    computed_ns, sent_ns = np.zeros((num_layers, 2), np.int64), np.zeros((num_layers, 2), np.int64)
    async with _computing(num_layers, request) as process, contextlib.AsyncExitStack() as ending:
        started_ns = time.monotonic_ns()
        process.start()  # before pages are asked for: a prefill worker does not wait for them either
        move = None if mover is None else await ending.enter_async_context(mover)
        for layer in range(num_layers):
            computed_ns[layer] = await process.layer()
            if move is not None:
                sent_ns[layer, 0] = time.monotonic_ns()
                await move(layer)
                sent_ns[layer, 1] = time.monotonic_ns()
        await ending.aclose()
        ended_ns = time.monotonic_ns()
    return RanLayers(started_ns, ended_ns, computed_ns, sent_ns)


def lost_seconds(together: Sequence[RanLayers], alone: Sequence[tuple[RanLayers, RanLayers]]) -> float:
    """How much longer computing and moving take together than computing alone.

    That is little beside what a machine's pace varies by from one moment to the next. So each layer is held against the
    same one of the runs right before and after; of what all runs lose there the mean is taken, the tenth at either end
    left out; and all layers are added up.

    Args:
        together: at least one.
        alone: computing alone, right before and right after each of these.
    """
    both, own = np.array([*map(_steps_ns, together)]), np.array([[*map(_steps_ns, around)] for around in alone])
    lost_ns = np.sort(both - own.mean(axis=1), axis=0)
    left_out = len(lost_ns) // 10
    return float(lost_ns[left_out : len(lost_ns) - left_out].mean(axis=0).sum() / 1e9)


def _steps_ns(ran: RanLayers) -> NDArray[np.int64]:
    """How long until each layer was computed since the one before, and what came after the last,
    ``[num_layers + 1]``."""
    return np.diff(ran.computed_ns[:, 1], prepend=ran.started_ns, append=ran.ended_ns)


def ran_seconds(ran: RanLayers) -> float:
    """All of it."""
    return (ran.ended_ns - ran.started_ns) / 1e9
