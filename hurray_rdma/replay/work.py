"""What every process of a replay knows from the start: settings, the trace, who serves what, and what blocks hold.

Knows how a block of 512 tokens becomes one page of fewer, and which decode worker takes a request; moves nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec
from hurray_rdma.demo.batch import Batch
from hurray_rdma.demo.content import Content
from hurray_rdma.replay.config import ReplayConfig
from hurray_rdma.replay.trace import BLOCK_TOKENS, Trace

__all__ = ["Work", "choose_workers"]


@dataclass(frozen=True, eq=False)
class Work:
    """One replay; every process makes the same of it."""

    config: ReplayConfig
    trace: Trace
    decode_of: NDArray[np.int64]
    """Number of the decode worker that a request goes to, ``[num_requests]``."""

    @cached_property
    def spec(self) -> CacheSpec:
        """The scaled cache: one page for each block."""
        return CacheSpec(**msgspec.structs.asdict(self.config.cache))

    @property
    def ucx_options(self) -> dict[str, str] | None:
        """UCX configuration for `hurray_rdma.transport.default_context`; None leaves all to UCX."""
        return {"TLS": self.config.run.lane} if self.config.run.lane else None

    @cached_property
    def headroom_pages(self) -> int:
        """Free pages that decode workers provide for the next request: what the largest needs that fits at all.

        With fewer an offer could wait for pages that are merely kept: an engine does not say that one waits.
        """
        fitting = self.trace.lengths[self.trace.lengths <= self.config.workers.decode_pages]
        return int(fitting.max(initial=1))

    @cached_property
    def content(self) -> Content:
        """Bytes of every block: they follow from its number, the layer and the role."""
        return Content(self.config.run.seed, page_nbytes=self.spec.page_nbytes, num_pages=self.trace.num_blocks)

    @cached_property
    def num_tokens(self) -> NDArray[np.int64]:
        """Scaled tokens of each request, ``[num_requests]``; a block that is not full becomes a page that is not."""
        size, rest = self.config.cache.page_size, self.trace.input_tokens % BLOCK_TOKENS
        last = np.where(rest == 0, size, np.maximum(1, rest * size // BLOCK_TOKENS))
        return np.asarray((self.trace.lengths - 1) * size + last)

    def keys_of(self, request: int) -> NDArray[np.uint8]:
        """Page keys of a request, uint8 ``[num_blocks, 8]``: the block's number from 1; zeros for a page not full."""
        keys = self.trace.blocks_of(request).astype("<u8") + np.uint64(1)
        if self.trace.ragged[request]:
            keys[-1] = 0
        return keys.view(np.uint8).reshape(-1, 8)

    def batch_of(self, request: int) -> Batch:
        """A request as the demo's comparison wants it: block numbers stand for source pages."""
        blocks = self.trace.blocks_of(request)
        return Batch(
            block_tables=(blocks,),
            seq_lens=self.num_tokens[request : request + 1].astype(np.uint32),
            page_ids=blocks,
            pool_pages=self.trace.num_blocks,
        )

    def prefill_of(self, request: int) -> int:
        """Number of the prefill worker that sends a request: they take turns."""
        return request % self.config.workers.prefill

    def decode_s(self, request: int) -> float:
        """Seconds that a decode worker takes over a request's output."""
        run = self.config.run
        return float(self.trace.output_tokens[request]) * run.token_ms / 1e3 / run.speed

    def due_s(self, request: int) -> float:
        """Seconds from the start until a request comes."""
        return float(self.trace.arrival_s[request]) / self.config.run.speed


def choose_workers(trace: Trace, num_workers: int) -> NDArray[np.int64]:
    """Where each request goes, ``[num_requests]``: to the worker that had most of its prefix, else the least busy one.

    A request of which less than half was seen before has no reason to follow it, the system prompt that all share
    included. Follows from the trace alone, so that a replay can be repeated.
    """
    owner: dict[int, int] = {}
    load = [0] * num_workers
    chosen = np.empty(len(trace), np.int64)
    for request in range(len(trace)):
        blocks = trace.blocks_of(request).tolist()
        num_known = next((at for at, block in enumerate(blocks) if block not in owner), len(blocks))
        follow = 2 * num_known >= len(blocks) > 0
        worker = owner[blocks[num_known - 1]] if follow else load.index(min(load))
        load[worker] += len(blocks) - num_known
        owner.update((block, worker) for block in blocks[num_known:])
        chosen[request] = worker
    return chosen
