"""Element types and the dtypes of libraries, both ways."""

from __future__ import annotations

import ctypes
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hurray_rdma.errors import GeometryError
from hurray_rdma.format import (
    DescriptorError,
    ElementType,
    cupy_dtype,
    dlpack_type,
    element_type_of,
    numpy_dtype,
    pack_codes,
    storage_dtype,
    torch_dtype,
    unpack_codes,
)

WITH_NUMPY = [each for each in ElementType if each is not ElementType.FLOAT128]


@pytest.mark.parametrize("element_type", WITH_NUMPY)
def test_numpy_and_back(element_type: ElementType) -> None:
    dtype = numpy_dtype(element_type)
    assert element_type_of(dtype) is element_type
    assert element_type_of(element_type.wire_name) is element_type
    assert dtype.itemsize * 8 == max(element_type.bits, 8)
    assert storage_dtype(element_type).itemsize == (1 if element_type.is_packed else dtype.itemsize)


def test_some_by_hand() -> None:
    assert numpy_dtype("bfloat16") == np.dtype(ml_dtypes.bfloat16)
    assert numpy_dtype("float8_e4m3") == np.dtype(ml_dtypes.float8_e4m3fn)
    assert element_type_of(np.float32) is ElementType.FLOAT32
    assert element_type_of(ml_dtypes.bfloat16) is ElementType.BFLOAT16
    assert element_type_of("float8_e5m2") is ElementType.FLOAT8_E5M2
    assert element_type_of("float8_e4m3fn") is ElementType.FLOAT8_E4M3
    assert storage_dtype("int4") == np.uint8


@pytest.mark.parametrize(
    "dtype", [np.complex64, np.dtype(">f4"), np.longdouble, ml_dtypes.float8_e4m3, "U5", "nonsense", None, object()]
)
def test_foreign_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(GeometryError, match="no such element type"):
        element_type_of(dtype)


def test_float128_is_not_what_numpy_calls_so() -> None:
    for mapping in (numpy_dtype, storage_dtype, cupy_dtype):
        with pytest.raises(GeometryError, match="float128"):
            mapping("float128")
    assert dlpack_type("float128") == (2, 128, 1)


def test_names_that_do_not_exist() -> None:
    for mapping in (numpy_dtype, torch_dtype, cupy_dtype, dlpack_type):
        with pytest.raises(DescriptorError, match="float7"):
            mapping("float7")


def test_cupy_has_numpys_own_types_only() -> None:
    assert cupy_dtype("float16") == np.float16
    assert cupy_dtype("uint64") == np.uint64
    with pytest.raises(GeometryError, match="uint16"):
        cupy_dtype("bfloat16")
    with pytest.raises(GeometryError, match="uint8"):
        cupy_dtype("int4")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("float16", (2, 16, 1)),
        ("bfloat16", (4, 16, 1)),
        ("int8", (0, 8, 1)),
        ("uint32", (1, 32, 1)),
        ("float8_e4m3", (10, 8, 1)),
        ("float8_e5m2", (12, 8, 1)),
        ("float8_e8m0", (14, 8, 1)),
        ("float6_e2m3", (15, 6, 1)),
        ("float6_e3m2", (16, 6, 1)),
        ("float4_e2m1", (17, 4, 1)),
        ("int4", (0, 4, 1)),
        ("uint2", (1, 2, 1)),
    ],
)
def test_dlpack(name: str, told: tuple[int, int, int]) -> None:
    assert dlpack_type(name) == told
    assert element_type_of(told) is ElementType.from_name(name)


class _DLTensor(ctypes.Structure):
    """The head of DLManagedTensor, as in dlpack.h, up to its dtype."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
    )


@pytest.mark.parametrize(
    "name",
    ["float16", "float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"],
)
def test_dlpack_agrees_with_what_numpy_exports(name: str) -> None:
    pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = np.zeros(1, numpy_dtype(name)).__dlpack__()
    exported = _DLTensor.from_address(pointer_of(capsule, b"dltensor"))
    assert dlpack_type(name) == (exported.code, exported.bits, exported.lanes)


def test_what_dlpack_and_the_format_do_not_share() -> None:
    with pytest.raises(GeometryError, match="bool"):
        dlpack_type("bool")
    with pytest.raises(GeometryError):
        element_type_of((5, 64, 1))
    with pytest.raises(GeometryError):
        element_type_of((2, 32, 4))


class _FakeTorchDtype:
    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"torch.{self.name}"


_FakeTorchDtype.__module__ = "torch"


def test_torch_by_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = ModuleType("torch")
    names = (
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e5m2",
        "uint8",
        "int64",
        "float4_e2m1fn_x2",
        "bool",
        "int4",
    )
    torch.__dict__.update({name: _FakeTorchDtype(name) for name in names})
    monkeypatch.setitem(sys.modules, "torch", torch)
    for name in names[:-2]:
        element_type = element_type_of(torch.__dict__[name])
        assert torch_dtype(element_type) is torch.__dict__[name]
    for missing in ("float8_e8m0", "float128", "int4", "bool"):
        with pytest.raises(GeometryError, match=r"torch\.uint8"):
            torch_dtype(missing)
    assert torch_dtype("float4_e2m1") is torch.__dict__["float4_e2m1fn_x2"]
    for foreign in ("qint8", "bool", "int4", "float4_e2m1fn"):  # torch's bool takes a byte, the format's a bit
        with pytest.raises(GeometryError):
            element_type_of(_FakeTorchDtype(foreign))


def test_torch_itself() -> None:
    torch = pytest.importorskip("torch")
    for element_type in ElementType:
        if element_type.is_packed or element_type is ElementType.FLOAT128:
            continue
        if not hasattr(torch, numpy_dtype(element_type).name):  # float8_e8m0 is younger than the oldest torch we take
            continue
        dtype = torch_dtype(element_type)
        assert element_type_of(dtype) is element_type
        assert dtype.itemsize == numpy_dtype(element_type).itemsize


def test_other_objects_are_no_dtypes() -> None:
    with pytest.raises(GeometryError):
        element_type_of(SimpleNamespace(dtype=7))


# Packing, with the worked examples of element-types.


@pytest.mark.parametrize(
    ("bits", "codes", "packed"),
    [
        (1, [1, 0, 1, 1, 0], [0x0D]),
        (4, [5, 12, 3], [0xC5, 0x03]),
        (2, [3, 1, 2], [0x27]),
        (6, [0b000001, 0b000010, 0b000100, 0b001000], [0x81, 0x40, 0x20]),
        (4, [-8, 7, -1], [0x78, 0x0F]),
    ],
)
def test_packing_examples(bits: int, codes: list[int], packed: list[int]) -> None:
    assert np.array_equal(pack_codes(np.array(codes), bits=bits), packed)
    unsigned = [each & (1 << bits) - 1 for each in codes]
    assert np.array_equal(unpack_codes(np.array(packed, np.uint8), bits=bits, num_elements=len(codes)), unsigned)


@pytest.mark.parametrize("bits", [1, 2, 4, 6])
def test_packing_rows(bits: int) -> None:
    codes = np.random.default_rng(bits).integers(0, 1 << bits, (3, 5, 7))
    packed = pack_codes(codes, bits=bits)
    assert packed.shape == (3, 5, (7 * bits + 7) // 8)
    assert np.array_equal(unpack_codes(packed, bits=bits, num_elements=7), codes)
