"""What makes the fields of a block-paged descriptor fit together: every rule once, as generators of findings.

This file reads a descriptor's fields and knows their offsets; it neither parses nor writes bytes. Sources: ADR-024
(sections 3 to 6), the block-paged layout (Buffer Table, Storage Invariants, Quantization Compatibility, Alignment).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.buffers import DEVICE_ALIGNMENT, entry_violations
from hurray_rdma.format.finding import Finding
from hurray_rdma.format.quantization import (
    MXFP,
    NF4,
    OpaqueScheme,
    PerBlockAffine,
    PerChannelAffine,
    PerTensorAffine,
)
from hurray_rdma.format.tags import IndexType, KvRole, SyncMode

if TYPE_CHECKING:
    from hurray_rdma.format.descriptor import Descriptor

__all__ = ["check_transferable"]

U32, U64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
BUFFERS_OFFSET = 85
ENTRY_NBYTES = 16
OFFSETS = {
    "total_tokens": 20,
    "num_heads": 28,
    "head_dim": 36,
    "byte_offset": 44,
    "page_size": 52,
    "num_pages": 56,
    "paged_axis": 64,
    "num_seqs": 68,
    "kv_role": 72,
    "layer_index": 73,
    "block_table_index_type": 77,
    "layout_reserved": 78,
    "buffer_count": 84,
}
_AXES = ("total_tokens", "num_heads", "head_dim")


def violations(d: Descriptor) -> Iterator[Finding]:
    """Every rule that the descriptor breaks, in the order of its bytes."""
    broken = False
    for finding in _field_violations(d):
        broken = broken or not finding.tolerable
        yield finding
    for index, entry in enumerate(d.buffers):
        for finding in entry_violations(entry, index, BUFFERS_OFFSET + ENTRY_NBYTES * index):
            broken = broken or not finding.tolerable
            yield finding
    if broken:
        return
    yield from _colocation_violations(d)
    yield from _geometry_violations(d)
    if d.quantization is not None:
        yield from _quantization_violations(d)


def _field_violations(d: Descriptor) -> Iterator[Finding]:
    """Each field by itself (ADR-024 section 3: rank and shape; section 5: the scalar fields)."""
    for name, value in zip(_AXES, d.shape, strict=True):
        if not _lies(value, 0, U64 - 1):
            sentinel = "; 2**64 - 1 marks a dynamic dimension, which pages cannot have"
            yield _finding(name, value, f"must be an integer in 0..{U64 - 1}{sentinel}")
    if not _lies(d.page_size, 1, U32):
        yield _finding("page_size", d.page_size, f"a page holds 1..{U32} tokens")
    if not _lies(d.num_pages, 0, U64):
        yield _finding("num_pages", d.num_pages, f"must be an integer in 0..{U64}")
    if d.paged_axis != 0:
        yield Finding("paged_axis", d.paged_axis, "the paged axis is 0", OFFSETS["paged_axis"], tolerable=True)
    if not _lies(d.num_seqs, 0, U32):
        yield _finding("num_seqs", d.num_seqs, f"must be an integer in 0..{U32}")
    if not _is_a(d.kv_role, KvRole):
        yield _finding("kv_role", d.kv_role, "must be 0 (key), 1 (value) or 2 (fused)")
    if d.layer_index is not None and not _lies(d.layer_index, 0, U32 - 1):
        yield _finding("layer_index", d.layer_index, f"must be an integer in 0..{U32 - 1}; None is not layer-scoped")
    if not _is_a(d.block_table_index_type, IndexType):
        yield _finding("block_table_index_type", d.block_table_index_type, "must be 0 (uint32) or 1 (uint64)")
    elif d.block_table_index_type is IndexType.UINT32 and _lies(d.num_pages, U32 + 1, U64):
        rule = f"a uint32 block table addresses at most {U32} pages"
        yield _finding("num_pages", d.num_pages, rule)
    if not 3 <= len(d.buffers) <= 0xFF:
        rule = "block-paged has 3 buffers (page_pool, block_table, seq_ptr) and up to 252 of quantization parameters"
        yield _finding("buffer_count", len(d.buffers), rule)


def _colocation_violations(d: Descriptor) -> Iterator[Finding]:
    """All buffers of one descriptor share device_tag and memory_class (ADR-024 section 5; block-paged, Alignment)."""
    first = d.buffers[0]
    for index, entry in enumerate(d.buffers):
        offset = BUFFERS_OFFSET + ENTRY_NBYTES * index
        for name, where in (("device_tag", 12), ("memory_class", 14)):
            ours, theirs = getattr(entry, name), getattr(first, name)
            if ours != theirs:
                rule = f"all buffers share one {name}, but buffers[0] has {int(theirs)}"
                yield Finding(f"buffers[{index}].{name}", int(ours), rule, offset + where)


def _geometry_violations(d: Descriptor) -> Iterator[Finding]:
    """Buffers 0 to 2 have the sizes of the geometry (ADR-024 section 5; block-paged, Storage Invariant 4)."""
    pool = d.element_type.nbytes(d.num_pages * d.page_size * d.num_heads * d.head_dim)
    if d.buffers[0].byte_size != pool:
        factors = f"{d.num_pages} pages x {d.page_size} tokens x {d.num_heads} heads x {d.head_dim}"
        yield _size(d, 0, f"page_pool holds {factors} elements of {d.element_type.wire_name}, {pool} bytes")
    width = d.block_table_index_type.itemsize
    if d.buffers[2].byte_size != (d.num_seqs + 1) * width:
        rule = f"seq_ptr has num_seqs + 1 entries of {width} bytes, {(d.num_seqs + 1) * width} bytes"
        yield _size(d, 2, rule)
    entries, rest = divmod(d.buffers[1].byte_size, width)
    if rest:
        yield _size(d, 1, f"block_table has entries of {width} bytes, so its size is a multiple of that")
    elif entries and not d.num_seqs:
        yield _size(d, 1, f"block_table is empty when num_seqs is 0, but it has {entries} entries")
    elif entries and not d.num_pages:
        yield _size(d, 1, f"block_table has {entries} entries, but num_pages is 0, so no page ID is in range")
    elif d.total_tokens > entries * d.page_size:
        rule = f"{entries} block_table entries of {d.page_size} tokens hold at most {entries * d.page_size} tokens"
        yield _finding("total_tokens", d.total_tokens, rule)
    if d.quantization is None and len(d.buffers) > 3:
        rule = "without quantization block-paged has exactly 3 buffers"
        yield Finding("buffer_count", len(d.buffers), rule, OFFSETS["buffer_count"], tolerable=True)


def _quantization_violations(d: Descriptor) -> Iterator[Finding]:
    """How schemes compose with pages (ADR-024 section 6; block-paged, Quantization Compatibility)."""
    scheme = d.quantization
    start = BUFFERS_OFFSET + ENTRY_NBYTES * len(d.buffers) + 4
    if scheme is None:
        return
    if isinstance(scheme, OpaqueScheme):
        rule = f"a {scheme.wire_name} is not defined; 0x01..0x05 are"
        yield Finding("quantization.scheme_tag", scheme.tag, rule, start, tolerable=True)
        return
    if d.element_type not in scheme.storage:
        allowed = ", ".join(each.wire_name for each in scheme.storage)
        rule = f"{scheme.wire_name} needs a storage type of {allowed}, not {d.element_type.wire_name}"
        yield Finding("type_tag", d.element_type.wire_name, rule, 14)
        return
    match scheme:
        case PerTensorAffine():
            low, high = d.element_type.integer_range or (0, 0)
            if not low <= scheme.zero_point <= high:
                rule = f"must lie in {low}..{high}, the range of {d.element_type.wire_name}"
                yield Finding("quantization.zero_point", scheme.zero_point, rule, start + 8)
            yield from _parameter_violations(d, (), {}, start)
        case PerChannelAffine():
            if scheme.axis not in (1, 2):
                rule = "per-channel quantization of pages runs along axis 1 (heads) or 2 (head_dim)"
                fix = "Use per-block affine with block_size == page_size for axis 0" if scheme.axis == 0 else None
                yield Finding("quantization.axis", scheme.axis, rule, start + 4, fix=fix)
                return
            yield from _affine_violations(d, scheme, d.shape[scheme.axis], (8, 12), start)
        case PerBlockAffine():
            if scheme.axis != 0:
                rule = "per-block quantization of pages runs along axis 0, the paged one"
                yield Finding("quantization.axis", scheme.axis, rule, start + 4)
            if scheme.block_size != d.page_size:
                rule = f"must equal page_size {d.page_size}, so that each page carries its own scales"
                yield Finding("quantization.block_size", scheme.block_size, rule, start + 8)
            yield from _affine_violations(d, scheme, d.num_pages * d.page_size, (12, 16), start)
        case NF4() | MXFP():
            rule = (
                f"{scheme.wire_name} has no paging rule in ADR-024: only per-tensor, per-channel (axis 1 or 2) and "
                "per-block affine (axis 0) compose with block-paged"
            )
            yield Finding("quantization.scheme_tag", scheme.tag, rule, start, tolerable=True)
            if scheme.axis >= 3:
                yield Finding("quantization.axis", scheme.axis, "must be below rank 3", start + 4)
            elif isinstance(scheme, MXFP) and (d.shape[scheme.axis] % scheme.block_size or not d.shape[scheme.axis]):
                rule = f"must divide shape[{scheme.axis}] {d.shape[scheme.axis]}, which must not be 0"
                yield Finding("quantization.block_size", scheme.block_size, rule, start + 8)
            yield from _parameter_violations(d, ((scheme.scale_buffer_index, "scale_buffer_index", 12),), {}, start)


def _affine_violations(
    d: Descriptor, scheme: PerChannelAffine | PerBlockAffine, count: int, where: tuple[int, int], start: int
) -> Iterator[Finding]:
    """Where scales and zero points are, and of which sizes (ADR-024 section 6)."""
    scales, zero_points = scheme.scale_buffer_index, scheme.zero_point_buffer_index
    sizes = {scales: (count * scheme.scale_type.bits // 8, f"{count} scales of {scheme.scale_type.wire_name}")}
    indices = [(scales, "scale_buffer_index", where[0])]
    if zero_points is not None:
        indices.append((zero_points, "zero_point_buffer_index", where[1]))
        if zero_points == scales:
            sizes[scales] = (sizes[scales][0] + count * 4, f"{sizes[scales][1]}, then {count} zero points of int32")
        else:
            sizes[zero_points] = (count * 4, f"{count} zero points of int32")
    yield from _parameter_violations(d, tuple(indices), sizes, start)


def _parameter_violations(
    d: Descriptor, indices: tuple[tuple[int, str, int], ...], sizes: dict[int, tuple[int, str]], start: int
) -> Iterator[Finding]:
    """Parameter buffers lie at index 3 and up, exist, have exact sizes, none left over (ADR-024 sections 5 and 6)."""
    count = len(d.buffers)
    used = set()
    for index, name, where in indices:
        if not 3 <= index < count:
            rule = f"must lie in 3..{count - 1}: buffers 0 to 2 are the pool and its indices, buffer_count is {count}"
            if count == 3:
                rule = "the descriptor has no parameter buffer: buffer_count is 3, and parameters start at index 3"
            yield Finding(f"quantization.{name}", index, rule, start + where)
            continue
        used.add(index)
        if index in sizes and d.buffers[index].byte_size != sizes[index][0]:
            yield _size(d, index, f"holds {sizes[index][1]}, {sizes.pop(index)[0]} bytes")
    if len(used) == len({index for index, _, _ in indices}) and count > 3 + len(used):
        rule = f"the scheme uses {len(used)} parameter buffers, so there are {3 + len(used)} buffers"
        yield Finding("buffer_count", count, rule, OFFSETS["buffer_count"], tolerable=True)


def check_transferable(descriptor: Descriptor) -> None:
    """Check the two rules that hold only for buffers that cross machines.

    sync_mode must be PRODUCER_SYNCED, and buffers meant for RDMA are aligned to 4096 bytes or more (buffer-protocol,
    Page Alignment for GPU and IPC).

    Raises:
        DescriptorError: naming the first buffer at fault.
    """
    for index, entry in enumerate(descriptor.buffers):
        offset = BUFFERS_OFFSET + ENTRY_NBYTES * index
        if entry.sync_mode is not SyncMode.PRODUCER_SYNCED:
            rule = "only PRODUCER_SYNCED (0) buffers may cross machines"
            raise DescriptorError(
                rule, field=f"buffers[{index}].sync_mode", value=int(entry.sync_mode), offset=offset + 13
            )
        if entry.byte_size and entry.alignment < DEVICE_ALIGNMENT:
            rule = f"a buffer for RDMA must be aligned to at least {DEVICE_ALIGNMENT}"
            raise DescriptorError(rule, field=f"buffers[{index}].alignment", value=entry.alignment, offset=offset + 8)


def _lies(value: object, low: int, high: int) -> bool:
    return isinstance(value, int) and low <= value <= high


def _is_a(value: object, kind: type) -> bool:
    return isinstance(value, kind)


def _finding(name: str, value: object, rule: str) -> Finding:
    return Finding(name, value, rule, OFFSETS[name])


def _size(d: Descriptor, index: int, rule: str) -> Finding:
    offset = BUFFERS_OFFSET + ENTRY_NBYTES * index
    return Finding(f"buffers[{index}].byte_size", d.buffers[index].byte_size, rule, offset)
