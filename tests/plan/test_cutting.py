"""Buffers of pages cut into stretches anywhere: what is copied stretch by stretch is what is copied at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.cache import CacheSpec, PoolLayout, Segment
from hurray_rdma.plan import Cutter, Pieces, Program, TransferPlan, map_pages, pack, packed_nbytes, unpack
from hurray_rdma.plan.pieces import Tile
from tests.plan.test_packed import buffers
from tests.plan.test_transfer import Case, Side, cases, execute, page_map_of


def program_of(*tiles: Tile) -> Program:
    return Program(num_pages=1, nbytes=sum(tile.nbytes for tile in tiles), zeros=None, tiles=tiles, _plan=None)


def tile_of(places: list[tuple[int, int]], pieces: list[tuple[int, int]]) -> Tile:
    """Of 5 bytes each, at (source offset, destination offset)."""
    columns = [np.array(column, np.uint64) for rows in (places, pieces) for column in zip(*rows, strict=True)]
    return Tile(*columns, piece_nbytes=5, by_piece=False)


def listed(pieces: Pieces) -> list[tuple[int, ...]]:
    return list(zip(*(each.tolist() for each in pieces), strict=True))


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 100, [(505, 10, 5), (500, 20, 5), (75, 40, 5), (70, 50, 5)]),
        (0, 10, []),
        (-5, 11, [(505, 10, 1)]),
        (12, 20, [(507, 12, 3)]),
        (15, 20, []),
        (14, 21, [(509, 14, 1), (500, 20, 1)]),
        (22, 24, [(502, 22, 2)]),
        (24, 41, [(504, 24, 1), (75, 40, 1)]),
        (25, 40, []),
        (53, 53, []),
        (55, 9999, []),
        (-9, -3, []),
    ],
)
def test_what_lies_in_a_stretch(begin: int, end: int, expected: list[tuple[int, int, int]]) -> None:
    cutter = Cutter(program_of(tile_of([(500, 10), (70, 40)], [(0, 10), (5, 0)])), from_buffer=False)
    assert listed(cutter.cut(begin, end)) == expected


def test_the_side_of_the_buffer_is_the_one_that_is_cut() -> None:
    cutter = Cutter(program_of(tile_of([(70, 40), (500, 10)], [(5, 0), (0, 10)])), from_buffer=True)
    assert listed(cutter.cut(72, 507)) == [(72, 52, 3), (75, 40, 5), (500, 20, 5), (505, 10, 2)]


def test_neighbours_that_meet_on_both_sides_are_one_piece() -> None:
    cutter = Cutter(program_of(tile_of([(0, 100), (10, 110), (30, 120)], [(0, 0), (5, 5)])), from_buffer=True)
    assert listed(cutter.cut(3, 37)) == [(3, 103, 17), (30, 120, 7)]


def test_pages_with_unlike_tails_lie_between_one_another() -> None:
    full, short = tile_of([(0, 0), (20, 20)], [(0, 0), (5, 9)]), tile_of([(10, 10)], [(0, 0)])
    assert sorted(listed(Cutter(program_of(full, short), from_buffer=True).cut(6, 22))) == [
        (6, 10, 4),
        (10, 10, 5),
        (20, 20, 2),
    ]


def test_nothing_has_no_pieces() -> None:
    assert [len(each) for each in Cutter(program_of(), from_buffer=True).cut(0, 10)] == [0, 0, 0]


def test_no_pieces_are_made_but_those_of_the_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of a large snapshot, HND as vLLM keeps it, are two millions, which nobody makes at once."""
    monkeypatch.setattr("hurray_rdma.plan.transfer.plans_of", None)
    num_pages = 16_000
    spec = CacheSpec(num_layers=1, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16", roles=("key",))
    page = spec.page_nbytes
    layout = PoolLayout(
        spec=spec.with_order("HND"), num_pages=num_pages, segments=(Segment(0, 0, page, 256, 16 * 256),)
    )
    page_ids = np.arange(num_pages, dtype=np.uint32)
    table_ptr = np.array([0, num_pages], np.uint32)
    page_map = map_pages(
        page_ids,
        table_ptr,
        np.array([num_pages * 16], np.uint32),
        num_pages=num_pages,
        src_page_size=16,
        dst_page_size=16,
    )
    for plan, from_buffer in (
        (pack(layout, spec, page_map, resident=None, zero_tails=False), False),
        (unpack(spec, layout, page_ids), True),
    ):
        (move,) = plan.moves("key", 0)
        src, dst, lengths = Cutter(move.program, from_buffer=from_buffer).cut(7 * page + 256, 7 * page + 2560)
        at, to = (src, dst) if from_buffer else (dst, src)
        assert at.tolist() == [7 * page + 256 * n for n in range(1, 10)]
        # Behind token 0 of head 1: seven more heads of it, then token 1 of heads 0 and 1.
        assert to.tolist() == [7 * page + 4096 * head for head in range(1, 8)] + [7 * page + 256, 7 * page + 4352]
        assert lengths.tolist() == [256] * 9


def in_stretches(plan: TransferPlan, source: Side, dest: Side, cuts: list[int], *, from_buffer: bool) -> None:
    """Copies stretch by stretch, in place."""
    cutters: dict[int, Cutter] = {}
    for tensor in source.layout.spec.tensors:
        for begin, end in pairwise(cuts):
            for move in plan.moves(*tensor):
                cutter = cutters.setdefault(id(move.program), Cutter(move.program, from_buffer=from_buffer))
                base = move.src_base_nbytes if from_buffer else move.dst_base_nbytes
                for src, dst, length in zip(*(a.tolist() for a in cutter.cut(begin - base, end - base)), strict=True):
                    assert begin <= base + (src if from_buffer else dst), "before the stretch"
                    assert base + (src if from_buffer else dst) + length <= end, "behind the stretch"
                    at, to = move.src_base_nbytes + src, move.dst_base_nbytes + dst
                    piece = source.memory[move.src_region_index][at : at + length]
                    dest.memory[move.dst_region_index][to : to + length] = piece


@settings(max_examples=80, deadline=None)
@given(cases(), st.data())
def test_stretch_by_stretch_is_all_at_once(case: Case, data: st.DataObject) -> None:
    page_map = page_map_of(case)
    resident = np.array([data.draw(st.booleans()) for _ in range(page_map.num_pages)], np.bool_)
    granted = np.arange(page_map.num_pages, dtype=np.uint32)[~resident]
    spec = case.dest.layout.spec
    plan = pack(case.source.layout, spec, page_map, resident=resident, zero_tails=data.draw(st.booleans()))
    nbytes = packed_nbytes(case.source.layout.spec, spec, len(granted))
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, nbytes), max_size=6))), nbytes]

    packed = buffers(case, len(granted), 0)
    expected = execute(plan, case.source, packed)
    in_stretches(plan, case.source, packed, cuts, from_buffer=False)
    for one, other in zip(packed.memory, expected, strict=True):
        assert np.array_equal(one, other)

    unpacking = unpack(case.source.layout.spec, case.dest.layout, granted)
    source = Side(case.source.layout, packed.memory)
    whole = execute(unpacking, source, case.dest)
    dest = Side(case.dest.layout, tuple(region.copy() for region in case.dest.memory))
    in_stretches(unpacking, source, dest, cuts, from_buffer=True)
    for one, other in zip(dest.memory, whole, strict=True):
        assert np.array_equal(one, other)
