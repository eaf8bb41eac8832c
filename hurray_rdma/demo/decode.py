"""The demo's receiving process: takes the snapshot into its own pool and compares every token of it."""

from __future__ import annotations

import asyncio

import numpy as np

from hurray_rdma.cache import PagePool, Snapshot
from hurray_rdma.demo.batch import Batch, draw_batch
from hurray_rdma.demo.child import Link
from hurray_rdma.demo.config import DemoConfig
from hurray_rdma.demo.content import Content, MismatchError
from hurray_rdma.demo.messages import Command, Compared, Listening, Received
from hurray_rdma.demo.prefill import cache_spec, content_of, ucx_options
from hurray_rdma.engine import Engine
from hurray_rdma.transport import default_context

__all__ = ["compare", "decode"]

_UNWRITTEN = 0xEE
"""Fills the pool before each transfer, so that bytes of an earlier one cannot pass for this one's."""


async def decode(link: Link, config: DemoConfig) -> None:
    """Life of the decode process. It draws the batch from the settings: nothing about content comes from the sender."""
    spec = cache_spec(config)
    batch = draw_batch(config.batch, page_size=spec.page_size)
    content = content_of(config, spec, batch)
    context = default_context(ucx_options(config))
    with PagePool.allocate(spec, num_pages=len(batch.page_ids), context=context) as pool:
        _overwrite(pool)
        async with Engine(pool, listen="127.0.0.1:0") as engine:
            link.send(Listening(engine.address))
            arrivals = aiter(engine.arrivals())
            while await link.receive(Command) is not Command.FINISH:
                arrival = await anext(arrivals)
                snapshot = await arrival.snapshot()
                link.send(Received(snapshot.block_table, snapshot.seq_ptr, snapshot.seq_lens))
                await link.receive(Command)
                nbytes = await asyncio.to_thread(compare, snapshot, batch, content)
                await asyncio.to_thread(_overwrite, pool)
                arrival.release()
                link.send(Compared(nbytes))


def compare(snapshot: Snapshot, batch: Batch, content: Content) -> int:
    """Compares every token of every sequence, layer and role with what was sent; bytes compared.

    Raises:
        MismatchError: the shape of the batch or a byte differs; the message says where.
    """
    if not np.array_equal(snapshot.seq_lens, batch.seq_lens):
        raise MismatchError(
            f"must be {batch.seq_lens.tolist()} as sent", field="seq_lens", value=snapshot.seq_lens.tolist()
        )
    nbytes = 0
    for tensor, (role, layer) in enumerate(snapshot.pool.spec.tensors):
        for seq in range(len(batch.seq_lens)):
            tokens = snapshot.tokens(role, layer=layer, seq=seq)
            content.check(tokens, batch=batch, seq=seq, tensor=tensor, role=role, layer=layer)
            nbytes += tokens.nbytes
    return nbytes


def _overwrite(pool: PagePool) -> None:
    for role, layer in pool.spec.tensors:
        pool.pages(role, layer).view(np.uint8).fill(_UNWRITTEN)
