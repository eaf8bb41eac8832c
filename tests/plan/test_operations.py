"""Plans of whole pages: runs, strides, and every byte against a page-by-page copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import Plan, build_plan


def uint32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def pieces(plan: Plan) -> list[tuple[int, int, int]]:
    return list(zip(plan.src_offsets.tolist(), plan.dst_offsets.tolist(), plan.lengths.tolist(), strict=True))


def test_runs_contiguous_on_both_sides_are_one_operation() -> None:
    plan = build_plan(
        uint32(2, 3, 4, 6, 7), uint32(10, 11, 12, 13, 20), page_nbytes=8, src_stride_nbytes=8, dst_stride_nbytes=8
    )
    assert pieces(plan) == [(16, 80, 24), (48, 104, 8), (56, 160, 8)]
    assert (plan.num_pages, plan.num_operations, plan.nbytes) == (5, 3, 40)


def test_a_gap_between_pages_of_either_side_ends_a_run() -> None:
    plan = build_plan(uint32(2, 3), uint32(0, 1), page_nbytes=8, src_stride_nbytes=16, dst_stride_nbytes=8)
    assert pieces(plan) == [(32, 0, 8), (48, 8, 8)]


def test_descending_pages_and_the_step_from_last_to_first_are_no_run() -> None:
    plan = build_plan(uint32(4, 3, 0), uint32(1, 0, 2), page_nbytes=8, src_stride_nbytes=8, dst_stride_nbytes=8)
    assert plan.num_operations == 3


def test_an_empty_plan_moves_nothing() -> None:
    plan = build_plan(uint32(), uint32(), page_nbytes=8, src_stride_nbytes=8, dst_stride_nbytes=8)
    assert (plan.num_pages, plan.num_operations, plan.nbytes) == (0, 0, 0)


def test_misfits_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"len\(dst_page_ids\) = 1: must be the number of source pages 2"):
        build_plan(uint32(1, 2), uint32(1), page_nbytes=8, src_stride_nbytes=8, dst_stride_nbytes=8)
    with pytest.raises(GeometryError, match="dst_stride_nbytes = 7: is below the 8 bytes"):
        build_plan(uint32(1), uint32(1), page_nbytes=8, src_stride_nbytes=8, dst_stride_nbytes=7)


@given(
    st.lists(st.integers(0, 11), unique=True, max_size=12),
    st.permutations(range(12)),
    st.sampled_from([4, 6]),
    st.sampled_from([4, 5]),
)
def test_every_byte_lands_where_a_page_by_page_copy_puts_it(
    src_pages: list[int], dst_pages: list[int], src_stride: int, dst_stride: int
) -> None:
    dst_pages = dst_pages[: len(src_pages)]
    src = np.random.default_rng(0).integers(0, 255, 12 * src_stride, dtype=np.uint8)
    expected = np.full(12 * dst_stride, 0xEE, np.uint8)
    for a, b in zip(src_pages, dst_pages, strict=True):
        expected[b * dst_stride : b * dst_stride + 4] = src[a * src_stride : a * src_stride + 4]
    plan = build_plan(
        np.array(src_pages, np.uint32),
        np.array(dst_pages, np.uint32),
        page_nbytes=4,
        src_stride_nbytes=src_stride,
        dst_stride_nbytes=dst_stride,
    )
    actual = np.full(12 * dst_stride, 0xEE, np.uint8)
    for a, b, length in pieces(plan):
        actual[b : b + length] = src[a : a + length]
    assert (actual == expected).all()
    assert plan.nbytes == int(plan.lengths.sum()) == 4 * len(src_pages)
    assert not plan.lengths.flags.writeable
