"""Snapshots: the tables of ADR-024, gathered tokens, descriptors, and refusals with places and numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import DialectName, KvRole, encode

SPEC = CacheSpec(num_layers=2, num_heads=2, head_dim=4, page_size=3, dtype="bfloat16")


@pytest.fixture(params=["NHD", "HND"])
def pool(request: pytest.FixtureRequest) -> Iterator[PagePool]:
    with PagePool.allocate(SPEC.with_order(request.param), 10) as pool:
        for index, (role, layer) in enumerate(SPEC.tensors):
            view = pool.pages(role, layer)
            view[...] = np.random.default_rng(index).integers(0, 100, view.shape)
        yield pool


def test_tables_become_csr(pool: PagePool) -> None:
    snapshot = Snapshot.from_block_tables(pool, [[7, 3, 9], [], [7, 2]], seq_lens=[8, 0, 4])
    assert snapshot.block_table.tolist() == [7, 3, 9, 7, 2]
    assert snapshot.seq_ptr.tolist() == [0, 3, 3, 5]
    assert snapshot.seq_lens.tolist() == [8, 0, 4]
    assert {a.dtype for a in (snapshot.block_table, snapshot.seq_ptr, snapshot.seq_lens)} == {np.dtype(np.uint32)}
    assert (snapshot.num_seqs, snapshot.total_tokens) == (3, 12)
    assert snapshot.seq_pages(2).tolist() == [7, 2]
    with pytest.raises(ValueError, match="read-only"):
        snapshot.block_table[0] = 1


def test_tokens_follow_the_formula_of_the_format(pool: PagePool) -> None:
    snapshot = Snapshot.from_block_tables(pool, [[7, 3, 9], [7, 2, 5, 6]], seq_lens=[8, 4])
    for role, layer in SPEC.tensors:
        view = pool.pages(role, layer)
        for seq, table in enumerate([[7, 3, 9], [7, 2]]):
            tokens = snapshot.tokens(role, layer=layer, seq=seq)
            assert tokens.shape == (snapshot.seq_lens[seq], 2, 4)
            for token in range(len(tokens)):
                page = view[table[token // 3]]
                expected = page[:, token % 3] if pool.spec.order == "HND" else page[token % 3]
                assert (tokens[token] == expected).all()


def test_tokens_are_a_copy(pool: PagePool) -> None:
    snapshot = Snapshot.from_block_tables(pool, [[1]], seq_lens=[3])
    tokens = snapshot.tokens("key", layer=0, seq=0)
    tokens[...] = 101
    assert not (pool.pages("key", 0) == 101).any()


def test_an_empty_batch_and_an_empty_sequence(pool: PagePool) -> None:
    empty = Snapshot.from_block_tables(pool, [], seq_lens=[])
    assert (empty.block_table.tolist(), empty.seq_ptr.tolist(), empty.total_tokens) == ([], [0], 0)
    assert Snapshot.from_block_tables(pool, [[4]], seq_lens=[0]).tokens("key", layer=0, seq=0).shape == (0, 2, 4)


def test_one_descriptor_per_role_and_layer(pool: PagePool) -> None:
    descriptors = Snapshot.from_block_tables(pool, [[7, 3], [7]], seq_lens=[5, 3]).descriptors()
    assert [(d.kv_role, d.layer_index) for d in descriptors] == [
        (KvRole.KEY, 0),
        (KvRole.VALUE, 0),
        (KvRole.KEY, 1),
        (KvRole.VALUE, 1),
    ]
    first = descriptors[0]
    assert (first.total_tokens, first.num_heads, first.head_dim) == (8, 2, 4)
    assert (first.page_size, first.num_pages, first.num_seqs) == (3, 10, 2)


@pytest.mark.parametrize("dialect", ["adr-024", "hurray-0.2"])
def test_descriptors_as_bytes(pool: PagePool, dialect: DialectName) -> None:
    snapshot = Snapshot.from_block_tables(pool, [[7, 3], [7]], seq_lens=[5, 3])
    expected = b"".join(encode(each, dialect=dialect) for each in snapshot.descriptors())
    assert snapshot.encode_descriptors(dialect=dialect) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([9, 10], [0, 2], [6]), r"block_table\[1\] = 10: is not below num_pages 10"),
        (([9, -1], [0, 2], [6]), r"block_table\[1\] = -1"),
        (([2**32], [0, 1], [1]), r"block_table\[0\] = 4294967296"),
        (([1.5], [0, 1], [1]), "block_table = 'float64"),
        (([9, 8], [1, 2], [3]), r"seq_ptr\[0\] = 1: must be 0"),
        (([9, 8], [0, 2, 1], [3, 3]), r"seq_ptr\[2\] = 1: is below seq_ptr\[1\] = 2"),
        (([9, 8], [0, 1], [3]), r"seq_ptr\[1\] = 1: must be the 2 entries of block_table"),
        (([9, 8], [0, 1, 2], [3]), r"len\(seq_ptr\) = 3: must be one more than the 1 entries of seq_lens"),
        (([9, 8], [0, 1, 2], [3, 4]), r"seq_lens\[1\] = 4: is above the 3 tokens of its 1 pages of 3"),
        (([], [], []), r"len\(seq_ptr\) = 0"),
    ],
)
def test_tables_that_do_not_fit_are_refused_with_place_and_numbers(
    pool: PagePool, arguments: tuple[Any, Any, Any], message: str
) -> None:
    with pytest.raises(GeometryError, match=message):
        Snapshot(pool, *arguments)


def test_unknown_sequences_are_refused(pool: PagePool) -> None:
    with pytest.raises(GeometryError, match="seq = 1: must be from 0 to 0"):
        Snapshot.from_block_tables(pool, [[1]], seq_lens=[1]).tokens("key", layer=0, seq=1)


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_dequantize_goes_through_the_block_table_aliases_included(order: str) -> None:
    spec = CacheSpec(
        num_layers=1,
        num_heads=2,
        head_dim=4,
        page_size=4,
        dtype="int8",
        scale_dtype="float32",
        zero_points=True,
        order=order,  # type: ignore[arg-type]
    )
    with PagePool.allocate(spec, 6) as pool:
        random = np.random.default_rng(8)
        for role, layer in spec.tensors:
            pool.pages(role, layer)[...] = random.integers(-128, 128, pool.pages(role, layer).shape, np.int8)
            pool.scales(role, layer)[...] = random.uniform(0.5, 2, (6, 4)).astype(np.float32)
            pool.zero_points(role, layer)[...] = random.integers(-9, 9, (6, 4))
        snapshot = Snapshot.from_block_tables(pool, [[5, 2], [5, 0]], seq_lens=[7, 5])
        for role in spec.roles:
            pages, scales, zeros = pool.pages(role, 0), pool.scales(role, 0), pool.zero_points(role, 0)
            for seq, table in enumerate([[5, 2], [5, 0]]):
                got = snapshot.dequantize(role, layer=0, seq=seq)
                assert got.dtype == np.float32
                assert got.shape == (snapshot.seq_lens[seq], 2, 4)
                for token in range(len(got)):
                    page, slot = table[token // 4], token % 4
                    stored = pages[page][:, slot] if order == "HND" else pages[page][slot]
                    expected = scales[page, slot] * (stored.astype(np.float32) - zeros[page, slot])
                    np.testing.assert_array_equal(got[token], expected.astype(np.float32))


class OnDevice:
    """Follows NumPy's protocols as CuPy does."""

    def __init__(self, values: np.ndarray | None = None) -> None:
        self.values = values

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> OnDevice:
        assert function is np.array
        return OnDevice(np.array(*args, **kwargs))


def test_tables_go_where_the_pages_are_as_attention_kernels_take_them() -> None:
    with PagePool.allocate(SPEC, 10) as pool:
        snapshot = Snapshot.from_block_tables(pool, [[7, 3], [7, 2]], seq_lens=[5, 6])
        for tables in (
            snapshot.tables_like(pool.pages(*SPEC.tensors[0])),
            [each.values for each in snapshot.tables_like(OnDevice())],
        ):
            assert [each.dtype for each in tables] == [np.dtype(np.int32)] * 3
            assert [each.tolist() for each in tables] == [[7, 3, 7, 2], [0, 2, 4], [5, 6]]
            assert all(each.flags.writeable for each in tables), "copies: the snapshot's own stay as they are"
        with pytest.raises(GeometryError, match="is no NumPy, CuPy or torch array"):
            snapshot.tables_like([])


class Tensor:
    """A tensor of torch, as far as it is looked at: on a device, or a copy of it that was asked for there."""

    def __init__(self, values: np.ndarray, *, pinned: bool = False, place: tuple[str, bool] | None = None) -> None:
        self.values, self.pinned, self.place = values, pinned, place
        self.is_cuda, self.device = True, "cuda:3"

    def new_tensor(self) -> None:
        raise AssertionError("it would wait for the stream")

    def to(self, device: str, *, non_blocking: bool) -> Tensor:
        return Tensor(self.values, pinned=self.pinned, place=(device, non_blocking))


def test_tables_reach_a_gpu_of_torch_without_waiting_for_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = SimpleNamespace(tensor=lambda values, pin_memory: Tensor(values.copy(), pinned=pin_memory))
    monkeypatch.setitem(sys.modules, "torch", torch)
    with PagePool.allocate(SPEC, 10) as pool:
        snapshot = Snapshot.from_block_tables(pool, [[7, 3], [7, 2]], seq_lens=[5, 6])
        tables = snapshot.tables_like(Tensor(np.zeros(1)))
    assert [each.values.tolist() for each in tables] == [[7, 3, 7, 2], [0, 2, 4], [5, 6]]
    assert {each.values.dtype.name for each in tables} == {"int32"}
    assert {(each.pinned, each.place) for each in tables} == {(True, ("cuda:3", True))}
