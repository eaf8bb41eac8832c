"""Rewriting a block table where it is: in a NumPy array, or in an array of another library on any device.

For tables of a shape of one's own, such as an engine's padded ``[num_seqs, max_pages]``; the table of a transfer comes
from `PageMap.block_table`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache.indices import check_page_ids
from hurray_rdma.errors import GeometryError
from hurray_rdma.plan.lookups import look_up_beside
from hurray_rdma.plan.tables import look_up

__all__ = ["rewrite"]

_NO_PAGE = np.uint32(2**32 - 1)
"""No pool has so many pages that this is the ID of one."""
_DENSE_FACTOR = 8
"""On the host a lookup of all pages of a pool is made up to this many per entry of the table; else IDs are searched."""
_DEVICE_ITEMSIZE = 4
"""Bytes of an entry from which on every page ID below 2**31 has room, signed or not."""


def rewrite(
    block_table: Any, src_page_ids: NDArray[np.uint32], dst_page_ids: NDArray[np.uint32], *, num_pages: int
) -> Any:
    """The table with every page ID replaced; entries that were equal stay equal.

    The result is of the table's library, device, shape and dtype. Only a lookup of ``num_pages`` entries goes to a
    device; the table stays there. Waits for the device once, to see whether every page was known.

    Args:
        block_table: page IDs of the source, integers of any shape, dtype and device (NumPy, CuPy or torch).
        src_page_ids: on the host, distinct, ascending (as of `dedupe` or `PageMap.src_page_ids`), uint32 ``[n]``; all
            that the table names.
        dst_page_ids: on the host, what each becomes, uint32 ``[n]``.
        num_pages: pages of the source pool.

    Raises:
        GeometryError: the two lists differ in length, the table names a page that is not among ``src_page_ids``, it
            belongs to no library that is known here, or its dtype cannot hold the new page IDs.
    """
    if len(src_page_ids) != len(dst_page_ids):
        raise GeometryError(
            f"must be the number of source pages {len(src_page_ids)}",
            field="len(dst_page_ids)",
            value=len(dst_page_ids),
        )
    check_page_ids(src_page_ids, num_pages=num_pages, field="src_page_ids")
    if isinstance(block_table, np.ndarray):
        return _on_host(block_table, src_page_ids, dst_page_ids, num_pages)
    return _on_device(block_table, src_page_ids, dst_page_ids, num_pages)


def _on_host(
    table: NDArray[Any], src_page_ids: NDArray[np.uint32], dst_page_ids: NDArray[np.uint32], num_pages: int
) -> NDArray[Any]:
    if table.dtype.kind not in "iu":
        raise GeometryError("must be integers", field="block_table.dtype", value=str(table.dtype))
    _check_holds(np.iinfo(table.dtype).max, dst_page_ids, "in the table's dtype")
    flat = table.reshape(-1).astype(np.int64)
    if num_pages > _DENSE_FACTOR * len(flat):
        place = np.searchsorted(src_page_ids, flat)
        known = np.append(src_page_ids.astype(np.int64), -1).take(place) == flat
        result = np.append(dst_page_ids, _NO_PAGE).take(place)
    else:
        lookup = np.full(num_pages, _NO_PAGE)
        lookup[src_page_ids.astype(np.int64)] = dst_page_ids
        result = look_up(lookup, flat)
        known = result != _NO_PAGE
        known &= flat.view(np.uint64) < num_pages  # what is below 0 is far above
    if not known.all():
        at = int((~known).argmax())
        raise GeometryError("is not among src_page_ids", field=f"block_table[{at}]", value=int(flat[at]))
    return result.astype(table.dtype, copy=False).reshape(table.shape)


def _on_device(table: Any, src_page_ids: NDArray[np.uint32], dst_page_ids: NDArray[np.uint32], num_pages: int) -> Any:
    lookup = np.full(num_pages, -1, np.int64)
    lookup[src_page_ids.astype(np.int64)] = dst_page_ids
    inside, result = look_up_beside(table, lookup)
    if table.dtype.itemsize < _DEVICE_ITEMSIZE:
        raise GeometryError("must be integers of 32 or 64 bits", field="block_table.dtype", value=str(table.dtype))
    _check_holds(2**31 - 1, dst_page_ids, "on a device")
    if not bool((inside & (result >= 0)).all()):
        raise GeometryError("names a page that is not among src_page_ids", field="block_table")
    return result.to(table.dtype) if hasattr(result, "to") else result.astype(table.dtype)


def _check_holds(largest: int, dst_page_ids: NDArray[np.uint32], where: str) -> None:
    if len(dst_page_ids) and int(dst_page_ids.max()) > largest:
        raise GeometryError(f"must not be above {largest} {where}", field="dst_page_ids", value=int(dst_page_ids.max()))
