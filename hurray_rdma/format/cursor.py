"""The bounded cursor through which every read of a descriptor passes. It knows bytes and limits, not meanings."""

from __future__ import annotations

from struct import Struct
from typing import Any

from hurray_rdma.errors import DescriptorError

__all__ = ["BytesLike", "Cursor"]

BytesLike = bytes | bytearray | memoryview


class Cursor:
    """Reads forward through ``data[start:limit]`` and never beyond, whatever the bytes say.

    ``position`` is the absolute offset of the next byte.
    """

    __slots__ = ("data", "limit", "position", "what")

    def __init__(self, data: memoryview, *, start: int = 0, limit: int, what: str = "descriptor_length") -> None:
        self.data = data
        self.position = start
        self.limit = limit
        self.what = what

    def unpack(self, fields: Struct, name: str) -> tuple[Any, ...]:
        """Read one struct.

        Raises:
            DescriptorError: fewer bytes are left than the struct takes.
        """
        start = self.position
        end = start + fields.size
        if end > self.limit:
            raise self._short(name, fields.size)
        self.position = end
        return fields.unpack_from(self.data, start)

    def take(self, num_bytes: int, name: str) -> memoryview:
        """Read ``num_bytes`` raw bytes, without copying.

        Raises:
            DescriptorError: fewer bytes are left.
        """
        start = self.position
        end = start + num_bytes
        if end > self.limit:
            raise self._short(name, num_bytes)
        self.position = end
        return self.data[start:end]

    def _short(self, name: str, wanted: int) -> DescriptorError:
        left = self.limit - self.position
        return DescriptorError(
            f"needs {wanted} bytes, but {left} are left before {self.what} {self.limit}",
            field=name,
            value=left,
            offset=self.position,
        )
