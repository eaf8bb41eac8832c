"""The benchmark's sending process: a pool of known content, an engine, and the yardsticks over the same pages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import numpy as np

from hurray_rdma.bench.case import Case, cache_spec, snapshot_of, source_pages
from hurray_rdma.bench.child import allow_writes, answer, context_of, pin
from hurray_rdma.bench.layers import LayersMover, by_engine, run_layers
from hurray_rdma.bench.memory import ask_for_huge_pages
from hurray_rdma.bench.messages import (
    CloseCase,
    Closed,
    Contact,
    JoinCase,
    Joined,
    Opened,
    Party,
    Ran,
    RanLayers,
    Run,
    RunLayers,
    Used,
    UsePages,
)
from hurray_rdma.bench.yardsticks import LayerCopy, PageLists, open_yardstick
from hurray_rdma.cache import PagePool, Snapshot
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.content import Content
from hurray_rdma.engine import Engine, Peer
from hurray_rdma.errors import HurrayError
from hurray_rdma.transport import Context

__all__ = ["PUBLISHED", "YARDSTICKS", "sending"]

PUBLISHED = "published"
"""Key of the case's pages, for those who pull."""

_LEASE_S = 86400.0

YARDSTICKS = (Party.MEMCPY, Party.STREAM, Party.MAPPED, Party.CMA, Party.UCX_PUT, Party.SOCKET)
"""Run within the two processes of the benchmark."""


async def sending(link: Link, lane: str, core: int | None) -> None:
    """Life of the sending process; arguments as of `receiving`."""
    pin(core)
    allow_writes()
    sender = _Sender(context_of(lane))
    try:
        await answer(
            link,
            {
                JoinCase: sender.join,
                UsePages: sender.use_pages,
                Run: sender.run,
                RunLayers: sender.run_layers,
                Contact: sender.contact,
                CloseCase: sender.close,
            },
        )
    finally:
        await sender.close(None)


class _Sender:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._case: Case
        self._opened: Opened
        self._parties: frozenset[Party]
        self._pool: PagePool
        self._snapshot: Snapshot
        self._engine: Engine
        self._open = contextlib.AsyncExitStack()
        self._peers: dict[Party, Peer] = {}
        self._yardsticks: dict[Party, Callable[[], None]] = {}
        self._copy: LayerCopy | None = None

    async def join(self, request: JoinCase) -> Joined:
        case = self._case = request.case
        self._opened, self._parties = request.opened, request.parties
        spec = cache_spec(case.page_nbytes, num_layers=case.num_layers)
        self._pool = self._open.enter_context(PagePool.allocate(spec, case.pool_pages, context=self._context))
        content = Content(case.seed, page_nbytes=case.page_nbytes, num_pages=case.pool_pages)
        page_ids = source_pages(case)
        for tensor, (role, layer) in enumerate(spec.tensors):
            memory = self._pool.pages(role, layer).view(np.uint8).reshape(case.pool_pages, -1)
            if case.huge_pages:
                ask_for_huge_pages(memory.reshape(-1))
            memory.fill(0)
            content.fill(memory, tensor=tensor, page_ids=page_ids)
        self._snapshot = snapshot_of(self._pool, case)
        published = Party.HURRAY_PULL in request.parties
        engine = self._engine = await self._open.enter_async_context(
            Engine(self._pool, listen="127.0.0.1:0" if published else None, token=request.token, tls=request.tls)
        )
        if published:
            engine.publish(PUBLISHED, self._snapshot, lease_s=_LEASE_S)
        addresses = {Party.HURRAY: request.opened.address, Party.HURRAY_CALLER: request.opened.caller_address}
        for party, address in addresses.items():
            if address:
                self._peers[party] = await self._open.enter_async_context(engine.connect(address))
                await self._peers[party].send(self._snapshot, key="first")
        lanes = {party: f"{peer.lane}, {peer.path}" for party, peer in self._peers.items()}
        return Joined(lanes, engine.address if published else "")

    async def use_pages(self, request: UsePages) -> Used:
        """Prepares every yardstick; one that cannot run says why."""
        skipped = {}
        src_pages = source_pages(self._case)
        lists = PageLists.of(src_pages, request.page_ids, page_nbytes=self._case.page_nbytes)
        closing = self._open.enter_context(contextlib.ExitStack())
        for party in (party for party in YARDSTICKS if party in self._parties):
            try:
                self._yardsticks[party] = await asyncio.to_thread(
                    open_yardstick,
                    party,
                    source=self._pool.regions[0],
                    lists=lists,
                    src_pages=src_pages,
                    page_nbytes=self._case.page_nbytes,
                    opened=self._opened,
                    context=self._context,
                    pool_nbytes=self._case.pool_nbytes,
                    huge_pages=self._case.huge_pages,
                    closing=closing,
                )
            except (OSError, HurrayError) as error:
                skipped[party] = str(error)
        return Used(skipped, {})

    async def run(self, request: Run) -> Ran:
        started, ended = [], []
        peer = self._peers.get(request.party)
        for number in range(request.count):
            if peer is not None:
                key = f"run-{number}"
                started.append(time.monotonic_ns())
                await peer.send(self._snapshot, key=key)
                ended.append(time.monotonic_ns())
        if peer is None:
            started, ended = await asyncio.to_thread(_repeat, self._yardsticks[request.party], request.count)
        return Ran(np.array(started, np.int64), np.array(ended, np.int64))

    async def run_layers(self, request: RunLayers) -> RanLayers:
        mover: LayersMover | None = None
        if request.by is Party.HURRAY:
            mover = by_engine(self._peers[Party.HURRAY], self._snapshot)
        elif request.by is Party.STREAM:  # off the event loop, as the engine does it
            copy = self._layer_copy()
            mover = contextlib.nullcontext(lambda layer: asyncio.to_thread(copy, layer))
        return await run_layers(mover, self._case.num_layers, request)

    def _layer_copy(self) -> LayerCopy:
        if self._copy is None:
            self._copy = LayerCopy(self._pool, source_pages(self._case), huge_pages=self._case.huge_pages)
        return self._copy

    async def contact(self, request: Contact) -> Ran:
        started, ended = [], []
        for number in range(request.count):
            started.append(time.monotonic_ns())
            async with self._engine.connect(self._opened.address) as peer:
                await peer.send(self._snapshot, key=f"contact-{number}")
                ended.append(time.monotonic_ns())
        return Ran(np.array(started, np.int64), np.array(ended, np.int64))

    async def close(self, _: CloseCase | None) -> Closed:
        await self._open.aclose()
        self._peers, self._yardsticks, self._copy = {}, {}, None
        return Closed()


def _repeat(move: Callable[[], None], count: int) -> tuple[list[int], list[int]]:
    started, ended = [], []
    for _ in range(count):
        started.append(time.monotonic_ns())
        move()
        ended.append(time.monotonic_ns())
    return started, ended
