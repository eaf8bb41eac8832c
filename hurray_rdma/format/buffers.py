"""One entry of the buffer table: size, alignment, device, sync mode, memory class, and the rules each entry keeps.

Source: buffer-protocol (Buffer Handle, Alignment, Device Tags). What a buffer holds is not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Any

from hurray_rdma.format.finding import Finding
from hurray_rdma.format.tags import DeviceTag, MemoryClass, SyncMode, grade, is_private

__all__ = ["BufferEntry"]

ENTRY = Struct("<QIBBBB")
DEVICE_ALIGNMENT = 4096
MIN_ALIGNMENT = 64

_DEVICES: dict[int, DeviceTag] = {each.value: each for each in DeviceTag}
_SYNC_MODES: dict[int, SyncMode] = {each.value: each for each in SyncMode}
_MEMORY_CLASSES: dict[int, MemoryClass] = {each.value: each for each in MemoryClass}


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """A buffer as the descriptor declares it; no address, that travels apart.

    Attributes:
        byte_size: bytes; 0 is an empty buffer.
        alignment: guaranteed alignment of the base address in bytes, a power of two.
        device_tag: a `DeviceTag`, or the plain int of a private device (0xF0..0xFE).
        sync_mode: who orders accesses.
        memory_class: a `MemoryClass`, or the plain int of a private class (0xF0..0xFE).

    The rules are checked by the descriptor that holds the entry.
    """

    byte_size: int
    alignment: int = DEVICE_ALIGNMENT
    device_tag: DeviceTag | int = DeviceTag.CPU
    sync_mode: SyncMode = SyncMode.PRODUCER_SYNCED
    memory_class: MemoryClass | int = MemoryClass.STANDARD

    @classmethod
    def from_wire(cls, fields: tuple[Any, ...]) -> BufferEntry:
        """The entry of six unpacked integers; numbers without a name stay plain ints for the rules to judge."""
        size, alignment, device, sync, memory, _reserved = fields
        return cls(
            size,
            alignment,
            _DEVICES.get(device, device),
            _SYNC_MODES.get(sync, sync),
            _MEMORY_CLASSES.get(memory, memory),
        )


def entry_violations(entry: BufferEntry, index: int, offset: int) -> Iterator[Finding]:
    """Every rule that one buffer entry breaks on its own; ``offset`` is where the entry starts."""
    name = f"buffers[{index}]"
    size, alignment, device, memory = entry.byte_size, entry.alignment, entry.device_tag, entry.memory_class
    if not isinstance(size, int) or not 0 <= size < 1 << 64:
        yield Finding(f"{name}.byte_size", size, f"must lie in 0..{(1 << 64) - 1}", offset)
    if not isinstance(alignment, int) or not 0 < alignment < 1 << 32 or alignment & (alignment - 1):
        yield Finding(f"{name}.alignment", alignment, "must be a power of two below 2**32", offset + 8)
    elif size and alignment < MIN_ALIGNMENT:
        rule = f"a buffer of {size} bytes must be aligned to at least {MIN_ALIGNMENT}"
        yield Finding(f"{name}.alignment", alignment, rule, offset + 8)
    elif size and alignment < DEVICE_ALIGNMENT and device in _DEVICES and device != DeviceTag.CPU:
        rule = f"a buffer on {DeviceTag(device).name} must be aligned to at least {DEVICE_ALIGNMENT}"
        yield Finding(f"{name}.alignment", alignment, rule, offset + 8, tolerable=True)
    if device not in _DEVICES and not is_private(device):
        kind = grade(device, reserved_from=0x09, zero_is_invalid=False)
        yield Finding(
            f"{name}.device_tag", device, f"device tag is {kind}; 0..8 and 0xF0..0xFE are defined", offset + 12
        )
    if entry.sync_mode not in _SYNC_MODES:
        yield Finding(f"{name}.sync_mode", entry.sync_mode, "sync mode is invalid; 0..2 are defined", offset + 13)
    if memory in _MEMORY_CLASSES:
        if memory == MemoryClass.PEER and device == DeviceTag.CPU:
            yield Finding(f"{name}.memory_class", memory, "PEER memory cannot be on the CPU", offset + 14)
    elif not is_private(memory):
        yield Finding(f"{name}.memory_class", memory, "memory class is invalid; 0..3 are defined", offset + 14)
    elif not is_private(device):
        rule = f"a private memory class needs a private device, not device_tag {device}"
        yield Finding(f"{name}.memory_class", memory, rule, offset + 14)
