"""Checks and look-ups of block tables in arrays of other libraries, equal to those on the host."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma import GeometryError
from hurray_rdma.plan import check_table, entries_among
from tests.plan.test_rewrite import DeviceArray


class OnDevice(DeviceArray):
    """As CuPy's, which come to the host when they are asked to."""

    fetched = 0

    def get(self) -> np.ndarray:
        type(self).fetched += 1
        return self.values


TABLES = st.lists(st.integers(-2, 12), max_size=30)


@settings(deadline=None)  # the machine may be busy
@given(TABLES, st.sampled_from(["int32", "int64"]), st.booleans())
def test_a_table_is_judged_on_a_device_as_on_the_host(pages: list[int], dtype: str, two_axes: bool) -> None:
    table = np.array(pages, dtype).reshape((1, -1) if two_axes else -1)
    wild = [at for at, page in enumerate(pages) if not 0 <= page < 10]
    before = OnDevice.fetched
    if not wild:
        check_table(table, num_pages=10)
        check_table(OnDevice(table), num_pages=10)
        assert OnDevice.fetched == before, "nothing comes back of a good table"
        return
    with pytest.raises(GeometryError) as on_host:
        check_table(table, num_pages=10)
    with pytest.raises(GeometryError) as on_device:
        check_table(OnDevice(table), num_pages=10)
    assert str(on_host.value) == str(on_device.value)
    assert any(f"block_table[{at}] = {pages[at]}: " in str(on_device.value) for at in wild)


@settings(deadline=None)  # the machine may be busy
@given(TABLES, st.sets(st.integers(0, 9)))
def test_entries_among_some_pages_are_found_where_the_table_is(pages: list[int], some: set[int]) -> None:
    table, page_ids = np.array(pages, np.int64), np.array(sorted(some), np.uint32)
    expected = [page in some for page in pages]
    assert entries_among(table, page_ids, num_pages=10).tolist() == expected
    found = entries_among(DeviceArray(table), page_ids, num_pages=10)
    assert isinstance(found, DeviceArray)
    assert found.values.tolist() == expected


def test_pages_of_another_pool_and_arrays_of_nobody_are_refused() -> None:
    with pytest.raises(GeometryError, match="page_ids"):
        entries_among(np.zeros(3, np.int32), np.array([10], np.uint32), num_pages=10)
    with pytest.raises(GeometryError, match="is no NumPy, CuPy or torch array"):
        check_table([1, 2], num_pages=3)
    with pytest.raises(GeometryError, match="is no NumPy, CuPy or torch array"):
        entries_among([1, 2], np.empty(0, np.uint32), num_pages=3)


@pytest.mark.llm
def test_torch_tables_are_judged_and_looked_up_as_on_the_host() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int32, torch.int64):
        table = torch.tensor([[5, 2], [5, 7]], dtype=dtype)
        check_table(table, num_pages=9)
        found = entries_among(table, np.array([2, 7], np.uint32), num_pages=9)
        assert torch.equal(found, torch.tensor([[False, True], [False, True]]))
        table[1, 0] = 9
        with pytest.raises(GeometryError, match=r"block_table\[2\] = 9: is not below num_pages 9"):
            check_table(table, num_pages=9)
