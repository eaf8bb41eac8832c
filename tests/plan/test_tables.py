"""Block tables: trimming, and each page once; against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.cache.indices import place_pages
from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import dedupe, valid_pages


def uint32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


@st.composite
def tables(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, int, int]:
    """(block_table, seq_ptr, seq_lens, page_size, num_pages), pages aliased and allocated ahead."""
    page_size = draw(st.integers(1, 7))
    num_pages = draw(st.sampled_from([1, 3, 20, 5000, 10**8]))
    rows = draw(st.lists(st.lists(st.integers(0, num_pages - 1), max_size=8), max_size=6))
    seq_lens = [draw(st.integers(0, len(row) * page_size)) for row in rows]
    seq_ptr = np.cumsum([0] + [len(row) for row in rows])
    flat = [page for row in rows for page in row]
    return np.array(flat, np.uint32), seq_ptr.astype(np.uint32), np.array(seq_lens, np.uint32), page_size, num_pages


def test_pages_allocated_ahead_are_left_out() -> None:
    table, seq_ptr = valid_pages(uint32(7, 3, 9, 4, 5, 6), uint32(0, 3, 3, 6), uint32(17, 0, 32), 16)
    assert table.tolist() == [7, 3, 4, 5]
    assert seq_ptr.tolist() == [0, 2, 2, 4]


def test_a_full_table_is_not_copied() -> None:
    block_table = uint32(7, 3)
    assert valid_pages(block_table, uint32(0, 2), uint32(17), 16)[0] is block_table


def test_pages_of_no_tokens_are_refused() -> None:
    for seq_lens in (uint32(0), uint32(3)):
        with pytest.raises(GeometryError, match="page_size = 0: must be 1 or more"):
            valid_pages(uint32(7, 3), uint32(0, 2), seq_lens, 0)


def test_too_many_tokens_are_refused_with_numbers() -> None:
    with pytest.raises(GeometryError, match=r"seq_lens\[1\] = 33: is above the 32 tokens of its 2 pages of 16"):
        valid_pages(uint32(1, 2, 3), uint32(0, 1, 3), uint32(16, 33), 16)


def test_sequences_that_end_before_they_begin_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"seq_ptr\[2\] = 1: is below seq_ptr\[1\] = 2"):
        valid_pages(uint32(1, 2), uint32(0, 2, 1, 2), uint32(16, 0, 16), 16)


@given(tables())
def test_trimming_equals_plain_python(case: tuple[np.ndarray, np.ndarray, np.ndarray, int, int]) -> None:
    block_table, seq_ptr, seq_lens, page_size, _ = case
    expected = [
        [int(page) for page in block_table[seq_ptr[seq] : seq_ptr[seq + 1]]][: -(-int(tokens) // page_size)]
        for seq, tokens in enumerate(seq_lens)
    ]
    trimmed, trimmed_ptr = valid_pages(block_table, seq_ptr, seq_lens, page_size)
    assert [trimmed[trimmed_ptr[s] : trimmed_ptr[s + 1]].tolist() for s in range(len(seq_lens))] == expected
    assert trimmed.dtype == trimmed_ptr.dtype == np.uint32


@given(tables())
def test_dedupe_finds_each_page_once_and_its_entries(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int, int],
) -> None:
    block_table, _, _, _, num_pages = case
    page_ids, inverse = dedupe(block_table, num_pages=num_pages)
    assert page_ids.tolist() == sorted(set(block_table.tolist()))
    assert page_ids[inverse].tolist() == block_table.tolist()
    assert page_ids.dtype == inverse.dtype == np.uint32


@given(tables(), st.integers(0, 3))
def test_placing_is_trimming_and_looking_up_where_each_page_went(
    case: tuple[np.ndarray, np.ndarray, np.ndarray, int, int], left_over: int
) -> None:
    block_table, seq_ptr, seq_lens, page_size, num_pages = case
    trimmed, trimmed_ptr = valid_pages(block_table, seq_ptr, seq_lens, page_size)
    distinct = sorted(set(trimmed.tolist()))
    granted = uint32(*range(900 + len(distinct) + left_over, 900, -1))
    went = dict(zip(distinct, granted.tolist(), strict=False))
    arrays = block_table, seq_ptr, seq_lens
    placed, starts, count = place_pages(*arrays, granted, num_pages=num_pages, page_size=page_size)
    assert placed.tolist() == [went[page] for page in trimmed.tolist()]
    assert starts.tolist() == trimmed_ptr.tolist()
    assert count == len(distinct)
    if distinct:
        rule = f"num_pages = {count}: is above the {count - 1} that were granted"
        with pytest.raises(GeometryError, match=rule):
            place_pages(*arrays, granted[: count - 1], num_pages=num_pages, page_size=page_size)


@pytest.mark.parametrize("num_pages", [10, 10**6], ids=["dense", "sparse"])
def test_pages_that_the_pool_has_not_are_refused(num_pages: int) -> None:
    with pytest.raises(GeometryError, match=rf"block_table\[2\] = {num_pages}: is not below num_pages {num_pages}"):
        dedupe(uint32(0, 1, num_pages), num_pages=num_pages)
