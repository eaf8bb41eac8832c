"""A stream of descriptors: one after another, each as long as its descriptor_length says. Sans-IO.

It knows lengths and a size limit; it holds no socket and reads nothing that was not handed to it.
"""

from __future__ import annotations

from collections.abc import Iterator

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.codec import PREFIX_NBYTES, decode, descriptor_length
from hurray_rdma.format.cursor import BytesLike
from hurray_rdma.format.descriptor import Descriptor
from hurray_rdma.format.sections import shifted
from hurray_rdma.format.tags import Dialect, DialectName

__all__ = ["MAX_DESCRIPTOR_NBYTES", "DescriptorReader", "iter_descriptors"]

MAX_DESCRIPTOR_NBYTES = 65536
"""Default limit of one descriptor; the fields of version 1.0 with 255 buffers take less than 5 KiB, padding apart."""


def iter_descriptors(
    buffer: BytesLike,
    *,
    dialect: Dialect | DialectName | None = None,
    max_nbytes: int = MAX_DESCRIPTOR_NBYTES,
    strict: bool = True,
) -> Iterator[Descriptor]:
    """Decode descriptors that lie back to back in a buffer, to its end.

    Args:
        buffer: nothing but descriptors.
        dialect: the dialect that was agreed on; None recognises both.
        max_nbytes: largest descriptor to accept.
        strict: as in `decode`.

    Raises:
        DescriptorError: a descriptor is bad, too long or cut off; its offset counts from the start of the buffer.
    """
    view = memoryview(buffer).cast("B")
    start = 0
    while start < len(view):
        try:
            length = descriptor_length(view[start:], max_nbytes=max_nbytes)
            descriptor = decode(view[start:], dialect=dialect, strict=strict)
        except DescriptorError as error:
            raise shifted(error, start) from None
        yield descriptor
        start += length


class DescriptorReader:
    """Reads descriptors from a byte stream that arrives in pieces, such as a socket's.

    ``wanted`` says how many bytes may be read without going beyond the current descriptor; feed them as they come, and
    say when there are no more::

        reader = DescriptorReader(dialect="adr-024", max_nbytes=4096)
        while piece := sock.recv(reader.wanted):
            if (descriptor := reader.feed(piece)) is not None:
                ...
        reader.finish()

    The length is checked against the limit before anything behind it is asked for, so a peer cannot make it hold more
    than ``max_nbytes``.
    """

    __slots__ = ("_dialect", "_held", "_length", "_max_nbytes", "_strict")

    def __init__(
        self,
        *,
        dialect: Dialect | DialectName | None = None,
        max_nbytes: int = MAX_DESCRIPTOR_NBYTES,
        strict: bool = True,
    ) -> None:
        self._dialect = dialect
        self._max_nbytes = max_nbytes
        self._strict = strict
        self._held = bytearray()
        self._length: int | None = None

    @property
    def wanted(self) -> int:
        """Bytes still missing: up to the length field first, then up to the end of the descriptor."""
        return (PREFIX_NBYTES if self._length is None else self._length) - len(self._held)

    def feed(self, data: BytesLike) -> Descriptor | None:
        """Take at most ``wanted`` bytes; the descriptor if they complete it, else None.

        Raises:
            DescriptorError: more bytes than wanted, or the descriptor is bad or too long.
        """
        piece = memoryview(data).cast("B")
        if len(piece) > self.wanted:
            rule = f"the reader wants {self.wanted} bytes, and would lose what lies behind them"
            raise DescriptorError(rule, field="data", value=len(piece))
        self._held += piece
        if self._length is None and len(self._held) == PREFIX_NBYTES:
            self._length = descriptor_length(self._held, max_nbytes=self._max_nbytes)
        if len(self._held) != self._length:
            return None
        descriptor = decode(bytes(self._held), dialect=self._dialect, strict=self._strict)
        self._held.clear()
        self._length = None
        return descriptor

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            DescriptorError: it ended inside a descriptor.
        """
        if self._held:
            rule = f"the stream ended {self.wanted} bytes before the descriptor's next boundary"
            raise DescriptorError(rule, field="data", value=len(self._held), offset=len(self._held))
