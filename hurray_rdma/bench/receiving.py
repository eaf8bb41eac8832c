"""The benchmark's receiving process: pools and engines of one case after the other, and what yardsticks need there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.bench.case import Case, cache_spec, fragment, source_pages
from hurray_rdma.bench.child import allow_writes, answer, context_of, pin
from hurray_rdma.bench.memory import ask_for_huge_pages, private_memory
from hurray_rdma.bench.messages import (
    Arrived,
    CloseCase,
    Closed,
    Collect,
    Leave,
    OpenCase,
    Opened,
    Party,
    Ran,
    Run,
    Settle,
    Settled,
    Used,
    UsePages,
)
from hurray_rdma.bench.sending import PUBLISHED
from hurray_rdma.bench.sockets import SocketReceiver
from hurray_rdma.cache import PagePool, Snapshot
from hurray_rdma.demo import MismatchError
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.content import Content
from hurray_rdma.engine import Engine, Peer
from hurray_rdma.transport import Context

__all__ = ["Arrivals", "receiving"]

_TIMEOUT_S = 60.0
_PAGES_AT_ONCE = 256
_ENGINES = (Party.HURRAY, Party.HURRAY_CALLER)
_INTO_CALLERS = {Party.HURRAY_CALLER, Party.CMA, Party.UCX_PUT, Party.SOCKET}


class Arrivals:
    """Takes every arrival of an engine, notes when it was usable, and releases it.

    Args:
        engine: runs already.
        layers: to wait for and note one by one before the whole.
        look: called with each snapshot, in a thread, before its pages go back.
    """

    def __init__(
        self, engine: Engine, *, layers: tuple[int, ...] = (), look: Callable[[Snapshot], None] | None = None
    ) -> None:
        self.look = look
        self._engine = engine
        self._layers = layers
        self._usable: asyncio.Queue[tuple[int, list[int]]] = asyncio.Queue()
        self._task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        async for arrival in self._engine.arrivals():
            layers = []
            for layer in self._layers:
                await arrival.wait_layer(layer)
                layers.append(time.monotonic_ns())
            snapshot = await arrival.snapshot()
            now = time.monotonic_ns()
            if self.look is not None:
                await asyncio.to_thread(self.look, snapshot)  # the engine must stay alive to its peers meanwhile
            arrival.release()
            self._usable.put_nowait((now, layers))

    async def collect(self, count: int) -> Arrived:
        """When the next ``count`` arrivals were usable; the task's failure is this call's."""
        usable, layers = [], []
        for _ in range(count):
            getting = asyncio.ensure_future(self._usable.get())
            async with asyncio.timeout(_TIMEOUT_S):
                await asyncio.wait({getting, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                await self._task
            now, each = getting.result()
            usable.append(now)
            layers.append(each)
        return Arrived(np.array(usable, np.int64), np.array(layers, np.int64))

    async def end(self) -> None:
        """Waits for the task, once its engine is closed."""
        await self._task


async def receiving(link: Link, lane: str, core: int | None) -> None:
    """Life of the receiving process.

    Args:
        link: to the supervisor.
        lane: UCX transports; empty leaves the choice to UCX.
        core: to stay on, or None.
    """
    pin(core)
    allow_writes()
    receiver = _Receiver(context_of(lane))
    try:
        await answer(
            link,
            {
                OpenCase: receiver.open,
                Settle: receiver.settle,
                UsePages: receiver.use_pages,
                Run: receiver.run,
                Collect: receiver.collect,
                Leave: receiver.leave,
                CloseCase: receiver.close,
            },
        )
    finally:
        await receiver.close(None)


class _Receiver:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._case: Case
        self._open = contextlib.AsyncExitStack()
        self._arrivals: dict[Party, Arrivals] = {}
        self._page_ids: NDArray[np.uint32] | None = None
        self._compared_nbytes = 0
        self._memory: NDArray[np.uint8]
        self._socket: SocketReceiver | None = None
        self._engine: Engine
        self._publisher: Peer | None = None
        self._pulling = contextlib.AsyncExitStack()

    async def open(self, request: OpenCase) -> Opened:
        case = self._case = request.case
        spec = cache_spec(case.page_nbytes, num_layers=case.num_layers)
        addresses = dict.fromkeys(_ENGINES, "")
        region = caller_region = None
        for party in _ENGINES:
            if party is Party.HURRAY:
                pool = PagePool.allocate(spec, case.pool_pages, context=self._context)
                for role, layer in spec.tensors:
                    memory = pool.pages(role, layer).view(np.uint8).reshape(-1)
                    if case.huge_pages:
                        ask_for_huge_pages(memory)
                    memory.fill(1)
                region = pool.regions[0].remote()
            elif request.parties & _INTO_CALLERS:
                self._memory = private_memory(case.pool_nbytes, huge_pages=case.huge_pages)
                arrays = self._memory.reshape(case.num_layers, case.pool_pages, *spec.page_shape)
                pool = PagePool.from_arrays(spec, {"fused": list(arrays)}, context=self._context)
                caller_region = pool.regions[0].remote()
            else:
                continue
            self._open.callback(pool.close)
            fragment(pool.allocator, case)
            ahead_pages = case.ahead_pages if party is Party.HURRAY else 0
            engine = Engine(pool, listen="127.0.0.1:0", ahead_pages=ahead_pages)
            await engine.start()
            arrivals = Arrivals(engine, layers=spec.layer_indices if case.num_layers > 1 else (), look=self._first)
            self._open.push_async_callback(arrivals.end)
            self._open.push_async_callback(engine.close)
            addresses[party], self._arrivals[party] = engine.address, arrivals
            if party is Party.HURRAY:
                self._engine = engine
        worker = self._context.open_worker()
        self._open.callback(worker.close)
        if Party.SOCKET in request.parties:
            self._socket = SocketReceiver()
            self._open.callback(self._socket.close)
        return Opened(
            pid=os.getpid(),
            address=addresses[Party.HURRAY],
            caller_address=addresses[Party.HURRAY_CALLER],
            worker_address=worker.address,
            region=region,
            caller_region=caller_region,
            socket_port=self._socket.port if self._socket is not None else 0,
        )

    def _first(self, snapshot: Snapshot) -> None:
        """Compares what came first with what was to be moved, and notes where it went."""
        case, spec = self._case, snapshot.pool.spec
        content = Content(case.seed, page_nbytes=case.page_nbytes, num_pages=case.pool_pages)
        sent = source_pages(case)
        for tensor, (role, layer) in enumerate(spec.tensors):
            pages = snapshot.pool.pages(role, layer).view(np.uint8).reshape(case.pool_pages, -1)
            for start in range(0, case.num_pages, _PAGES_AT_ONCE):
                some = slice(start, start + _PAGES_AT_ONCE)
                want = content.expected(tensor=tensor, page_ids=sent[some])
                if not np.array_equal(pages[snapshot.block_table[some]], want):
                    raise MismatchError("what arrived is not what was sent", field="layer", value=layer)
                self._compared_nbytes += want.nbytes
        self._page_ids = snapshot.block_table

    async def settle(self, _: Settle) -> Settled:
        """After one transfer to each engine."""
        for arrivals in self._arrivals.values():
            await arrivals.collect(1)
            arrivals.look = None
        assert self._page_ids is not None, "there is at least one engine"
        return Settled(self._page_ids, self._compared_nbytes)

    async def use_pages(self, request: UsePages) -> Used:
        if self._socket is not None:
            await asyncio.to_thread(self._socket.use, self._memory, request.page_ids, self._case.page_nbytes)
        if not request.publisher:
            return Used({}, {})
        peer = self._publisher = await self._pulling.enter_async_context(self._engine.connect(request.publisher))
        self._compared_nbytes = 0
        with await peer.fetch(PUBLISHED) as snapshot:
            await asyncio.to_thread(self._first, snapshot)
        return Used({}, {Party.HURRAY_PULL: f"{peer.lane}, {peer.path}"}, self._compared_nbytes)

    async def run(self, request: Run) -> Ran:
        """Pulls; it is the only party that this process runs."""
        assert self._publisher is not None, "the supervisor was told that nobody can"
        started, ended = [], []
        for _ in range(request.count):
            started.append(time.monotonic_ns())
            snapshot = await self._publisher.fetch(PUBLISHED)
            ended.append(time.monotonic_ns())
            snapshot.release()
        return Ran(np.array(started, np.int64), np.array(ended, np.int64))

    async def collect(self, request: Collect) -> Arrived:
        if request.party is Party.SOCKET and self._socket is not None:
            return Arrived(await asyncio.to_thread(self._socket.collect, request.count), np.empty(0, np.int64))
        return await self._arrivals[request.party].collect(request.count)

    async def leave(self, _: Leave) -> Closed:
        await self._pulling.aclose()
        self._publisher = None
        return Closed()

    async def close(self, _: CloseCase | None) -> Closed:
        await self._pulling.aclose()
        await self._open.aclose()
        self._arrivals, self._socket, self._page_ids, self._compared_nbytes = {}, None, None, 0
        self._publisher = None
        return Closed()
