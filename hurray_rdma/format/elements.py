"""Element types: tags, widths, packing and value ranges. No arrays here, and no dtypes of any library.

Source: element-types (tags, packing) and metadata, Extension Type Section (private types).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.finding import is_integer
from hurray_rdma.format.tags import grade, is_private

__all__ = ["ElementType", "ExtensionType"]


class ElementType(IntEnum):
    """A storage type by its type tag."""

    FLOAT16 = 0x01
    BFLOAT16 = 0x02
    FLOAT32 = 0x03
    FLOAT64 = 0x04
    INT8 = 0x10
    UINT8 = 0x11
    INT16 = 0x12
    UINT16 = 0x13
    INT32 = 0x14
    UINT32 = 0x15
    INT64 = 0x16
    UINT64 = 0x17
    BOOL = 0x20
    FLOAT8_E4M3 = 0x40
    FLOAT8_E5M2 = 0x41
    FLOAT8_E8M0 = 0x42
    FLOAT4_E2M1 = 0x43
    FLOAT6_E2M3 = 0x44
    FLOAT6_E3M2 = 0x45
    FLOAT128 = 0x46
    INT4 = 0x48
    UINT4 = 0x49
    INT2 = 0x4A
    UINT2 = 0x4B

    @property
    def wire_name(self) -> str:
        """The specification's name, such as ``bfloat16``."""
        return self.name.lower()

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return _BITS[self]

    @property
    def is_packed(self) -> bool:
        """Whether several elements share a byte, first element in the low bits."""
        return _BITS[self] < 8

    def nbytes(self, num_elements: int) -> int:
        """Bytes of a buffer of that many elements: whole bytes, the last one filled up.

        For the 6-bit types this is the ceiling of the packed bits, 4 elements in 3 bytes.
        """
        return (num_elements * _BITS[self] + 7) // 8

    @property
    def integer_range(self) -> tuple[int, int] | None:
        """Smallest and largest value of an integer type; None for the others."""
        if self.wire_name.startswith("uint"):
            return 0, (1 << self.bits) - 1
        if self.wire_name.startswith("int"):
            return -(1 << (self.bits - 1)), (1 << (self.bits - 1)) - 1
        return None

    @classmethod
    def from_name(cls, name: str) -> ElementType:
        """The type that the specification calls ``name``, such as ``bfloat16`` or ``float8_e4m3``.

        Raises:
            DescriptorError: there is no such type.
        """
        element_type = _BY_NAME.get(name)
        if element_type is None:
            raise DescriptorError(
                f"not an element type of the format; known are {', '.join(_BY_NAME)}", field="element_type", value=name
            )
        return element_type


_BITS: dict[ElementType, int] = {
    ElementType.FLOAT16: 16,
    ElementType.BFLOAT16: 16,
    ElementType.FLOAT32: 32,
    ElementType.FLOAT64: 64,
    ElementType.INT8: 8,
    ElementType.UINT8: 8,
    ElementType.INT16: 16,
    ElementType.UINT16: 16,
    ElementType.INT32: 32,
    ElementType.UINT32: 32,
    ElementType.INT64: 64,
    ElementType.UINT64: 64,
    ElementType.BOOL: 1,
    ElementType.FLOAT8_E4M3: 8,
    ElementType.FLOAT8_E5M2: 8,
    ElementType.FLOAT8_E8M0: 8,
    ElementType.FLOAT4_E2M1: 4,
    ElementType.FLOAT6_E2M3: 6,
    ElementType.FLOAT6_E3M2: 6,
    ElementType.FLOAT128: 128,
    ElementType.INT4: 4,
    ElementType.UINT4: 4,
    ElementType.INT2: 2,
    ElementType.UINT2: 2,
}
_BY_NAME = {each.name.lower(): each for each in ElementType}
BY_TAG: dict[int, ElementType] = {each.value: each for each in ElementType}


def type_tag_rule(tag: int) -> str | None:
    """The rule that a type tag breaks, None when it names a known type or a private one."""
    if tag in BY_TAG or is_private(tag):
        return None
    return f"type tag 0x{tag:02X} is {grade(tag)}; it must name an element type (0x01..0x4B) or a private one"


@dataclass(frozen=True, slots=True)
class ExtensionType:
    """A private element type (type tag 0xF0..0xFE) with the 20-byte section that says how wide it is.

    Attributes:
        tag: type tag, 0xF0..0xFE.
        bit_width: bits of one element: 1, 2, 4, or a multiple of 8.
        is_float: floating point if true, integer if false.
        is_signed: signed integer; false for floats.
        sign_bits, exponent_bits, mantissa_bits, exponent_bias: shape of a float; 0 for integers.
        has_nan, has_inf: whether a float can be NaN or infinite; false for integers.

    Raises:
        DescriptorError: a value breaks metadata, Extension Type Section.
    """

    tag: int
    bit_width: int
    is_float: bool = False
    is_signed: bool = False
    sign_bits: int = 0
    exponent_bits: int = 0
    mantissa_bits: int = 0
    exponent_bias: int = 0
    has_nan: bool = False
    has_inf: bool = False

    def __post_init__(self) -> None:
        if not is_private(self.tag):
            raise DescriptorError("a private type tag lies in 0xF0..0xFE", field="type_tag", value=self.tag)
        if not is_integer(self.bit_width) or (
            self.bit_width not in (1, 2, 4) and (self.bit_width % 8 or not 0 < self.bit_width < 1 << 32)
        ):
            raise _extension_error(
                "bit_width", self.bit_width, 0, "the width of a private type is 1, 2, 4 or a multiple of 8"
            )
        if self.sign_bits not in (0, 1):
            raise _extension_error("sign_bits", self.sign_bits, 7, "a float has 0 or 1 sign bits")
        for name, offset, limit in (
            ("exponent_bits", 8, 0xFF),
            ("mantissa_bits", 9, 0xFF),
            ("exponent_bias", 12, 0xFFFFFFFF),
        ):
            value = getattr(self, name)
            if not is_integer(value) or not 0 <= value <= limit:
                raise _extension_error(name, value, offset, f"must lie in 0..{limit}")
        if self.is_float:
            if self.is_signed:
                raise _extension_error("is_signed", 1, 6, "is_signed is 0 for float types")
            return
        for name, offset in _FLOAT_ONLY:
            value = getattr(self, name)
            if value:
                raise _extension_error(name, int(value), offset, f"{name} is 0 for integer types")

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return self.bit_width

    @property
    def packing_factor(self) -> int:
        """Elements in one byte: 8, 4 or 2 below a byte, else 1."""
        return 8 // self.bit_width if self.bit_width < 8 else 1

    @property
    def is_packed(self) -> bool:
        """Whether several elements share a byte."""
        return self.bit_width < 8

    @property
    def wire_name(self) -> str:
        """``private-0xF0`` and so on."""
        return f"private-0x{self.tag:02X}"

    @property
    def integer_range(self) -> None:
        """None: the format does not interpret values of private types."""
        return

    def nbytes(self, num_elements: int) -> int:
        """Bytes of a buffer of that many elements, the last byte filled up."""
        return (num_elements * self.bit_width + 7) // 8


_FLOAT_ONLY = (
    ("sign_bits", 7),
    ("exponent_bits", 8),
    ("mantissa_bits", 9),
    ("exponent_bias", 12),
    ("has_nan", 16),
    ("has_inf", 17),
)


def _extension_error(name: str, value: int, offset: int, rule: str) -> DescriptorError:
    return DescriptorError(rule, field=f"extension_type.{name}", value=value, offset=offset)
