"""Captured control-channel bytes with their meaning: the format's own messages field by field, private ones by length.

Source: WIRE.md, Network messages (interchange). Descriptors inside messages are walked by ``annotate``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType

from hurray_rdma.format.annotate import (
    AnnotatedField,
    Annotation,
    CutError,
    Rows,
    annotate_descriptor,
    annotate_descriptors,
)
from hurray_rdma.format.cursor import BytesLike
from hurray_rdma.format.tags import DeviceTag, Dialect, MemoryClass, is_private, layout_name

__all__ = ["MESSAGE_NAMES", "annotate", "annotate_messages"]

MESSAGE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        1: "CLIENT_HELLO",
        2: "SERVER_HELLO",
        3: "TENSOR_REQUEST",
        4: "TENSOR_DESCRIPTOR",
        5: "TENSOR_DATA",
        6: "TENSOR_DATA_END",
        7: "TENSOR_PUT",
        8: "TENSOR_PUT_ACK",
        9: "ERROR",
        10: "PING",
        11: "PONG",
        12: "RDMA_REGISTER",
        13: "RDMA_READY",
    }
)
_ERRORS = {
    1: "PROTOCOL_VERSION_MISMATCH",
    2: "UNKNOWN_TENSOR",
    3: "LAYOUT_UNAVAILABLE",
    4: "TRANSCODE_LIMIT_EXCEEDED",
    5: "DEVICE_UNAVAILABLE",
    6: "INVALID_MESSAGE",
    7: "MESSAGE_TOO_LARGE",
    8: "SHARD_MISMATCH",
}
_CAPABILITIES = ("TRANSCODING", "PARALLEL_STREAMS", "RDMA_DATA_PLANE", "RDMA_GPUDIRECT")
_REQUEST_FLAGS = ("ALLOW_TRANSCODE", "PARALLEL_OK")


def annotate(
    data: BytesLike, *, dialect: Dialect | None = None, private_names: Mapping[int, str] | None = None
) -> list[Annotation]:
    """Annotate descriptors, or a capture of control messages: bytes that start with b"HRRY" are descriptors.

    Args:
        data: one or more descriptors back to back, or messages of one direction of a control channel.
        dialect: the dialect that was agreed on; None recognises both.
        private_names: names of private message types (0xF0..0xFE).
    """
    view = memoryview(data).cast("B")
    # A message of type 0x59525248, which is what "HRRY" would be, does not exist.
    if len(view) and b"HRRY".startswith(bytes(view[:4])):
        return annotate_descriptors(view, dialect=dialect)
    return annotate_messages(view, dialect=dialect, private_names=private_names)


def annotate_messages(
    data: BytesLike, *, dialect: Dialect | None = None, private_names: Mapping[int, str] | None = None
) -> list[Annotation]:
    """Annotate messages that lie back to back; stops where a header or payload is cut off."""
    view = memoryview(data).cast("B")
    names = {**MESSAGE_NAMES, **(private_names or {})}
    found: list[Annotation] = []
    start = 0
    while start < len(view):
        annotation, start = _annotate_message(view, start, names, dialect)
        found.append(annotation)
    return found


def _annotate_message(
    view: memoryview, start: int, names: Mapping[int, str], dialect: Dialect | None
) -> tuple[Annotation, int]:
    """One message and where the next one starts."""
    rows = Rows(view, start=start, limit=len(view))
    name, problem = "not a message", None
    end = len(view)
    with suppress(CutError):
        kind = rows.number("message_type", "I", lambda value: _message_name(value, names))
        stream = rows.number("stream_id", "I")
        length = rows.number("payload_length", "I", lambda value: f"{value} bytes")
        end = min(rows.at + length, len(view))
        name = f"{_message_name(kind, names)} on stream {stream}"
        if kind not in MESSAGE_NAMES and not is_private(kind):
            problem = f"message_type = {kind}: must be 1..13 or private (0xF0..0xFE)"
            rows.rest("rest", "not read: messages cannot be told apart behind an unknown one")
            return Annotation("message", name, start, tuple(rows.rows), problem), len(view)
        if stream == 0:
            problem = "stream_id = 0: stream 0 is reserved"
        if rows.at + length > end:
            missing = rows.at + length - end
            problem = problem or f"payload_length = {length}: the capture ends {missing} bytes early"
        payload = Rows(view, start=rows.at, limit=end)
        try:
            _PAYLOADS.get(kind, _opaque)(payload, dialect)
            if payload.at < payload.limit:
                payload.rest("rest", "bytes behind the last field")
                payload.rows[-1] = _with_problem(payload.rows[-1], "the payload is longer than its fields")
        finally:
            rows.rows += payload.rows
    problem = problem or next((f"{row.field}: {row.problem}" for row in rows.rows if row.problem), None)
    return Annotation("message", name, start, tuple(rows.rows), problem), end


def _message_name(kind: int, names: Mapping[int, str]) -> str:
    return names.get(kind) or (f"private 0x{kind:02X}" if is_private(kind) else "unknown")


def _with_problem(row: AnnotatedField, problem: str) -> AnnotatedField:
    return AnnotatedField(row.offset, row.raw, row.field, row.meaning, problem)


def _hello(rows: Rows, _dialect: Dialect | None) -> None:
    rows.number("protocol_version", "I")
    rows.number("max_message_size", "I", lambda value: f"{value} bytes")
    rows.number("capability_flags", "Q", _bit_namer(_CAPABILITIES))
    _layouts(rows)
    for name, kind in (("device_tags", DeviceTag), ("memory_classes", MemoryClass)):
        count = rows.number(f"{name}: count", "H")
        rows.take(name, count, _tag_namer({each.value: each.name.lower() for each in kind}))


def _layouts(rows: Rows) -> None:
    for index in range(rows.number("layouts: count", "H")):
        tag = rows.number(f"layouts[{index}]", "B", lambda tag: layout_name(tag, None))
        if is_private(tag):
            size = rows.number(f"layouts[{index}].length", "H")
            rows.take(f"layouts[{index}].bytes", size, repr)


def _text(rows: Rows, name: str) -> None:
    size = rows.number(f"{name}: length", "I")
    rows.take(name, size, lambda raw: repr(raw.decode("utf-8", "backslashreplace")))
    try:
        rows.rows[-1].raw.decode("utf-8")
    except UnicodeDecodeError:
        rows.rows[-1] = _with_problem(rows.rows[-1], "must be UTF-8")


def _request(rows: Rows, _dialect: Dialect | None) -> None:
    _text(rows, "key")
    _layouts(rows)
    rows.number(
        "preferred_device",
        "B",
        lambda tag: _tag_namer({each.value: each.name.lower() for each in DeviceTag})(bytes([tag])),
    )
    rows.number("min_alignment", "I")
    rows.number("request_flags", "I", _bit_namer(_REQUEST_FLAGS))


def _nested(rows: Rows, limit: int, dialect: Dialect | None) -> None:
    inner = annotate_descriptor(rows.view, start=rows.at, limit=limit, dialect=dialect)
    rows.rows += (
        AnnotatedField(each.offset, each.raw, f"descriptor: {each.field}", each.meaning, each.problem)
        for each in inner.fields
    )
    if inner.problem is not None and not any(each.problem for each in inner.fields):
        rows.rows.append(AnnotatedField(rows.at, b"", "descriptor", inner.name, inner.problem))
    last = inner.fields[-1]
    rows.at = last.offset + len(last.raw)
    if inner.name == "not a descriptor":
        rows.rest("rest", "not read: where the descriptor ends cannot be told")
        raise CutError


def _descriptor(rows: Rows, dialect: Dialect | None) -> None:
    _nested(rows, rows.limit, dialect)
    rows.number("total_data_bytes", "Q")
    rows.number("shard_index", "I")
    rows.number("total_shards", "I")


def _put(rows: Rows, dialect: Dialect | None) -> None:
    _text(rows, "key")
    size = rows.number("descriptor_length", "I", lambda value: f"{value} bytes")
    end = rows.at + size
    _nested(rows, min(end, rows.limit), dialect)
    if rows.at < min(end, rows.limit):
        rows.take("rest of descriptor", min(end, rows.limit) - rows.at)
        rows.rows[-1] = _with_problem(rows.rows[-1], f"the descriptor is shorter than the {size} bytes given for it")
    rows.number("total_data_bytes", "Q")


def _data(rows: Rows, _dialect: Dialect | None) -> None:
    rows.number("byte_offset_in_buffer", "Q")
    rows.rest("data", f"{rows.limit - rows.at} bytes")


def _error(rows: Rows, _dialect: Dialect | None) -> None:
    rows.number(
        "error_code",
        "I",
        lambda code: _ERRORS.get(code) or (f"implementation 0x{code:02X}" if is_private(code) else "unknown"),
    )
    _text(rows, "message")


def _register(rows: Rows, _dialect: Dialect | None) -> None:
    rows.number("remote_addr", "Q", lambda value: f"0x{value:X}")
    rows.number("length", "Q", lambda value: f"{value} bytes")
    size = rows.number("rkey: length", "I")
    rows.take("rkey", size, "packed UCX rkey")


def _empty(_rows: Rows, _dialect: Dialect | None) -> None:
    """No fields."""


def _opaque(rows: Rows, _dialect: Dialect | None) -> None:
    rows.rest("payload", f"{rows.limit - rows.at} bytes, private")


def _bit_namer(names: tuple[str, ...]) -> Callable[[int], str]:
    def meaning(value: int) -> str:
        known = [name for bit, name in enumerate(names) if value >> bit & 1]
        rest = value >> len(names) << len(names)
        return " | ".join(known + ([f"0x{rest:X}"] if rest else [])) or "none"

    return meaning


def _tag_namer(names: Mapping[int, str]) -> Callable[[bytes], str]:
    return lambda raw: ", ".join(names.get(tag) or f"0x{tag:02X}" for tag in raw) or "none"


_PAYLOADS: dict[int, Callable[[Rows, Dialect | None], None]] = {
    1: _hello,
    2: _hello,
    3: _request,
    4: _descriptor,
    5: _data,
    6: _empty,
    7: _put,
    8: _empty,
    9: _error,
    10: _empty,
    11: _empty,
    12: _register,
    13: _empty,
}
