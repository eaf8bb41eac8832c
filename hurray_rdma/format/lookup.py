"""Where an element lies in the page pool (block-paged, Element Lookup). Index arithmetic only, scalar or vectorised."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.errors import DescriptorError

__all__ = ["element_index", "slot_index"]

_Index = int | NDArray[np.int64]
_MOST_SLOTS = 1 << 62


def slot_index(
    block_table: ArrayLike,
    seq_ptr: ArrayLike,
    *,
    seq: ArrayLike,
    token: ArrayLike,
    page_size: int,
    seq_lens: ArrayLike | None = None,
) -> _Index:
    """Pool slot of a token: ``block_table[seq_ptr[seq] + token // page_size] * page_size + token % page_size``.

    Args:
        block_table, seq_ptr: index arrays that `validate_indices` accepts.
        seq: sequence numbers, scalar or array.
        token: tokens within their sequence, scalar or array; broadcast against ``seq``.
        page_size: tokens per page.
        seq_lens: tokens per sequence; with it, slots past a sequence's valid tokens are refused.

    Returns:
        int for scalars, int64 array otherwise.

    Raises:
        DescriptorError: a sequence, token or page ID is out of range, naming the first.
    """
    table, pointers = np.asarray(block_table), np.asarray(seq_ptr)
    seqs, tokens = np.broadcast_arrays(_index("seq", seq), _index("token", token))
    _need_below("seq", seqs, len(pointers) - 1, "the number of sequences")
    if seq_lens is not None:
        lengths = np.asarray(seq_lens)
        _need_below("seq", seqs, len(lengths), "the number of seq_lens")
        _need_below("token", tokens, lengths[seqs].astype(np.int64), "seq_lens of the sequence")
    starts, ends = pointers[seqs].astype(np.int64), pointers[seqs + 1].astype(np.int64)
    _need_below("token", tokens, (ends - starts) * page_size, "the tokens that the sequence's pages hold")
    positions = starts + tokens // page_size
    _need_below("block_table position", positions, len(table), "the length of block_table")
    pages = table[positions]
    limit = _MOST_SLOTS // page_size  # so that a page ID that no pool has cannot wrap around to one that it has
    if np.any(pages > limit):
        first = int(np.argmax(pages > limit))
        at = f"block_table[{positions.flat[first]}]"
        raise DescriptorError(f"no page ID is above {limit}", field=at, value=int(pages.flat[first]))
    slots = pages.astype(np.int64) * page_size + tokens % page_size
    return int(slots) if slots.ndim == 0 else slots


def element_index(
    block_table: ArrayLike,
    seq_ptr: ArrayLike,
    *,
    seq: ArrayLike,
    token: ArrayLike,
    head: ArrayLike,
    dim: ArrayLike,
    page_size: int,
    num_heads: int,
    head_dim: int,
    seq_lens: ArrayLike | None = None,
) -> _Index:
    """Flat index in the page pool of element (seq, token, head, dim): ``(slot * num_heads + head) * head_dim + dim``.

    Scalars give an int; arrays broadcast and give int64. Other arguments as in `slot_index`.

    Raises:
        DescriptorError: an index is out of range, naming the first.
    """
    heads, dims = _index("head", head), _index("dim", dim)
    _need_below("head", heads, num_heads, "num_heads")
    _need_below("dim", dims, head_dim, "head_dim")
    slots = slot_index(block_table, seq_ptr, seq=seq, token=token, page_size=page_size, seq_lens=seq_lens)
    flat: Any = (np.asarray(slots) * num_heads + heads) * head_dim + dims
    return int(flat) if np.ndim(flat) == 0 else np.asarray(flat, dtype=np.int64)


def _index(name: str, value: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(value)
    if array.size and array.dtype.kind not in "ui":
        raise DescriptorError("must be integers", field=name, value=str(array.dtype))
    return array.astype(np.int64)


def _need_below(name: str, values: NDArray[np.int64], limits: int | NDArray[np.int64], what: str) -> None:
    outside = (values < 0) | (values >= limits)
    if np.any(outside):
        first = int(np.argmax(outside))
        limit = int(np.broadcast_to(np.asarray(limits), outside.shape).flat[first])
        at = f"{name}[{first}]" if outside.ndim else name
        raise DescriptorError(f"must be 0 or more and below {what}, {limit}", field=at, value=int(values.flat[first]))
