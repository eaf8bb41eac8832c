"""The small numbers of the wire format: roles, devices, memory classes, sync modes, index types, dialects.

This file knows the values and their grades (invalid, reserved, private, unknown). It does not know where in a
descriptor they stand.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from functools import lru_cache
from typing import Literal

from hurray_rdma.errors import DescriptorError

__all__ = [
    "DeviceTag",
    "Dialect",
    "DialectName",
    "IndexType",
    "KvRole",
    "MemberRole",
    "MemoryClass",
    "SyncMode",
]

PRIVATE_FIRST, PRIVATE_LAST = 0xF0, 0xFE


class KvRole(IntEnum):
    """What the tensor of a layer holds (ADR-024 section 4; field ``kv_role``)."""

    KEY = 0
    VALUE = 1
    FUSED = 2

    @property
    def wire_name(self) -> str:
        """Lower-case name: ``key``, ``value`` or ``fused``."""
        return self.name.lower()

    @classmethod
    def from_name(cls, name: str) -> KvRole:
        """The role called ``key``, ``value`` or ``fused``.

        Raises:
            DescriptorError: the name is none of these.
        """
        for role in cls:
            if role.wire_name == name:
                return role
        raise DescriptorError("the role must be key, value or fused", field="kv_role", value=name)


class DeviceTag(IntEnum):
    """Where a buffer lives (buffer-protocol, Device Tags). 0xF0..0xFE are private and travel as plain ints."""

    CPU = 0
    CUDA = 1
    ROCM = 2
    METAL = 3
    VULKAN = 4
    WEBGPU = 5
    HEXAGON = 6
    LEVEL_ZERO = 7
    OPENCL = 8

    @property
    def wire_name(self) -> str:
        """Lower-case name: ``cpu``, ``cuda`` ..."""
        return self.name.lower()

    @classmethod
    @lru_cache(maxsize=64)
    def of_device(cls, device: str) -> DeviceTag:
        """The tag of ``"cpu"``, or of a device with a number: ``"cuda:0"``.

        Raises:
            DescriptorError: it names none.
        """
        kind, colon, index = device.partition(":")
        for tag in cls:
            if tag.wire_name == kind and bool(colon) == (tag is not cls.CPU) and index.isdecimal() == bool(colon):
                return tag
        raise DescriptorError("must be 'cpu', or a device with its number, as 'cuda:0'", field="device", value=device)


class MemoryClass(IntEnum):
    """What kind of memory of the device it is. 0xF0..0xFE are private, legal with private devices only."""

    STANDARD = 0
    HOST_PINNED = 1
    UNIFIED = 2
    PEER = 3


class SyncMode(IntEnum):
    """Who orders accesses to the buffer. Only PRODUCER_SYNCED may cross machines."""

    PRODUCER_SYNCED = 0
    EVENT = 1
    CONSUMER_STREAM = 2


class IndexType(IntEnum):
    """Entry type of ``block_table`` and ``seq_ptr`` (ADR-024 section 5; field ``block_table_index_type``)."""

    UINT32 = 0
    UINT64 = 1

    @property
    def itemsize(self) -> int:
        """Bytes of one entry: 4 or 8."""
        return 4 << self.value

    @property
    def wire_name(self) -> str:
        """``uint32`` or ``uint64``, which is also the numpy dtype's name."""
        return self.name.lower()


class MemberRole(IntEnum):
    """Role of an overlay composite's member (composite layout, Composite Member Section)."""

    CORRECTION = 0
    BASE = 1


DialectName = Literal["adr-024", "hurray-0.2"]


class Dialect(StrEnum):
    """Which layout tag means block-paged: 0x0B in ADR-024, 0x0A in the published hurray-core 0.2."""

    ADR_024 = "adr-024"
    HURRAY_0_2 = "hurray-0.2"

    @property
    def layout_tag(self) -> int:
        """The layout tag of block-paged in this dialect."""
        return 0x0B if self is Dialect.ADR_024 else 0x0A

    @classmethod
    def of(cls, dialect: Dialect | DialectName) -> Dialect:
        """The dialect by its name.

        Raises:
            DescriptorError: there is no such dialect.
        """
        try:
            return cls(dialect)
        except ValueError:
            known = ", ".join(each.value for each in cls)
            raise DescriptorError(f"the dialect must be one of {known}", field="dialect", value=dialect) from None


def is_private(tag: int) -> bool:
    """Whether the tag lies in 0xF0..0xFE, the range kept for private use in every tag space of the format."""
    return PRIVATE_FIRST <= tag <= PRIVATE_LAST


def grade(tag: int, *, reserved_from: int = 0x80, zero_is_invalid: bool = True) -> str:
    """What an unusable tag is: ``invalid``, ``reserved``, ``private`` or ``unknown``."""
    if tag == 0xFF or (tag == 0 and zero_is_invalid):
        return "invalid"
    if is_private(tag):
        return "private"
    return "reserved" if tag >= reserved_from else "unknown"


LAYOUT_NAMES = {
    0x01: "row-major",
    0x02: "column-major",
    0x03: "strided",
    0x04: "tiled",
    0x05: "morton",
    0x06: "subpaving",
    0x07: "COO",
    0x08: "CSR",
    0x09: "CSC",
    0x40: "hilbert",
}


def layout_name(tag: int, dialect: Dialect | None) -> str:
    """Name of a layout tag in a dialect; block-paged where either dialect says so and none is chosen."""
    if tag == 0x0A:
        return "CSF" if dialect is Dialect.ADR_024 else "block-paged"
    if tag == 0x0B:
        return "composite head" if dialect is Dialect.HURRAY_0_2 else "block-paged"
    return LAYOUT_NAMES.get(tag) or f"{grade(tag)} layout"
