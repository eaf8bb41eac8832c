# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""From page IDs to byte offsets, and from offsets to operations: one pass each, without the GIL.

Knows numbers only; `hurray_rdma.plan.transfer` and `hurray_rdma.plan.pieces` know what they are of. Arrays are
contiguous, and nobody may write to them meanwhile. Sums and products are those of uint64: they wrap.
"""
from libc.stdint cimport uint32_t, uint64_t

import numpy as np


def offsets_of(
    const uint32_t[::1] page_ids not None,
    const uint32_t[::1] slots not None,
    *,
    uint64_t page_nbytes,
    uint64_t token_nbytes,
    uint64_t head_nbytes,
    const uint32_t[::1] places=None,
):
    """Where slots of pages start: ``page_ids[i] * page_nbytes + slots[i] * token_nbytes + head_nbytes``.

    Args:
        page_ids: uint32 ``[count]``; of any length with ``places``.
        slots: uint32 ``[count]``.
        page_nbytes, token_nbytes: from one page or slot to the next.
        head_nbytes: from a slot to the first of the heads that are meant.
        places: where in ``page_ids`` each page is, uint32 ``[count]``; None is one after the other.

    Returns:
        Bytes, uint64 ``[count]``.

    Raises:
        IndexError: the arrays differ in length, or a place is not in ``page_ids``.
    """
    cdef Py_ssize_t count = slots.shape[0], at
    cdef uint32_t highest = 0
    offsets = np.empty(count, np.uint64)
    cdef uint64_t[::1] out = offsets
    if (page_ids.shape[0] if places is None else places.shape[0]) != count:
        raise IndexError(f"there are {count} slots, and not as many pages")
    if places is None:
        with nogil:
            for at in range(count):
                out[at] = page_ids[at] * page_nbytes + slots[at] * token_nbytes + head_nbytes
        return offsets
    with nogil:
        for at in range(count):
            highest = max(highest, places[at])
    if count and highest >= page_ids.shape[0]:
        raise IndexError(f"place {highest} is not below the {page_ids.shape[0]} pages")
    with nogil:
        for at in range(count):
            out[at] = page_ids[places[at]] * page_nbytes + slots[at] * token_nbytes + head_nbytes
    return offsets


def merged(src_offsets not None, dst_offsets not None, uint64_t piece_nbytes):
    """Pieces of one length as operations: neighbours in the list that meet on both sides become one.

    Args:
        src_offsets, dst_offsets: bytes, uint64 ``[count]``.
        piece_nbytes: length of each.

    Returns:
        Source offsets, destination offsets (the arguments themselves where no two meet) and lengths, uint64
        ``[num_operations]``.

    Raises:
        IndexError: the arrays differ in length.
    """
    cdef const uint64_t[::1] src = src_offsets, dst = dst_offsets
    cdef Py_ssize_t count = src.shape[0], at, operation = 0
    if dst.shape[0] != count:
        raise IndexError(f"there are {count} source offsets, but {dst.shape[0]} destination offsets")
    with nogil:
        for at in range(count):
            operation += not meets(src, dst, at, piece_nbytes)
    lengths = np.empty(operation, np.uint64)
    cdef uint64_t[::1] nbytes = lengths, src_out, dst_out
    if operation == count:
        nbytes[:] = piece_nbytes
        return src_offsets, dst_offsets, lengths
    src_starts, dst_starts = np.empty(operation, np.uint64), np.empty(operation, np.uint64)
    src_out, dst_out = src_starts, dst_starts
    with nogil:
        operation = -1
        for at in range(count):
            if meets(src, dst, at, piece_nbytes):
                nbytes[operation] += piece_nbytes
                continue
            operation += 1
            src_out[operation], dst_out[operation], nbytes[operation] = src[at], dst[at], piece_nbytes
    return src_starts, dst_starts, lengths


cdef bint meets(
    const uint64_t[::1] src, const uint64_t[::1] dst, Py_ssize_t at, uint64_t piece_nbytes
) noexcept nogil:
    """Whether a piece begins where the one before it ends, on both sides."""
    return at > 0 and src[at] - src[at - 1] == piece_nbytes and dst[at] - dst[at - 1] == piece_nbytes
