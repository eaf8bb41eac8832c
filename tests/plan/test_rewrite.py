"""Rewriting tables on the host, against plain Python, and in arrays of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.mixins import NDArrayOperatorsMixin

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import dedupe, map_pages, rewrite

SRC, DST = np.array([2, 5, 7], np.uint32), np.array([40, 41, 42], np.uint32)


def uint32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


class DeviceArray(NDArrayOperatorsMixin):
    """Follows NumPy's protocols as CuPy does, and refuses to become a NumPy array behind one's back."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.dtype = values.dtype

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("implicit conversion to the host")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> DeviceArray:
        assert function is np.array
        return DeviceArray(np.array(*args, **kwargs))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any) -> DeviceArray:
        assert method == "__call__"
        return DeviceArray(ufunc(*(each.values if isinstance(each, DeviceArray) else each for each in inputs)))

    def __getitem__(self, index: DeviceArray) -> DeviceArray:
        return DeviceArray(self.values[index.values])

    def all(self) -> bool:
        return bool(self.values.all())

    def astype(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.values.astype(dtype))


@given(
    st.lists(st.integers(0, 30), max_size=40),
    st.sampled_from([31, 10**4]),
    st.sampled_from(["uint32", "int32", "int64", "uint8"]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_lookup_that_keeps_aliases(
    pages: list[int], num_pages: int, dtype: str, on_device: bool, random: object
) -> None:
    page_ids, _ = dedupe(np.array(pages, np.uint32), num_pages=num_pages)
    dst = list(range(100, 100 + len(page_ids)))
    random.shuffle(dst)  # type: ignore[attr-defined]
    meaning = dict(zip(page_ids.tolist(), dst, strict=True))
    table = np.array(pages, "int64" if on_device else dtype)
    given = DeviceArray(table) if on_device else table
    new = rewrite(given, page_ids, np.array(dst, np.uint32), num_pages=num_pages)
    assert type(new) is type(given)
    assert new.dtype == table.dtype
    assert (new.values if on_device else new).tolist() == [meaning[page] for page in pages]


def test_a_table_keeps_its_shape_and_dtype() -> None:
    table = np.array([[5, 2], [5, 7]], np.int32)
    for result in (
        rewrite(table, SRC, DST, num_pages=9),
        rewrite(DeviceArray(table), SRC, DST, num_pages=9).values,
    ):
        assert result.tolist() == [[41, 40], [41, 42]]
        assert result.dtype == np.int32


def test_what_a_map_and_a_grant_say_is_the_rewrite() -> None:
    table, seq_ptr, seq_lens = uint32(9, 3, 5, 9, 3, 2), uint32(0, 3, 6), uint32(12, 9)
    page_map = map_pages(table, seq_ptr, seq_lens, num_pages=10, src_page_size=4, dst_page_size=4)
    grant = uint32(70, 71, 72, 73)
    assert page_map.block_table(grant).tolist() == [73, 71, 72, 73, 71, 70]
    assert rewrite(table, page_map.src_page_ids, grant, num_pages=10).tolist() == [73, 71, 72, 73, 71, 70]


@pytest.mark.parametrize("num_pages", [10, 10**6], ids=["dense", "sparse"])
@pytest.mark.parametrize("unknown", [4, 0, 8])
def test_unknown_pages_are_refused(num_pages: int, unknown: int) -> None:
    with pytest.raises(GeometryError, match=rf"block_table\[1\] = {unknown}: is not among src_page_ids"):
        rewrite(uint32(2, unknown, 7), SRC, DST, num_pages=num_pages)
    with pytest.raises(GeometryError, match="names a page that is not among src_page_ids"):
        rewrite(DeviceArray(np.array([5, unknown])), SRC, DST, num_pages=num_pages)


@pytest.mark.parametrize("num_pages", [9, 10**6], ids=["dense", "sparse"])
@pytest.mark.parametrize("wild", [-1, 10**6, 2**40])
def test_padding_and_wild_entries_are_refused_and_read_nothing(num_pages: int, wild: int) -> None:
    everything, granted = np.arange(9, dtype=np.uint32), np.arange(9, dtype=np.uint32)
    with pytest.raises(GeometryError, match=rf"block_table\[2\] = {wild}: is not among src_page_ids"):
        rewrite(np.array([[0, 1], [wild, 2]]), everything, granted, num_pages=num_pages)
    with pytest.raises(GeometryError, match="names a page that is not among src_page_ids"):
        rewrite(DeviceArray(np.array([0, wild])), everything, granted, num_pages=num_pages)


def test_lists_and_tables_that_do_not_fit_are_refused() -> None:
    for table in (uint32(5), DeviceArray(np.array([5]))):
        with pytest.raises(GeometryError, match=r"len\(dst_page_ids\) = 2: must be the number of source pages 3"):
            rewrite(table, SRC, DST[:2], num_pages=9)
        with pytest.raises(GeometryError, match=r"src_page_ids\[2\] = 7: is not below num_pages 7"):
            rewrite(table, SRC, DST, num_pages=7)
    with pytest.raises(GeometryError, match="block_table = 'list': is no NumPy, CuPy or torch array"):
        rewrite([5], SRC, DST, num_pages=9)
    with pytest.raises(GeometryError, match=r"block_table.dtype = 'float64': must be integers"):
        rewrite(np.array([5.0]), SRC, DST, num_pages=9)
    with pytest.raises(GeometryError, match="dst_page_ids = 298: must not be above 255 in the table's dtype"):
        rewrite(np.array([5], np.uint8), SRC, DST + np.uint32(256), num_pages=9)
    with pytest.raises(GeometryError, match=r"block_table.dtype = 'int16': must be integers of 32 or 64 bits"):
        rewrite(DeviceArray(np.array([5], np.int16)), SRC, DST, num_pages=9)
    with pytest.raises(GeometryError, match=r"must not be above 2147483647 on a device"):
        rewrite(DeviceArray(np.array([5])), SRC, DST + np.uint32(2**31), num_pages=9)


def test_no_pages_and_no_table() -> None:
    nothing = uint32()
    assert rewrite(nothing, nothing, nothing, num_pages=9).tolist() == []
    with pytest.raises(GeometryError, match=r"block_table\[0\] = 3: is not among src_page_ids"):
        rewrite(uint32(3), nothing, nothing, num_pages=9)


@pytest.mark.llm
def test_a_torch_table_stays_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64):
        result = rewrite(torch.tensor([[5, 2], [5, 7]], dtype=dtype), SRC, DST, num_pages=9)
        assert torch.equal(result, torch.tensor([[41, 40], [41, 42]], dtype=dtype))
    for wild in (3, -1, 9):
        with pytest.raises(GeometryError, match="names a page that is not among"):
            rewrite(torch.tensor([2, wild]), SRC, DST, num_pages=9)
    with pytest.raises(GeometryError, match=r"block_table.dtype = 'torch.uint8'"):
        rewrite(torch.tensor([5], dtype=torch.uint8), SRC, DST, num_pages=9)
