"""The optional sections behind the buffer table that are not quantization: statistics, private type, composite member.

Source: metadata (Statistics Section, Extension Type Section) and the composite layout (Composite Member Section).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.cursor import Cursor
from hurray_rdma.format.elements import ExtensionType
from hurray_rdma.format.finding import is_integer
from hurray_rdma.format.tags import MemberRole

__all__ = ["Statistics"]

STATISTICS = Struct("<IIQ6dBBBB4s")
EXTENSION = Struct("<IBBBBBB2sIBB2s")
MEMBER = Struct("<B15s")

_NNZ, _SPARSITY, _RANGE, _MOMENTS, _NM, _NAN_INF = (1 << bit for bit in range(6))
_DEFINED_BITS = 0x3F


@dataclass(frozen=True, slots=True)
class Statistics:
    """Advisory statistics of the tensor's values; each is None where the writer did not compute it.

    Attributes:
        nnz: number of non-zero elements.
        sparsity_ratio: fraction of zero elements, 0 to 1.
        value_range: smallest, largest and largest absolute value, dequantized.
        moments: mean and population standard deviation (>= 0), dequantized.
        nm_sparsity: (N, M) of an N:M pattern, N <= M.
        has_nan_inf: whether there is a NaN, whether there is an infinity.

    Raises:
        DescriptorError: a value lies outside its range.
    """

    nnz: int | None = None
    sparsity_ratio: float | None = None
    value_range: tuple[float, float, float] | None = None
    moments: tuple[float, float] | None = None
    nm_sparsity: tuple[int, int] | None = None
    has_nan_inf: tuple[bool, bool] | None = None

    def __post_init__(self) -> None:
        for name, value, offset, rule in self._violations():
            raise DescriptorError(rule, field=f"statistics.{name}", value=value, offset=offset)

    def _violations(self) -> Iterator[tuple[str, object, int, str]]:
        if self.nnz is not None and (not is_integer(self.nnz) or not 0 <= self.nnz < 1 << 64):
            yield "nnz", self.nnz, 8, "must be an integer that fits uint64"
        if self.sparsity_ratio is not None and not 0 <= self.sparsity_ratio <= 1:
            yield "sparsity_ratio", self.sparsity_ratio, 16, "must lie in 0..1"
        if self.moments is not None and not self.moments[1] >= 0:
            yield "value_stddev", self.moments[1], 56, "must be 0 or more"
        if self.nm_sparsity is not None and not 0 <= self.nm_sparsity[0] <= self.nm_sparsity[1] <= 0xFF:
            yield "nm_n", self.nm_sparsity, 64, "N must not exceed M in N:M sparsity, nor M 255"


def decode_statistics(cursor: Cursor) -> Statistics:
    """Read the 72-byte section; values whose mask bit is clear are unknown, whatever their bytes."""
    start = cursor.position
    fields = cursor.unpack(STATISTICS, "statistics")
    mask, reserved, nnz, sparsity, low, high, peak, mean, deviation, n, m, has_nan, has_inf, reserved2 = fields
    if mask & ~_DEFINED_BITS:
        raise _error("statistics.computed_mask", f"0x{mask:08X}", start, "bits 6..31 must be 0")
    if reserved:
        raise _error("statistics.reserved", reserved, start + 4, "reserved bytes must be 0")
    if any(reserved2):
        raise _error("statistics.reserved2", reserved2.hex(), start + 68, "reserved bytes must be 0")
    if mask & _NAN_INF and (has_nan > 1 or has_inf > 1):
        raise _error("statistics.has_nan", (has_nan, has_inf), start + 66, "has_nan and has_inf must be 0 or 1")
    try:
        return Statistics(
            nnz=nnz if mask & _NNZ else None,
            sparsity_ratio=sparsity if mask & _SPARSITY else None,
            value_range=(low, high, peak) if mask & _RANGE else None,
            moments=(mean, deviation) if mask & _MOMENTS else None,
            nm_sparsity=(n, m) if mask & _NM else None,
            has_nan_inf=(bool(has_nan), bool(has_inf)) if mask & _NAN_INF else None,
        )
    except DescriptorError as error:
        raise shifted(error, start) from None


def encode_statistics(statistics: Statistics) -> bytes:
    """The 72 bytes of the section; unknown values are written as 0."""
    values = (
        (statistics.nnz, _NNZ),
        (statistics.sparsity_ratio, _SPARSITY),
        (statistics.value_range, _RANGE),
        (statistics.moments, _MOMENTS),
        (statistics.nm_sparsity, _NM),
        (statistics.has_nan_inf, _NAN_INF),
    )
    mask = sum(bit for value, bit in values if value is not None)
    return STATISTICS.pack(
        mask,
        0,
        statistics.nnz or 0,
        statistics.sparsity_ratio or 0.0,
        *(statistics.value_range or (0.0, 0.0, 0.0)),
        *(statistics.moments or (0.0, 0.0)),
        *(statistics.nm_sparsity or (0, 0)),
        *(statistics.has_nan_inf or (0, 0)),
        bytes(4),
    )


def decode_extension(cursor: Cursor, tag: int) -> ExtensionType:
    """Read the 20-byte section of a private type."""
    start = cursor.position
    fields = cursor.unpack(EXTENSION, "extension_type")
    width, packing, is_float, is_signed, sign, exponent, mantissa, reserved, bias, has_nan, has_inf, reserved2 = fields
    for name, value, offset in (
        ("is_float", is_float, 5),
        ("is_signed", is_signed, 6),
        ("has_nan", has_nan, 16),
        ("has_inf", has_inf, 17),
    ):
        if value > 1:
            raise _error(f"extension_type.{name}", value, start + offset, "must be 0 or 1")
    if any(reserved) or any(reserved2):
        where = 10 if any(reserved) else 18
        raise _error("extension_type.reserved", (reserved + reserved2).hex(), start + where, "reserved bytes must be 0")
    try:
        extension = ExtensionType(
            tag, width, bool(is_float), bool(is_signed), sign, exponent, mantissa, bias, bool(has_nan), bool(has_inf)
        )
    except DescriptorError as error:
        raise shifted(error, start) from None
    if packing != extension.packing_factor:
        rule = f"must be {extension.packing_factor} for a type of {width} bits"
        raise _error("extension_type.packing_factor", packing, start + 4, rule)
    return extension


def encode_extension(extension: ExtensionType) -> bytes:
    """The 20 bytes of the section."""
    return EXTENSION.pack(
        extension.bit_width,
        extension.packing_factor,
        extension.is_float,
        extension.is_signed,
        extension.sign_bits,
        extension.exponent_bits,
        extension.mantissa_bits,
        bytes(2),
        extension.exponent_bias,
        extension.has_nan,
        extension.has_inf,
        bytes(2),
    )


def decode_member(cursor: Cursor) -> MemberRole:
    """Read the 16-byte composite member section."""
    start = cursor.position
    role, reserved = cursor.unpack(MEMBER, "composite_member")
    if role > MemberRole.BASE:
        raise _error("composite_member.member_role", role, start, "must be 0 (correction) or 1 (base)")
    if any(reserved):
        raise _error("composite_member.reserved", reserved.hex(), start + 1, "reserved bytes must be 0")
    return MemberRole(role)


def encode_member(role: MemberRole) -> bytes:
    """The 16 bytes of the section."""
    return MEMBER.pack(role, bytes(15))


def shifted(error: DescriptorError, start: int) -> DescriptorError:
    """The error with its section-relative offset made one of the whole descriptor."""
    if error.offset is not None:
        error.offset += start
    return error


def _error(field: str, value: object, offset: int, rule: str) -> DescriptorError:
    return DescriptorError(rule, field=field, value=value, offset=offset)
