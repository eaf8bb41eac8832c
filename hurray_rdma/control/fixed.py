"""Payloads of the format's own messages (WIRE.md, network messages), bytes to values and back.

This module knows the layout of messages 1 to 13. It does not know the 12-byte header before a payload, nor the private
messages. Every read goes through one bounded cursor; what does not fit is a :class:`ProtocolError` naming the field.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from hurray_rdma.control.codes import Capability, MessageType
from hurray_rdma.control.messages import (
    ClientHello,
    ErrorMessage,
    Hello,
    Message,
    Ping,
    Pong,
    RdmaReady,
    RdmaRegister,
    ServerHello,
    TensorDataEndMessage,
    TensorDataMessage,
    TensorDescriptorMessage,
    TensorPut,
    TensorPutAck,
    TensorRequest,
)
from hurray_rdma.errors import ProtocolError

__all__ = ["FIXED_DECODERS", "FIXED_ENCODERS"]

_U16 = struct.Struct("<H")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_FIRST_PRIVATE_TAG, _LAST_PRIVATE_TAG = 0xF0, 0xFE
_MAX_LAYOUTS = 256
_KNOWN_CAPABILITIES = (1 << 4) - 1


class _Cursor:
    """Bounded reader of one payload."""

    def __init__(self, payload: memoryview) -> None:
        self._payload = payload
        self._at = 0

    @property
    def num_left(self) -> int:
        return len(self._payload) - self._at

    def take(self, field: str, nbytes: int) -> memoryview:
        if nbytes > self.num_left:
            raise ProtocolError(f"{field} needs {nbytes} bytes at payload byte {self._at}, {self.num_left} are left")
        start, self._at = self._at, self._at + nbytes
        return self._payload[start : self._at]

    def u8(self, field: str) -> int:
        return self.take(field, 1)[0]

    def u16(self, field: str) -> int:
        return int(_U16.unpack(self.take(field, 2))[0])

    def u32(self, field: str) -> int:
        return int(_U32.unpack(self.take(field, 4))[0])

    def u64(self, field: str) -> int:
        return int(_U64.unpack(self.take(field, 8))[0])

    def text(self, field: str) -> str:
        raw = bytes(self.take(field, self.u32(f"length of {field}")))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("must be UTF-8", field=field, value=raw[:40]) from error

    def layouts(self) -> tuple[tuple[int, bytes], ...]:
        entries = []
        count = self.u16("layout count")
        if count > _MAX_LAYOUTS:
            raise ProtocolError(f"must be at most {_MAX_LAYOUTS}", field="layout count", value=count)
        for _ in range(count):
            tag = self.u8("layout tag")
            private = _FIRST_PRIVATE_TAG <= tag <= _LAST_PRIVATE_TAG
            entries.append((tag, bytes(self.take("layout entry", self.u16("layout entry length"))) if private else b""))
        return tuple(entries)

    def end(self) -> None:
        if self.num_left:
            raise ProtocolError(f"{self.num_left} bytes follow the last field of the payload")


def _layouts(entries: tuple[tuple[int, bytes], ...]) -> bytes:
    parts = [_U16.pack(len(entries))]
    for tag, private in entries:
        parts.append(bytes([tag]))
        if _FIRST_PRIVATE_TAG <= tag <= _LAST_PRIVATE_TAG:
            parts += [_U16.pack(len(private)), private]
    return b"".join(parts)


def _sized(data: bytes) -> bytes:
    return _U32.pack(len(data)) + data


def _encode_hello(hello: Hello) -> bytes:
    return b"".join(
        [
            struct.pack("<IIQ", hello.protocol_version, hello.max_message_nbytes, hello.capabilities),
            _layouts(hello.layouts),
            _U16.pack(len(hello.devices)) + bytes(hello.devices),
            _U16.pack(len(hello.memory_classes)) + bytes(hello.memory_classes),
        ]
    )


def _decode_hello(kind: type[ClientHello] | type[ServerHello], c: _Cursor) -> Message:
    return kind(
        protocol_version=c.u32("protocol_version"),
        max_message_nbytes=c.u32("max_message_size"),
        capabilities=Capability(c.u64("capability_flags") & _KNOWN_CAPABILITIES),
        layouts=c.layouts(),
        devices=tuple(c.take("device tags", c.u16("device count"))),
        memory_classes=tuple(c.take("memory classes", c.u16("memory class count"))),
    )


def _decode_request(c: _Cursor) -> Message:
    return TensorRequest(
        key=c.text("key"),
        layouts=c.layouts(),
        preferred_device=c.u8("preferred_device"),
        min_alignment=c.u32("min_alignment"),
        request_flags=c.u32("request_flags"),
    )


def _decode_descriptor(c: _Cursor) -> Message:
    # The descriptor says its own length; it is followed by exactly 16 bytes, so the two must agree.
    if c.num_left < 16 + 20:
        raise ProtocolError(f"payload of {c.num_left} bytes is too short for a descriptor and 16 bytes")
    descriptor = bytes(c.take("descriptor", c.num_left - 16))
    declared = int.from_bytes(descriptor[6:10], "little")
    if declared != len(descriptor):
        raise ProtocolError(
            f"must be the {len(descriptor)} bytes of the descriptor in its message",
            field="descriptor_length",
            value=declared,
        )
    return TensorDescriptorMessage(
        descriptor=descriptor,
        total_data_nbytes=c.u64("total_data_bytes"),
        shard_index=c.u32("shard_index"),
        total_shards=c.u32("total_shards"),
    )


def _decode_data(c: _Cursor) -> Message:
    return TensorDataMessage(offset_nbytes=c.u64("byte_offset_in_buffer"), data=c.take("data", c.num_left))


def _decode_put(c: _Cursor) -> Message:
    return TensorPut(
        key=c.text("key"),
        descriptor=bytes(c.take("descriptor", c.u32("length of descriptor"))),
        total_data_nbytes=c.u64("total_data_bytes"),
    )


def _decode_register(c: _Cursor) -> Message:
    return RdmaRegister(
        remote_addr=c.u64("remote_addr"),
        nbytes=c.u64("length"),
        rkey=bytes(c.take("rkey", c.u32("length of rkey"))),
    )


def _whole(decode: Callable[[_Cursor], Message]) -> Callable[[memoryview], Message]:
    def decode_payload(payload: memoryview) -> Message:
        cursor = _Cursor(payload)
        message = decode(cursor)
        cursor.end()
        return message

    return decode_payload


def _empty(message: Message) -> Callable[[memoryview], Message]:
    def decode_payload(payload: memoryview) -> Message:
        if payload:
            raise ProtocolError(f"{len(payload)} bytes follow the last field of the payload")
        return message

    return decode_payload


FIXED_DECODERS: dict[int, Callable[[memoryview], Message]] = {
    MessageType.CLIENT_HELLO: _whole(lambda c: _decode_hello(ClientHello, c)),
    MessageType.SERVER_HELLO: _whole(lambda c: _decode_hello(ServerHello, c)),
    MessageType.TENSOR_REQUEST: _whole(_decode_request),
    MessageType.TENSOR_DESCRIPTOR: _whole(_decode_descriptor),
    MessageType.TENSOR_DATA: _whole(_decode_data),
    MessageType.TENSOR_DATA_END: _empty(TensorDataEndMessage()),
    MessageType.TENSOR_PUT: _whole(_decode_put),
    MessageType.TENSOR_PUT_ACK: _empty(TensorPutAck()),
    MessageType.ERROR: _whole(lambda c: ErrorMessage(c.u32("error_code"), c.text("message"))),
    MessageType.PING: _empty(Ping()),
    MessageType.PONG: _empty(Pong()),
    MessageType.RDMA_REGISTER: _whole(_decode_register),
    MessageType.RDMA_READY: _empty(RdmaReady()),
}
"""Payload decoder of each message type 1 to 13; each raises :class:`ProtocolError` and nothing else."""


def _encode_request(message: TensorRequest) -> bytes:
    tail = struct.pack("<BII", message.preferred_device, message.min_alignment, message.request_flags)
    return _sized(message.key.encode()) + _layouts(message.layouts) + tail


def _encode_descriptor(message: TensorDescriptorMessage) -> bytes:
    return message.descriptor + struct.pack(
        "<QII", message.total_data_nbytes, message.shard_index, message.total_shards
    )


def _encode_put(message: TensorPut) -> bytes:
    return _sized(message.key.encode()) + _sized(message.descriptor) + _U64.pack(message.total_data_nbytes)


def _encode_register(message: RdmaRegister) -> bytes:
    return struct.pack("<QQ", message.remote_addr, message.nbytes) + _sized(message.rkey)


def _no_payload(message: Message) -> bytes:
    return b""


FIXED_ENCODERS: dict[type[Any], tuple[MessageType, Callable[[Any], bytes | list[bytes | memoryview]]]] = {
    ClientHello: (MessageType.CLIENT_HELLO, _encode_hello),
    ServerHello: (MessageType.SERVER_HELLO, _encode_hello),
    TensorRequest: (MessageType.TENSOR_REQUEST, _encode_request),
    TensorDescriptorMessage: (MessageType.TENSOR_DESCRIPTOR, _encode_descriptor),
    TensorDataMessage: (MessageType.TENSOR_DATA, lambda m: [_U64.pack(m.offset_nbytes), m.data]),
    TensorDataEndMessage: (MessageType.TENSOR_DATA_END, _no_payload),
    TensorPut: (MessageType.TENSOR_PUT, _encode_put),
    TensorPutAck: (MessageType.TENSOR_PUT_ACK, _no_payload),
    ErrorMessage: (MessageType.ERROR, lambda m: _U32.pack(m.code) + _sized(m.text.encode())),
    Ping: (MessageType.PING, _no_payload),
    Pong: (MessageType.PONG, _no_payload),
    RdmaRegister: (MessageType.RDMA_REGISTER, _encode_register),
    RdmaReady: (MessageType.RDMA_READY, _no_payload),
}
"""Type of each of the format's own messages, and what makes its payload: parts where that saves copying page data."""
