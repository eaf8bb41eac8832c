"""Whole pages: the places of a pair of pools against what a plan says of them, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hurray_rdma.cache import CacheSpec, Part, PoolLayout, Segment, page_nbytes_of, parts_of
from hurray_rdma.plan import WholePages
from tests.plan.test_transfer import LLAMA, dense, plan_of

SMALL: dict[str, Any] = {"num_layers": 3, "num_heads": 3, "head_dim": 8, "page_size": 4, "dtype": "int8"}
SRC_PAGES, DST_PAGES = [4, 5, 0, 8], [2, 9, 1, 7]


def bytes_moved(pieces: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """The source byte that comes to each destination byte."""
    return {dst + step: src + step for src, dst, nbytes in pieces for step in range(nbytes)}


def with_scales(spec: CacheSpec, num_pages: int) -> PoolLayout:
    """All parts of all layers, one after the other."""
    row, segments, at = spec.row_nbytes, [], 0
    pages = (row, spec.page_size * row) if spec.order == "HND" else (spec.num_heads * row, row)
    for _ in spec.tensors:
        for part in parts_of(spec):
            nbytes = page_nbytes_of(spec, part)
            token = nbytes // spec.page_size
            segments.append(Segment(0, at, nbytes, *(pages if part is Part.PAGES else (token, token))))
            at += num_pages * nbytes
    return PoolLayout(spec=spec, num_pages=num_pages, segments=tuple(segments))


def planned(source: PoolLayout, dest: PoolLayout) -> dict[int, int]:
    plan, pieces = plan_of(source, dest, sorted(SRC_PAGES), DST_PAGES), []
    for tensor in source.spec.tensors:
        for move in plan.moves(*tensor):
            for each in move.program.plans():
                srcs, dsts = each.src_offsets + move.src_base_nbytes, each.dst_offsets + move.dst_base_nbytes
                pieces += list(zip(srcs.tolist(), dsts.tolist(), each.lengths.tolist(), strict=True))
    return bytes_moved(pieces)


def by_places(whole: WholePages) -> dict[int, int]:
    return bytes_moved(
        (src + src_stride * src_page, dst + dst_stride * dst_page, nbytes)
        for src, src_stride, dst, dst_stride, nbytes in whole.places.tolist()
        for src_page, dst_page in zip(sorted(SRC_PAGES), DST_PAGES, strict=True)
    )


@pytest.mark.parametrize(
    ("changes", "page_nbytes"),
    [
        ({}, 6 * 96),
        ({"order": "HND"}, 6 * 96),
        ({"num_layers": 1, "roles": ("fused",)}, 96),
        ({"scale_dtype": "float32", "zero_points": True}, 6 * (96 + 4 * 4 + 4 * 4)),
        ({"scale_dtype": "float16", "order": "HND"}, 6 * (96 + 4 * 2)),
    ],
)
def test_places_move_what_a_plan_moves(changes: dict[str, Any], page_nbytes: int) -> None:
    spec = CacheSpec(**(SMALL | changes))
    source, dest = with_scales(spec, 10), with_scales(spec, 12)
    whole = WholePages.between(source, dest)
    assert whole is not None
    assert whole.places.dtype == np.uint64
    assert whole.page_nbytes == page_nbytes
    moved = by_places(whole)
    assert len(moved) == len(SRC_PAGES) * page_nbytes
    assert moved == planned(source, dest)


def test_pools_whose_pages_differ_have_none() -> None:
    spec = CacheSpec(**LLAMA)
    pool = dense(spec, 10)
    for changes in ({"order": "HND"}, {"num_heads": 4}, {"page_size": 32}, {"dtype": "float16"}):
        assert WholePages.between(pool, dense(CacheSpec(**(LLAMA | changes)), 10)) is None
    gaps = replace(pool, segments=tuple(replace(each, token_stride_nbytes=4096) for each in pool.segments))
    assert WholePages.between(pool, gaps) is None, "tokens lie apart on one side"
    elsewhere = replace(pool, segments=(replace(pool.segments[0], region_index=1), *pool.segments[1:]))
    assert WholePages.between(pool, elsewhere) is None, "not all in the first region"
