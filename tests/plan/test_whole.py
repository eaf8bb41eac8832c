"""Whole pages: the places of a pair of pools against what a plan says of them, byte by byte."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hurray_rdma.cache import CacheSpec, PoolLayout
from hurray_rdma.plan import WholePages
from tests.plan.test_transfer import LLAMA, dense, plan_of

SRC_PAGES, DST_PAGES = [4, 5, 0, 8], [2, 9, 1, 7]


def bytes_moved(pieces: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """The source byte that comes to each destination byte, in steps of 64."""
    return {dst + step: src + step for src, dst, nbytes in pieces for step in range(0, nbytes, 64)}


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


@pytest.mark.parametrize("changes", [{}, {"order": "HND"}, {"num_layers": 1}])
def test_places_move_what_a_plan_moves(changes: dict[str, Any]) -> None:
    spec = CacheSpec(**(LLAMA | changes))
    source, dest = dense(spec, 10), dense(spec, 12)
    whole = WholePages.between(source, dest)
    assert whole is not None
    assert whole.places.dtype == np.uint64
    assert whole.page_nbytes == spec.page_nbytes * len(spec.tensors)
    assert by_places(whole) == planned(source, dest)


def test_pools_whose_pages_differ_have_none() -> None:
    spec = CacheSpec(**LLAMA)
    pool = dense(spec, 10)
    for changes in ({"order": "HND"}, {"num_heads": 4}, {"page_size": 32}, {"dtype": "float16"}):
        assert WholePages.between(pool, dense(CacheSpec(**(LLAMA | changes)), 10)) is None
    gaps = replace(pool, segments=tuple(replace(each, token_stride_nbytes=4096) for each in pool.segments))
    assert WholePages.between(pool, gaps) is None, "tokens lie apart on one side"
    elsewhere = replace(pool, segments=(replace(pool.segments[0], region_index=1), *pool.segments[1:]))
    assert WholePages.between(pool, elsewhere) is None, "not all in the first region"
