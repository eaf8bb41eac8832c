"""Resident pages: found by whole keys, while somebody holds them, and only with the content that was entered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.cache import PageAllocator, ResidentIndex
from hurray_rdma.errors import GeometryError, LeaseExpiredError


def keys(*texts: str) -> np.ndarray:
    """One row for each text, "" a row of zeros."""
    return np.array([list(text.encode().ljust(40, b"\0")) for text in texts], np.uint8).reshape(len(texts), 40)


def found_page(index: ResidentIndex, name: str) -> int | None:
    """Where the page of a key is; it is let go of at once."""
    with (here := index.acquire(keys(name))).lease:
        return here.page_ids.item() if here.found.item() else None


def test_pages_are_found_whichever_part_of_the_list_they_are_in() -> None:
    allocator = PageAllocator(8)
    index = ResidentIndex(allocator)
    held = allocator.lease(3)
    index.insert(keys("a", "b", "c"), held)
    here = index.acquire(keys("x", "c", "", "a"))
    assert here.found.tolist() == [False, True, False, True]
    assert here.page_ids.tolist() == [0, 2, 0, 0]
    assert here.lease.page_ids.tolist() == [2, 0]
    held.release()
    assert allocator.accounts().leased == 2, "the pages found stay, the third went back"
    here.lease.release()
    assert allocator.accounts().free == 8


def test_a_page_that_was_leased_afresh_is_not_what_it_was() -> None:
    allocator = PageAllocator(2)
    index = ResidentIndex(allocator)
    held = allocator.lease(2)
    index.insert(keys("a", "b"), held)
    held.release()
    assert not index.acquire(keys("a", "b")).found.any()
    allocator.lease(2)
    assert not index.acquire(keys("a", "b")).found.any()


def test_pages_in_quarantine_are_not_found() -> None:
    allocator = PageAllocator(2)
    index = ResidentIndex(allocator)
    held = allocator.lease(1)
    index.insert(keys("a"), held)
    allocator.quarantine(held, reason="test")
    assert not index.acquire(keys("a")).found.any()


def test_keys_are_compared_whole() -> None:
    allocator = PageAllocator(1)
    index = ResidentIndex(allocator)
    index.insert(keys("prefix-1"), allocator.lease(1))
    assert not index.acquire(keys("prefix-2")).found.any()


def test_equal_keys_find_one_page_once() -> None:
    allocator = PageAllocator(2)
    index = ResidentIndex(allocator)
    index.insert(keys("a"), allocator.lease(1))
    assert index.acquire(keys("b", "a", "a")).found.tolist() == [False, True, False]


def test_an_older_page_of_a_key_is_found_when_the_newer_one_is_gone() -> None:
    allocator = PageAllocator(4)
    index = ResidentIndex(allocator)
    oldest, middle, newest = (allocator.lease(1) for _ in range(3))
    for lease in (oldest, middle, newest):
        index.insert(keys("a"), lease)
    pages = [lease.page_ids.item() for lease in (oldest, middle, newest)]
    assert found_page(index, "a") == pages[2]
    newest.release()
    assert found_page(index, "a") == pages[1]
    middle.release()
    fresh = allocator.lease(3)  # both pages that went back among them
    index.insert(keys("b", "c", "d"), fresh)
    assert found_page(index, "a") == pages[0]
    oldest.release()
    assert found_page(index, "a") is None


def test_a_page_whose_key_changed_stands_in_for_no_other() -> None:
    allocator = PageAllocator(3)
    index = ResidentIndex(allocator)
    first, second = allocator.lease(1), allocator.lease(1)
    index.insert(keys("a"), first)
    index.insert(keys("a"), second)
    index.insert(keys("b"), first)
    assert found_page(index, "b") == first.page_ids.item()
    index.insert(keys("c"), second)
    assert found_page(index, "a") is None
    assert found_page(index, "c") == second.page_ids.item()


def test_many_copies_of_one_key_cost_no_more_than_pages() -> None:
    """A prefix that comes and goes: what is remembered of it ends where its page is entered anew."""
    allocator = PageAllocator(2)
    index = ResidentIndex(allocator)
    kept = allocator.lease(1)
    index.insert(keys("a"), kept)
    for _ in range(50):
        with allocator.lease(1) as lease:
            index.insert(keys("a"), lease)
            assert found_page(index, "a") == lease.page_ids.item()
    assert found_page(index, "a") == kept.page_ids.item()
    assert sum(map(len, index._older.values())) == 0


def test_a_page_has_one_entry_and_rows_of_zeros_have_none() -> None:
    allocator = PageAllocator(4)
    index = ResidentIndex(allocator)
    held = allocator.lease(2)
    index.insert(keys("a", ""), held)
    assert len(index) == 1
    index.insert(keys("c", ""), held)
    assert len(index) == 1
    assert index.acquire(keys("a", "c")).found.tolist() == [False, True]


def test_what_does_not_fit_is_refused() -> None:
    allocator = PageAllocator(4)
    index = ResidentIndex(allocator)
    held = allocator.lease(2)
    with pytest.raises(GeometryError, match="a row for each of the 2 pages"):
        index.insert(keys("a"), held)
    held.release()
    with pytest.raises(LeaseExpiredError):
        index.insert(keys("a", "b"), held)


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 9), st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True)),
        max_size=30,
    )
)
def test_against_a_dictionary_of_what_is_held(steps: list[tuple[bool, int, list[int]]]) -> None:
    """Each step enters fresh pages for the keys, or releases some lease and looks the keys up."""
    allocator = PageAllocator(200)
    index = ResidentIndex(allocator)
    leases = []
    for enter, which, names in steps:
        rows = keys(*(f"key {name}" for name in names))
        if enter:
            lease = allocator.lease(len(names))
            index.insert(rows, lease)
            leases.append((lease, dict(zip(names, lease.page_ids.tolist(), strict=True))))
            continue
        if leases:
            leases.pop(which % len(leases))[0].release()
        here = index.acquire(rows)
        for name, found, page in zip(names, here.found, here.page_ids, strict=True):
            holders = [pages[name] for _, pages in leases if name in pages]
            assert found == bool(holders)
            assert not found or page == holders[-1], "the last one entered that is held"
        here.lease.release()
    assert allocator.accounts().leased == sum(len(pages) for _, pages in leases)
