"""What one transfer is to be, told by its key: so the receiver knows every byte that must come, whoever was killed.

A `Recipe` travels as the key of the transfer. Table, lengths, aliases and content follow from it alone. It knows no
engine.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot

__all__ = ["Receipt", "Recipe", "Shape", "mismatch", "paint", "raw", "shape_of"]

Receipt = Literal["take", "abort at once", "abort after a layer"]
"""What the receiving application does with the arrival."""

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Recipe(msgspec.Struct, frozen=True, array_like=True):
    """One transfer; `key` and `of` are inverse to each other."""

    name: str
    """Unique in a scene."""
    seed: int
    num_pages: int
    receipt: Receipt = "take"
    hold_s: float = 0.0
    """The receiver keeps the delivered pages for so long."""

    @property
    def key(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def of(cls, key: str) -> Recipe:
        """Raises msgspec.DecodeError: no recipe."""
        return msgspec.json.decode(key, type=cls)


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """The batch of a recipe: page j of it is logical page j, wherever it lies."""

    tables: list[list[int]]
    """Logical pages of each sequence."""
    seq_lens: list[int]
    num_tokens: NDArray[np.int64]
    """Valid tokens of each logical page, ``[num_pages]``."""


def shape_of(recipe: Recipe, spec: CacheSpec) -> Shape:
    """Two sequences where there are pages for them: they share page 0, and each ends in a partial page of its own."""
    random = np.random.default_rng(_number(recipe, "shape"))
    pages = list(range(recipe.num_pages))
    split = int(random.integers(1, recipe.num_pages)) if recipe.num_pages > 2 else recipe.num_pages
    tables = [pages] if split == recipe.num_pages else [pages[:split], [0, *pages[split:]]]
    num_tokens = np.full(recipe.num_pages, spec.page_size)
    seq_lens = []
    for table in tables:
        last = int(random.integers(1, spec.page_size + 1)) if table[-1] else spec.page_size  # page 0 is shared
        num_tokens[table[-1]] = last
        seq_lens.append((len(table) - 1) * spec.page_size + last)
    return Shape(tables, seq_lens, num_tokens)


def raw(pool: PagePool, role: str, layer: int) -> NDArray[np.uint8]:
    """Bytes of each page of a pool in NHD order: ``[num_pages, page_nbytes]``."""
    pages: NDArray[np.uint8] = pool.pages(role, layer).view(np.uint8).reshape(pool.num_pages, -1)
    return pages


def paint(recipe: Recipe, pool: PagePool, page_ids: NDArray[np.uint32]) -> None:
    """Writes the recipe's content into these pages of a pool, ``[num_pages]``: logical page j into ``page_ids[j]``."""
    seed = _number(recipe, "content")
    for index, (role, layer) in enumerate(pool.spec.tensors):
        raw(pool, role, layer)[page_ids] = _content(seed, index, recipe.num_pages, pool.spec.page_nbytes)


def mismatch(recipe: Recipe, snapshot: Snapshot) -> str | None:
    """What is wrong with a delivered snapshot; None if every valid token, length and alias is right."""
    pool, shape = snapshot.pool, shape_of(recipe, snapshot.pool.spec)
    if snapshot.seq_lens.tolist() != shape.seq_lens:
        return f"seq_lens are {snapshot.seq_lens.tolist()}, not {shape.seq_lens}"
    logical = np.concatenate([np.array(table) for table in shape.tables])
    if len(snapshot.block_table) != len(logical):
        return f"block_table has {len(snapshot.block_table)} entries, not {len(logical)}"
    page_ids = np.zeros(recipe.num_pages, np.uint32)
    page_ids[logical] = snapshot.block_table
    if not np.array_equal(page_ids[logical], snapshot.block_table) or len(set(page_ids.tolist())) != len(page_ids):
        return f"block_table {snapshot.block_table.tolist()} has not the aliases of {logical.tolist()}"
    seed, token_nbytes = _number(recipe, "content"), pool.spec.page_nbytes // pool.spec.page_size
    valid = np.arange(pool.spec.page_nbytes) < (shape.num_tokens * token_nbytes)[:, None]
    for index, (role, layer) in enumerate(pool.spec.tensors):
        wrong = (raw(pool, role, layer)[page_ids] != _content(seed, index, *valid.shape)) & valid
        if wrong.any():
            page, byte = (int(n) for n in np.argwhere(wrong)[0])
            return (
                f"{int(wrong.sum())} bytes of {role} of layer {layer} are wrong, "
                f"the first at byte {byte} of page {page_ids[page]} (logical page {page})"
            )
    return None


def _number(recipe: Recipe, what: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{what} {recipe.key}".encode()).digest()[:8], "little")


def _content(seed: int, tensor_index: int, num_pages: int, page_nbytes: int) -> NDArray[np.uint8]:
    """Bytes ``[num_pages, page_nbytes]``; each word of 8 tells seed, tensor, page and place. Cheap, for large pages."""
    num_words = -(-page_nbytes // 8)
    words = np.arange(num_pages * num_words, dtype=np.uint64)
    words *= _GOLDEN
    words += np.uint64((seed + (tensor_index << 40)) % 2**64)
    return words.view(np.uint8).reshape(num_pages, num_words * 8)[:, :page_nbytes]
