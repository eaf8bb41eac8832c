"""The tensor inside a DLPack capsule: address, shape, strides, dtype, device, without importing who made it.

NumPy's own reader refuses bfloat16, 8-bit floats and device memory, all of which caches are made of. Source: DLPack
1.1, dlpack.h (DLManagedTensor, DLManagedTensorVersioned).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from hurray_rdma.errors import GeometryError

__all__ = ["CapsuleTensor", "contiguous_strides", "read_capsule"]

_CPU, _CUDA, _CUDA_HOST, _CUDA_MANAGED = 1, 2, 3, 13
_STREAMS = frozenset({_CUDA, _CUDA_MANAGED})
_NO_SYNC = -1
"""As ``stream``: the producer need not make any stream wait, since the content is not looked at."""
_READ_ONLY = 1
_NAMES = {
    (0, 8): "int8",
    (0, 16): "int16",
    (0, 32): "int32",
    (0, 64): "int64",
    (1, 8): "uint8",
    (1, 16): "uint16",
    (1, 32): "uint32",
    (1, 64): "uint64",
    (2, 16): "float16",
    (2, 32): "float32",
    (2, 64): "float64",
    (4, 16): "bfloat16",
    (8, 8): "float8_e4m3",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
    (14, 8): "float8_e8m0fnu",
}
"""(type code, bits) -> NumPy's or ml_dtypes' name."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


@dataclass(frozen=True, slots=True)
class CapsuleTensor:
    """What a capsule says."""

    address: int
    shape: tuple[int, ...]
    strides_nbytes: tuple[int, ...]
    itemsize: int
    dtype_name: str
    device: str
    read_only: bool
    capsule: Any
    """Keeps the memory alive: unconsumed, it frees its tensor when it goes."""


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Bytes from one element to the next along each axis, the last axis fastest."""
    strides: list[int] = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def read_capsule(array: Any, *, name: str) -> CapsuleTensor:
    """Asks an object for its capsule (``__dlpack__``) and reads it.

    Args:
        array: the object; work on it that is queued on a stream is the caller's to wait for.
        name: of the argument, for errors.

    Raises:
        GeometryError: a dtype or device that no pool can hold, or a capsule of an unknown version.
    """
    on_device = hasattr(array, "__dlpack_device__") and int(array.__dlpack_device__()[0]) in _STREAMS
    arguments = {"stream": _NO_SYNC} if on_device else {}
    try:
        capsule = array.__dlpack__(max_version=(1, 1), **arguments)
    except TypeError:  # made before DLPack 1.0
        capsule = array.__dlpack__(**arguments)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    is_valid = ctypes.pythonapi.PyCapsule_IsValid
    is_valid.restype, is_valid.argtypes = ctypes.c_int, (ctypes.py_object, ctypes.c_char_p)
    read_only = False
    if is_valid(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(get_pointer(capsule, b"dltensor_versioned"))
        if versioned.major != 1:
            raise GeometryError("must be DLPack 1", field=f"{name}.__dlpack__", value=versioned.major)
        read_only = bool(versioned.flags & _READ_ONLY)
        tensor = versioned.tensor
    else:
        tensor = _Tensor.from_address(get_pointer(capsule, b"dltensor"))
    itemsize = tensor.dtype.bits // 8
    dtype_name = _NAMES.get((tensor.dtype.code, tensor.dtype.bits))
    if dtype_name is None or tensor.dtype.lanes != 1:
        raise GeometryError(
            "is no DLPack type that a page holds",
            field=f"{name}.dtype",
            value=f"code {tensor.dtype.code}, {tensor.dtype.bits} bits, {tensor.dtype.lanes} lanes",
        )
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    return CapsuleTensor(
        address=(tensor.data or 0) + tensor.byte_offset,
        shape=shape,
        strides_nbytes=_strides(tensor, shape, itemsize),
        itemsize=itemsize,
        dtype_name=dtype_name,
        device=_device(tensor.device, name=name),
        read_only=read_only,
        capsule=capsule,
    )


def _strides(tensor: _Tensor, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    if tensor.strides:
        return tuple(tensor.strides[axis] * itemsize for axis in range(tensor.ndim))
    return contiguous_strides(shape, itemsize)


def _device(device: _Device, *, name: str) -> str:
    if device.kind in {_CPU, _CUDA_HOST}:
        return "cpu"
    if device.kind in _STREAMS:
        return f"cuda:{device.index}"
    raise GeometryError("must be host or CUDA memory", field=f"{name}.device", value=f"DLPack device {device.kind}")
