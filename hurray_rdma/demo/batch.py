"""The demo's batch: sequence lengths and block tables over scattered pages, drawn from a seed.

Knows page IDs and token counts; no memory. Both processes draw the same batch from the same settings, so that the
receiving one knows what it must get without being sent it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.demo.config import BatchConfig

__all__ = ["Batch", "draw_batch"]

_SPARE_PAGES = 2
"""The source pool has one page more for each so many used ones, so that used pages lie among unused ones."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences over a source pool."""

    block_tables: tuple[NDArray[np.uint32], ...]
    """Per sequence: its page IDs in the source pool, uint32 ``[ceil(tokens / page_size)]``."""
    seq_lens: NDArray[np.uint32]
    """Tokens per sequence, uint32 ``[num_sequences]``."""
    page_ids: NDArray[np.uint32]
    """Every page in use, once, in the order in which the block tables first name it; uint32 ``[num_pages]``."""
    pool_pages: int
    """Pages of the source pool, used or not."""


def draw_batch(config: BatchConfig, *, page_size: int) -> Batch:
    """Draws the batch that ``config.seed`` stands for.

    Args:
        config: counts and ranges.
        page_size: tokens per page.
    """
    rng = np.random.default_rng(config.seed)
    seq_lens = rng.integers(config.tokens_min, config.tokens_max, config.num_sequences, np.uint32, endpoint=True)
    # Sharing sequences are not all neighbours: aliases must survive wherever they stand.
    sharing = np.zeros(config.num_sequences, bool)
    sharing[rng.permutation(config.num_sequences)[: config.num_sharing]] = True
    shared_pages = config.shared_prefix_tokens // page_size if config.num_sharing else 0
    table_lens = -(-seq_lens.astype(np.int64) // page_size)
    own_pages = table_lens - np.where(sharing, shared_pages, 0)

    num_pages = shared_pages + int(own_pages.sum())
    pool_pages = num_pages + -(-num_pages // _SPARE_PAGES)
    used = rng.permutation(pool_pages).astype(np.uint32)[:num_pages]
    prefix, own = used[:shared_pages], np.split(used[shared_pages:], np.cumsum(own_pages)[:-1])
    tables = tuple(
        np.concatenate([prefix, pages]) if shares else pages for shares, pages in zip(sharing, own, strict=True)
    )
    flat = np.concatenate(tables)
    page_ids = flat[np.sort(np.unique(flat, return_index=True)[1])]
    return Batch(block_tables=tables, seq_lens=seq_lens, page_ids=page_ids, pool_pages=pool_pages)
