"""The five quantization schemes: their fields, the rules each keeps alone, and their bytes.

How a scheme composes with block-paged is in ``rules``; the arithmetic is in ``dequantize``. Source: quantization and
quantization/*. Offsets in errors count from the scheme's first byte until the descriptor's decoder shifts them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from struct import Struct, pack, unpack
from struct import error as StructError  # noqa: N812 - it is an exception
from typing import Any, ClassVar

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.cursor import BytesLike, Cursor
from hurray_rdma.format.elements import ElementType
from hurray_rdma.format.finding import is_integer
from hurray_rdma.format.tags import grade

__all__ = [
    "MXFP",
    "NF4",
    "OpaqueScheme",
    "PerBlockAffine",
    "PerChannelAffine",
    "PerTensorAffine",
    "Quantization",
    "decode_quantization",
    "encode_quantization",
]

NO_BUFFER = 0xFFFFFFFF
SYMMETRIC = 0x0001
HEAD = Struct("<BBH")
_PER_TENSOR = Struct("<fi4s")
_PER_CHANNEL = Struct("<IIIB3s")
_PER_BLOCK = Struct("<IIIIB3s")
_BLOCK_FLOAT = Struct("<III")
_ZEROS = bytes(4)

_E = ElementType
_NARROW = (_E.INT8, _E.UINT8, _E.INT4, _E.UINT4, _E.INT2, _E.UINT2)
_INTEGERS = (_E.INT8, _E.UINT8, _E.INT16, _E.UINT16, _E.INT32, _E.UINT32, _E.INT4, _E.UINT4, _E.INT2, _E.UINT2)


def _fail(field: str, value: object, offset: int, rule: str) -> DescriptorError:
    return DescriptorError(rule, field=f"quantization.{field}", value=value, offset=offset)


def _need_u32(field: str, value: int, offset: int) -> None:
    if not is_integer(value) or not 0 <= value <= 0xFFFFFFFF:
        raise _fail(field, value, offset, f"must be an integer in 0..{0xFFFFFFFF}")


def _need_block_size(value: int, smallest: int, largest: int) -> None:
    if not is_integer(value) or not smallest <= value <= largest or value & (value - 1):
        raise _fail("block_size", value, 8, f"must be a power of two in {smallest}..{largest}")


@dataclass(frozen=True, slots=True)
class PerTensorAffine:
    """One scale and zero point for the whole tensor (quantization/per-tensor-affine, tag 0x01).

    Attributes:
        scale: finite, not zero; rounded to float32, as it travels.
        zero_point: int32, within the range of the storage type.
    """

    scale: float
    zero_point: int = 0

    tag: ClassVar[int] = 0x01
    wire_name: ClassVar[str] = "per-tensor affine"
    storage: ClassVar[tuple[ElementType, ...]] = _INTEGERS

    def __post_init__(self) -> None:
        try:
            scale = unpack("<f", pack("<f", self.scale))[0]
        except OverflowError:
            scale = math.inf
        except StructError:
            raise _fail("scale", self.scale, 4, "the scale must be a number") from None
        if not math.isfinite(scale) or scale == 0:
            raise _fail("scale", self.scale, 4, "the scale must be finite and not zero in float32")
        object.__setattr__(self, "scale", scale)
        if not is_integer(self.zero_point) or not -(1 << 31) <= self.zero_point < 1 << 31:
            raise _fail("zero_point", self.zero_point, 8, "must be an integer that fits int32")


@dataclass(frozen=True, slots=True)
class PerChannelAffine:
    """A scale and zero point per index of one axis (quantization/per-channel-affine, tag 0x02).

    Attributes:
        axis: the quantized axis; 1 (heads) or 2 (head_dim) for block-paged.
        scale_buffer_index: buffer of float32 scales, one per channel.
        zero_point_buffer_index: buffer of int32 zero points; None is symmetric, all zero.
    """

    axis: int
    scale_buffer_index: int
    zero_point_buffer_index: int | None = None

    tag: ClassVar[int] = 0x02
    wire_name: ClassVar[str] = "per-channel affine"
    storage: ClassVar[tuple[ElementType, ...]] = _INTEGERS
    scale_type: ClassVar[ElementType] = ElementType.FLOAT32

    def __post_init__(self) -> None:
        _need_u32("axis", self.axis, 4)
        _need_u32("scale_buffer_index", self.scale_buffer_index, 8)
        if self.zero_point_buffer_index is not None:
            _need_u32("zero_point_buffer_index", self.zero_point_buffer_index, 12)


@dataclass(frozen=True, slots=True)
class PerBlockAffine:
    """A scale and zero point per block; for block-paged, per page slot (quantization/per-block-affine, tag 0x03).

    Attributes:
        axis: the axis cut into blocks; 0 for block-paged.
        block_size: elements per block, a power of two >= 2; equal to page_size for block-paged.
        scale_buffer_index: buffer of scales.
        zero_point_buffer_index: buffer of int32 zero points; None is symmetric, all zero.
        scale_type: FLOAT16, BFLOAT16 or FLOAT32.
    """

    axis: int
    block_size: int
    scale_buffer_index: int
    zero_point_buffer_index: int | None = None
    scale_type: ElementType = ElementType.FLOAT32

    tag: ClassVar[int] = 0x03
    wire_name: ClassVar[str] = "per-block affine"
    storage: ClassVar[tuple[ElementType, ...]] = _NARROW

    def __post_init__(self) -> None:
        _need_u32("axis", self.axis, 4)
        _need_block_size(self.block_size, 2, 1 << 31)
        _need_u32("scale_buffer_index", self.scale_buffer_index, 12)
        if self.zero_point_buffer_index is not None:
            _need_u32("zero_point_buffer_index", self.zero_point_buffer_index, 16)
        if self.scale_type not in (_E.FLOAT16, _E.BFLOAT16, _E.FLOAT32):
            raise _fail("scale_type_tag", self.scale_type, 20, "scales must be float16, bfloat16 or float32")
        object.__setattr__(self, "scale_type", ElementType(self.scale_type))


@dataclass(frozen=True, slots=True)
class NF4:
    """NormalFloat4 (quantization/nf4, tag 0x04). ADR-024 defines no paging rule for it.

    Attributes:
        axis: the axis cut into blocks.
        block_size: elements per block, a power of two >= 8.
        scale_buffer_index: buffer of float32 absmax scales, one per block.
    """

    axis: int
    block_size: int
    scale_buffer_index: int

    tag: ClassVar[int] = 0x04
    wire_name: ClassVar[str] = "NF4"
    storage: ClassVar[tuple[ElementType, ...]] = (_E.UINT4,)

    def __post_init__(self) -> None:
        _need_u32("axis", self.axis, 4)
        _need_block_size(self.block_size, 8, 1 << 31)
        _need_u32("scale_buffer_index", self.scale_buffer_index, 12)


@dataclass(frozen=True, slots=True)
class MXFP:
    """OCP microscaling (quantization/mxfp, tag 0x05). ADR-024 defines no paging rule for it.

    Attributes:
        axis: the axis cut into blocks; its size is a multiple of block_size.
        block_size: elements per block, a power of two in 16..2048.
        scale_buffer_index: buffer of float8_e8m0 scales, one per block.
    """

    axis: int
    block_size: int
    scale_buffer_index: int

    tag: ClassVar[int] = 0x05
    wire_name: ClassVar[str] = "MXFP"
    storage: ClassVar[tuple[ElementType, ...]] = (
        _E.FLOAT8_E4M3,
        _E.FLOAT8_E5M2,
        _E.FLOAT4_E2M1,
        _E.FLOAT6_E2M3,
        _E.FLOAT6_E3M2,
        _E.INT8,
        _E.INT4,
    )

    def __post_init__(self) -> None:
        _need_u32("axis", self.axis, 4)
        _need_block_size(self.block_size, 16, 2048)
        _need_u32("scale_buffer_index", self.scale_buffer_index, 12)


@dataclass(frozen=True, slots=True)
class OpaqueScheme:
    """A scheme that this reader does not know, as a permissive reader skips it.

    Attributes:
        tag: its scheme tag, not 0x00 or 0xFF.
        payload: the section's bytes, the tag included.
    """

    tag: int
    payload: bytes

    @property
    def wire_name(self) -> str:
        """Its grade and tag, such as ``private scheme 0xF0``."""
        return f"{grade(self.tag, reserved_from=0x60)} scheme 0x{self.tag:02X}"


Quantization = PerTensorAffine | PerChannelAffine | PerBlockAffine | NF4 | MXFP | OpaqueScheme


def decode_quantization(data: BytesLike, *, strict: bool = True) -> Quantization:
    """Decode one quantization descriptor (the bytes behind its u32 length). Padding at the end is ignored.

    Args:
        data: the section's bytes.
        strict: refuse private and unknown schemes; otherwise they come back as `OpaqueScheme`.

    Raises:
        DescriptorError: a field breaks its rule; offsets count from the first byte of ``data``.
    """
    view = memoryview(data).cast("B")
    cursor = Cursor(view, limit=len(view), what="quantization_length")
    tag, version, flags = cursor.unpack(HEAD, "quantization.scheme_tag")
    decoder = _DECODERS.get(tag)
    if decoder is None:
        kind = grade(tag, reserved_from=0x60)
        if strict or kind == "invalid":
            raise _fail("scheme_tag", tag, 0, f"scheme tag 0x{tag:02X} is {kind}; 0x01..0x05 are defined")
        return OpaqueScheme(tag, bytes(view))
    if version != 1:
        raise _fail("scheme_version", version, 1, f"scheme 0x{tag:02X} is known in version 1")
    allowed = SYMMETRIC if tag in (PerChannelAffine.tag, PerBlockAffine.tag) else 0
    if flags & ~allowed:
        raise _fail("flags", flags, 2, f"only the bits of 0x{allowed:04X} are defined for scheme 0x{tag:02X}")
    return decoder(cursor, bool(flags & SYMMETRIC))  # type: ignore[no-any-return]


def encode_quantization(scheme: Quantization) -> bytes:
    """The bytes of a quantization descriptor, without its u32 length.

    Raises:
        DescriptorError: the scheme is one that only its owner can write.
    """
    match scheme:
        case PerTensorAffine():
            return HEAD.pack(scheme.tag, 1, 0) + _PER_TENSOR.pack(scheme.scale, scheme.zero_point, _ZEROS)
        case PerChannelAffine():
            zero_points, flags = _zero_points(scheme.zero_point_buffer_index)
            fields = (scheme.axis, scheme.scale_buffer_index, zero_points, scheme.scale_type, _ZEROS[:3])
            return HEAD.pack(scheme.tag, 1, flags) + _PER_CHANNEL.pack(*fields)
        case PerBlockAffine():
            zero_points, flags = _zero_points(scheme.zero_point_buffer_index)
            head = (scheme.axis, scheme.block_size, scheme.scale_buffer_index, zero_points)
            return HEAD.pack(scheme.tag, 1, flags) + _PER_BLOCK.pack(*head, scheme.scale_type, _ZEROS[:3])
        case NF4() | MXFP():
            block = (scheme.axis, scheme.block_size, scheme.scale_buffer_index)
            return HEAD.pack(scheme.tag, 1, 0) + _BLOCK_FLOAT.pack(*block)
        case OpaqueScheme():
            raise _fail("scheme_tag", scheme.tag, 0, f"a {scheme.wire_name} is read permissively, never written")


def _zero_points(index: int | None) -> tuple[int, int]:
    return (NO_BUFFER, SYMMETRIC) if index is None else (index, 0)


def _read_zero_points(index: int, symmetric: bool, offset: int) -> int | None:
    if not symmetric:
        return index
    if index != NO_BUFFER:
        rule = "must be 0xFFFFFFFF when SYMMETRIC is set"
        raise _fail("zero_point_buffer_index", index, offset, rule)
    return None


def _need_zero(reserved: bytes, offset: int) -> None:
    if any(reserved):
        raise _fail("reserved", reserved.hex(), offset, "reserved bytes must be 0")


def _decode_per_tensor(cursor: Cursor, _symmetric: bool) -> PerTensorAffine:
    scale, zero_point, reserved = cursor.unpack(_PER_TENSOR, "quantization.scale")
    _need_zero(reserved, 12)
    return PerTensorAffine(scale, zero_point)


def _decode_per_channel(cursor: Cursor, symmetric: bool) -> PerChannelAffine:
    axis, scales, zero_points, scale_type, reserved = cursor.unpack(_PER_CHANNEL, "quantization.axis")
    if scale_type != ElementType.FLOAT32:
        raise _fail("scale_type_tag", scale_type, 16, "per-channel scales must be float32 (0x03)")
    _need_zero(reserved, 17)
    return PerChannelAffine(axis, scales, _read_zero_points(zero_points, symmetric, 12))


def _decode_per_block(cursor: Cursor, symmetric: bool) -> PerBlockAffine:
    axis, block_size, scales, zero_points, scale_type, reserved = cursor.unpack(_PER_BLOCK, "quantization.axis")
    _need_zero(reserved, 21)
    return PerBlockAffine(axis, block_size, scales, _read_zero_points(zero_points, symmetric, 16), scale_type)


def _decode_nf4(cursor: Cursor, _symmetric: bool) -> NF4:
    return NF4(*cursor.unpack(_BLOCK_FLOAT, "quantization.axis"))


def _decode_mxfp(cursor: Cursor, _symmetric: bool) -> MXFP:
    return MXFP(*cursor.unpack(_BLOCK_FLOAT, "quantization.axis"))


_DECODERS: dict[int, Any] = {
    PerTensorAffine.tag: _decode_per_tensor,
    PerChannelAffine.tag: _decode_per_channel,
    PerBlockAffine.tag: _decode_per_block,
    NF4.tag: _decode_nf4,
    MXFP.tag: _decode_mxfp,
}
