"""Block tables looked at where they are: in a NumPy array, or in an array of another library on any device.

Knows how to ask an array for a sibling of itself, so that no device library is imported. Only what is looked up goes to
the device; the table stays there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache.indices import check_page_ids, narrowed, sibling
from hurray_rdma.errors import GeometryError

__all__ = ["beside", "check_table", "entries_among", "look_up_beside"]


def check_table(block_table: Any, *, num_pages: int, field: str = "block_table") -> None:
    """Raises unless every entry is a page of a pool, as the host's check does; waits for the device once.

    Args:
        block_table: page IDs, integers of any shape, dtype and device (NumPy, CuPy or torch).
        num_pages: pages of the pool.
        field: its name, for errors.

    Raises:
        GeometryError: an entry is not below ``num_pages``, or it is no array of integers that is known here.
    """
    table = block_table
    if not isinstance(table, np.ndarray):
        index, _ = beside(table, np.zeros(1, np.int64))
        if bool(_inside(index, num_pages).all()):
            return
        table = table.get() if hasattr(table, "get") else table.cpu().numpy()  # only to say which entry it is
    check_page_ids(narrowed(table.reshape(-1), field=field), num_pages=num_pages, field=field)


def entries_among(block_table: Any, page_ids: NDArray[np.uint32], *, num_pages: int) -> Any:
    """Which entries name one of some pages, such as those that a receiver has already: bool, of the table's shape.

    The result is of the table's library and device, and the device is not waited for. Entries that name no page of the
    pool, such as padding, are among none.

    Args:
        block_table: as of `check_table`.
        page_ids: on the host, uint32 ``[n]``.
        num_pages: pages of the pool.

    Raises:
        GeometryError: a page ID is not below ``num_pages``, or the table is no array that is known here.
    """
    check_page_ids(page_ids, num_pages=num_pages, field="page_ids")
    among = np.zeros(num_pages, np.int64)
    among[page_ids.astype(np.int64)] = 1
    inside, found = look_up_beside(block_table, among)
    return inside & (found > 0)


def look_up_beside(table: Any, values: NDArray[np.int64]) -> tuple[Any, Any]:
    """``values[table]`` where the table is, and which of its entries are places in ``values``: others get the first.

    Raises:
        GeometryError: the table is no array that is known here.
    """
    index, there = beside(table, values)
    inside = _inside(index, len(values))
    return inside, there[index * inside]  # a wild index would wrap around, or end the process


def beside(like: Any, values: NDArray[np.int64]) -> tuple[Any, Any]:
    """An array as an index of its library, and values in a sibling of it, on its device.

    Raises:
        GeometryError: it is no NumPy, CuPy or torch array.
    """
    if isinstance(like, np.ndarray):
        return like.astype(np.int64), values
    if hasattr(like, "new_tensor"):  # torch, which indexes by int64
        index = like.long()
        return index, sibling(index, values)
    if hasattr(like, "__array_function__"):  # CuPy and others that follow NumPy's NEP 35
        return like, sibling(like, values)
    raise GeometryError("is no NumPy, CuPy or torch array", field="block_table", value=type(like).__name__)


def _inside(index: Any, num_pages: int) -> Any:
    return (index >= 0) & (index < num_pages)
