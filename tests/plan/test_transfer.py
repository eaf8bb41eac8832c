"""The proof: plans for random pairs of pools against a model that copies token by token, every byte compared.

Each side is a few buffers of random bytes. The model knows only the formula of a layout (offset + page + token + head)
and plain loops; bytes that it does not write must be as they were.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.cache import CacheSpec, Part, PoolLayout, Segment, parts_of
from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import PageMap, TransferPlan, map_pages, pieces, plan_transfer


@dataclass(frozen=True)
class Side:
    layout: PoolLayout
    memory: tuple[np.ndarray, ...]

    def row(self, role: str, layer: int, part: Part, at: tuple[int, int, int]) -> np.ndarray:
        """Bytes of one token of one head: page, token, head of this pool."""
        segment = self.layout.segment(role, layer, part=part)
        page, token, head = at
        start = (
            segment.offset_nbytes
            + page * segment.page_stride_nbytes
            + token * segment.token_stride_nbytes
            + head * segment.head_stride_nbytes
        )
        return self.memory[segment.region_index][start : start + self.layout.row_nbytes(part)]


@dataclass(frozen=True)
class Case:
    source: Side
    dest: Side
    rows: list[list[int]]
    """Page IDs of each sequence, pages allocated ahead included."""
    seq_lens: list[int]


@st.composite
def sides(draw: st.DrawFn, spec: CacheSpec, num_pages: int) -> Side:
    """Segments with the axes in any order and with gaps, in one region or in several; all bytes random."""
    shapes: dict[Part, tuple[int, ...]] = dict.fromkeys(Part, (num_pages, spec.page_size, 1))
    shapes[Part.PAGES] = num_pages, spec.page_size, spec.num_heads
    # One set of strides for each part, or one for each segment: programs are shared where strides are equal.
    chosen: dict[Part, tuple[tuple[int, ...], int]] = {}
    own_strides, own_regions = draw(st.booleans()), draw(st.booleans())
    segments: list[Segment] = []
    lengths = [draw(st.integers(0, 9))]
    rows = PoolLayout(
        spec=spec, num_pages=1, segments=(Segment(0, 0, 0, 0, 0),) * len(spec.tensors) * len(parts_of(spec))
    )
    for _ in spec.tensors:
        for part in parts_of(spec):
            if part not in chosen or own_strides:
                strides = [0, 0, 0]
                extent = rows.row_nbytes(part)
                step = extent + draw(st.sampled_from([0, 0, 3]))
                for axis in draw(st.permutations(range(3))):
                    strides[axis] = step
                    extent += (shapes[part][axis] - 1) * step
                    step = step * shapes[part][axis] + draw(st.sampled_from([0, 0, 5]))
                chosen[part] = tuple(strides), extent
            strides_of, extent = chosen[part]
            if own_regions:
                lengths.append(draw(st.integers(0, 9)))
            head_stride = strides_of[2] if part is Part.PAGES else 0
            segments.append(Segment(len(lengths) - 1, lengths[-1], strides_of[0], strides_of[1], head_stride))
            lengths[-1] += extent + draw(st.integers(0, 9))
    layout = PoolLayout(spec=spec, num_pages=num_pages, segments=tuple(segments))
    layout.check_inside(lengths)
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Side(layout, tuple(random.integers(0, 256, length, dtype=np.uint8) for length in lengths))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    quantized = draw(st.booleans())
    small = draw(st.sampled_from([2, 4] if quantized else [1, 2, 3]))
    ratio = draw(st.sampled_from([1, 1, 2, 4] if quantized else [1, 1, 2, 3, 4]))
    page_sizes = draw(st.permutations([small, small * ratio]))
    total_heads = draw(st.integers(1, 4))
    heads = [sorted(draw(st.sets(st.integers(0, total_heads), min_size=2, max_size=2))) for _ in range(2)]
    if heads[0][1] <= heads[1][0] or heads[1][1] <= heads[0][0] or draw(st.booleans()):
        heads = [[0, total_heads], [0, total_heads]]
    if quantized:
        heads[0] = [min(heads[0][0], heads[1][0]), max(heads[0][1], heads[1][1])]
    roles = draw(st.sampled_from([("key", "value"), ("fused",)]))
    common: dict[str, Any] = {
        "num_layers": 2,
        "layers": draw(st.sampled_from([None, (1, 5)])),
        "head_dim": draw(st.sampled_from([1, 3])),
        "total_heads": total_heads,
        "dtype": "int8" if quantized else draw(st.sampled_from(["int8", "bfloat16"])),
        "scale_dtype": draw(st.sampled_from(["float16", "float32"])) if quantized else None,
        "zero_points": quantized and draw(st.booleans()),
    }
    specs = [
        CacheSpec(
            **common,
            roles=roles if index else draw(st.permutations(roles).map(tuple)),
            page_size=page_sizes[index],
            head_offset=heads[index][0],
            num_heads=heads[index][1] - heads[index][0],
        )
        for index in range(2)
    ]
    num_src_pages = draw(st.integers(1, 9))
    page = st.integers(0, num_src_pages - 1)
    rows = draw(st.lists(st.lists(page, max_size=5), max_size=4))
    if rows and draw(st.booleans()):  # a shared prefix
        prefix = draw(st.lists(page, max_size=4))
        rows = [prefix + row for row in rows]
    seq_lens = [draw(st.integers(0, len(row) * page_sizes[0])) for row in rows]
    needed = sum(-(-tokens // page_sizes[1]) for tokens in seq_lens)
    source = draw(sides(specs[0], num_src_pages))
    dest = draw(sides(specs[1], needed + draw(st.integers(1, 3))))
    return Case(source, dest, rows, seq_lens)


def page_map_of(case: Case) -> PageMap:
    return map_pages(
        np.array([page for row in case.rows for page in row], np.uint32),
        np.cumsum([0] + [len(row) for row in case.rows]).astype(np.uint32),
        np.array(case.seq_lens, np.uint32),
        num_pages=case.source.layout.num_pages,
        src_page_size=case.source.layout.spec.page_size,
        dst_page_size=case.dest.layout.spec.page_size,
    )


def execute(plan: TransferPlan, source: Side, dest: Side) -> list[np.ndarray]:
    """What the plan makes of the destination's memory, byte for byte; no byte may be written twice."""
    result = [region.copy() for region in dest.memory]
    touched = [np.zeros(len(region), np.bool_) for region in dest.memory]
    zeros = np.zeros(plan.zeros_nbytes, np.uint8)
    nbytes = operations = 0
    for role, layer in source.layout.spec.tensors:
        for move in plan.moves(role, layer):
            src = source.memory[move.src_region_index][move.src_base_nbytes :]
            pieces_of = [(src, each) for each in move.program.plans()]
            if move.program.zeros is not None:
                pieces_of.append((zeros, move.program.zeros))
            for origin, each in pieces_of:
                operations += each.num_operations
                nbytes += each.nbytes if origin is src else 0
                for a, b, length in zip(each.src_offsets, each.dst_offsets, each.lengths, strict=True):
                    assert length > 0
                    start = move.dst_base_nbytes + int(b)
                    assert int(a) + int(length) <= len(origin)
                    assert start + int(length) <= len(result[move.dst_region_index])
                    place = slice(start, start + int(length))
                    assert not touched[move.dst_region_index][place].any()
                    touched[move.dst_region_index][place] = True
                    result[move.dst_region_index][place] = origin[int(a) : int(a) + int(length)]
    assert nbytes == plan.nbytes
    assert operations <= plan.max_operations
    return result


def check(
    case: Case, actual: list[np.ndarray], table: list[list[int]], resident: set[int], *, zero_tails: bool
) -> None:
    """A destination against the slow model: valid tokens right, undefined slots free, every other byte as it was."""
    source, dest = case.source, case.dest
    expected = [region.copy() for region in dest.memory]
    free = [np.zeros(len(region), np.bool_) for region in dest.memory]
    model, undefined = Side(dest.layout, tuple(expected)), Side(dest.layout, tuple(free))
    src_size, dst_size = source.layout.spec.page_size, dest.layout.spec.page_size
    src_heads, dst_heads = (range(*side.layout.spec.heads) for side in (source, dest))
    for role, layer in source.layout.spec.tensors:
        for part in parts_of(source.layout.spec):
            pairs = [(0, 0)]
            if part is Part.PAGES:
                pairs = [(src_heads.index(h), dst_heads.index(h)) for h in src_heads if h in dst_heads]
            for page in {page for row in table for page in row} - resident:
                for slot in range(dst_size):
                    for _, head in pairs:
                        at = page, slot, head
                        if zero_tails:
                            model.row(role, layer, part, at)[:] = 0
                        else:
                            undefined.row(role, layer, part, at)[:] = True
            for row, new_row, tokens in zip(case.rows, table, case.seq_lens, strict=True):
                for token in range(tokens):
                    page = new_row[token // dst_size]
                    if page in resident:
                        continue
                    for src_head, head in pairs:
                        at = page, token % dst_size, head
                        model.row(role, layer, part, at)[:] = source.row(
                            role, layer, part, (row[token // src_size], token % src_size, src_head)
                        )
                        undefined.row(role, layer, part, at)[:] = False
    for got, want, ignored in zip(actual, expected, free, strict=True):
        assert (got[~ignored] == want[~ignored]).all()


@settings(max_examples=400, deadline=None)
@given(cases(), st.data())
def test_any_pair_of_pools_against_a_token_by_token_copy(case: Case, data: st.DataObject) -> None:
    page_map = page_map_of(case)
    granted = data.draw(st.permutations(range(case.dest.layout.num_pages)))[: page_map.num_pages]
    resident = np.array([data.draw(st.booleans()) for _ in granted], np.bool_)
    zero_tails = data.draw(st.booleans())
    plan = plan_transfer(
        case.source.layout, case.dest.layout, page_map, granted, resident=resident, zero_tails=zero_tails
    )
    flat = page_map.block_table(granted).tolist()
    table = [flat[page_map.seq_ptr[s] : page_map.seq_ptr[s + 1]] for s in range(len(case.rows))]
    assert [len(row) for row in table] == [-(-n // case.dest.layout.spec.page_size) for n in case.seq_lens]
    skipped = {page for page, is_resident in zip(granted, resident, strict=True) if is_resident}
    assert plan.num_resident == len(skipped)
    check(case, execute(plan, case.source, case.dest), table, skipped, zero_tails=zero_tails)


@settings(max_examples=50, deadline=None)
@given(cases(), st.sampled_from([1, 2, 3, 7]))
def test_plans_of_bounded_size_do_the_same(case: Case, limit: int) -> None:
    page_map = page_map_of(case)
    granted = list(range(page_map.num_pages))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hurray_rdma.plan.pieces.MAX_OPERATIONS", limit)
        patch.setattr("hurray_rdma.plan.transfer.MAX_OPERATIONS", limit)
        plan = plan_transfer(case.source.layout, case.dest.layout, page_map, granted)
        flat = page_map.block_table(granted).tolist()
        table = [flat[page_map.seq_ptr[s] : page_map.seq_ptr[s + 1]] for s in range(len(case.rows))]
        check(case, execute(plan, case.source, case.dest), table, set(), zero_tails=False)


def dense(spec: CacheSpec, num_pages: int) -> PoolLayout:
    row, heads, tokens = spec.row_nbytes, spec.num_heads, spec.page_size
    token, head = (row, tokens * row) if spec.order == "HND" else (heads * row, row)
    size = num_pages * spec.page_nbytes
    segments = tuple(Segment(0, index * size, spec.page_nbytes, token, head) for index in range(len(spec.tensors)))
    return PoolLayout(spec=spec, num_pages=num_pages, segments=segments)


LLAMA: dict[str, Any] = {"num_layers": 3, "num_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}


def plan_of(source: PoolLayout, dest: PoolLayout, pages: list[int], granted: list[int], **options: Any) -> TransferPlan:
    page_map = map_pages(
        np.array(pages, np.uint32),
        np.array([0, len(pages)], np.uint32),
        np.array([len(pages) * source.spec.page_size], np.uint32),
        num_pages=source.num_pages,
        src_page_size=source.spec.page_size,
        dst_page_size=dest.spec.page_size,
    )
    return plan_transfer(source, dest, page_map, granted, **options)


def operations(plan: TransferPlan) -> list[tuple[int, int, int]]:
    found = []
    for each in plan.moves("key", 0)[0].program.plans():
        found += list(zip(each.src_offsets.tolist(), each.dst_offsets.tolist(), each.lengths.tolist(), strict=True))
    return found


def test_equal_geometry_is_one_program_of_whole_runs_for_all_layers() -> None:
    pool = dense(CacheSpec(**LLAMA), 10)
    plan = plan_of(pool, pool, [4, 5, 6, 8], [0, 1, 2, 3])
    assert operations(plan) == [(4 * 32768, 0, 3 * 32768), (8 * 32768, 3 * 32768, 32768)]
    programs = {id(move.program) for role, layer in pool.spec.tensors for move in plan.moves(role, layer)}
    assert len(programs) == 1
    assert plan.nbytes == 6 * 4 * 32768
    assert (plan.num_pages, plan.num_resident, plan.heads) == (4, 0, (0, 8))


def test_only_pages_that_follow_each_other_on_both_sides_are_one_operation() -> None:
    pool = dense(CacheSpec(**LLAMA), 10)
    assert [length // 32768 for *_, length in operations(plan_of(pool, pool, [3, 4, 5], [1, 0, 2]))] == [1, 1, 1]
    gaps = PoolLayout(
        spec=pool.spec,
        num_pages=10,
        segments=tuple(Segment(0, index * 400_000, 40_000, 2048, 256) for index in range(6)),
    )
    assert operations(plan_of(gaps, pool, [3, 4], [0, 1])) == [(120_000, 0, 32768), (160_000, 32768, 32768)]


def test_plans_cannot_be_changed_and_unknown_tensors_have_none() -> None:
    pool = dense(CacheSpec(**LLAMA), 10)
    plan = plan_of(pool, pool, [4, 6], [0, 1])
    (each,) = plan.moves("key", 0)[0].program.plans()
    assert (each.num_operations, each.num_pages, each.nbytes) == (2, 2, 2 * 32768)
    assert not any(array.flags.writeable for array in (each.src_offsets, each.dst_offsets, each.lengths))
    for role, layer in (("fused", 0), ("key", 3)):
        with pytest.raises(GeometryError, match="must be"):
            plan.moves(role, layer)


def test_roles_may_be_in_another_order_and_regions_of_their_own() -> None:
    spec = CacheSpec(**LLAMA)
    other = replace(spec, roles=("value", "key"))
    source, dest = (
        PoolLayout(
            spec=each,
            num_pages=4,
            segments=tuple(Segment(index, 10 * index, 32768, 2048, 256) for index in range(6)),
        )
        for each in (spec, other)
    )
    plan = plan_of(source, dest, [1], [2])
    found = {
        tensor: (move.src_region_index, move.src_base_nbytes, move.dst_region_index, move.dst_base_nbytes)
        for tensor in spec.tensors
        for move in plan.moves(*tensor)
    }
    assert found["key", 0] == (0, 0, 1, 10)
    assert found["value", 0] == (1, 10, 0, 0)
    assert found["key", 2] == (4, 40, 5, 50)
    assert found["value", 2] == (5, 50, 4, 40)


def test_heads_before_tokens_on_both_sides_are_whole_pages_too() -> None:
    pool = dense(CacheSpec(**LLAMA, order="HND"), 10)
    assert operations(plan_of(pool, pool, [4, 5], [7, 8])) == [(4 * 32768, 7 * 32768, 2 * 32768)]


def test_unlike_orders_move_one_token_of_one_head_at_a_time() -> None:
    nhd, hnd = dense(CacheSpec(**LLAMA), 10), dense(CacheSpec(**LLAMA, order="HND"), 10)
    found = operations(plan_of(nhd, hnd, [1], [0]))
    assert len(found) == 16 * 8
    assert found[0] == (32768, 0, 256)
    assert found[1] == (32768 + 2048, 256, 256), "the destination is written in ascending order"


def test_a_slice_of_heads_is_one_piece_for_each_token_or_for_all() -> None:
    whole = CacheSpec(**LLAMA)
    part = CacheSpec(**(LLAMA | {"num_heads": 2, "head_offset": 4, "total_heads": 8}))
    plan = plan_of(dense(whole, 4), dense(part, 4), [3], [1])
    assert operations(plan)[0] == (3 * 32768 + 4 * 256, 8192, 512)
    assert len(operations(plan)) == 16
    assert plan.heads == (4, 6)
    back = plan_of(dense(part, 4), dense(whole, 4), [3], [1])
    assert back.heads == (4, 6), "other senders have the rest"
    hnd = plan_of(dense(whole.with_order("HND"), 4), dense(part.with_order("HND"), 4), [3], [1])
    assert operations(hnd) == [(3 * 32768 + 4 * 4096, 8192, 8192)]


def test_heads_outside_pages_still_make_runs_of_pages() -> None:
    spec = CacheSpec(**(LLAMA | {"num_layers": 1}), roles=("fused",))
    row = spec.row_nbytes
    outer = PoolLayout(spec=spec, num_pages=10, segments=(Segment(0, 0, 16 * row, row, 160 * row),))
    plan = plan_of(outer, outer, [2, 3, 4], [5, 6, 7])
    (each,) = plan.moves("fused", 0)[0].program.plans()
    assert each.num_operations == 8
    assert set(each.lengths.tolist()) == {3 * 16 * row}


def test_larger_pages_join_runs_and_smaller_pages_cut_them() -> None:
    small, large = dense(CacheSpec(**LLAMA), 10), dense(CacheSpec(**(LLAMA | {"page_size": 64})), 10)
    assert operations(plan_of(small, large, [2, 3, 4, 5, 9], [1, 0])) == [
        (2 * 32768, 4 * 32768, 4 * 32768),
        (9 * 32768, 0, 32768),
    ]
    assert operations(plan_of(large, small, [1], [3, 4, 5, 7])) == [
        (4 * 32768, 3 * 32768, 3 * 32768),
        (7 * 32768, 7 * 32768, 32768),
    ]


def test_everything_resident_is_nothing_to_do() -> None:
    pool = dense(CacheSpec(**LLAMA), 10)
    plan = plan_of(pool, pool, [4, 5], [0, 1], resident=np.array([True, True]))
    assert (plan.num_pages, plan.num_resident, plan.nbytes, plan.max_operations) == (0, 2, 0, 0)
    assert operations(plan) == []


def test_zeroed_tails_are_written_from_one_buffer_of_zeros() -> None:
    pool = dense(CacheSpec(**LLAMA), 10)
    page_map = map_pages(
        np.array([4, 5], np.uint32),
        np.array([0, 2], np.uint32),
        np.array([17], np.uint32),
        num_pages=10,
        src_page_size=16,
        dst_page_size=16,
    )
    plan = plan_transfer(pool, pool, page_map, [0, 1], zero_tails=True)
    assert sorted(operations(plan)) == [(4 * 32768, 0, 32768), (5 * 32768, 32768, 2048)]
    zeros = plan.moves("value", 2)[0].program.zeros
    assert zeros is not None
    assert (zeros.src_offsets.tolist(), zeros.dst_offsets.tolist(), zeros.lengths.tolist()) == (
        [0],
        [32768 + 2048],
        [15 * 2048],
    )
    assert plan.zeros_nbytes == 15 * 2048


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float16"}, "dtype = 'bfloat16': the destination has 'float16'"),
        ({"head_dim": 64}, "head_dim = 128: the destination has 64"),
        ({"roles": ("fused",)}, r"roles = \('key', 'value'\): the destination has \('fused',\)"),
        ({"num_layers": 4}, "num_layers = 3: the destination has 4"),
        ({"layers": (0, 1, 3)}, r"layers = \(0, 1, 2\): the destination has \(0, 1, 3\)"),
        ({"num_heads": 4}, "total_heads = 8: the destination has 4. A cache that holds some"),
        ({"page_size": 24}, "page_size = 16: must divide the destination's 24, or be a multiple of it"),
    ],
)
def test_pairs_that_cannot_be_are_refused_by_field(changes: dict[str, Any], message: str) -> None:
    source, dest = dense(CacheSpec(**LLAMA), 4), dense(CacheSpec(**(LLAMA | changes)), 4)
    page_map = page_map_of(Case(Side(source, ()), Side(source, ()), [[1]], [16]))
    with pytest.raises(GeometryError, match=message):
        plan_transfer(source, dest, page_map, [0])


def test_slices_without_a_common_head_are_refused() -> None:
    first, second = (
        dense(CacheSpec(**(LLAMA | {"num_heads": 2, "head_offset": offset, "total_heads": 8})), 4) for offset in (0, 4)
    )
    page_map = page_map_of(Case(Side(first, ()), Side(first, ()), [[1]], [16]))
    with pytest.raises(GeometryError, match="head_offset = 0: its heads 0 to 1 are none of the destination's 4 to 5"):
        plan_transfer(first, second, page_map, [0])


def test_slices_of_heads_with_scales_of_their_own_cannot_be_joined() -> None:
    quantized = LLAMA | {"dtype": "int8", "scale_dtype": "float32"}
    whole = CacheSpec(**quantized)
    part = CacheSpec(**(quantized | {"num_heads": 2, "total_heads": 8}))

    def layout(spec: CacheSpec) -> PoolLayout:
        return PoolLayout(spec=spec, num_pages=4, segments=(Segment(0, 0, 10**6, 10**4, 10**3),) * 12)

    page_map = page_map_of(Case(Side(layout(part), ()), Side(layout(part), ()), [[1]], [16]))
    plan_transfer(layout(whole), layout(part), page_map, [0])
    with pytest.raises(GeometryError, match=r"num_heads = 2: .* a slot has one scale"):
        plan_transfer(layout(part), layout(whole), page_map, [0])


def test_grants_that_do_not_fit_are_refused() -> None:
    pool = dense(CacheSpec(**LLAMA), 4)
    with pytest.raises(GeometryError, match=r"len\(dst_page_ids\) = 1: must be the 2 pages of the offer"):
        plan_of(pool, pool, [1, 2], [0])
    with pytest.raises(GeometryError, match="must not name a page twice"):
        plan_of(pool, pool, [1, 2], [3, 3])
    with pytest.raises(GeometryError, match="= 4: is not below num_pages 4"):
        plan_of(pool, pool, [1, 2], [3, 4])
    with pytest.raises(GeometryError, match=r"len\(resident\) = 1"):
        plan_of(pool, pool, [1, 2], [0, 3], resident=np.array([True]))


def test_many_pieces_come_in_bounded_plans_and_are_not_kept() -> None:
    nhd, hnd = dense(CacheSpec(**LLAMA), 4096), dense(CacheSpec(**LLAMA, order="HND"), 4096)
    program = plan_of(nhd, hnd, list(range(4096)), list(range(4096))).moves("key", 0)[0].program
    assert program.max_operations == 4096 * 128
    counts = [each.num_operations for each in program.plans()]
    assert max(counts) < 2 * pieces.MAX_OPERATIONS
    # The last piece of a page meets the first of the next: all but those of a batch's last page become one.
    assert sum(counts) == 4096 * 128 - 4095 + 1
