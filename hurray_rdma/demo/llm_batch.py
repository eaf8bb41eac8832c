"""The batch of ``--llm``: prompts that begin alike, packed into one row of tokens, and the pages that they go to.

Knows token IDs, positions and page IDs, as numpy arrays; knows neither models nor memory. What all prompts begin with
is there once: it is computed once, and its whole pages stand in every block table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["PackedPrompts", "PageTables", "lay_out", "pack"]


@dataclass(frozen=True, slots=True, eq=False)
class PackedPrompts:
    """Prompts in one row: the shared prefix, then the rest of each, one after the other."""

    token_ids: NDArray[np.int64]
    """int64 ``[num_packed]``."""
    positions: NDArray[np.int64]
    """Of each token in its sequence, int64 ``[num_packed]``."""
    owners: NDArray[np.int64]
    """The sequence of each token, -1 in the prefix; int64 ``[num_packed]``."""
    seq_lens: NDArray[np.uint32]
    """Tokens per sequence, the prefix included, uint32 ``[num_seqs]``."""
    prefix_tokens: int
    """Whole pages."""

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def last(self) -> NDArray[np.int64]:
        """Where the last token of each sequence is in the row, int64 ``[num_seqs]``."""
        return self.prefix_tokens - 1 + np.cumsum(self.seq_lens.astype(np.int64) - self.prefix_tokens)

    def places(self, seq: int) -> NDArray[np.int64]:
        """Where the tokens of one sequence are in the row, int64 ``[seq_len]``."""
        return np.flatnonzero((self.owners == -1) | (self.owners == seq))

    def attended(self) -> NDArray[np.bool_]:
        """Which token (row) attends to which (column): its own sequence's and the prefix's, up to itself.

        bool ``[num_packed, num_packed]``.
        """
        owners = self.owners
        related: NDArray[np.bool_] = (owners[None, :] == -1) | (owners[None, :] == owners[:, None])
        return related & np.tri(len(owners), dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class PageTables:
    """Where packed prompts are in a pool."""

    tables: tuple[NDArray[np.uint32], ...]
    """Per sequence its page IDs, uint32 ``[ceil(seq_len / page_size)]``; they begin alike."""
    page_ids: NDArray[np.int64]
    """The page of each packed token, int64 ``[num_packed]``."""
    offsets: NDArray[np.int64]
    """Its slot in that page, int64 ``[num_packed]``."""
    pool_pages: int
    """Pages of the pool, used or not."""


def pack(prompts: Sequence[Sequence[int]], *, page_size: int) -> PackedPrompts:
    """Packs prompts.

    Args:
        prompts: token IDs, at least one in each.
        page_size: tokens per page; only whole pages are shared. The last token of each prompt is its own, since the
            next one is generated from it.
    """
    shortest = min(len(prompt) for prompt in prompts)
    heads = np.array([prompt[: shortest - 1] for prompt in prompts], np.int64)
    common = int((heads == heads[0]).all(axis=0).cumprod().sum()) if len(prompts) > 1 else 0
    prefix = common // page_size * page_size
    rests = [np.asarray(prompt[prefix:], np.int64) for prompt in prompts]
    counts = [len(rest) for rest in rests]
    return PackedPrompts(
        token_ids=np.concatenate([np.asarray(prompts[0][:prefix], np.int64), *rests]),
        positions=np.concatenate([np.arange(prefix), *(prefix + np.arange(count) for count in counts)]),
        owners=np.repeat(np.arange(-1, len(prompts)), [prefix, *counts]),
        seq_lens=np.array([prefix + count for count in counts], np.uint32),
        prefix_tokens=prefix,
    )


def lay_out(prompts: PackedPrompts, *, page_size: int, seed: int) -> PageTables:
    """Scatters the prompts over a pool of twice the pages that they need.

    Args:
        prompts: packed with the same ``page_size``.
        page_size: tokens per page.
        seed: of the scattering.
    """
    lens = prompts.seq_lens.astype(np.int64)
    shared = prompts.prefix_tokens // page_size
    own = -(-lens // page_size) - shared
    num_pages = shared + int(own.sum())
    used = np.random.default_rng(seed).permutation(2 * num_pages).astype(np.uint32)[:num_pages]
    tables = tuple(np.concatenate([used[:shared], pages]) for pages in np.split(used[shared:], np.cumsum(own)[:-1]))
    # The prefix is the same in all tables: the first one says where it is.
    page_ids = [
        tables[max(owner, 0)][prompts.positions[prompts.owners == owner] // page_size]
        for owner in range(-1, prompts.num_seqs)
    ]
    return PageTables(
        tables=tables,
        page_ids=np.concatenate(page_ids).astype(np.int64),
        offsets=prompts.positions % page_size,
        pool_pages=2 * num_pages,
    )
