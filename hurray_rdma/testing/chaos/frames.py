"""Frames of the control channel as bytes: cuts a stream at the 12-byte headers (WIRE.md), and reads nothing else.

This module knows the header. It knows no payload and no order, so that it carries wrong messages as well as right ones.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from hurray_rdma.control.codes import MessageType
from hurray_rdma.control.framing import HEADER_NBYTES

__all__ = ["Frame", "FrameCutter"]

_HEADER = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class Frame:
    """One message as it travels."""

    kind: int
    """message_type, a `MessageType` if it is a known one."""
    stream_id: int
    data: bytes = field(repr=False)
    """Header and payload."""

    @property
    def name(self) -> str:
        """The message's name, for logs."""
        try:
            return MessageType(self.kind).name
        except ValueError:
            return f"0x{self.kind:X}"


class FrameCutter:
    """Cuts bytes, in any split, into whole frames; `rest` is what is not one yet."""

    def __init__(self) -> None:
        self._held = bytearray()

    @property
    def rest(self) -> bytes:
        """The start of a frame that has not come whole."""
        return bytes(self._held)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that ``data`` completes, in order."""
        held, at, frames = self._held, 0, []
        held += data
        while len(held) - at >= HEADER_NBYTES:
            kind, stream_id, nbytes = _HEADER.unpack_from(held, at)
            end = at + HEADER_NBYTES + nbytes
            if len(held) < end:
                break
            frames.append(Frame(kind, stream_id, bytes(held[at:end])))
            at = end
        del held[:at]
        return frames
