"""Rewriting a block table where it is: in an array of another library, on any device.

Knows how to ask an array for a sibling of itself, so that no device library is imported; the host's tables are in
`hurray_rdma.plan.tables`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan.tables import check_paired, rewrite

__all__ = ["rewrite_in_library"]


def rewrite_in_library(
    block_table: Any, src_page_ids: NDArray[np.uint32], dst_page_ids: NDArray[np.uint32], *, num_pages: int
) -> Any:
    """As `rewrite`, for a table of any shape in a NumPy, CuPy or torch array; the result is of its library and device.

    Only a lookup of ``num_pages`` entries goes to the device; the table stays there. Waits for the device once, to see
    whether every page was known.

    Args:
        block_table: integers of any shape, dtype and device.
        src_page_ids, dst_page_ids, num_pages: as of `rewrite`, on the host.

    Raises:
        GeometryError: as of `rewrite`, or the table belongs to no library that is known here, or its dtype cannot hold
            the new page IDs.
    """
    if isinstance(block_table, np.ndarray):
        flat = rewrite(block_table.reshape(-1).astype(np.uint32), src_page_ids, dst_page_ids, num_pages=num_pages)
        return flat.reshape(block_table.shape).astype(block_table.dtype)
    check_paired(src_page_ids, dst_page_ids)
    if len(dst_page_ids) and int(dst_page_ids.max()) >= 2**31 - 1:
        raise GeometryError("must be below 2**31 - 1 on a device", field="dst_page_ids", value=int(dst_page_ids.max()))
    lookup = np.full(num_pages, -1, np.int32)
    lookup[src_page_ids.astype(np.int64)] = dst_page_ids
    if hasattr(block_table, "new_tensor"):  # torch: indices are int64, the sibling has the table's own dtype
        result = block_table.new_tensor(lookup)[block_table.long()]
    elif hasattr(block_table, "__array_function__"):  # CuPy and others that follow NumPy's NEP 35
        result = np.asarray(lookup, like=block_table)[block_table].astype(block_table.dtype)
    else:
        raise GeometryError("is no NumPy, CuPy or torch array", field="block_table", value=type(block_table).__name__)
    if bool((result < 0).any()):
        raise GeometryError("names a page that is not among src_page_ids", field="block_table")
    return result
