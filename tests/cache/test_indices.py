"""Index arrays of a batch: each rule by name, and distinct page IDs against Python's sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.cache.indices import check_distinct, check_indices, cut_units, narrowed, sibling
from hurray_rdma.errors import GeometryError


def uint32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def test_a_batch_that_keeps_every_rule() -> None:
    check_indices(uint32(9, 3, 9), uint32(0, 2, 2, 3), uint32(7, 0, 1), num_pages=10, page_size=4)
    check_indices(uint32(), uint32(0), uint32(), num_pages=1, page_size=1)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([9, 3], [0, 2], [8, 1]), r"len\(seq_ptr\) = 2: must be one more than the 2 entries of seq_lens"),
        (([9, 3], [1, 2], [1]), r"seq_ptr\[0\] = 1: must be 0"),
        (([9, 3], [0, 2, 1, 2], [1, 0, 1]), r"seq_ptr\[2\] = 1: is below seq_ptr\[1\] = 2"),
        (([9, 3], [0, 1], [1]), r"seq_ptr\[1\] = 1: must be the 2 entries of block_table"),
        (([9, 10], [0, 2], [8]), r"block_table\[1\] = 10: is not below num_pages 10"),
        (([9, 3], [0, 1, 2], [4, 5]), r"seq_lens\[1\] = 5: is above the 4 tokens of its 1 pages of 4"),
        (([9], [0, 1], [2**32 - 1]), r"seq_lens\[0\] = 4294967295: is above the 4 tokens"),
    ],
)
def test_each_rule_is_told_with_its_place(arrays: tuple[list[int], list[int], list[int]], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        check_indices(*(uint32(*each) for each in arrays), num_pages=10, page_size=4)


@given(st.lists(st.integers(0, 12), max_size=14), st.sampled_from([10, 13, 10**5]), st.booleans())
def test_page_ids_are_distinct_exactly_if_a_set_has_as_many(pages: list[int], num_pages: int, ascending: bool) -> None:
    pages = sorted(pages) if ascending else pages
    if any(page >= num_pages for page in pages):
        message = "is not below num_pages 10"
    elif len(set(pages)) < len(pages):
        message = "field_name = [0-9]+: must not name a page twice"
    else:
        check_distinct(uint32(*pages), num_pages=num_pages, field="field_name")
        return
    with pytest.raises(GeometryError, match=message):
        check_distinct(uint32(*pages), num_pages=num_pages, field="field_name")


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "uint32", "int32", "int64", "uint64", ">i4"])
def test_integers_of_any_kind_are_narrowed(dtype: str) -> None:
    values = np.array([3, 0, 127, 9], dtype)
    for given_values in (values, values[::2], values[:0]):
        found = narrowed(given_values, field="x")
        assert found.dtype == np.uint32
        assert found.tolist() == given_values.tolist()
        assert not np.shares_memory(found, given_values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1, -1, -2], r"x\[1\] = -1: must be from 0 to 2\*\*32 - 1"),
        ([0, 2**32 - 1, 2**32], r"x\[2\] = 4294967296: must be from 0"),
        (np.array([5, 2**64 - 1], np.uint64), r"x\[1\] = 18446744073709551615: must be from 0"),
        (np.array([5, 2**64 - 2**32 + 1], np.uint64), r"x\[1\] = 18446744069414584321: must be from 0"),
        ([1.0], r"x = 'float64 \(1,\)': must be integers in one axis"),
        ([[1]], r"x = 'int64 \(1, 1\)': must be integers in one axis"),
    ],
)
def test_what_is_no_uint32_is_refused_with_its_place(values: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        narrowed(values, field="x")  # type: ignore[arg-type]


def test_parts_of_larger_pages_are_counted_through_all_of_them() -> None:
    units = cut_units(uint32(1, 0, 1), uint32(0, 2, 2, 3), uint32(0, 5, 5, 6), 3)
    assert units.tolist() == [3, 4, 5, 0, 1, 3]
    for src_ptr, dst_ptr in (
        ([0, 2], [0, 7]),
        ([0, 4], [0, 6]),
        ([2, 0], [0, 1]),
        ([0, 2], [1, 0]),
        ([0, 2], [0, 1, 2]),
    ):
        with pytest.raises(IndexError):
            cut_units(uint32(1, 0, 1), uint32(*src_ptr), uint32(*dst_ptr), 3)
    with pytest.raises(IndexError):
        cut_units(uint32(), uint32(), uint32(), 3)


def test_siblings_are_made_on_the_device_of_the_array_whichever_is_current() -> None:
    current: list[int] = []

    class Device:
        def __enter__(self) -> None:
            current.append(1)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Array:
        device = Device()

        def __array_function__(self, function: object, types: object, args: Any, kwargs: Any) -> Any:
            return list(current), args[0].tolist()

    assert sibling(Array(), np.arange(3)) == ([1], [0, 1, 2])
    assert sibling(np.zeros(1), np.arange(3)).tolist() == [0, 1, 2]
    assert current == []
