"""Buffers of pages cut into stretches anywhere: what is copied stretch by stretch is what is copied at once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.plan import Cutter, Plan, Program, TransferPlan, pack, packed_nbytes, unpack
from tests.plan.test_packed import buffers
from tests.plan.test_transfer import Case, Side, cases, execute, page_map_of


def program_of(*plans: list[tuple[int, int, int]]) -> Program:
    """Of (source offset, destination offset, length)."""
    made = []
    for rows in plans:
        src, dst, lengths = (np.array(column, np.uint64) for column in zip(*rows, strict=True))
        made.append(Plan(src_offsets=src, dst_offsets=dst, lengths=lengths, num_pages=1, nbytes=int(lengths.sum())))
    return Program(num_pages=1, nbytes=sum(plan.nbytes for plan in made), zeros=None, _tiles=(), _plan=tuple(made))


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0, 100, [(500, 10, 5), (0, 20, 10), (70, 40, 1)]),
        (0, 10, []),
        (-5, 11, [(500, 10, 1)]),
        (12, 20, [(502, 12, 3)]),
        (15, 20, []),
        (14, 21, [(504, 14, 1), (0, 20, 1)]),
        (23, 26, [(3, 23, 3)]),
        (29, 41, [(9, 29, 1), (70, 40, 1)]),
        (30, 40, []),
        (41, 41, []),
        (41, 9999, []),
        (-9, -3, []),
    ],
)
def test_what_lies_in_a_stretch(begin: int, end: int, expected: list[tuple[int, int, int]]) -> None:
    cutter = Cutter(program_of([(70, 40, 1), (0, 20, 10)], [(500, 10, 5)]), from_buffer=False)
    assert list(zip(*(each.tolist() for each in cutter.cut(begin, end)), strict=True)) == expected


def test_the_side_of_the_buffer_is_the_one_that_is_cut() -> None:
    cutter = Cutter(program_of([(70, 40, 4), (0, 20, 10)]), from_buffer=True)
    assert [each.tolist() for each in cutter.cut(8, 72)] == [[8, 70], [28, 40], [2, 2]]


def test_nothing_has_no_pieces() -> None:
    assert [len(each) for each in Cutter(program_of(), from_buffer=True).cut(0, 10)] == [0, 0, 0]


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
