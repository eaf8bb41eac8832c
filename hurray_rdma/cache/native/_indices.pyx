# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""One pass over the index arrays of a batch for each question that is asked of them: do they fit, which pages are named.

Knows arrays of page IDs and token counts only; `hurray_rdma.cache.indices` and `hurray_rdma.plan.tables` hand these
functions on. All arrays are contiguous uint32, read without the GIL: nobody may write to them meanwhile. Nothing is
looked up at a place that was not compared with the bounds first, whatever the arrays say.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, qsort
from libc.string cimport memcpy

import numpy as np

from hurray_rdma.errors import GeometryError

cdef extern from * nogil:
    """
    static inline uint32_t hurray_ones(uint64_t word) {  /* the builtin calls a function where no CPU is named */
        word -= (word >> 1) & 0x5555555555555555u;
        word = (word & 0x3333333333333333u) + ((word >> 2) & 0x3333333333333333u);
        return (uint32_t)((((word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu) * 0x0101010101010101u) >> 56);
    }
    """
    const uint32_t UINT32_MAX
    uint32_t hurray_ones(uint64_t word)
    int __builtin_ctzll(unsigned long long)

cdef enum:
    DENSE_FACTOR = 2048  # a bit for every page of a pool is kept up to this many pages per page ID; fewer are sorted


def check_indices(
    const uint32_t[::1] block_table not None,
    const uint32_t[::1] seq_ptr not None,
    const uint32_t[::1] seq_lens not None,
    *,
    uint64_t num_pages,
    uint32_t page_size,
):
    """Checks all that a batch must keep to.

    Args:
        block_table: page IDs, uint32 ``[seq_ptr[-1]]``.
        seq_ptr: uint32 ``[num_seqs + 1]``, pages.
        seq_lens: uint32 ``[num_seqs]``, tokens.
        num_pages: pages of the pool.
        page_size: tokens per page.

    Raises:
        GeometryError: with the place and the numbers on both sides.
    """
    check_seq_ptr(block_table.shape[0], seq_ptr, seq_lens)
    check_range("block_table", block_table, num_pages)
    check_room(seq_ptr, seq_lens, page_size)


def check_page_ids(const uint32_t[::1] page_ids not None, *, uint64_t num_pages, str field):
    """Raises GeometryError unless every page ID is below ``num_pages``."""
    check_range(field, page_ids, num_pages)


def check_distinct(const uint32_t[::1] page_ids not None, *, uint64_t num_pages, str field):
    """Raises GeometryError unless every page ID is below ``num_pages`` and none is there twice."""
    cdef Py_ssize_t count = page_ids.shape[0], at
    cdef uint64_t *marks
    cdef uint64_t bit
    cdef uint32_t *in_order
    cdef int64_t twice = -1
    check_range(field, page_ids, num_pages)
    if is_ascending(page_ids):
        return
    if is_dense(count, num_pages):
        marks = <uint64_t *>allocated(calloc((num_pages + 63) >> 6, sizeof(uint64_t)))
        with nogil:
            for at in range(count):
                bit = <uint64_t>1 << (page_ids[at] & 63)
                if marks[page_ids[at] >> 6] & bit:
                    twice = page_ids[at]
                    break
                marks[page_ids[at] >> 6] |= bit
        free(marks)
    else:
        in_order = <uint32_t *>allocated(malloc(count * sizeof(uint32_t)))
        with nogil:
            memcpy(in_order, &page_ids[0], count * sizeof(uint32_t))
            qsort(in_order, count, sizeof(uint32_t), compare_uint32)
            for at in range(1, count):
                if in_order[at] == in_order[at - 1]:
                    twice = in_order[at]
                    break
        free(in_order)
    if twice >= 0:
        raise GeometryError("must not name a page twice", field=field, value=twice)


def dedupe(const uint32_t[::1] block_table not None, *, uint64_t num_pages):
    """Each physical page once, however many entries alias it. O(entries), but for a sort where pages are few in a pool.

    Args:
        block_table: page IDs, uint32 ``[num_entries]``.
        num_pages: pages of the pool they are of.

    Returns:
        ``(page_ids, inverse)``: the distinct page IDs, ascending (so that consecutive pages are neighbours), and for
        each entry its place in ``page_ids``; both uint32.

    Raises:
        GeometryError: a page ID is not below ``num_pages``.
    """
    check_range("block_table", block_table, num_pages)
    cdef Py_ssize_t count = block_table.shape[0]
    inverse = np.empty(count, np.uint32)
    cdef uint32_t[::1] places = inverse
    if is_ascending(block_table):
        page_ids = np.empty(count, np.uint32)
        copy_with_places(block_table, page_ids, places)
        return page_ids, inverse
    if is_dense(count, num_pages):
        return dedupe_by_marks(block_table, num_pages, places), inverse
    return dedupe_by_order(block_table, places), inverse


def valid_pages(block_table not None, seq_ptr not None, const uint32_t[::1] seq_lens not None, uint32_t page_size):
    """Leaves out the table entries that hold no valid token: pages that were allocated ahead.

    Args:
        block_table: page IDs, uint32 ``[seq_ptr[-1]]``.
        seq_ptr: uint32 ``[num_seqs + 1]``, pages.
        seq_lens: uint32 ``[num_seqs]``, tokens.
        page_size: tokens per page.

    Returns:
        ``block_table`` and ``seq_ptr`` without them; the arguments themselves when there are none.

    Raises:
        GeometryError: the arrays do not fit together, a sequence has more tokens than its pages hold, or ``page_size``
            is 0.
    """
    cdef const uint32_t[::1] table = block_table, begins = seq_ptr
    check_seq_ptr(table.shape[0], begins, seq_lens)
    check_page_size(page_size)
    check_room(begins, seq_lens, page_size)
    cdef Py_ssize_t seq, num_seqs = seq_lens.shape[0]
    if num_entries_of(seq_lens, page_size) == <uint64_t>table.shape[0]:  # so every sequence has all that it needs
        return block_table, seq_ptr
    trimmed_ptr = starts_of(seq_lens, page_size)
    cdef uint32_t[::1] starts = trimmed_ptr
    trimmed = np.empty(starts[num_seqs], np.uint32)
    cdef uint32_t[::1] out = trimmed
    with nogil:
        for seq in range(num_seqs):
            if starts[seq + 1] > starts[seq]:
                memcpy(
                    &out[starts[seq]],
                    &table[begins[seq]],
                    (starts[seq + 1] - starts[seq]) * sizeof(uint32_t),
                )
    return trimmed, trimmed_ptr


def place_pages(
    block_table not None,
    seq_ptr not None,
    seq_lens not None,
    const uint32_t[::1] page_ids not None,
    *,
    uint64_t num_pages,
    uint32_t page_size,
):
    """`valid_pages` and `dedupe` of a batch, and its table in other pages: those of a grant, in order.

    Args:
        block_table, seq_ptr, seq_lens, page_size: as of `valid_pages`.
        page_ids: where the distinct pages go, in the order of `dedupe`, uint32; those that are left over do not count.
        num_pages: pages of the pool that ``block_table`` is of.

    Returns:
        The table in these pages, uint32, ``seq_ptr`` for it, and how many of ``page_ids`` it has.

    Raises:
        GeometryError: as of `valid_pages` and `dedupe`, or the batch has more pages than there are here.
    """
    table, trimmed_ptr = valid_pages(block_table, seq_ptr, seq_lens, page_size)
    distinct, placed = dedupe(table, num_pages=num_pages)
    cdef uint32_t[::1] places = placed
    cdef Py_ssize_t count = len(distinct), at
    if count > page_ids.shape[0]:
        raise GeometryError(f"is above the {page_ids.shape[0]} that were granted", field="num_pages", value=count)
    with nogil:
        for at in range(places.shape[0]):
            places[at] = page_ids[places[at]]
    return placed, trimmed_ptr, count


def starts_of(const uint32_t[::1] seq_lens not None, uint32_t page_size):
    """Where each sequence starts in a block table without pages allocated ahead, uint32 ``[num_seqs + 1]``.

    Raises:
        GeometryError: ``page_size`` is 0, or the table has more than 2**32 - 1 entries.
    """
    check_page_size(page_size)
    starts = np.empty(seq_lens.shape[0] + 1, np.uint32)
    cdef uint32_t[::1] out = starts
    cdef uint64_t total = 0
    cdef Py_ssize_t seq
    with nogil:
        out[0] = 0
        for seq in range(seq_lens.shape[0]):
            total += num_pages_of(seq_lens[seq], page_size)
            out[seq + 1] = <uint32_t>total
    if total > UINT32_MAX:
        raise GeometryError(f"must be at most {UINT32_MAX}", field="entries of the block table", value=total)
    return starts


def total_of(const uint32_t[::1] values not None):
    """Their sum, which fits 64 bits whatever they are."""
    cdef uint64_t total = 0
    cdef Py_ssize_t at
    for at in range(values.shape[0]):
        total += values[at]
    return total


def valid_tokens(
    const uint32_t[::1] entries not None,
    const uint32_t[::1] seq_ptr not None,
    const uint32_t[::1] seq_lens not None,
    *,
    uint32_t num_pages,
    uint32_t page_size,
):
    """The most tokens that any sequence has of each page: all of it, unless the page is the last of all that have it.

    Args:
        entries: page IDs, uint32 ``[seq_ptr[-1]]``.
        seq_ptr: uint32 ``[num_seqs + 1]``, pages.
        seq_lens: uint32 ``[num_seqs]``, tokens.
        num_pages: pages that the entries name.
        page_size: tokens per page.

    Returns:
        uint32 ``[num_pages]``.

    Raises:
        GeometryError: as of `check_indices`.
    """
    check_indices(entries, seq_ptr, seq_lens, num_pages=num_pages, page_size=page_size)
    valid = np.zeros(num_pages, np.uint32)
    cdef uint32_t[::1] out = valid
    cdef Py_ssize_t seq, at
    cdef uint32_t rest
    with nogil:
        for seq in range(seq_lens.shape[0]):
            rest = seq_lens[seq]
            for at in range(seq_ptr[seq], seq_ptr[seq + 1]):
                out[entries[at]] = max(out[entries[at]], min(rest, page_size))
                rest -= min(rest, page_size)
    return valid


def narrow(const int64_t[::1] values not None):
    """int64 as uint32, and the place of the first that is below 0 or above 2**32 - 1, -1 where none is."""
    narrowed = np.empty(values.shape[0], np.uint32)
    cdef uint32_t[::1] out = narrowed
    cdef Py_ssize_t at, wrong = -1
    with nogil:
        for at in range(values.shape[0]):
            out[at] = <uint32_t>values[at]
            if out[at] != values[at] and wrong < 0:
                wrong = at
    return narrowed, wrong


def cut_units(
    const uint32_t[::1] places not None,
    const uint32_t[::1] src_ptr not None,
    const uint32_t[::1] dst_ptr not None,
    uint32_t per_page,
):
    """The parts of larger pages that the entries of a table of smaller pages are, counted through all larger pages.

    Args:
        places: the larger page of each entry, uint32 ``[src_ptr[-1]]``.
        src_ptr: where each sequence starts in ``places``, uint32 ``[num_seqs + 1]``.
        dst_ptr: where it starts in the table of smaller pages, uint32 ``[num_seqs + 1]``.
        per_page: smaller pages in a larger one.

    Returns:
        ``places[entry] * per_page + part``, uint64 ``[dst_ptr[-1]]``.

    Raises:
        IndexError: a sequence has more smaller pages than are in its larger ones.
    """
    cdef Py_ssize_t seq, num_seqs = src_ptr.shape[0] - 1, at
    cdef uint64_t ordinal, room
    cdef bint fits = 0 <= num_seqs == dst_ptr.shape[0] - 1 and src_ptr[num_seqs] <= places.shape[0]
    for seq in range(num_seqs if fits else 0):
        room = <uint64_t>per_page * (src_ptr[seq + 1] - src_ptr[seq])
        fits = fits and src_ptr[seq] <= src_ptr[seq + 1] and dst_ptr[seq] <= dst_ptr[seq + 1]
        fits = fits and dst_ptr[seq + 1] - dst_ptr[seq] <= room
    if not fits or dst_ptr[0]:
        raise IndexError("a sequence has more smaller pages than are in its larger ones")
    units = np.empty(dst_ptr[num_seqs], np.uint64)
    cdef uint64_t[::1] out = units
    with nogil:
        for seq in range(num_seqs):
            ordinal = 0
            for at in range(dst_ptr[seq], dst_ptr[seq + 1]):
                out[at] = <uint64_t>places[src_ptr[seq] + ordinal // per_page] * per_page + ordinal % per_page
                ordinal += 1
    return units


cdef int check_seq_ptr(Py_ssize_t num_entries, const uint32_t[::1] seq_ptr, const uint32_t[::1] seq_lens) except -1:
    cdef Py_ssize_t last = seq_lens.shape[0], at
    if seq_ptr.shape[0] != last + 1:
        raise GeometryError(
            f"must be one more than the {last} entries of seq_lens", field="len(seq_ptr)", value=seq_ptr.shape[0]
        )
    if seq_ptr[0]:
        raise GeometryError("must be 0", field="seq_ptr[0]", value=seq_ptr[0])
    with nogil:
        for at in range(1, last + 1):
            if seq_ptr[at] < seq_ptr[at - 1]:
                break
        else:
            at = 0
    if at:
        raise GeometryError(
            f"is below seq_ptr[{at - 1}] = {seq_ptr[at - 1]}", field=f"seq_ptr[{at}]", value=seq_ptr[at]
        )
    if seq_ptr[last] != num_entries:
        raise GeometryError(
            f"must be the {num_entries} entries of block_table", field=f"seq_ptr[{last}]", value=seq_ptr[last]
        )
    return 0


cdef int check_range(str field, const uint32_t[::1] page_ids, uint64_t num_pages) except -1:
    cdef Py_ssize_t at
    cdef uint32_t highest = 0
    with nogil:
        for at in range(page_ids.shape[0]):
            highest = max(highest, page_ids[at])
        at = 0
        if page_ids.shape[0] and highest >= num_pages:
            while page_ids[at] < num_pages:
                at += 1
    if page_ids.shape[0] and highest >= num_pages:
        raise GeometryError(f"is not below num_pages {num_pages}", field=f"{field}[{at}]", value=page_ids[at])
    return 0


cdef int check_room(const uint32_t[::1] seq_ptr, const uint32_t[::1] seq_lens, uint32_t page_size) except -1:
    """Whether the pages of each sequence have room for its tokens; ``seq_ptr`` is known to fit."""
    cdef Py_ssize_t seq
    cdef uint64_t pages = 0
    with nogil:
        for seq in range(seq_lens.shape[0]):
            pages = seq_ptr[seq + 1] - seq_ptr[seq]
            if seq_lens[seq] > pages * page_size:
                break
        else:
            seq = -1
    if seq >= 0:
        raise GeometryError(
            f"is above the {pages * page_size} tokens of its {pages} pages of {page_size}",
            field=f"seq_lens[{seq}]",
            value=seq_lens[seq],
            fix="Give the sequence more pages in the block table",
        )
    return 0


cdef int check_page_size(uint32_t page_size) except -1:
    if not page_size:
        raise GeometryError("must be 1 or more", field="page_size", value=0)
    return 0


cdef uint64_t num_pages_of(uint32_t num_tokens, uint32_t page_size) noexcept nogil:
    return (<uint64_t>num_tokens + page_size - 1) // page_size


cdef uint64_t num_entries_of(const uint32_t[::1] seq_lens, uint32_t page_size) noexcept nogil:
    cdef uint64_t total = 0
    cdef Py_ssize_t seq
    for seq in range(seq_lens.shape[0]):
        total += num_pages_of(seq_lens[seq], page_size)
    return total


cdef bint is_ascending(const uint32_t[::1] page_ids) noexcept nogil:
    cdef Py_ssize_t at
    for at in range(1, page_ids.shape[0]):
        if page_ids[at] <= page_ids[at - 1]:
            return False
    return True


cdef bint is_dense(Py_ssize_t count, uint64_t num_pages) noexcept nogil:
    return num_pages <= <uint64_t>DENSE_FACTOR * count


cdef void *allocated(void *memory) except NULL:
    if memory == NULL:
        raise MemoryError
    return memory


cdef void copy_with_places(const uint32_t[::1] values, uint32_t[::1] copy, uint32_t[::1] places) noexcept nogil:
    cdef Py_ssize_t at
    for at in range(values.shape[0]):
        copy[at] = values[at]
        places[at] = <uint32_t>at


cdef dedupe_by_marks(const uint32_t[::1] table, uint64_t num_pages, uint32_t[::1] places):
    """The distinct page IDs by a bit for every page; the ranks of the bits are the places."""
    cdef Py_ssize_t num_words = (num_pages + 63) >> 6, word, at, distinct = 0
    cdef uint64_t *marks = <uint64_t *>allocated(calloc(num_words, sizeof(uint64_t)))
    cdef uint32_t *ranks = NULL
    cdef uint64_t left
    cdef uint32_t page
    cdef uint32_t[::1] out
    try:
        ranks = <uint32_t *>allocated(malloc(num_words * sizeof(uint32_t)))
        with nogil:
            for at in range(table.shape[0]):
                marks[table[at] >> 6] |= <uint64_t>1 << (table[at] & 63)
            for word in range(num_words):
                ranks[word] = <uint32_t>distinct
                if marks[word]:
                    distinct += hurray_ones(marks[word])
        page_ids = np.empty(distinct, np.uint32)
        out = page_ids
        with nogil:
            distinct = 0
            for word in range(num_words):
                left = marks[word]
                while left:
                    out[distinct] = <uint32_t>((word << 6) + __builtin_ctzll(left))
                    left &= left - 1
                    distinct += 1
            for at in range(table.shape[0]):
                page = table[at]
                left = marks[page >> 6] & ((<uint64_t>1 << (page & 63)) - 1)
                places[at] = ranks[page >> 6] + hurray_ones(left)
        return page_ids
    finally:
        free(ranks)
        free(marks)


cdef dedupe_by_order(const uint32_t[::1] table, uint32_t[::1] places):
    """The same by sorting pairs of page ID and entry."""
    cdef Py_ssize_t count = table.shape[0], at, distinct = 0
    cdef uint64_t *pairs = <uint64_t *>allocated(malloc(count * sizeof(uint64_t)))
    cdef uint32_t[::1] out
    try:
        with nogil:
            for at in range(count):
                pairs[at] = <uint64_t>table[at] << 32 | <uint64_t>at
            qsort(pairs, count, sizeof(uint64_t), compare_uint64)
            for at in range(count):
                distinct += at == 0 or pairs[at] >> 32 != pairs[at - 1] >> 32
        page_ids = np.empty(distinct, np.uint32)
        out = page_ids
        with nogil:
            distinct = -1
            for at in range(count):
                if at == 0 or pairs[at] >> 32 != pairs[at - 1] >> 32:
                    distinct += 1
                    out[distinct] = <uint32_t>(pairs[at] >> 32)
                places[<uint32_t>pairs[at]] = <uint32_t>distinct
        return page_ids
    finally:
        free(pairs)


cdef int compare_uint32(const void *a, const void *b) noexcept nogil:
    cdef uint32_t left = (<const uint32_t *>a)[0], right = (<const uint32_t *>b)[0]
    return (left > right) - (left < right)


cdef int compare_uint64(const void *a, const void *b) noexcept nogil:
    cdef uint64_t left = (<const uint64_t *>a)[0], right = (<const uint64_t *>b)[0]
    return (left > right) - (left < right)
