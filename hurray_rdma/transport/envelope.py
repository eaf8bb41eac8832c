"""What carries UCX's opaque bytes (worker addresses, packed rkeys) between two processes.

UCX trusts such bytes: a truncated rkey is read past its end and a malformed address aborts the process, so neither may
reach it damaged. The envelope holds their length and checksum. It guards against damage and mixed versions, not
against a peer that lies on purpose: such a peer must not get past authentication.
"""

from __future__ import annotations

import struct
import zlib

from hurray_rdma.errors import ProtocolError

__all__ = ["seal", "unseal"]

_HEADER = struct.Struct("<4sBBHI")
_MAGIC = b"HUCX"
_API = (1, 21)
_MIN_API = (1, 19)


def seal(payload: bytes) -> bytes:
    """``HUCX`` | UCX wire API major u8, minor u8 | length u16 | crc32 u32 | payload (1 to 65535 bytes)."""
    return _HEADER.pack(_MAGIC, *_API, len(payload), zlib.crc32(payload)) + payload


def unseal(envelope: bytes, *, field: str) -> bytes:
    """The payload of an envelope.

    Raises:
        ProtocolError: anything about it is wrong; ``field`` names it in the message.
    """
    if len(envelope) <= _HEADER.size:
        raise ProtocolError(
            f"must hold more than the {_HEADER.size} bytes of its header", field=f"len({field})", value=len(envelope)
        )
    magic, major, minor, length, checksum = _HEADER.unpack_from(envelope)
    payload = envelope[_HEADER.size :]
    if magic != _MAGIC:
        raise ProtocolError(f"must start with {_MAGIC!r}", field=field, value=magic)
    if major != _API[0] or (major, minor) < _MIN_API:
        raise ProtocolError(
            f"must be UCX API {_API[0]}.{_MIN_API[1]} or later",
            field=f"{field} UCX API",
            value=f"{major}.{minor}",
            fix="Install the same libucx on both sides",
        )
    if length != len(payload):
        raise ProtocolError(f"must be the {len(payload)} bytes that follow", field=f"{field} length", value=length)
    if checksum != zlib.crc32(payload):
        raise ProtocolError("must match the bytes that follow", field=f"{field} crc32", value=checksum)
    return payload
