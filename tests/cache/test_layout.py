"""Layouts, the part of a pool that travels: what a peer may claim."""

from __future__ import annotations

import pytest

from hurray_rdma.cache import CacheSpec, Part, PoolLayout, Segment
from hurray_rdma.errors import GeometryError

SPEC = CacheSpec(num_layers=1, num_heads=2, head_dim=4, page_size=4, dtype="int8", scale_dtype="float16")
SEGMENT, SCALES = Segment(0, 8, 32, 8, 4), Segment(1, 0, 8, 2, 0)


def layout(*segments: Segment) -> PoolLayout:
    return PoolLayout(spec=SPEC, num_pages=3, segments=segments)


def test_parts_are_found_by_role_layer_and_part() -> None:
    other = Segment(0, 200, 32, 8, 4)
    found = layout(SEGMENT, SCALES, other, SCALES)
    assert found.segment("key", 0) == SEGMENT
    assert found.segment("value", 0) == other
    assert found.segment("key", 0, part=Part.SCALES) == SCALES
    assert [found.row_nbytes(part) for part in Part] == [4, 2, 4]
    with pytest.raises(GeometryError, match="part = 'zero_points': must be one of"):
        found.segment("key", 0, part=Part.ZERO_POINTS)


def test_every_slot_must_lie_in_its_region() -> None:
    found = layout(SEGMENT, SCALES, SEGMENT, SCALES)
    # 8 + 2 * 32 (last page) + 3 * 8 (last token) + 1 * 4 (last head) + 4 (its bytes); 2 * 8 + 3 * 2 + 2
    found.check_inside([104, 24])
    with pytest.raises(GeometryError, match=r"segments\[0\].* = 8: ends at byte 104 of region 0, which has 103"):
        found.check_inside([103, 24])
    with pytest.raises(GeometryError, match=r"segments\[1\].* = 0: ends at byte 24 of region 1, which has 23"):
        found.check_inside([104, 23])
    with pytest.raises(GeometryError, match=r"segments\[1\]\.region_index = 1: is not below the number of regions 1"):
        found.check_inside([104])


def test_segments_of_the_same_strides_are_alike_wherever_they_are() -> None:
    moved, wider = Segment(2, 900, 32, 8, 4), Segment(0, 8, 40, 8, 4)
    same, other = layout(SEGMENT, SCALES, moved, SCALES), layout(SEGMENT, SCALES, wider, SCALES)
    assert (same.alike, same.uniform) == ((0, 1, 0, 1), True)
    assert (other.alike, other.uniform) == ((0, 1, 2, 1), False)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(GeometryError, match=r"len\(segments\) = 2: must be 4"):
        layout(SEGMENT, SCALES)
    with pytest.raises(GeometryError, match=r"segments\[0\]\.page_stride_nbytes = -1"):
        layout(Segment(0, 0, -1, 8, 4), SCALES, SEGMENT, SCALES)
    with pytest.raises(GeometryError, match="num_pages = 0"):
        PoolLayout(spec=SPEC, num_pages=0, segments=(SEGMENT, SCALES) * 2)
