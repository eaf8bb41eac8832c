"""Bytes to `Descriptor` and back: decode in numbered steps in the specification's order, encode in one pass.

Every read goes through the bounded cursor; any bytes give a `Descriptor` or a `DescriptorError`. Source: metadata
(Overall Descriptor Structure) and ADR-024 section 5; tags of the two dialects as in WIRE.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from struct import Struct

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.buffers import ENTRY, BufferEntry
from hurray_rdma.format.counts import mark_bytes
from hurray_rdma.format.cursor import BytesLike, Cursor
from hurray_rdma.format.descriptor import Descriptor, check_tensor
from hurray_rdma.format.elements import BY_TAG, ExtensionType, type_tag_rule
from hurray_rdma.format.quantization import Quantization, decode_quantization, encode_quantization
from hurray_rdma.format.rules import OFFSETS, U32
from hurray_rdma.format.sections import (
    decode_extension,
    decode_member,
    decode_statistics,
    encode_extension,
    encode_member,
    encode_statistics,
    shifted,
)
from hurray_rdma.format.tags import Dialect, DialectName, IndexType, KvRole, is_private, layout_name

__all__ = [
    "HEADER_NBYTES",
    "PREFIX_NBYTES",
    "decode",
    "descriptor_length",
    "encode",
    "encode_many",
    "encode_tensors",
    "mark_tensors",
]

MAGIC = b"HRRY"
PREFIX_NBYTES = 10
"""Bytes from which the length of a descriptor is known."""
HEADER_NBYTES = 20

HAS_QUANTIZATION, HAS_SHARD, HAS_EXTENSION_TYPE, HAS_STATISTICS, HAS_COMPOSITE_MEMBER = (1 << bit for bit in range(5))
DEFINED_FLAGS = 0x1F

_PREFIX = Struct("<4sBBI")
_HEADER = Struct("<4sBBIIBBI")
_FIXED = Struct("<QQQQIQIIBIB6s")
_COUNT = Struct("<B")
_LENGTH = Struct("<I")
_WHOLE = Struct("<4sBBIIBBIQQQQIQIIBIB6sB")
_ROLE_AND_LAYER = Struct("<BI")
_HEAD_FIELDS = Struct("<BBHIB")

_ROLES: dict[int, KvRole] = {each.value: each for each in KvRole}
_ROLES_BY_NAME: dict[object, KvRole] = {each.wire_name: each for each in KvRole}
_INDEX_TYPES: dict[int, IndexType] = {each.value: each for each in IndexType}
_RESERVED6 = bytes(6)


def descriptor_length(prefix: BytesLike, *, max_nbytes: int | None = None) -> int:
    """Whole length in bytes of the descriptor that starts with these 10 bytes or more (metadata, Fixed Header).

    Args:
        prefix: at least the first 10 bytes.
        max_nbytes: largest length to accept.

    Raises:
        DescriptorError: too few bytes, wrong magic, unsupported version, length below 20 or above ``max_nbytes``.
    """
    view = memoryview(prefix).cast("B")
    magic, major, _minor, length = Cursor(view, limit=len(view), what="the end of the data").unpack(_PREFIX, "magic")
    if magic != MAGIC:
        raise _error("magic", bytes(magic), 0, "a descriptor starts with b'HRRY'")
    if major != 1:
        raise _error("version_major", major, 4, "this reader knows major version 1")
    if length < HEADER_NBYTES:
        raise _error("descriptor_length", length, 6, f"a descriptor has at least {HEADER_NBYTES} bytes")
    if max_nbytes is not None and length > max_nbytes:
        raise _error("descriptor_length", length, 6, f"longer than the {max_nbytes} bytes agreed on")
    return int(length)


def decode(data: BytesLike, *, dialect: Dialect | DialectName | None = None, strict: bool = True) -> Descriptor:
    """Decode the block-paged descriptor that ``data`` starts with; bytes beyond descriptor_length are not looked at.

    Args:
        data: bytes-like, contiguous.
        dialect: the dialect that was agreed on; None recognises both.
        strict: reject every broken rule. A permissive reader (False) keeps what can be tolerated in
            ``Descriptor.findings``: schemes without a paging rule, unknown schemes, paged_axis, device alignment below
            4096, parameter buffers nothing refers to.

    Raises:
        DescriptorError: the bytes break a rule; carries field, value, offset and rule.
    """
    chosen = None if dialect is None else Dialect.of(dialect)
    view = memoryview(data).cast("B")
    # 1. magic, version, length
    length = descriptor_length(view)
    if length > len(view):
        raise _error("descriptor_length", length, 6, f"only {len(view)} bytes are at hand")
    cursor = Cursor(view, limit=length)
    # 2. flags, type, layout, rank
    _magic, _major, minor, _length, flags, type_tag, layout_tag, rank = cursor.unpack(_HEADER, "header")
    if flags & ~DEFINED_FLAGS:
        raise _error("flags", f"0x{flags:08X}", 10, "bits 5..31 are reserved and must be 0")
    rule = type_tag_rule(type_tag)
    if rule is not None:
        raise _error("type_tag", type_tag, 14, rule)
    if layout_tag == 0x0B and chosen is not Dialect.HURRAY_0_2 and _is_composite_head(view, length, flags, rank):
        rule = "a hurray-0.2 composite head owns no buffers; this reader takes block-paged descriptors only"
        raise _error("layout_tag", layout_tag, 15, rule)
    found = _recognise(layout_tag, chosen)
    if rank != 3:
        raise _error("rank", rank, 16, "block-paged tensors have rank 3: tokens, heads, head_dim")
    if flags & HAS_SHARD:
        raise _error("flags", f"0x{flags:08X}", 10, "a block-paged tensor cannot carry a shard section (bit 1)")
    if bool(flags & HAS_EXTENSION_TYPE) != is_private(type_tag):
        rule = f"bit 2 (extension type) is set exactly when type_tag is private, but it is 0x{type_tag:02X}"
        raise _error("flags", f"0x{flags:08X}", 10, rule)
    # 3. shape, byte_offset, layout fields
    (
        total_tokens,
        num_heads,
        head_dim,
        byte_offset,
        page_size,
        num_pages,
        paged_axis,
        num_seqs,
        role,
        layer,
        index_type,
        reserved,
    ) = cursor.unpack(_FIXED, "shape")
    if byte_offset:
        raise _fixed_error("byte_offset", byte_offset, "must be 0: pages are found through the block table")
    if role not in _ROLES:
        raise _fixed_error("kv_role", role, "must be 0 (key), 1 (value) or 2 (fused)")
    if index_type not in _INDEX_TYPES:
        raise _fixed_error("block_table_index_type", index_type, "must be 0 (uint32) or 1 (uint64)")
    if reserved != _RESERVED6:
        raise _fixed_error("layout_reserved", reserved.hex(), "reserved bytes must be 0")
    # 4. buffer table
    buffers = _read_buffers(cursor)
    # 5. optional sections
    quantization = _read_quantization(cursor, strict) if flags & HAS_QUANTIZATION else None
    statistics = decode_statistics(cursor) if flags & HAS_STATISTICS else None
    extension = decode_extension(cursor, type_tag) if flags & HAS_EXTENSION_TYPE else None
    member = decode_member(cursor) if flags & HAS_COMPOSITE_MEMBER else None
    # 6. nothing is left over, but in a later minor version
    if minor == 0 and cursor.position != length:
        rule = f"the fields of version 1.0 end at byte {cursor.position}"
        raise _error("descriptor_length", length, 6, rule)
    # 7. the rules between fields
    return Descriptor(
        extension or BY_TAG[type_tag],
        total_tokens,
        num_heads,
        head_dim,
        page_size,
        num_pages,
        num_seqs,
        _ROLES[role],
        None if layer == U32 else layer,
        _INDEX_TYPES[index_type],
        buffers,
        quantization,
        statistics,
        member,
        paged_axis,
        found,
        (),
        not strict,
    )


def encode(descriptor: Descriptor, *, dialect: Dialect | DialectName = Dialect.ADR_024) -> bytes:
    """The bytes of a descriptor in a dialect.

    Raises:
        DescriptorError: the dialect is unknown, or the descriptor has findings that only a permissive reader tolerates.
    """
    layout_tag = Dialect.of(dialect).layout_tag
    d = descriptor
    if d.findings:
        raise d.findings[0].error()
    buffers = d.buffers
    tail = _pack_buffers(buffers)
    flags = 0
    if d.quantization is not None:
        flags |= HAS_QUANTIZATION
        payload = encode_quantization(d.quantization)
        tail += _LENGTH.pack(len(payload)) + payload
    if d.statistics is not None:
        flags |= HAS_STATISTICS
        tail += encode_statistics(d.statistics)
    element_type = d.element_type
    if isinstance(element_type, ExtensionType):
        flags |= HAS_EXTENSION_TYPE
        tail += encode_extension(element_type)
        type_tag = element_type.tag
    else:
        type_tag = element_type.value
    if d.composite_member is not None:
        flags |= HAS_COMPOSITE_MEMBER
        tail += encode_member(d.composite_member)
    return (
        _WHOLE.pack(
            MAGIC,
            1,
            0,
            _WHOLE.size + len(tail),
            flags,
            type_tag,
            layout_tag,
            3,
            d.total_tokens,
            d.num_heads,
            d.head_dim,
            0,
            d.page_size,
            d.num_pages,
            0,
            d.num_seqs,
            d.kv_role,
            U32 if d.layer_index is None else d.layer_index,
            d.block_table_index_type,
            _RESERVED6,
            len(buffers),
        )
        + tail
    )


def encode_many(descriptors: Iterable[Descriptor], *, dialect: Dialect | DialectName = Dialect.ADR_024) -> bytes:
    """The descriptors one after another, fast where they differ in role and layer alone, as those of a snapshot do.

    Descriptors made by `Descriptor.for_tensors` share their other fields, so that telling them apart costs little.

    Raises:
        DescriptorError: as `encode`.
    """
    chosen = Dialect.of(dialect)
    out = bytearray()
    previous: Descriptor | None = None
    template = b""
    for descriptor in descriptors:
        if previous is None or not _same_but_tensor(previous, descriptor):
            template = encode(descriptor, dialect=chosen)
            previous = descriptor
            out += template
            continue
        start = len(out) + OFFSETS["kv_role"]
        out += template
        layer = U32 if descriptor.layer_index is None else descriptor.layer_index
        _ROLE_AND_LAYER.pack_into(out, start, descriptor.kv_role, layer)
    return bytes(out)


def encode_tensors(
    first: Descriptor,
    tensors: Iterable[tuple[KvRole | str, int | None]],
    *,
    dialect: Dialect | DialectName = Dialect.ADR_024,
) -> bytes:
    """``encode_many(first.for_tensors(tensors))`` without making the descriptors: a fraction of a microsecond for each.

    Args:
        first: what they share; its own role and layer do not count.
        tensors: (role or its name, layer) of each, in order.
        dialect: as in `encode`.

    Raises:
        DescriptorError: as `encode`, or a role or layer is out of range.
    """
    return mark_bytes(encode(first, dialect=dialect), mark_tensors(tensors))


def mark_tensors(tensors: Iterable[tuple[KvRole | str, int | None]]) -> tuple[bytes, ...]:
    """What tells the descriptors of a snapshot apart: the bytes of kv_role and layer_index of each.

    Args:
        tensors: (role or its name, layer) of each, in order.

    Raises:
        DescriptorError: a role or layer is out of range.
    """
    marks = []
    for role, layer in tensors:
        kv_role = _ROLES_BY_NAME.get(role, role)
        check_tensor(kv_role, layer)
        marks.append(_ROLE_AND_LAYER.pack(kv_role, U32 if layer is None else layer))
    return tuple(marks)


def _same_but_tensor(a: Descriptor, b: Descriptor) -> bool:
    return (
        a.buffers is b.buffers
        and a.element_type is b.element_type
        and a.quantization is b.quantization
        and a.statistics is b.statistics
        and a.composite_member is b.composite_member
        and a.findings == b.findings
        and a.shape == b.shape
        and (a.page_size, a.num_pages, a.num_seqs, a.block_table_index_type)
        == (b.page_size, b.num_pages, b.num_seqs, b.block_table_index_type)
    )


_TABLES = {count: Struct("<" + "QIBBBx" * count) for count in (3, 4, 5)}


def _pack_buffers(buffers: tuple[BufferEntry, ...]) -> bytes:
    fields: list[int] = []
    for entry in buffers:
        fields += (entry.byte_size, entry.alignment, entry.device_tag, entry.sync_mode, entry.memory_class)
    return _TABLES[len(buffers)].pack(*fields)


def _read_buffers(cursor: Cursor) -> tuple[BufferEntry, ...]:
    (count,) = cursor.unpack(_COUNT, "buffer_count")
    if count < 3:
        rule = "block-paged has at least 3 buffers: page_pool, block_table, seq_ptr"
        raise _fixed_error("buffer_count", count, rule)
    start = cursor.position
    table = cursor.take(count * ENTRY.size, "buffers")
    entries = []
    for position, fields in enumerate(ENTRY.iter_unpack(table)):
        if fields[5]:
            offset = start + position * ENTRY.size + 15
            raise _error(f"buffers[{position}].reserved", fields[5], offset, "the reserved byte must be 0")
        entries.append(BufferEntry.from_wire(fields))
    return tuple(entries)


def _read_quantization(cursor: Cursor, strict: bool) -> Quantization:
    (length,) = cursor.unpack(_LENGTH, "quantization_length")
    start = cursor.position
    section = cursor.take(length, "quantization")
    try:
        return decode_quantization(section, strict=strict)
    except DescriptorError as error:
        raise shifted(error, start) from None


def _recognise(layout_tag: int, chosen: Dialect | None) -> Dialect:
    """The dialect in which the layout tag means block-paged; anything else is rejected by its name (WIRE.md)."""
    for each in Dialect if chosen is None else (chosen,):
        if layout_tag == each.layout_tag:
            return each
    where = "adr-024 and 0x0A in hurray-0.2" if chosen is None else chosen.value
    wanted = 0x0B if chosen is None else chosen.layout_tag
    rule = f"layout 0x{layout_tag:02X} is {layout_name(layout_tag, chosen)}; block-paged is 0x{wanted:02X} in {where}"
    raise _error("layout_tag", layout_tag, 15, rule)


def _is_composite_head(view: memoryview, length: int, flags: int, rank: int) -> bool:
    """Whether these are a composite head's bytes: no buffers, and exactly as long as its own fields make it."""
    if flags & (HAS_QUANTIZATION | HAS_COMPOSITE_MEMBER):
        return False
    fields_at = HEADER_NBYTES + 8 * rank + 8
    expected = fields_at + _HEAD_FIELDS.size
    expected += 16 * rank * bool(flags & HAS_SHARD) + 72 * bool(flags & HAS_STATISTICS)
    expected += 20 * bool(flags & HAS_EXTENSION_TYPE)
    if length != expected:
        return False
    composition_rule, _combine_op, reserved, _members, buffer_count = _HEAD_FIELDS.unpack_from(view, fields_at)
    known = composition_rule in (1, 2, 3) or is_private(composition_rule)
    return known and reserved == 0 and buffer_count == 0


def _fixed_error(field: str, value: object, rule: str) -> DescriptorError:
    return _error(field, value, OFFSETS[field], rule)


def _error(field: str, value: object, offset: int, rule: str) -> DescriptorError:
    return DescriptorError(rule, field=field, value=value, offset=offset)
