"""Byte offsets of pages, and which pieces become one operation; against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.plan._offsets import merged, offsets_of


def uint32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def uint64(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


NUMBERS = st.integers(0, 2**32 - 1)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=9), st.lists(NUMBERS, min_size=3, max_size=3), st.data())
def test_offsets_are_the_sum_of_their_steps(
    pairs: list[tuple[int, int]], steps: list[int], data: st.DataObject
) -> None:
    pages, slots = [page for page, _ in pairs], [slot for _, slot in pairs]
    strides = dict(zip(("page_nbytes", "token_nbytes", "head_nbytes"), steps, strict=True))
    places = data.draw(st.permutations(range(len(pages))))
    for through, order in ((None, range(len(pages))), (uint32(*places), places)):
        expected = [
            (pages[place] * steps[0] + slot * steps[1] + steps[2]) % 2**64
            for place, slot in zip(order, slots, strict=True)
        ]
        assert offsets_of(uint32(*pages), uint32(*slots), **strides, places=through).tolist() == expected


def test_places_that_are_not_there_are_refused() -> None:
    strides = {"page_nbytes": 1, "token_nbytes": 1, "head_nbytes": 0}
    with pytest.raises(IndexError, match="place 2 is not below the 2 pages"):
        offsets_of(uint32(7, 8), uint32(0, 0), places=uint32(1, 2), **strides)
    with pytest.raises(IndexError, match="there are 2 slots, and not as many pages"):
        offsets_of(uint32(7), uint32(0, 0), **strides)
    with pytest.raises(IndexError, match="there are 2 slots, and not as many pages"):
        offsets_of(uint32(7, 8), uint32(0, 0), places=uint32(1), **strides)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12))
def test_pieces_are_merged_exactly_where_they_meet_on_both_sides(pieces: list[tuple[int, int]]) -> None:
    src, dst = [10 * a for a, _ in pieces], [10 * b for _, b in pieces]
    expected: list[list[int]] = []
    for a, b in zip(src, dst, strict=True):
        if expected and (a, b) == (expected[-1][0] + expected[-1][2], expected[-1][1] + expected[-1][2]):
            expected[-1][2] += 10
        else:
            expected.append([a, b, 10])
    found = merged(uint64(*src), uint64(*dst), 10)
    assert [list(operation) for operation in zip(*(each.tolist() for each in found), strict=True)] == expected


def test_nothing_is_copied_where_no_two_pieces_meet() -> None:
    src, dst = uint64(0, 10, 20), uint64(30, 20, 10)
    found = merged(src, dst, 10)
    assert found[0] is src
    assert found[1] is dst
    with pytest.raises(IndexError, match="3 source offsets, but 1 destination offsets"):
        merged(src, uint64(1), 10)
