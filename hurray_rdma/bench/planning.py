"""What plans cost: scattered pages of a cache of Llama-3-8B's shape, mapped and planned. No memory, no peers."""

from __future__ import annotations

import time

import numpy as np

from hurray_rdma.bench.config import PlanningConfig, RunConfig
from hurray_rdma.bench.measured import Stat
from hurray_rdma.bench.results import PlanningRow
from hurray_rdma.bench.sections import Step
from hurray_rdma.cache import CacheSpec, PoolLayout, Segment
from hurray_rdma.plan import map_pages, plan_transfer

__all__ = ["planning"]

_NUM_LAYERS = 32


def planning(config: PlanningConfig, run: RunConfig, step: Step) -> tuple[PlanningRow, ...]:
    """Seconds from a block table and granted pages to a plan that moves all layers and roles."""
    rows = []
    for num_pages in config.num_pages:
        step(f"plans of {num_pages:,} pages")
        rng = np.random.default_rng(run.seed)
        pool = _layout(2 * num_pages)
        pages, granted = (rng.permutation(2 * num_pages)[:num_pages].astype(np.uint32) for _ in range(2))
        seq_ptr = np.unique(np.linspace(0, num_pages, 65).astype(np.uint32))
        seq_lens = np.diff(seq_ptr) * np.uint32(pool.spec.page_size)
        seconds = []
        for _ in range(run.rounds + 1):
            started = time.perf_counter()
            page_map = map_pages(
                pages,
                seq_ptr,
                seq_lens,
                num_pages=pool.num_pages,
                src_page_size=pool.spec.page_size,
                dst_page_size=pool.spec.page_size,
            )
            plan_transfer(pool, pool, page_map, granted)
            seconds.append(time.perf_counter() - started)
        stat = Stat.of(seconds[1:])  # the first one warms up
        rows.append(PlanningRow(num_pages=num_pages, seconds=stat, us_per_page=stat.median / num_pages * 1e6))
    return tuple(rows)


def _layout(num_pages: int) -> PoolLayout:
    spec = CacheSpec(num_layers=_NUM_LAYERS, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
    token_nbytes = spec.num_heads * spec.row_nbytes
    size = num_pages * spec.page_nbytes
    segments = tuple(
        Segment(0, i * size, spec.page_nbytes, token_nbytes, spec.row_nbytes) for i in range(len(spec.tensors))
    )
    return PoolLayout(spec=spec, num_pages=num_pages, segments=segments)
