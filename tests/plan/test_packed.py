"""Pages by way of buffers, packed on one side and unpacked on the other: random pairs of pools, every byte compared."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import pack, packed_nbytes, plan_transfer, unpack
from tests.plan.test_transfer import Case, Side, cases, check, execute, page_map_of


def buffers(case: Case, num_pages: int, filler: int) -> Side:
    """One for each role of each layer, of the length that both sides derive."""
    nbytes = packed_nbytes(case.source.layout.spec, case.dest.layout.spec, num_pages)
    tensors = case.source.layout.spec.tensors
    return Side(case.source.layout, tuple(np.full(nbytes, filler, np.uint8) for _ in tensors))


@settings(max_examples=300, deadline=None)
@given(cases(), st.data())
def test_packed_and_unpacked_is_what_a_token_by_token_copy_makes(case: Case, data: st.DataObject) -> None:
    page_map = page_map_of(case)
    granted = np.array(
        data.draw(st.permutations(range(case.dest.layout.num_pages)))[: page_map.num_pages], dtype=np.uint32
    )
    resident = np.array([data.draw(st.booleans()) for _ in granted], np.bool_)
    zero_tails = data.draw(st.booleans())
    num_sent = int((~resident).sum())

    packing = pack(case.source.layout, case.dest.layout.spec, page_map, resident=resident, zero_tails=zero_tails)
    assert (packing.num_pages, packing.num_resident) == (num_sent, int(resident.sum()))
    packed = execute(packing, case.source, buffers(case, num_sent, data.draw(st.sampled_from([0, 0xEE]))))
    unpacking = unpack(case.source.layout.spec, case.dest.layout, granted[~resident])
    assert unpacking.num_pages == num_sent
    actual = execute(unpacking, Side(case.source.layout, tuple(packed)), case.dest)

    flat = page_map.block_table(granted).tolist()
    table = [flat[page_map.seq_ptr[s] : page_map.seq_ptr[s + 1]] for s in range(len(case.rows))]
    check(case, actual, table, set(granted[resident].tolist()), zero_tails=zero_tails)

    direct = plan_transfer(
        case.source.layout, case.dest.layout, page_map, granted, resident=resident, zero_tails=zero_tails
    )
    if zero_tails:  # then no slot is undefined: both ways make the same of every byte
        for one, other in zip(actual, execute(direct, case.source, case.dest), strict=True):
            assert np.array_equal(one, other)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_a_buffer_is_as_long_as_the_pages_that_travel_and_is_filled_where_they_are_full(case: Case) -> None:
    """Nothing between the pages, nothing behind them: what no token fills is what a tail leaves."""
    page_map = page_map_of(case)
    packing = pack(case.source.layout, case.dest.layout.spec, page_map, resident=None, zero_tails=True)
    source, dest = case.source.layout.spec, case.dest.layout.spec
    first, last = max(source.heads[0], dest.heads[0]), min(source.heads[1], dest.heads[1])
    slot = (last - first) * source.row_nbytes
    if source.scale_dtype is not None:
        slot += np.dtype(source.scale_dtype).itemsize + 4 * source.zero_points
    target = buffers(case, page_map.num_pages, 0)
    assert {len(each) for each in target.memory} == {page_map.num_pages * dest.page_size * slot}
    # Zeroed tails and tokens together cover it: two fillers give the same.
    other = buffers(case, page_map.num_pages, 0xEE)
    for one, two in zip(execute(packing, case.source, target), execute(packing, case.source, other), strict=True):
        assert np.array_equal(one, two)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_pairs_that_cannot_be_are_refused_on_both_sides(case: Case) -> None:
    page_map = page_map_of(case)
    wrong = replace(case.dest.layout.spec, head_dim=case.dest.layout.spec.head_dim + 1)
    with pytest.raises(GeometryError, match="head_dim"):
        pack(case.source.layout, wrong, page_map, resident=None, zero_tails=False)
    with pytest.raises(GeometryError, match="head_dim"):
        unpack(
            replace(case.source.layout.spec, head_dim=case.source.layout.spec.head_dim + 1),
            case.dest.layout,
            np.arange(page_map.num_pages, dtype=np.uint32),
        )
