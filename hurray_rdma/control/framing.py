"""Frames: the 12-byte header before each payload, and the decoder that cuts a byte stream into messages.

This module knows headers and lengths. It does not know which message may come when. A length is checked before one byte
of it is kept; each payload byte is copied at most once, however the stream was split.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from hurray_rdma.control.codes import ErrorCode, MessageType
from hurray_rdma.control.config import MIN_MESSAGE_NBYTES
from hurray_rdma.control.fixed import FIXED_DECODERS, FIXED_ENCODERS
from hurray_rdma.control.messages import Malformed, Message
from hurray_rdma.control.private import PRIVATE_DECODERS, PRIVATE_ENCODERS
from hurray_rdma.errors import ConfigError, ProtocolError

__all__ = ["HEADER_NBYTES", "FrameDecoder", "encode", "encode_parts"]

_HEADER = struct.Struct("<III")
HEADER_NBYTES = _HEADER.size
_DECODERS = {**FIXED_DECODERS, **PRIVATE_DECODERS}
_ENCODERS = {**FIXED_ENCODERS, **PRIVATE_ENCODERS}
_LONG = (
    MessageType.TENSOR_DATA,
    MessageType.POOL,
    MessageType.OFFER,
    MessageType.GRANT,
    MessageType.PUBLISHED,
    MessageType.PREPARE,
    MessageType.COMMIT,
    MessageType.TAKE,
)
"""Kinds that carry tables or page data, and may be as long as is agreed."""
_SHORT = _DECODERS.keys() - set(_LONG)
"""All others fit into the least that a side must accept, and are held to it."""
_HTTP_METHODS = (b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"PATCH", b"PRI")


def encode_parts(
    message: Message, stream_id: int, *, max_message_nbytes: int = 2**32 - 1
) -> tuple[int, list[bytes | memoryview]]:
    """Frame one message without joining its parts: (bytes in all, header and payload parts).

    Args:
        message: what to send; a large ``TensorDataMessage.data`` is handed through, not copied.
        stream_id: 1 to 2**32 - 1.
        max_message_nbytes: largest payload the receiver accepts.

    Raises:
        ConfigError: the payload is larger than that.
    """
    kind, encode_payload = _ENCODERS[type(message)]
    payload = encode_payload(message)
    nbytes = len(payload) if isinstance(payload, bytes) else sum(map(len, payload))
    if nbytes > max_message_nbytes:
        raise ConfigError(
            f"a {kind.name} message of {nbytes} bytes is above the {max_message_nbytes} bytes the peer accepts",
            fix="Send fewer sequences at once, or raise max_message_nbytes on the peer",
        )
    header = _HEADER.pack(kind, stream_id, nbytes)
    if not isinstance(payload, bytes):
        return HEADER_NBYTES + nbytes, [header, *payload]
    return HEADER_NBYTES + nbytes, [header + payload] if nbytes <= MIN_MESSAGE_NBYTES else [header, payload]


def encode(message: Message, stream_id: int) -> bytes:
    """Header and payload of one message, as bytes."""
    return b"".join(encode_parts(message, stream_id)[1])


class FrameDecoder:
    """Cuts a byte stream into (stream_id, message) pairs.

    Args:
        max_message_nbytes: largest payload accepted; may be changed between messages. Of the kinds that carry neither
            tables nor page data at most 64 KiB are accepted.
    """

    def __init__(self, max_message_nbytes: int) -> None:
        self.max_message_nbytes = max_message_nbytes
        self.missing_nbytes = 0
        """What has not come yet of the payload that the bytes so far end in."""
        self._header = bytearray()
        self._payload = bytearray()
        self._expected: tuple[int, int] | None = None

    @property
    def in_message(self) -> bool:
        """Whether the bytes so far end inside a message."""
        return bool(self._header) or self._expected is not None

    def foreign(self) -> ProtocolError | None:
        """The error that names who speaks, if the stream ended in a header that begins as another protocol does."""
        return _not_hurray(bytes(self._header)) if _foreign(self._header) is not None else None

    def feed(self, data: bytes) -> Iterator[tuple[int, Message]]:
        """Take the next bytes of the stream; iterate to the end before feeding more.

        A payload that breaks a rule comes as :class:`Malformed`, since the frames after it are still whole.

        Raises:
            ProtocolError: the stream cannot be cut into frames any more: stream 0, a payload above the maximum
                (``MESSAGE_TOO_LARGE``), or another protocol's bytes. Raised after the messages before it were given
                out.
        """
        view = memoryview(data)
        at, end = 0, len(view)
        while at < end:
            if self._expected is not None:
                (kind, stream_id), missing = self._expected, self.missing_nbytes
            elif not self._header and end - at >= HEADER_NBYTES:
                kind, stream_id, missing = self._check_header(*_HEADER.unpack_from(view, at))
                at += HEADER_NBYTES
            else:
                rest = view[at : at + HEADER_NBYTES - len(self._header)]
                self._header += rest
                at += len(rest)
                if len(self._header) < HEADER_NBYTES:
                    return
                kind, stream_id, missing = self._check_header(*_HEADER.unpack(self._header))
                self._header.clear()
            if end - at < missing:
                self._expected = kind, stream_id
                self._payload += view[at:]
                self.missing_nbytes = missing - (end - at)
                return
            payload = view[at : at + missing]
            at += missing
            if self._expected is not None:
                self._payload += payload
                # The decoder lets go of this buffer: views into it given out with a message stay as they are.
                payload, self._payload = memoryview(self._payload).toreadonly(), bytearray()
                self._expected, self.missing_nbytes = None, 0
            yield stream_id, _decode_payload(kind, payload)

    def _check_header(self, kind: int, stream_id: int, nbytes: int) -> tuple[int, int, int]:
        limit = self.max_message_nbytes
        if nbytes > MIN_MESSAGE_NBYTES and kind in _SHORT:
            limit = min(limit, MIN_MESSAGE_NBYTES)
        if stream_id and nbytes <= limit:
            return kind, stream_id, nbytes
        if kind not in _DECODERS:
            raise _not_hurray(_HEADER.pack(kind, stream_id, nbytes))
        if stream_id == 0:
            raise ProtocolError("is reserved", field="stream_id", value=0, code=ErrorCode.INVALID_MESSAGE)
        raise ProtocolError(
            f"a {MessageType(kind).name} message of {nbytes} bytes is above the {limit} bytes that this side accepts",
            code=ErrorCode.MESSAGE_TOO_LARGE,
        )


def _foreign(begin: bytes | bytearray) -> tuple[str, str] | None:
    """Who speaks, and what to do, if these first bytes are those of a protocol that is often met on a wrong port."""
    if begin[:2] in (b"\x16\x03", b"\x15\x03"):
        return "a TLS client" if begin[0] == 0x16 else "a TLS server", "Set up TLS on both sides, or on neither"
    if begin[:5] == b"HTTP/":
        return "an HTTP server", "Check the address and the port: a hurray_rdma engine must listen there"
    if begin.split(b" ")[0] in _HTTP_METHODS:
        return "an HTTP client", "This port takes hurray_rdma engines only; check the address and the port"
    return None


def _not_hurray(begin: bytes) -> ProtocolError:
    who, fix = _foreign(begin) or ("something else", "Check that both ends of the connection are hurray_rdma engines")
    rule = f"this is not a Hurray connection: the other side is {who}, it sends {begin!r}"
    return ProtocolError(rule, code=ErrorCode.INVALID_MESSAGE, fix=fix)


def _decode_payload(kind: int, payload: memoryview) -> Message:
    decoder = _DECODERS.get(kind)
    if decoder is None:
        return Malformed(kind, ProtocolError("is not a known message", field="message_type", value=kind))
    try:
        return decoder(payload)
    except ProtocolError as error:
        return Malformed(kind, error)
