"""Rewriting tables that are in arrays of other libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import rewrite_in_library

SRC, DST = np.array([2, 5, 7], np.uint32), np.array([40, 41, 42], np.uint32)


class DeviceArray:
    """Follows NumPy's protocols as CuPy does, and refuses to become a NumPy array behind one's back."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.dtype = values.dtype

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("implicit conversion to the host")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> DeviceArray:
        assert function is np.asarray
        return DeviceArray(np.asarray(*args, **kwargs))

    def __getitem__(self, index: DeviceArray) -> DeviceArray:
        return DeviceArray(self.values[index.values])

    def __lt__(self, other: int) -> np.ndarray:
        return self.values < other

    def astype(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.values.astype(dtype))


def test_a_host_table_keeps_its_shape_and_dtype() -> None:
    table = np.array([[5, 2], [5, 7]], np.int32)
    result = rewrite_in_library(table, SRC, DST, num_pages=9)
    assert result.tolist() == [[41, 40], [41, 42]]
    assert result.dtype == np.int32


def test_a_device_table_stays_on_its_device() -> None:
    table = DeviceArray(np.array([[5, 2], [5, 7]], np.int64))
    result = rewrite_in_library(table, SRC, DST, num_pages=9)
    assert isinstance(result, DeviceArray)
    assert result.values.tolist() == [[41, 40], [41, 42]]
    assert result.values.dtype == np.int64


def test_unknown_pages_and_libraries_are_refused() -> None:
    with pytest.raises(GeometryError, match="names a page that is not among src_page_ids"):
        rewrite_in_library(DeviceArray(np.array([5, 3])), SRC, DST, num_pages=9)
    with pytest.raises(GeometryError, match="block_table = 'list': is no NumPy, CuPy or torch array"):
        rewrite_in_library([5], SRC, DST, num_pages=9)
    with pytest.raises(GeometryError, match=r"len\(dst_page_ids\) = 2"):
        rewrite_in_library(DeviceArray(np.array([5])), SRC, DST[:2], num_pages=9)
    with pytest.raises(GeometryError, match=r"must be below 2\*\*31 - 1 on a device"):
        rewrite_in_library(DeviceArray(np.array([5])), SRC, DST + np.uint32(2**31), num_pages=9)


@pytest.mark.llm
def test_a_torch_table_stays_a_tensor() -> None:
    torch = pytest.importorskip("torch")
    table = torch.tensor([[5, 2], [5, 7]], dtype=torch.int32)
    result = rewrite_in_library(table, SRC, DST, num_pages=9)
    assert torch.equal(result, torch.tensor([[41, 40], [41, 42]], dtype=torch.int32))
    with pytest.raises(GeometryError):
        rewrite_in_library(torch.tensor([3]), SRC, DST, num_pages=9)
