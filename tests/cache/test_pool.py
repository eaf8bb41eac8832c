"""Pools over UCX's memory and over the caller's: what is registered, and that pages are the caller's bytes."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from hurray_rdma.cache import CacheSpec, PagePool, Part, Segment
from hurray_rdma.errors import GeometryError, RegistrationError, TransportError

SPEC = CacheSpec(num_layers=2, num_heads=2, head_dim=4, page_size=3, dtype="float32")
PAGES = 5


def zeros(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def arrays(**changes: Any) -> dict[str, Any]:
    return {role: [zeros(PAGES, 3, 2, 4) for _ in range(2)] for role in ("key", "value")} | changes


def bytes_at(pool: PagePool, at: Segment, page: int, token: int, head: int) -> bytes:
    """One token of one head, found through region and segment alone, as a peer would."""
    offset = (
        at.offset_nbytes + page * at.page_stride_nbytes + token * at.token_stride_nbytes + head * at.head_stride_nbytes
    )
    address = pool.regions[at.region_index].address + offset
    return ctypes.string_at(address, pool.spec.row_nbytes)


def check_every_row(pool: PagePool) -> None:
    """Fills every element with its own number through `pages`, and reads it back through the segments."""
    spec = pool.spec
    for index, (role, layer) in enumerate(spec.tensors):
        view = pool.pages(role, layer)
        view[...] = np.arange(view.size, dtype=np.float32).reshape(view.shape) + 1000 * index
    for role, layer in spec.tensors:
        view = pool.pages(role, layer)
        nhd = view.swapaxes(1, 2) if spec.order == "HND" else view
        for page, token, head in np.ndindex(nhd.shape[:3]):
            assert bytes_at(pool, pool.segment(role, layer), page, token, head) == nhd[page, token, head].tobytes()


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_an_allocated_pool_is_one_zero_filled_region(order: str) -> None:
    with PagePool.allocate(SPEC.with_order(order), PAGES) as pool:
        assert len(pool.regions) == 1
        assert not any(pool.pages(role, layer).any() for role, layer in SPEC.tensors)
        assert pool.segment("value", 0).offset_nbytes % 4096 == 0
        assert pool.segment("value", 0).page_stride_nbytes == SPEC.page_nbytes == 96
        check_every_row(pool)


def test_separate_arrays_are_registered_one_by_one_in_place() -> None:
    mine = arrays()
    with PagePool.from_arrays(SPEC, mine) as pool:
        assert len(pool.regions) == 4
        assert pool.num_pages == PAGES
        assert pool.pages("value", 1) is mine["value"][1]
        check_every_row(pool)
    assert mine["value"][1][4, 2, 1, 3] == 3000 + PAGES * 24 - 1


def test_interleaved_keys_and_values_are_one_region_with_strides() -> None:
    layers = [zeros(PAGES, 2, 3, 2, 4) for _ in range(2)]
    with PagePool.from_arrays(
        SPEC, {"key": [layer[:, 0] for layer in layers], "value": [layer[:, 1] for layer in layers]}
    ) as pool:
        assert len(pool.regions) == 2
        assert sum(region.nbytes for region in pool.regions) == 2 * layers[0].nbytes
        first = pool.segment("key", 0)
        assert pool.segment("value", 0) == Segment(first.region_index, 96, 192, 32, 16)
        check_every_row(pool)


@pytest.mark.parametrize(
    ("order", "axes"),
    [
        ("HND", "LBHND"),
        ("NHD", "LBNHD"),
        ("HND", "LHBND"),
        ("HND", "BLHND"),
        ("NHD", "BLNHD"),
        ("HND", "BHLND"),
    ],
)
def test_the_six_physical_orders_of_one_allocation(order: str, axes: str) -> None:
    sizes = {"L": 4, "B": PAGES, "N": 3, "H": 2, "D": 4}
    whole = zeros(*(sizes[axis] for axis in axes))
    logical = whole.transpose([axes.index(axis) for axis in "LB" + order])
    with PagePool.from_arrays(
        SPEC, {"key": [logical[0], logical[2]], "value": [logical[1], logical[3]]}, order=order
    ) as pool:
        assert len(pool.regions) == 1
        assert pool.regions[0].nbytes == whole.nbytes
        check_every_row(pool)


def test_keys_and_values_packed_in_the_last_axis() -> None:
    layers = [zeros(PAGES, 2, 3, 8) for _ in range(2)]
    with PagePool.from_arrays(
        SPEC,
        {"key": [layer[..., :4] for layer in layers], "value": [layer[..., 4:] for layer in layers]},
        order="HND",
    ) as pool:
        assert len(pool.regions) == 2
        assert pool.segment("key", 0).token_stride_nbytes == 32
        check_every_row(pool)


def test_memory_between_arrays_stays_private() -> None:
    arena = zeros(4 * PAGES * 24 + 300)
    parts = [arena[i * (PAGES * 24 + 100) :][: PAGES * 24].reshape(PAGES, 3, 2, 4) for i in range(4)]
    with PagePool.from_arrays(SPEC, {"key": parts[:2], "value": parts[2:]}) as pool:
        assert [region.nbytes for region in pool.regions] == [PAGES * 96] * 4


def readonly() -> np.ndarray:
    array = zeros(PAGES, 3, 2, 4)
    array.setflags(write=False)
    return array


SHARED = zeros(PAGES, 3, 2, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fused": []}, "arrays = .*: must have the roles"),
        ({"key": [zeros(PAGES, 3, 2, 4)]}, r"len\(arrays\['key'\]\) = 1: must have one array for each of the 2 layers"),
        (
            {"value": [zeros(PAGES, 3, 2, 4), zeros(PAGES + 1, 3, 2, 4)]},
            r"arrays\['value'\]\[1\]\.shape = .*num_pages 5 as the first array",
        ),
        ({"key": [zeros(PAGES, 2, 3, 4)] * 2}, r"arrays\['key'\]\[0\]\.shape = \(5, 2, 3, 4\)"),
        (
            {"key": [np.zeros((PAGES, 3, 2, 4), np.int32)] * 2},
            r"arrays\['key'\]\[0\]\.dtype = 'int32': must be float32",
        ),
        ({"key": [zeros(PAGES, 3, 2, 8)[..., ::2]] * 2}, r"strides = .*: must be 4 along the last axis"),
        ({"key": [np.broadcast_to(zeros(3, 2, 4), (PAGES, 3, 2, 4))] * 2}, "is read-only"),
        ({"key": [readonly()] * 2}, r"arrays\['key'\]\[0\] = .*: is read-only"),
        ({"key": [SHARED, SHARED]}, r"arrays\['key'\]\[1\] = .*: is the same memory as arrays\['key'\]\[0\]"),
        ({"key": [zeros(PAGES, 3, 2, 4)[::-1]] * 2}, "would overlap"),
        ({"key": ["no array"] * 2}, "is no array"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        PagePool.from_arrays(SPEC, arrays(**changes))


def test_pages_per_pool_are_limited() -> None:
    with pytest.raises(GeometryError, match="num_pages = 0"):
        PagePool.allocate(SPEC, 0)


class FailingContext:
    """Registers twice, then refuses."""

    def __init__(self) -> None:
        self.open: list[object] = []

    def register(self, address: int, nbytes: int, *, owner: object, device: str) -> Any:
        if len(self.open) == 2:
            raise RegistrationError("refused")
        self.open.append(owner)
        return self

    def close(self) -> None:
        self.open.pop()


def test_a_registration_that_fails_leaves_nothing_registered() -> None:
    context: Any = FailingContext()
    with pytest.raises(RegistrationError, match="refused"):
        PagePool.from_arrays(SPEC, arrays(), context=context)
    assert context.open == []


def test_close_is_idempotent_and_views_stay_valid() -> None:
    pool = PagePool.allocate(SPEC, PAGES)
    view = pool.pages("key", 0)
    view[...] = 7
    pool.close()
    pool.close()
    assert (view == 7).all()
    with pytest.raises(RegistrationError, match=r"PagePool\.pages: the pool is closed"):
        pool.pages("key", 0)
    with pytest.raises(RegistrationError, match=r"PagePool\.segment"):
        pool.segment("key", 0)
    assert "closed" in repr(pool)


QUANTIZED = CacheSpec(
    num_layers=2, num_heads=2, head_dim=4, page_size=4, dtype="int8", scale_dtype="float16", zero_points=True
)


def test_scales_and_zero_points_are_segments_of_the_pool() -> None:
    with PagePool.allocate(QUANTIZED, PAGES) as pool:
        assert len(pool.regions) == 1
        assert (pool.scales("key", 1).shape, pool.scales("key", 1).dtype) == ((PAGES, 4), np.float16)
        assert (pool.zero_points("key", 1).shape, pool.zero_points("key", 1).dtype) == ((PAGES, 4), np.int32)
        pool.scales("value", 1)[3, 2] = 0.5
        at = pool.segment("value", 1, part=Part.SCALES)
        start = at.offset_nbytes + 3 * at.page_stride_nbytes + 2 * at.token_stride_nbytes
        assert pool.regions[0].array()[start : start + 2].view(np.float16) == [0.5]
        pool.layout.check_inside([pool.regions[0].nbytes])
    with PagePool.allocate(SPEC, PAGES) as pool, pytest.raises(GeometryError, match="part = 'scales': the cache has"):
        pool.scales("key", 0)


def quantized(dtype: Any, *shape: int) -> dict[str, list[np.ndarray]]:
    return {role: [np.zeros((PAGES, *shape), dtype) for _ in range(2)] for role in ("key", "value")}


def test_scales_of_the_caller_are_registered_in_place() -> None:
    scales, points = quantized(np.float16, 4), quantized(np.int32, 4)
    with PagePool.from_arrays(QUANTIZED, quantized(np.int8, 4, 2, 4), scales=scales, zero_points=points) as pool:
        assert len(pool.regions) == 12
        assert pool.scales("value", 0) is scales["value"][0]
        assert pool.zero_points("key", 1) is points["key"][1]
        pool.layout.check_inside([region.nbytes for region in pool.regions])


def test_scales_are_neither_forgotten_nor_uncalled_for() -> None:
    pages, scales = quantized(np.int8, 4, 2, 4), quantized(np.float16, 4)
    with pytest.raises(GeometryError, match="scales = None: the spec needs them"):
        PagePool.from_arrays(QUANTIZED, pages)
    with pytest.raises(GeometryError, match="zero_points = None: the spec needs them"):
        PagePool.from_arrays(QUANTIZED, pages, scales=scales)
    with pytest.raises(GeometryError, match=r"scales = .*: the spec has none"):
        PagePool.from_arrays(SPEC, arrays(), scales=scales)
    with pytest.raises(GeometryError, match=r"scales\['key'\]\[0\]\.dtype = 'float32': must be float16"):
        PagePool.from_arrays(QUANTIZED, pages, scales=quantized(np.float32, 4), zero_points=quantized(np.int32, 4))


def test_a_region_that_cannot_be_closed_keeps_none_of_the_others_open() -> None:
    pool = PagePool.from_arrays(SPEC, arrays())
    first, *others = pool.regions

    def refuse() -> None:
        raise TransportError("unpin: refused")

    close, first.close = first.close, refuse  # type: ignore[method-assign]
    with pytest.raises(TransportError, match="refused"):
        pool.close()
    assert pool.closed
    assert all(region.closed for region in others)
    close()
