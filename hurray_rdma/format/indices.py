"""The index arrays of a batch: block_table, seq_ptr and this project's seq_lens, checked in one vectorised pass.

It knows arrays and the storage invariants of ADR-024; it never touches page data. Source: block-paged, Storage
Invariants (1) to (3), and WIRE.md (seq_lens). Invariant (6), paged_axis = 0, is a field and checked with the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.finding import Finding, settle

__all__ = ["validate_indices"]

_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_Indices = NDArray[np.integer[Any]]


def validate_indices(
    block_table: ArrayLike,
    seq_ptr: ArrayLike,
    *,
    num_pages: int,
    seq_lens: ArrayLike | None = None,
    page_size: int | None = None,
    total_tokens: int | None = None,
    strict: bool = True,
) -> tuple[Finding, ...]:
    """Check the index arrays of one batch.

    Args:
        block_table: page IDs of all sequences, integers [seq_ptr[-1]].
        seq_ptr: offsets into block_table, integers [num_seqs + 1].
        num_pages: pages in the pool; every page ID lies below it.
        seq_lens: tokens of each sequence, integers [num_seqs]; checked when given.
        page_size: tokens per page; with it each seq_len must fit its sequence's pages.
        total_tokens: what seq_lens must sum to, the descriptor's shape[0].
        strict: raise the first violation; False returns them all, the first offender of each rule.

    Returns:
        What was found, empty when all is well. ``position`` is the index of the first offending entry.

    Raises:
        DescriptorError: strict and something was found; or an array is not one-dimensional and of integers.
    """
    table = _integers("block_table", block_table)
    pointers = _integers("seq_ptr", seq_ptr)
    lengths = None if seq_lens is None else _integers("seq_lens", seq_lens)
    found = [*_pointer_findings(pointers, len(table))]
    sound = not found
    found += _page_findings(table, num_pages)
    if lengths is not None:
        found += _length_findings(lengths, pointers, page_size, total_tokens, sound=sound)
    if strict:
        settle(found, strict=True)
    return tuple(found)


def _integers(name: str, values: ArrayLike) -> _Indices:
    array = np.asarray(values)
    if array.ndim != 1:
        raise DescriptorError("must be one-dimensional", field=f"{name}.shape", value=array.shape)
    if array.size == 0:
        return np.zeros(0, dtype=np.uint64)
    if array.dtype.kind not in "ui":
        raise DescriptorError("must hold integers", field=f"{name}.dtype", value=str(array.dtype))
    return array


def _pointer_findings(pointers: _Indices, entries: int) -> Iterator[Finding]:
    if not len(pointers):
        yield Finding("seq_ptr", 0, "seq_ptr has num_seqs + 1 entries, at least one", position=0)
        return
    if pointers[0] != 0:
        yield _at("seq_ptr", pointers, 0, "seq_ptr starts at 0")
    falling = pointers[1:] < pointers[:-1]
    if falling.any():
        first = int(falling.argmax()) + 1
        yield _at("seq_ptr", pointers, first, f"seq_ptr never falls, but seq_ptr[{first - 1}] is {pointers[first - 1]}")
    if pointers[-1] != entries:
        rule = f"the last entry of seq_ptr equals the length of block_table, {entries}"
        yield _at("seq_ptr", pointers, len(pointers) - 1, rule)


def _page_findings(table: _Indices, num_pages: int) -> Iterator[Finding]:
    if not len(table):
        return
    low = int(table.min()) if table.dtype.kind == "i" else 0
    if low >= 0 and int(table.max()) < num_pages:
        return
    outside = table >= num_pages if num_pages <= np.iinfo(table.dtype).max else np.zeros(len(table), dtype=bool)
    if low < 0:
        outside |= table < 0
    first = int(outside.argmax())
    yield _at("block_table", table, first, f"a page ID must be 0 or more and below num_pages {num_pages}")


def _length_findings(
    lengths: _Indices, pointers: _Indices, page_size: int | None, total_tokens: int | None, *, sound: bool
) -> Iterator[Finding]:
    num_seqs = max(len(pointers) - 1, 0)
    if len(lengths) != num_seqs:
        yield Finding("seq_lens", len(lengths), f"has one entry per sequence, and seq_ptr makes {num_seqs} sequences")
        return
    if not num_seqs:
        if total_tokens:
            yield Finding("seq_lens", 0, f"an empty batch has no tokens, but total_tokens is {total_tokens}")
        return
    if lengths.dtype.kind == "i" and int(lengths.min()) < 0:
        first = int((lengths < 0).argmax())
        yield _at("seq_lens", lengths, first, "a sequence has 0 tokens or more")
        return
    lengths = lengths.astype(np.uint64)
    if page_size is not None and sound:
        pages = (pointers[1:] - pointers[:-1]).astype(np.uint64)
        size = np.uint64(page_size)
        excess = lengths // size + (lengths % size != 0) > pages
        if excess.any():
            first = int(excess.argmax())
            room = int(pages[first]) * page_size
            rule = f"the {pages[first]} pages of sequence {first} hold {page_size} tokens each, {room} in all"
            yield _at("seq_lens", lengths, first, rule)
    if total_tokens is not None:
        total = (int((lengths >> _HALF).sum()) << 32) + int((lengths & _LOW).sum())
        if total != total_tokens:
            yield Finding("seq_lens", total, f"seq_lens sum to total_tokens {total_tokens}, shape[0] of the descriptor")


def _at(name: str, array: _Indices, position: int, rule: str) -> Finding:
    return Finding(f"{name}[{position}]", int(array[position]), rule, position=position)
