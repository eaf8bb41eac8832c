"""Arrays of any library seen as address, shape and strides: how a pool takes the caller's tensors without copying.

Knows the array interfaces (NumPy's, CUDA's, torch's, DLPack's); knows nothing of pages. No library but NumPy is ever
imported here: the objects are asked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache.dlpack import contiguous_strides, read_capsule
from hurray_rdma.errors import GeometryError

__all__ = ["StridedView", "strided_view"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StridedView:
    """Where the elements of an array are."""

    address: int
    """Of the first element."""
    shape: tuple[int, ...]
    strides_nbytes: tuple[int, ...]
    itemsize: int
    """Bytes of one item."""
    dtype_name: str
    """As NumPy and ml_dtypes spell it, e.g. ``"bfloat16"``."""
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
        array: a NumPy array, a torch tensor, or any object with ``__cuda_array_interface__``, ``__array_interface__``
            or ``__dlpack__``. Work on it that is still queued on a device stream is the caller's to wait for.
        name: of the argument, for errors.

    Raises:
        GeometryError: the object shows no memory, or memory that must not be written.
        TransportError: it does not say on which GPU it is, and there is no CUDA driver to ask.
    """
    if isinstance(array, np.ndarray):
        return _numpy_view(array, array, name=name)
    if hasattr(array, "data_ptr") and hasattr(array, "untyped_storage"):
        return _torch_view(array)
    if hasattr(array, "__cuda_array_interface__"):
        return _cuda_view(array, name=name)
    if hasattr(array, "__array_interface__"):
        return _numpy_view(np.asarray(array), array, name=name)
    if hasattr(array, "__dlpack__"):
        return _dlpack_view(array, name=name)
    raise GeometryError(
        "is no array that shows its memory (DLPack, or an array interface)", field=name, value=type(array).__name__
    )


def _numpy_view(view: NDArray[Any], array: Any, *, name: str) -> StridedView:
    if not view.flags.writeable:
        raise _read_only(name, f"{view.dtype} {view.shape}")
    base = view
    while isinstance(base.base, np.ndarray):
        base = base.base
    return StridedView(
        address=view.ctypes.data,
        shape=view.shape,
        strides_nbytes=view.strides,
        itemsize=view.itemsize,
        dtype_name=str(view.dtype),
        device="cpu",
        owner=view,
        allocation=base.ctypes.data,
        array=array,
    )


def _torch_view(tensor: Any) -> StridedView:
    # Not by DLPack, which refuses tensors that autograd watches, and does not tell the storage.
    itemsize = tensor.element_size()
    kind, index = tensor.device.type, tensor.device.index
    return StridedView(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides_nbytes=tuple(step * itemsize for step in tensor.stride()),
        itemsize=itemsize,
        dtype_name=str(tensor.dtype).removeprefix("torch."),
        device=kind if kind == "cpu" else f"{kind}:{index or 0}",
        owner=tensor,
        allocation=tensor.untyped_storage().data_ptr(),
        array=tensor,
    )


def _cuda_view(array: Any, *, name: str) -> StridedView:
    # Versions 0 to 3: strides may be absent (0, 1) or None (2, 3), a stream may be named (3): the caller waits for it.
    interface = array.__cuda_array_interface__
    address, read_only = interface["data"]
    shape = tuple(interface["shape"])
    if read_only:
        raise _read_only(name, shape)
    if interface.get("mask") is not None:
        raise GeometryError("must be none: pages hold every element", field=f"{name}.mask", value="given")
    dtype = getattr(array, "dtype", None) or np.dtype(interface["typestr"])
    itemsize = np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    return StridedView(
        address=address,
        shape=shape,
        strides_nbytes=contiguous_strides(shape, itemsize) if strides is None else tuple(strides),
        itemsize=itemsize,
        dtype_name=str(dtype),
        device=_cuda_device(array, address, name=name),
        owner=array,
        allocation=getattr(getattr(getattr(array, "data", None), "mem", None), "ptr", address),  # CuPy tells
        array=array,
    )


def _cuda_device(array: Any, address: int, *, name: str) -> str:
    """The interface does not tell; CuPy's arrays do, and else the driver."""
    index = getattr(getattr(array, "device", None), "id", None)
    if index is None:
        from hurray_rdma.transport.cuda import driver  # noqa: PLC0415 - loads UCX, which views elsewhere need not

        pointer = driver().pointer(address)
        if pointer is None:
            raise GeometryError("points at memory that CUDA does not know", field=f"{name}.data", value=hex(address))
        index = pointer.device_index
    return f"cuda:{index}"


def _dlpack_view(array: Any, *, name: str) -> StridedView:
    tensor = read_capsule(array, name=name)
    if tensor.read_only:
        raise _read_only(name, tensor.shape)
    return StridedView(
        address=tensor.address,
        shape=tensor.shape,
        strides_nbytes=tensor.strides_nbytes,
        itemsize=tensor.itemsize,
        dtype_name=tensor.dtype_name,
        device=tensor.device,
        owner=(array, tensor.capsule),
        allocation=tensor.address,
        array=array,
    )


def _read_only(name: str, value: object) -> GeometryError:
    return GeometryError(
        "is read-only: pages are registered for remote writes",
        field=name,
        value=value,
        fix="Make the array writable, or copy it into a pool of PagePool.allocate",
    )
