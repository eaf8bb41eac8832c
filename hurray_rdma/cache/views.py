"""Arrays of any library seen as address, shape and strides: how a pool takes the caller's tensors without copying.

Knows the array interfaces (NumPy's, DLPack's, CUDA's, torch's); knows nothing of pages. Libraries other than NumPy are
never imported here: their objects are asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import GeometryError

__all__ = ["StridedView", "strided_view"]


@dataclass(frozen=True, slots=True, eq=False)
class StridedView:
    """Where the elements of an array are."""

    address: int
    """Of the first element."""
    shape: tuple[int, ...]
    strides_nbytes: tuple[int, ...]
    itemsize: int
    """Bytes of one item."""
    dtype_name: str
    """The library's name of the dtype, e.g. ``"bfloat16"``."""
    device: str
    """``"cpu"`` or ``"cuda:N"``."""
    owner: object
    """Keeps the memory alive."""
    allocation: int
    """Equal for views of one allocation: the address of its first byte, as far as the library tells."""
    array: Any
    """The object itself."""

    @property
    def span(self) -> tuple[int, int]:
        """First byte and the byte after the last."""
        extent = sum((n - 1) * stride for n, stride in zip(self.shape, self.strides_nbytes, strict=True))
        return self.address, self.address + extent + self.itemsize


def strided_view(array: Any, *, name: str) -> StridedView:
    """Looks at an array without copying it.

    Args:
        array: a NumPy array, or any object with ``__array_interface__``.
        name: of the argument, for errors.

    Raises:
        GeometryError: the object shows no memory, or memory that must not be written.
    """
    if not isinstance(array, np.ndarray):
        if not hasattr(array, "__array_interface__"):
            raise GeometryError("is no array that shows its memory", field=name, value=type(array).__name__)
        array = np.asarray(array)
    if not array.flags.writeable:
        raise GeometryError(
            "is read-only: pages are registered for remote writes",
            field=name,
            value=f"{array.dtype} {array.shape}",
            fix="Make the array writable, or copy it into a pool of PagePool.allocate",
        )
    base = _allocation(array)
    return StridedView(
        address=array.ctypes.data,
        shape=array.shape,
        strides_nbytes=array.strides,
        itemsize=array.itemsize,
        dtype_name=str(array.dtype),
        device="cpu",
        owner=array,
        allocation=base,
        array=array,
    )


def _allocation(array: NDArray[Any]) -> int:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return int(array.ctypes.data)
