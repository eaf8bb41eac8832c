"""Whether the index arrays of a batch fit together and into a pool (ADR-024, storage invariants), and what they name.

Knows arrays of page IDs and token counts only; of a caller's or of a peer's, nothing is used before it was here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache._indices import (
    check_distinct,
    check_indices,
    check_page_ids,
    dedupe,
    starts_of,
    valid_pages,
    valid_tokens,
)
from hurray_rdma.errors import GeometryError

__all__ = [
    "check_distinct",
    "check_indices",
    "check_page_ids",
    "dedupe",
    "narrowed",
    "starts_of",
    "valid_pages",
    "valid_tokens",
]


def narrowed(values: ArrayLike, *, field: str) -> NDArray[np.uint32]:
    """A copy as uint32 ``[count]``.

    Args:
        values: integers in one axis.
        field: name of the values, for errors.

    Raises:
        GeometryError: they are no such integers, or one is below 0 or above 2**32 - 1.
    """
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise GeometryError("must be integers in one axis", field=field, value=f"{array.dtype} {array.shape}")
    result = array.astype(np.uint32)
    if array.dtype != np.uint32 and (wrong := result != array).any():
        at = int(wrong.argmax())
        raise GeometryError("must be from 0 to 2**32 - 1", field=f"{field}[{at}]", value=int(array[at]))
    return result
