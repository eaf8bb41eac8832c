"""Element types and the dtypes of numpy, ml_dtypes, torch, CuPy and DLPack, both ways.

Torch is imported only when its dtypes are asked for. Where a library has no such type the error says so and what to
do. Packed types (several elements in a byte) have an element dtype of one byte each and a storage dtype of raw bytes.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import ml_dtypes
import numpy as np

from hurray_rdma.errors import GeometryError
from hurray_rdma.format.elements import ElementType

__all__ = ["cupy_dtype", "dlpack_type", "element_type_of", "numpy_dtype", "storage_dtype", "torch_dtype"]

_E = ElementType
_ML_NAMES = {
    _E.BFLOAT16: "bfloat16",
    _E.FLOAT8_E4M3: "float8_e4m3fn",
    _E.FLOAT8_E5M2: "float8_e5m2",
    _E.FLOAT8_E8M0: "float8_e8m0fnu",
    _E.FLOAT4_E2M1: "float4_e2m1fn",
    _E.FLOAT6_E2M3: "float6_e2m3fn",
    _E.FLOAT6_E3M2: "float6_e3m2fn",
    _E.INT4: "int4",
    _E.UINT4: "uint4",
    _E.INT2: "int2",
    _E.UINT2: "uint2",
}
_NUMPY: dict[ElementType, np.dtype[Any]] = {
    each: np.dtype(getattr(ml_dtypes, _ML_NAMES[each]) if each in _ML_NAMES else each.wire_name).newbyteorder("<")
    for each in ElementType
    if each is not _E.FLOAT128
}
_TORCH_PACKED = {_E.FLOAT4_E2M1: "float4_e2m1fn_x2"}
_BY_LIBRARY_NAME: dict[str, ElementType] = {dtype.name: each for each, dtype in _NUMPY.items()}
_BY_WIRE_NAME: dict[str, ElementType] = {each.wire_name: each for each in ElementType}
_DLPACK_CODES = {
    _E.BFLOAT16: 4,
    _E.FLOAT8_E4M3: 10,
    _E.FLOAT8_E5M2: 12,
    _E.FLOAT8_E8M0: 14,
    _E.FLOAT6_E2M3: 15,
    _E.FLOAT6_E3M2: 16,
    _E.FLOAT4_E2M1: 17,
}
_DLPACK_INT, _DLPACK_UINT, _DLPACK_FLOAT = 0, 1, 2


def numpy_dtype(element_type: ElementType | str) -> np.dtype[Any]:
    """The numpy (or ml_dtypes) dtype of one element; for packed types that of unpacked elements, one byte each.

    Raises:
        GeometryError: numpy has none (float128, private types).
        DescriptorError: the name is no element type.
    """
    element_type = _named(element_type)
    dtype = _NUMPY.get(element_type)
    if dtype is None:
        raise _missing(element_type, "numpy", "Handle the buffer as bytes (uint8)")
    return dtype


def storage_dtype(element_type: ElementType | str) -> np.dtype[Any]:
    """The numpy dtype of the page pool's own bytes: `numpy_dtype`, but uint8 where elements are packed.

    Raises:
        GeometryError: numpy has none (float128, private types).
        DescriptorError: the name is no element type.
    """
    element_type = _named(element_type)
    return np.dtype(np.uint8) if element_type.is_packed else numpy_dtype(element_type)


def torch_dtype(element_type: ElementType | str) -> Any:
    """The ``torch.dtype`` of an element type. Imports torch.

    Of the packed types only float4_e2m1 has one, ``torch.float4_e2m1fn_x2``: an item holds two elements, the first in
    the low nibble, as here. Torch's bool takes a byte and its int4 and the like hold no values, so they are not used.

    Raises:
        GeometryError: this torch has none.
        DescriptorError: the name is no element type.
        ImportError: torch is not installed.
    """
    element_type = _named(element_type)
    torch = import_module("torch")
    name = _ML_NAMES.get(element_type, element_type.wire_name)
    if element_type.is_packed:
        name = _TORCH_PACKED.get(element_type, "")
    dtype = getattr(torch, name, None) if name else None
    if dtype is None:
        raise _missing(element_type, "torch", "Keep the packed or private bytes in a torch.uint8 tensor")
    return dtype


def cupy_dtype(element_type: ElementType | str) -> np.dtype[Any]:
    """The dtype of a CuPy array, which is numpy's own, without ml_dtypes.

    Raises:
        GeometryError: CuPy has none.
        DescriptorError: the name is no element type.
    """
    element_type = _named(element_type)
    dtype = _NUMPY.get(element_type)
    if dtype is None or element_type.is_packed or element_type in _ML_NAMES:
        width = element_type.bits if element_type.bits in (8, 16) else 8
        raise _missing(element_type, "CuPy", f"View the array as uint{width}")
    return dtype


def dlpack_type(element_type: ElementType | str) -> tuple[int, int, int]:
    """DLPack's ``(type code, bits, lanes)``, as in dlpack.h (DLDataTypeCode). Sub-byte types are packed there too.

    Raises:
        GeometryError: DLPack has none: its bool takes a byte, the format's takes a bit; private types.
        DescriptorError: the name is no element type.
    """
    element_type = _named(element_type)
    code = _DLPACK_CODES.get(element_type)
    if code is None:
        name = element_type.wire_name
        if name == "bool" or not isinstance(element_type, ElementType):
            raise _missing(element_type, "DLPack", "Exchange the packed bytes as uint8")
        code = _DLPACK_UINT if name[0] == "u" else _DLPACK_INT if name[0] == "i" else _DLPACK_FLOAT
    return (code, element_type.bits, 1)


def element_type_of(dtype: object) -> ElementType:
    """The element type of a dtype: numpy, ml_dtypes, torch, CuPy, a DLPack ``(code, bits, lanes)``, or a name.

    Raises:
        GeometryError: the format has no such type.
    """
    if isinstance(dtype, ElementType):
        return dtype
    found: ElementType | None = None
    if isinstance(dtype, tuple):
        found = next((each for each in ElementType if each is not _E.BOOL and dlpack_type(each) == dtype), None)
    elif isinstance(dtype, str):
        found = _BY_WIRE_NAME.get(dtype) or _BY_LIBRARY_NAME.get(dtype)
    elif type(dtype).__module__.partition(".")[0] == "torch":
        found = _from_torch(str(dtype).removeprefix("torch."))
    elif dtype is not None:
        found = _from_numpy(dtype)
    if found is None:
        known = ", ".join(each.wire_name for each in ElementType)
        raise GeometryError(f"the format has no such element type; it has {known}", field="dtype", value=str(dtype))
    return found


def _from_torch(name: str) -> ElementType | None:
    for packed, theirs in _TORCH_PACKED.items():
        if name == theirs:
            return packed
    found = _BY_LIBRARY_NAME.get(name)
    return None if found is None or found.is_packed else found


def _from_numpy(dtype: object) -> ElementType | None:
    try:
        numpy_type: np.dtype[Any] = np.dtype(dtype)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return None
    return None if numpy_type.byteorder == ">" else _BY_LIBRARY_NAME.get(numpy_type.name)


def _named(element_type: ElementType | str) -> ElementType:
    return ElementType.from_name(element_type) if isinstance(element_type, str) else element_type


def _missing(element_type: ElementType, library: str, fix: str) -> GeometryError:
    rule = f"{library} has no dtype for {element_type.wire_name}"
    return GeometryError(rule, field="element_type", value=element_type.wire_name, fix=fix)
