"""Bytes with their meaning beside them: each field of a descriptor as a row, and the rule that it breaks.

This file explains and never decides: the verdict is what `decode` says. Control messages are in ``annotate_messages``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from struct import Struct
from typing import Any

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.codec import PREFIX_NBYTES, decode, descriptor_length
from hurray_rdma.format.cursor import BytesLike
from hurray_rdma.format.elements import BY_TAG
from hurray_rdma.format.quantization import MXFP, NF4, NO_BUFFER, PerBlockAffine, PerChannelAffine, PerTensorAffine
from hurray_rdma.format.tags import DeviceTag, Dialect, IndexType, KvRole, MemoryClass, SyncMode, grade, layout_name

__all__ = ["AnnotatedField", "Annotation", "annotate_descriptor", "annotate_descriptors"]


@dataclass(frozen=True, slots=True)
class AnnotatedField:
    """One field: where it lies in the input, its bytes, what it says, and the rule it breaks, if it breaks one."""

    offset: int
    raw: bytes
    field: str
    meaning: str
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Annotation:
    """One descriptor or message of the input.

    Attributes:
        kind: ``descriptor``, ``message`` or ``bytes`` (what belongs to neither).
        name: what it is, in words.
        offset: where it starts in the input.
        fields: its rows, in the order of the bytes.
        problem: the first rule that a strict reader finds broken, None for accept.
    """

    kind: str
    name: str
    offset: int
    fields: tuple[AnnotatedField, ...]
    problem: str | None = None

    @property
    def verdict(self) -> str:
        """``accept`` or ``reject``, as a strict reader says."""
        return "accept" if self.problem is None else "reject"


class CutError(Exception):
    """The bytes ended inside a field; the rows so far tell where."""


class Rows:
    """Collects rows while walking forward through ``view[start:limit]``; stops with `CutError` where bytes end."""

    def __init__(self, view: memoryview, *, start: int, limit: int) -> None:
        self.view = view
        self.at = start
        self.limit = min(limit, len(view))
        self.rows: list[AnnotatedField] = []

    def take(self, name: str, size: int, meaning: Callable[[bytes], str] | str = "") -> bytes:
        """One row of ``size`` raw bytes."""
        raw = bytes(self.view[self.at : min(self.at + size, self.limit)])
        if len(raw) < size:
            self.rows.append(AnnotatedField(self.at, raw, name, "", f"needs {size} bytes, {len(raw)} are left"))
            self.at = self.limit
            raise CutError
        text = meaning if isinstance(meaning, str) else meaning(raw)
        self.rows.append(AnnotatedField(self.at, raw, name, text))
        self.at += size
        return raw

    def number(self, name: str, code: str, meaning: Callable[[Any], str] = str) -> Any:
        """One row of a little-endian number; its value."""
        fields = Struct(f"<{code}")
        raw = self.take(name, fields.size, lambda raw: meaning(fields.unpack(raw)[0]))
        return fields.unpack(raw)[0]

    def rest(self, name: str, meaning: str) -> None:
        """What is left up to the limit, as one row, if anything is."""
        if self.at < self.limit:
            self.take(name, self.limit - self.at, meaning)


def annotate_descriptors(data: BytesLike, *, dialect: Dialect | None = None) -> list[Annotation]:
    """Annotate descriptors that lie back to back; stops behind the first whose end cannot be told."""
    view = memoryview(data).cast("B")
    found: list[Annotation] = []
    start = 0
    while start < len(view):
        found.append(annotate_descriptor(view, start=start, dialect=dialect))
        try:
            start += descriptor_length(view[start : start + PREFIX_NBYTES])
        except DescriptorError:
            break
    return found


def annotate_descriptor(
    data: BytesLike, *, start: int = 0, limit: int | None = None, dialect: Dialect | None = None
) -> Annotation:
    """Annotate the descriptor at ``start``, whose bytes end at ``limit`` at the latest."""
    view = memoryview(data).cast("B")
    end = len(view) if limit is None else min(limit, len(view))
    name, error = "block-paged descriptor", None
    try:
        descriptor = decode(view[start:end], dialect=dialect)
        layer = "no layer" if descriptor.layer_index is None else f"layer {descriptor.layer_index}"
        name += f", {descriptor.kv_role.wire_name} of {layer}"
    except DescriptorError as caught:
        error = caught
    try:
        end = min(end, start + descriptor_length(view[start:end]))
    except DescriptorError:
        name = "not a descriptor"
    rows = Rows(view, start=start, limit=end)
    with suppress(CutError):
        _walk(rows, dialect)
    fields = tuple(rows.rows)
    if error is None:
        return Annotation("descriptor", name, start, fields)
    return Annotation("descriptor", name, start, _blame(fields, error, start), str(error))


def _blame(fields: tuple[AnnotatedField, ...], error: DescriptorError, start: int) -> tuple[AnnotatedField, ...]:
    """Put the rule beside the row in which the error's offset lies."""
    if error.offset is None:
        return fields
    at = start + error.offset
    text = error.rule if error.fix is None else f"{error.rule}. {error.fix}"
    return tuple(
        replace(each, problem=text) if each.offset <= at < each.offset + max(len(each.raw), 1) else each
        for each in fields
    )


def _walk(rows: Rows, dialect: Dialect | None) -> None:
    rows.take("magic", 4, repr)
    rows.number("version_major", "B")
    rows.number("version_minor", "B")
    rows.number("descriptor_length", "I", lambda value: f"{value} bytes")
    flags = rows.number("flags", "I", _flags)
    rows.number("type_tag", "B", lambda tag: BY_TAG[tag].wire_name if tag in BY_TAG else grade(tag))
    layout = rows.number("layout_tag", "B", lambda tag: layout_name(tag, dialect))
    rank = rows.number("rank", "I")
    if rank != 3 or layout not in (0x0A, 0x0B):
        rows.rest("rest", "not read: this is no block-paged descriptor of rank 3")
        return
    for name in ("total_tokens", "num_heads", "head_dim"):
        rows.number(f"shape: {name}", "Q")
    rows.number("byte_offset", "Q")
    rows.number("page_size", "I", lambda value: f"{value} tokens")
    rows.number("num_pages", "Q")
    rows.number("paged_axis", "I")
    rows.number("num_seqs", "I")
    rows.number("kv_role", "B", _namer(KvRole))
    rows.number("layer_index", "I", lambda value: "not layer-scoped" if value == NO_BUFFER else str(value))
    rows.number("block_table_index_type", "B", _namer(IndexType))
    rows.take("reserved", 6)
    for index in range(rows.number("buffer_count", "B")):
        _walk_buffer(rows, index)
    if flags & 1:
        _walk_quantization(rows)
    if flags & 2:
        rows.take("shard section", 48, "not allowed for block-paged")
    if flags & 8:
        _walk_statistics(rows)
    if flags & 4:
        _walk_extension(rows)
    if flags & 16:
        rows.number("composite_member: role", "B", lambda role: {0: "correction", 1: "base"}.get(role, "reserved"))
        rows.take("composite_member: reserved", 15)
    rows.rest("rest", "fields that version 1.0 does not have")


def _walk_buffer(rows: Rows, index: int) -> None:
    what = ("page_pool", "block_table", "seq_ptr")[index] if index < 3 else "parameters"
    name = f"buffers[{index}]"
    rows.number(f"{name}.byte_size", "Q", lambda value: f"{value} bytes of {what}")
    rows.number(f"{name}.alignment", "I")
    rows.number(f"{name}.device_tag", "B", _namer(DeviceTag, reserved_from=0x09))
    rows.number(f"{name}.sync_mode", "B", _namer(SyncMode))
    rows.number(f"{name}.memory_class", "B", _namer(MemoryClass))
    rows.take(f"{name}.reserved", 1)


def _walk_quantization(rows: Rows) -> None:
    length = rows.number("quantization_length", "I", lambda value: f"{value} bytes")
    section = Rows(rows.view, start=rows.at, limit=min(rows.at + length, rows.limit))
    try:
        tag = section.number(
            "quantization: scheme_tag", "B", lambda tag: _SCHEMES.get(tag, grade(tag, reserved_from=0x60))
        )
        section.number("quantization: scheme_version", "B")
        section.number("quantization: flags", "H", lambda value: "SYMMETRIC" if value == 1 else f"0x{value:04X}")
        for name, code in _SCHEME_FIELDS.get(tag, ()):
            meaning = _buffer_index if name.endswith("buffer_index") else str
            section.number(f"quantization: {name}", code, meaning)
        if tag in _SCHEME_RESERVED:
            section.take("quantization: reserved", _SCHEME_RESERVED[tag])
        section.rest("quantization: padding", "ignored" if tag in _SCHEMES else "private or unknown scheme")
    finally:
        rows.rows += section.rows
        rows.at = section.at


def _walk_statistics(rows: Rows) -> None:
    rows.number("statistics: computed_mask", "I", lambda value: f"0x{value:08X}")
    rows.take("statistics: reserved", 4)
    rows.number("statistics: nnz", "Q")
    for name in ("sparsity_ratio", "value_min", "value_max", "value_abs_max", "value_mean", "value_stddev"):
        rows.number(f"statistics: {name}", "d")
    for name in ("nm_n", "nm_m", "has_nan", "has_inf"):
        rows.number(f"statistics: {name}", "B")
    rows.take("statistics: reserved2", 4)


def _walk_extension(rows: Rows) -> None:
    rows.number("extension_type: bit_width", "I")
    for name in ("packing_factor", "is_float", "is_signed", "sign_bits", "exponent_bits", "mantissa_bits"):
        rows.number(f"extension_type: {name}", "B")
    rows.take("extension_type: reserved", 2)
    rows.number("extension_type: exponent_bias", "I")
    rows.number("extension_type: has_nan", "B")
    rows.number("extension_type: has_inf", "B")
    rows.take("extension_type: reserved2", 2)


_SCHEMES = {each.tag: each.wire_name for each in (PerTensorAffine, PerChannelAffine, PerBlockAffine, NF4, MXFP)}
_BLOCK_FIELDS = (("axis", "I"), ("block_size", "I"), ("scale_buffer_index", "I"))
_TAIL_FIELDS = (("zero_point_buffer_index", "I"), ("scale_type_tag", "B"))
_SCHEME_FIELDS: dict[int, tuple[tuple[str, str], ...]] = {
    PerTensorAffine.tag: (("scale", "f"), ("zero_point", "i")),
    PerChannelAffine.tag: (("axis", "I"), ("scale_buffer_index", "I"), *_TAIL_FIELDS),
    PerBlockAffine.tag: (*_BLOCK_FIELDS, *_TAIL_FIELDS),
    NF4.tag: _BLOCK_FIELDS,
    MXFP.tag: _BLOCK_FIELDS,
}
_SCHEME_RESERVED = {PerTensorAffine.tag: 4, PerChannelAffine.tag: 3, PerBlockAffine.tag: 3}
_FLAG_NAMES = ("HAS_QUANTIZATION", "HAS_SHARD", "HAS_EXTENSION_TYPE", "HAS_STATISTICS", "HAS_COMPOSITE_MEMBER")


def _buffer_index(value: int) -> str:
    return "none" if value == NO_BUFFER else f"buffers[{value}]"


def _flags(value: int) -> str:
    names = [name for bit, name in enumerate(_FLAG_NAMES) if value >> bit & 1]
    if value >> len(_FLAG_NAMES):
        names.append(f"reserved bits 0x{value & ~0x1F:08X}")
    return " | ".join(names) or "no optional sections"


def _namer(
    kind: type[KvRole | IndexType | DeviceTag | SyncMode | MemoryClass], *, reserved_from: int = 0x80
) -> Callable[[int], str]:
    names = {each.value: each.name.lower() for each in kind}
    return lambda value: names.get(value) or grade(value, reserved_from=reserved_from, zero_is_invalid=False)
