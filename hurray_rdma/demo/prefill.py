"""The demo's sending process: writes scattered pages, sends them, and copies the same pages as a yardstick."""

from __future__ import annotations

import mmap
import time

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.demo.batch import Batch, draw_batch
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.config import DemoConfig
from hurray_rdma.demo.content import Content
from hurray_rdma.demo.messages import Command, Copied, Drawn, Listening, Ready, Sent
from hurray_rdma.engine import Engine
from hurray_rdma.transport import default_context
from hurray_rdma.transport.binding import native

__all__ = ["cache_spec", "content_of", "prefill", "ucx_options"]


async def prefill(link: Link, config: DemoConfig) -> None:
    """Life of the prefill process; ``link`` brings the receiver's address and then commands."""
    spec = cache_spec(config)
    batch = draw_batch(config.batch, page_size=spec.page_size)
    link.send(Drawn(batch))
    context = default_context(ucx_options(config))
    with PagePool.allocate(spec, num_pages=batch.pool_pages, context=context) as pool:
        content = content_of(config, spec, batch)
        for tensor, (role, layer) in enumerate(spec.tensors):
            content.fill(pool.pages(role, layer), tensor=tensor, page_ids=batch.page_ids)
        yardstick = _Memcpy(pool, batch.page_ids)
        snapshot = Snapshot.from_block_tables(pool, batch.block_tables, seq_lens=batch.seq_lens)
        link.send(Ready())
        receiver = await link.receive(Listening)
        async with Engine(pool) as engine, engine.connect(receiver.address) as peer:
            number = 0
            while (command := await link.receive(Command)) is not Command.FINISH:
                if command is Command.TRANSFER:
                    link.send(Sent(await peer.send(snapshot, key=f"demo-{number}")))
                    number += 1
                else:
                    link.send(Copied(yardstick.run()))


def cache_spec(config: DemoConfig) -> CacheSpec:
    """The cache that ``config`` describes.

    Raises:
        GeometryError: a field is out of its range.
    """
    cache = config.cache
    return CacheSpec(
        num_layers=cache.num_layers,
        num_heads=cache.num_heads,
        head_dim=cache.head_dim,
        page_size=cache.page_size,
        dtype=cache.dtype,
    )


def content_of(config: DemoConfig, spec: CacheSpec, batch: Batch) -> Content:
    """What the source pages of ``batch`` hold; both processes ask."""
    return Content(config.batch.seed, page_nbytes=spec.page_nbytes, num_pages=batch.pool_pages)


def ucx_options(config: DemoConfig) -> dict[str, str] | None:
    """UCX configuration for `hurray_rdma.transport.default_context`; None leaves all to UCX."""
    return {"TLS": config.run.lane} if config.run.lane else None


class _Memcpy:
    """Copies the batch's pages into memory of this process: what the same bytes cost without a peer.

    The destination is laid out as the receiver's is, page after page, and has been touched.
    """

    def __init__(self, pool: PagePool, page_ids: NDArray[np.uint32]) -> None:
        page_nbytes = pool.spec.page_nbytes
        self._sources = [pool.pages(role, layer) for role, layer in pool.spec.tensors]
        self._src_offsets = page_ids.astype(np.uint64) * np.uint64(self._sources[0].strides[0])
        self._dst_offsets = np.arange(len(page_ids), dtype=np.uint64) * np.uint64(page_nbytes)
        self._lengths = np.full(len(page_ids), page_nbytes, np.uint64)
        # Of its own mapping, so that it begins at a memory page as pools do: memcpy runs at a quarter of its speed
        # between addresses of different alignment.
        memory = mmap.mmap(-1, len(self._sources) * len(page_ids) * page_nbytes)
        self._destinations = np.frombuffer(memory, np.uint8).reshape(len(self._sources), -1)
        self._destinations.fill(1)

    def run(self) -> float:
        """Seconds of one copy of everything."""
        started = time.perf_counter()
        for source, destination in zip(self._sources, self._destinations, strict=True):
            native.memcpy(
                source.ctypes.data, destination.ctypes.data, self._src_offsets, self._dst_offsets, self._lengths
            )
        return time.perf_counter() - started
