# cython: language_level=3, boundscheck=False, wraparound=False, embedsignature=True
"""The accounts of a pool's pages as C arrays: which are free, and how often each of the others is held.

Knows page IDs, nothing of leases, deadlines or why: the policy is in `hurray_rdma.cache.allocator`, which alone uses
this, under its lock: one call at a time, for the GIL is released in all loops. Page IDs come and go as uint32 arrays.

Free pages are kept as runs, maximal stretches of consecutive IDs. The first and the last page of each carry its
length (boundary tags; 0 on all other pages), so that a page given back finds the runs beside it at once; runs whose
lengths have the same number of bits are linked to each other. A call costs time per page that it is about, and no more.
"""
from libc.stdint cimport uint32_t, uint64_t
from libc.stdlib cimport calloc, free

import numpy as np

cdef extern from * nogil:
    const uint32_t NO_PAGE "UINT32_MAX"  # no pool has so many pages that this is the ID of one
    int __builtin_clzll(unsigned long long)
    int __builtin_ctzll(unsigned long long)

cdef enum:
    NUM_BUCKETS = 33  # lengths of 1 to 32 bits, by that number
    LOOKS = 8  # runs of the request's own number of bits that are looked at for one that is long enough

ctypedef struct run_t:
    uint32_t length  # on the first and the last page of a free run; else 0
    uint32_t next  # first page of the next run of the bucket, on the first page of a run
    uint32_t previous

ctypedef struct page_t:
    uint32_t holders  # leases that hold it, quarantined ones included
    uint32_t suspects  # quarantined leases that hold it
    uint32_t births  # how often it was taken from the free ones


cdef int bucket_of(uint32_t length) noexcept nogil:
    return 64 - __builtin_clzll(length)


cdef class PageLedger:
    """The pages of ``range(num_pages)``; all are free at first. Not thread-safe.

    A page is free (nobody holds it), quarantined (all that hold it are suspect) or leased.

    Raises:
        ValueError: ``num_pages`` is not from 1 to 2**32 - 1.
        MemoryError: no memory for 24 bytes for each page.
    """
    cdef run_t *runs
    cdef page_t *pages
    cdef uint32_t heads[NUM_BUCKETS]
    cdef uint64_t filled  # bit k: bucket k is not empty
    cdef readonly Py_ssize_t num_pages
    cdef readonly Py_ssize_t num_free
    cdef readonly Py_ssize_t num_free_runs
    cdef readonly Py_ssize_t num_quarantined

    def __cinit__(self, Py_ssize_t num_pages):
        cdef int bucket
        if not 1 <= num_pages < <Py_ssize_t>NO_PAGE + 1:
            raise ValueError(f"num_pages = {num_pages}: must be from 1 to 2**32 - 1")
        self.runs = <run_t *>calloc(num_pages, sizeof(run_t))
        self.pages = <page_t *>calloc(num_pages, sizeof(page_t))
        if self.runs == NULL or self.pages == NULL:
            raise MemoryError(f"no memory for the accounts of {num_pages} pages")
        self.num_pages = num_pages
        for bucket in range(NUM_BUCKETS):
            self.heads[bucket] = NO_PAGE
        self.link(0, <uint32_t>num_pages)

    def __dealloc__(self):
        free(self.runs)
        free(self.pages)

    def take(self, Py_ssize_t count):
        """Takes free pages, each now held once: one run if a long enough one is found at once, else the longest ones.

        Returns their IDs, uint32 ``[count]``, ascending within each run.

        Raises:
            ValueError: ``count`` is below 0 or above `num_free`; nothing was taken.
        """
        if not 0 <= count <= self.num_free:
            raise ValueError(f"count = {count}: must be from 0 to the {self.num_free} free pages")
        page_ids = np.empty(count, np.uint32)
        cdef uint32_t[::1] taken = page_ids
        cdef Py_ssize_t done = 0
        cdef uint32_t start, length, wanted, page
        with nogil:
            while done < count:
                wanted = <uint32_t>(count - done)
                start = self.find(wanted)
                length = self.runs[start].length
                self.unlink(start)
                if wanted < length:
                    self.link(start + wanted, length - wanted)
                    length = wanted
                for page in range(start, start + length):
                    taken[done] = page
                    self.pages[page].holders = 1
                    self.pages[page].births += 1
                    done += 1
        return page_ids

    def hold(self, const uint32_t[::1] page_ids not None):
        """Has one more hold each page, if all are leased: -1. Else holds none: the place of the first that is not.

        Raises:
            IndexError: a page ID is not below `num_pages`.
        """
        cdef Py_ssize_t at, undone
        cdef page_t *page
        self.check(page_ids)
        with nogil:
            for at in range(page_ids.shape[0]):
                page = &self.pages[page_ids[at]]
                if page.holders == page.suspects:
                    break
                page.holders += 1
            else:
                at = -1
            for undone in range(at):
                self.pages[page_ids[undone]].holders -= 1
        return at

    def drop(self, const uint32_t[::1] page_ids not None):
        """Has one less hold each page (each is held, none twice in the list); pages that nobody holds are free.

        Raises:
            IndexError: a page ID is not below `num_pages`.
        """
        self.check(page_ids)
        with nogil:
            self.let_go(page_ids, False)

    def suspect(self, const uint32_t[::1] page_ids not None):
        """Makes one that holds each page suspect.

        Raises:
            IndexError: a page ID is not below `num_pages`.
        """
        cdef Py_ssize_t at
        cdef page_t *page
        self.check(page_ids)
        with nogil:
            for at in range(page_ids.shape[0]):
                page = &self.pages[page_ids[at]]
                page.suspects += 1
                self.num_quarantined += page.holders == page.suspects

    def recover(self, const uint32_t[::1] page_ids not None):
        """As `drop`, of one that is suspect.

        Raises:
            IndexError: a page ID is not below `num_pages`.
        """
        self.check(page_ids)
        with nogil:
            self.let_go(page_ids, True)

    def births(self, const uint32_t[::1] page_ids not None):
        """How often each page was taken, uint32 ``[count]``.

        Raises:
            IndexError: a page ID is not below `num_pages`.
        """
        self.check(page_ids)
        births = np.empty(page_ids.shape[0], np.uint32)
        cdef uint32_t[::1] out = births
        cdef Py_ssize_t at
        with nogil:
            for at in range(page_ids.shape[0]):
                out[at] = self.pages[page_ids[at]].births
        return births

    def leased(self, const uint32_t[::1] page_ids not None):
        """Which pages are held by one that is not suspect, bool ``[count]``.

        Raises:
            IndexError: a page ID is not below `num_pages`.
        """
        self.check(page_ids)
        leased = np.empty(page_ids.shape[0], np.uint8)
        cdef unsigned char[::1] out = leased
        cdef Py_ssize_t at
        cdef page_t *page
        with nogil:
            for at in range(page_ids.shape[0]):
                page = &self.pages[page_ids[at]]
                out[at] = page.holders > page.suspects
        return leased.view(np.bool_)

    cdef int check(self, const uint32_t[::1] page_ids) except -1:
        cdef uint32_t highest = 0
        cdef Py_ssize_t at
        with nogil:
            for at in range(page_ids.shape[0]):
                highest = max(highest, page_ids[at])
        if highest >= self.num_pages:
            raise IndexError(f"page ID {highest} is not below num_pages {self.num_pages}")
        return 0

    cdef void let_go(self, const uint32_t[::1] page_ids, bint suspect) noexcept nogil:
        cdef Py_ssize_t at
        cdef page_t *page
        cdef uint32_t start = 0, length = 0  # of a run of pages that became free, not yet among the free ones
        for at in range(page_ids.shape[0]):
            page = &self.pages[page_ids[at]]
            page.holders -= 1
            page.suspects -= suspect
            if page.holders:
                self.num_quarantined += not suspect and page.holders == page.suspects
                continue
            self.num_quarantined -= suspect
            if length and page_ids[at] == start + length:
                length += 1
                continue
            self.give(start, length)
            start, length = page_ids[at], 1
        self.give(start, length)

    cdef void give(self, uint32_t start, uint32_t length) noexcept nogil:
        """Adds pages to the free ones, and to the runs beside them."""
        cdef uint32_t beside
        if not length:
            return
        if start and self.runs[start - 1].length:
            beside = self.runs[start - 1].length
            start -= beside
            length += beside
            self.unlink(start)
        if start + length < self.num_pages and self.runs[start + length].length:
            beside = self.runs[start + length].length
            self.unlink(start + length)
            length += beside
        self.link(start, length)

    cdef uint32_t find(self, uint32_t count) noexcept nogil:
        """First page of a run of at least ``count`` pages, a short one if found, else of one of the longest."""
        cdef int own = bucket_of(count), look
        cdef uint32_t start = self.heads[own]
        cdef uint64_t longer = self.filled >> (own + 1)
        for look in range(LOOKS):
            if start == NO_PAGE:
                break
            if self.runs[start].length >= count:
                return start
            start = self.runs[start].next
        if longer:
            return self.heads[own + 1 + __builtin_ctzll(longer)]
        return self.heads[63 - __builtin_clzll(self.filled)]

    cdef void link(self, uint32_t start, uint32_t length) noexcept nogil:
        cdef int bucket = bucket_of(length)
        cdef uint32_t head = self.heads[bucket]
        self.runs[start].length = self.runs[start + (length - 1)].length = length
        self.runs[start].next = head
        self.runs[start].previous = NO_PAGE
        if head != NO_PAGE:
            self.runs[head].previous = start
        self.heads[bucket] = start
        self.filled |= <uint64_t>1 << bucket
        self.num_free += length
        self.num_free_runs += 1

    cdef void unlink(self, uint32_t start) noexcept nogil:
        cdef run_t run = self.runs[start]
        cdef int bucket = bucket_of(run.length)
        if run.next != NO_PAGE:
            self.runs[run.next].previous = run.previous
        if run.previous != NO_PAGE:
            self.runs[run.previous].next = run.next
        else:
            self.heads[bucket] = run.next
            if run.next == NO_PAGE:
                self.filled &= ~(<uint64_t>1 << bucket)
        self.runs[start].length = self.runs[start + (run.length - 1)].length = 0
        self.num_free -= run.length
        self.num_free_runs -= 1
