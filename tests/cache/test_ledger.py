"""The accounts of pages: runs against a plain set of free pages, which run is taken, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.cache._ledger import PageLedger


def uint32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def runs_of(free: set[int]) -> list[int]:
    """Lengths of the maximal stretches."""
    ends = [-2, *sorted(free)]
    lengths: list[int] = []
    for before, page in pairwise(ends):
        if page == before + 1:
            lengths[-1] += 1
        else:
            lengths.append(1)
    return lengths


def leaving_free(num_pages: int, free: list[int]) -> PageLedger:
    """A ledger whose other pages are taken; the free ones were given back in that order."""
    ledger = PageLedger(num_pages)
    ledger.take(num_pages)
    ledger.drop(uint32(*free))
    return ledger


@settings(max_examples=200)
@given(st.integers(1, 70), st.data())
def test_any_order_of_taking_and_dropping_keeps_the_runs(num_pages: int, data: st.DataObject) -> None:
    ledger, free = PageLedger(num_pages), set(range(num_pages))
    for _ in range(data.draw(st.integers(1, 12))):
        count = data.draw(st.integers(0, len(free)))
        runs = runs_of(free)
        taken = ledger.take(count).tolist()
        assert len(set(taken)) == count
        assert set(taken) <= free
        if len(runs) <= 8 and count and max(runs) >= count:
            assert taken == list(range(taken[0], taken[0] + count)), "all fitting runs are looked at: one is taken"
        free -= set(taken)
        held = sorted(set(range(num_pages)) - free)
        back = data.draw(st.lists(st.sampled_from(held), unique=True)) if held else []
        ledger.drop(uint32(*back))
        free |= set(back)
        assert (ledger.num_free, ledger.num_free_runs) == (len(free), len(runs_of(free)))
    ledger.drop(uint32(*sorted(set(range(num_pages)) - free)))
    assert (ledger.num_free, ledger.num_free_runs) == (num_pages, 1)
    assert ledger.take(num_pages).tolist() == list(range(num_pages))


def test_the_longest_runs_are_taken_first_where_none_is_long_enough() -> None:
    ledger = leaving_free(20, [0, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12])
    assert ledger.take(10).tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 2, 3]


def test_a_run_of_the_same_number_of_bits_is_taken_before_a_longer_one() -> None:
    ledger = leaving_free(40, [*range(8), *range(10, 16), *range(20, 25)])
    assert ledger.take(6).tolist() == [10, 11, 12, 13, 14, 15], "five are too few, and eight have more bits"
    assert ledger.take(6).tolist() == [0, 1, 2, 3, 4, 5]


def test_many_short_runs_of_the_same_number_of_bits_are_not_all_looked_at() -> None:
    pages = [page for start in range(0, 90, 9) for page in range(start, start + 4)]
    ledger = leaving_free(200, [*range(100, 107), *pages, *range(120, 136)])
    assert ledger.take(5).tolist() == [120, 121, 122, 123, 124], "the seven are behind ten runs of four"


def test_a_page_is_counted_once_for_each_that_holds_it() -> None:
    ledger = PageLedger(6)
    ledger.take(4)
    assert ledger.hold(uint32(1, 3)) == -1
    ledger.drop(uint32(0, 1, 2, 3))
    assert ledger.leased(uint32(0, 1, 2, 3, 4)).tolist() == [False, True, False, True, False]
    assert ledger.hold(uint32(3, 1, 2)) == 2, "nobody holds page 2: none is held"
    ledger.drop(uint32(3, 1))
    assert ledger.num_free == 6
    assert ledger.births(uint32(0, 4)).tolist() == [1, 0]


def test_a_page_is_quarantined_while_all_that_hold_it_are_suspect() -> None:
    ledger = PageLedger(3)
    pages = ledger.take(2)
    ledger.hold(pages[:1])
    ledger.suspect(pages)
    assert (ledger.num_quarantined, ledger.leased(pages).tolist()) == (1, [True, False])
    assert ledger.hold(pages) == 1
    ledger.drop(pages[:1])
    assert (ledger.num_quarantined, ledger.num_free) == (2, 1)
    ledger.recover(pages)
    assert (ledger.num_quarantined, ledger.num_free, ledger.num_free_runs) == (0, 3, 1)


def test_what_is_no_page_is_refused_and_changes_nothing() -> None:
    ledger = PageLedger(4)
    ledger.take(3)
    for call in (ledger.hold, ledger.drop, ledger.suspect, ledger.recover, ledger.births, ledger.leased):
        with pytest.raises(IndexError, match="page ID 4 is not below num_pages 4"):
            call(uint32(0, 4))
        with pytest.raises((ValueError, TypeError)):
            call(np.array([0, 1], np.int64))
    with pytest.raises(ValueError, match="count = 2: must be from 0 to the 1 free pages"):
        ledger.take(2)
    assert (ledger.num_free, ledger.num_quarantined, ledger.leased(uint32(0)).tolist()) == (1, 0, [True])
    for num_pages in (0, -1, 2**32):
        with pytest.raises(ValueError, match="must be from 1 to"):
            PageLedger(num_pages)
