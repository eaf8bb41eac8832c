"""One case of a benchmark, and the pages that it moves: drawn from a seed, so that both processes know them.

Knows page IDs, counts and sizes; no memory and no peers. A case's pools have one role; a page of it is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PageAllocator, PagePool, Snapshot
from hurray_rdma.errors import ConfigError

__all__ = ["Case", "Pattern", "cache_spec", "fragment", "snapshot_of", "source_pages"]

_RUN_PAGES = 8
_SPARE = 2
"""Pools hold this many times what is moved, so that scattered pages lie among others."""
_MIN_POOL_PAGES = 64
_MAX_SEQUENCES = 8
_TOKENS_PER_PAGE = 16


class Pattern(StrEnum):
    """How the pages of one transfer lie in the pools of the two sides."""

    RANDOM = "random"
    """Single pages in random order at the sender; at the receiver a random half of the pool is free."""
    GATHER = "gather"
    """Single pages in random order at the sender; the receiver's pool is fresh, so that it grants neighbours."""
    FRAGMENTED = "fragmented"
    """Runs of eight pages on both sides."""
    CONTIGUOUS = "contiguous"
    """One run on both sides: a fresh snapshot into a fresh pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is moved, and between which pools."""

    page_nbytes: int
    num_pages: int
    """Pages of one transfer, of each layer."""
    pattern: Pattern
    seed: int
    num_layers: int = 1
    pool_pages: int = 0
    """Pages of the pools of both sides, of each layer; 0 is twice ``num_pages``."""
    ahead_pages: int = 0
    """What the receiver with a pool of its own grants ahead, as of `hurray_rdma.Engine`."""
    huge_pages: bool = True
    """Whether all memory asks for transparent huge pages."""

    def __post_init__(self) -> None:
        if self.pool_pages == 0:
            object.__setattr__(self, "pool_pages", max(_MIN_POOL_PAGES, _SPARE * self.num_pages))

    @property
    def nbytes(self) -> int:
        """Bytes of one transfer."""
        return self.page_nbytes * self.num_pages * self.num_layers

    @property
    def pool_nbytes(self) -> int:
        """Bytes of the pages of one pool."""
        return self.page_nbytes * self.pool_pages * self.num_layers


def cache_spec(page_nbytes: int, *, num_layers: int = 1) -> CacheSpec:
    """A cache whose pages, of one fused role, have ``page_nbytes`` bytes.

    A single layer has that number for its index: where a receiver has pools of several page sizes, a sender finds its
    like.

    Raises:
        ConfigError: above 1 KiB it is no multiple of the 16 tokens of a page.
    """
    tokens = _TOKENS_PER_PAGE if page_nbytes >= 1024 else 1
    if page_nbytes < 1 or page_nbytes % tokens:
        raise ConfigError(
            f"must be above 0, and a multiple of {_TOKENS_PER_PAGE} from 1024 on",
            field="page_nbytes",
            value=page_nbytes,
        )
    return CacheSpec(
        num_layers=num_layers,
        num_heads=1,
        head_dim=page_nbytes // tokens,
        page_size=tokens,
        dtype="uint8",
        roles=("fused",),
        layers=(page_nbytes,) if num_layers == 1 else None,
    )


def source_pages(case: Case) -> NDArray[np.uint32]:
    """The sender's page IDs in the order of its block table, uint32 ``[num_pages]``."""
    rng = np.random.default_rng(case.seed)
    if case.pattern is Pattern.CONTIGUOUS:
        return np.arange(case.num_pages, dtype=np.uint32)
    if case.pattern is Pattern.FRAGMENTED:
        return _in_runs(rng, case)
    return rng.permutation(case.pool_pages)[: case.num_pages].astype(np.uint32)


def fragment(allocator: PageAllocator, case: Case) -> None:
    """Takes pages of a fresh pool for good, so that what is free lies as the case's pattern says."""
    if case.pattern in (Pattern.GATHER, Pattern.CONTIGUOUS):
        return
    rng = np.random.default_rng([case.seed, 1])
    if case.pattern is Pattern.FRAGMENTED:
        free = _in_runs(rng, case)
    else:
        free = rng.permutation(case.pool_pages)[: case.num_pages + case.ahead_pages].astype(np.uint32)
    taken = np.ones(case.pool_pages, bool)
    taken[free] = False
    everything = allocator.lease(case.pool_pages)
    allocator.retain(np.flatnonzero(taken))
    everything.release()


def snapshot_of(pool: PagePool, case: Case) -> Snapshot:
    """The case's pages as whole sequences, at most eight of them."""
    page_ids = source_pages(case)
    bounds = np.unique(np.linspace(0, case.num_pages, _MAX_SEQUENCES + 1).astype(np.int64))
    return Snapshot(pool, block_table=page_ids, seq_ptr=bounds, seq_lens=np.diff(bounds) * pool.spec.page_size)


def _in_runs(rng: np.random.Generator, case: Case) -> NDArray[np.uint32]:
    # Every other run of the pool, at most, so that no two are neighbours.
    starts = rng.permutation(case.pool_pages // (_SPARE * _RUN_PAGES)).astype(np.uint32) * np.uint32(
        _SPARE * _RUN_PAGES
    )
    pages = (starts[:, None] + np.arange(_RUN_PAGES, dtype=np.uint32)).ravel()
    if len(pages) < case.num_pages:
        raise ConfigError(
            f"must be a multiple of {_RUN_PAGES} for pattern {case.pattern}", field="num_pages", value=case.num_pages
        )
    return pages[: case.num_pages].astype(np.uint32)
