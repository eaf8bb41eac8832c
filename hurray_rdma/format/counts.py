"""The counts of a snapshot inside the bytes of its descriptors: read and written where they are.

Snapshots of one cache have descriptors that differ in nothing else, so that what holds for the rest of the bytes needs
to be found out once. Knows offsets of the block-paged layout (ADR-024 section 5); knows no rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple

from hurray_rdma.format.rules import BUFFERS_OFFSET, ENTRY_NBYTES, OFFSETS
from hurray_rdma.format.tags import IndexType

__all__ = ["Counts", "DescriptorForm", "counts_of", "mark_bytes", "with_counts"]

_TOTAL_TOKENS, _NUM_SEQS, _MARK = OFFSETS["total_tokens"], OFFSETS["num_seqs"], OFFSETS["kv_role"]
_INDEX_TYPE = OFFSETS["block_table_index_type"]
_BLOCK_TABLE, _SEQ_PTR = BUFFERS_OFFSET + ENTRY_NBYTES, BUFFERS_OFFSET + 2 * ENTRY_NBYTES
_TOKENS_AND_SEQS = Struct(f"<Q{_NUM_SEQS - _TOTAL_TOKENS - 8}sI")
"""The two that come before the role and the layer, with what is between them."""
_TABLES = Struct(f"<Q{_SEQ_PTR - _BLOCK_TABLE - 8}sQ")
"""The two that come after."""
assert _MARK == _NUM_SEQS + 4, "nothing lies between what is counted first and what tells descriptors apart"
_INDEX_NBYTES = IndexType.UINT32.itemsize
_MIN_NBYTES = BUFFERS_OFFSET + 3 * ENTRY_NBYTES


class Counts(NamedTuple):
    """What a descriptor counts, its index buffers in bytes of uint32 entries."""

    total_tokens: int
    num_seqs: int
    block_table_nbytes: int
    seq_ptr_nbytes: int

    @classmethod
    def of(cls, *, total_tokens: int, num_seqs: int, block_table_length: int) -> Counts:
        """Those of a snapshot."""
        return cls(total_tokens, num_seqs, block_table_length * _INDEX_NBYTES, (num_seqs + 1) * _INDEX_NBYTES)


def counts_of(data: bytes, /) -> Counts | None:
    """The counts in the bytes of a descriptor; None if it is too short to have any, or its indices are no uint32."""
    if len(data) < _MIN_NBYTES or data[_INDEX_TYPE] != IndexType.UINT32:
        return None
    total_tokens, _, num_seqs = _TOKENS_AND_SEQS.unpack_from(data, _TOTAL_TOKENS)
    block_table, _, seq_ptr = _TABLES.unpack_from(data, _BLOCK_TABLE)
    return Counts(total_tokens, num_seqs, block_table, seq_ptr)


def with_counts(data: bytes, counts: Counts, /) -> bytes:
    """The bytes of the same descriptor with other counts.

    Args:
        data: a descriptor of which `counts_of` has told.
        counts: what is to be in it.
    """
    return DescriptorForm(data, (data[_MARK : _MARK + 1],)).encode(counts)  # its own role: no other mark changes


class DescriptorForm:
    """The descriptors of any snapshot of one cache: they differ in what they count, and among each other in role and
    layer alone.

    Args:
        first: one of them, whatever its role, layer and counts; `encode` is right only if `counts_of` tells of it.
        marks: of each tensor, at least one, in order, as of `mark_tensors`.
    """

    __slots__ = ("_after", "_after_mark", "_after_tokens", "_before", "_between", "marks")

    def __init__(self, first: bytes, marks: tuple[bytes, ...]) -> None:
        self.marks = marks
        self._before = first[:_TOTAL_TOKENS]
        self._after_tokens = first[_TOTAL_TOKENS + 8 : _NUM_SEQS]
        self._after_mark = first[_MARK + len(marks[0]) : _BLOCK_TABLE]
        self._between = first[_BLOCK_TABLE + 8 : _SEQ_PTR]
        self._after = first[_SEQ_PTR + 8 :]

    def encode(self, counts: Counts, /) -> bytes:
        """The descriptors of the snapshot that has these counts, one after the other."""
        total_tokens, num_seqs, block_table, seq_ptr = counts
        head = self._before + _TOKENS_AND_SEQS.pack(total_tokens, self._after_tokens, num_seqs)
        tail = self._after_mark + _TABLES.pack(block_table, self._between, seq_ptr) + self._after
        return b"".join((head, (tail + head).join(self.marks), tail))


def mark_bytes(first: bytes, marks: Sequence[bytes], /) -> bytes:
    """The descriptors that differ from one in role and layer alone, one after the other.

    Args:
        first: its bytes; its own role and layer do not count.
        marks: of each tensor, in order, as of `mark_tensors`.
    """
    if not marks:
        return b""
    head, tail = first[:_MARK], first[_MARK + len(marks[0]) :]
    return b"".join((head, (tail + head).join(marks), tail))
