"""Whether the index arrays of a batch fit together and into a pool (ADR-024, storage invariants), and what they name.

Knows arrays of page IDs and token counts only; of a caller's or of a peer's, nothing is used before it was here.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache._indices import (
    check_distinct,
    check_indices,
    check_page_ids,
    cut_units,
    dedupe,
    narrow,
    place_pages,
    starts_of,
    total_of,
    valid_pages,
    valid_tokens,
)
from hurray_rdma.errors import GeometryError

__all__ = [
    "check_distinct",
    "check_indices",
    "check_page_ids",
    "cut_units",
    "dedupe",
    "narrowed",
    "place_pages",
    "sibling",
    "starts_of",
    "total_of",
    "valid_pages",
    "valid_tokens",
]

_INT64_MAX = np.uint64(2**63 - 1)


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
    if array.dtype == np.uint32:
        return array.copy()
    # What int64 cannot hold, uint32 cannot either.
    wide = np.minimum(array, _INT64_MAX) if array.dtype == np.uint64 else array
    result, wrong = narrow(np.ascontiguousarray(wide, np.int64))
    if wrong >= 0:
        raise GeometryError("must be from 0 to 2**32 - 1", field=f"{field}[{wrong}]", value=int(array[wrong]))
    return result


def sibling(like: Any, values: NDArray[Any]) -> Any:
    """A copy of values as an array of another one's library, on its device, whichever is the current one.

    On a device it goes there on the library's current stream, from page-locked memory, and waits for nothing that is on
    the stream: CuPy's arrays are made that way (NEP 35), torch has to be told.
    """
    if hasattr(like, "new_tensor"):
        torch = importlib.import_module("torch")
        return torch.tensor(values, pin_memory=like.is_cuda).to(like.device, non_blocking=True)
    device: Any = getattr(like, "device", None)
    with device if hasattr(device, "__enter__") else contextlib.nullcontext():
        return np.array(values, like=like)
