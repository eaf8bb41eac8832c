"""Each rule of the format, broken alone: by its byte on the way in, by its field on the way out."""

from __future__ import annotations

import pickle
import struct
from dataclasses import replace
from typing import Any

import pytest

from hurray_rdma.format import (
    BufferEntry,
    Descriptor,
    DescriptorError,
    DeviceTag,
    ElementType,
    ExtensionType,
    IndexType,
    KvRole,
    MemberRole,
    MemoryClass,
    Statistics,
    SyncMode,
    check_transferable,
    decode,
    encode,
)

U64 = (1 << 64) - 1


def plain(**changes: Any) -> Descriptor:
    """The example of the specification: 2 sequences of 6 and 3 tokens, pages of 4, 5 pages, 2 heads of 8."""
    geometry: dict[str, Any] = {
        "element_type": ElementType.FLOAT16,
        "total_tokens": 9,
        "num_heads": 2,
        "head_dim": 8,
        "page_size": 4,
        "num_pages": 5,
        "num_seqs": 2,
        "block_table_length": 3,
        "kv_role": KvRole.KEY,
        "layer_index": 3,
    }
    return Descriptor.paged(**(geometry | changes))


def patched(data: bytes, offset: int, code: str, value: int | bytes) -> bytes:
    out = bytearray(data)
    struct.pack_into(f"<{code}", out, offset, value)
    return bytes(out)


BASE = encode(plain())


def test_layout_of_the_example_byte_for_byte() -> None:
    assert (
        b"".join(
            (
                b"HRRY\x01\x00",
                struct.pack("<II", 133, 0),
                bytes([0x01, 0x0B]),
                struct.pack("<IQQQQ", 3, 9, 2, 8, 0),
                struct.pack("<IQII", 4, 5, 0, 2),
                struct.pack("<BIB6x", 0, 3, 0),
                bytes([3]),
                struct.pack("<QIBBBB", 5 * 4 * 2 * 8 * 2, 4096, 0, 0, 0, 0),
                struct.pack("<QIBBBB", 3 * 4, 4096, 0, 0, 0, 0),
                struct.pack("<QIBBBB", 3 * 4, 4096, 0, 0, 0, 0),
            )
        )
        == BASE
    )


@pytest.mark.parametrize(
    ("offset", "code", "value", "field", "at"),
    [
        (0, "4s", b"HRRX", "magic", 0),
        (4, "B", 2, "version_major", 4),
        (4, "B", 0, "version_major", 4),
        (6, "I", 19, "descriptor_length", 6),
        (6, "I", 134, "descriptor_length", 6),
        (6, "I", 132, "buffers", 85),
        (10, "I", 1 << 5, "flags", 10),
        (10, "I", 1 << 31, "flags", 10),
        (10, "I", 1 << 1, "flags", 10),
        (10, "I", 1 << 2, "flags", 10),
        (10, "I", 1 << 0, "quantization_length", 133),
        (10, "I", 1 << 3, "statistics", 133),
        (10, "I", 1 << 4, "composite_member", 133),
        (14, "B", 0x00, "type_tag", 14),
        (14, "B", 0xFF, "type_tag", 14),
        (14, "B", 0x05, "type_tag", 14),
        (14, "B", 0x47, "type_tag", 14),
        (14, "B", 0x50, "type_tag", 14),
        (14, "B", 0x80, "type_tag", 14),
        (14, "B", 0xF0, "flags", 10),
        (15, "B", 0x01, "layout_tag", 15),
        (15, "B", 0x0C, "layout_tag", 15),
        (15, "B", 0xF0, "layout_tag", 15),
        (16, "I", 2, "rank", 16),
        (16, "I", 4, "rank", 16),
        (16, "I", 0xFFFFFFFF, "rank", 16),
        (20, "Q", 13, "total_tokens", 20),
        (20, "Q", U64, "total_tokens", 20),
        (28, "Q", U64, "num_heads", 28),
        (36, "Q", U64, "head_dim", 36),
        (44, "Q", 1, "byte_offset", 44),
        (52, "I", 0, "page_size", 52),
        (56, "Q", 1 << 33, "num_pages", 56),
        (64, "I", 1, "paged_axis", 64),
        (68, "I", 1, "buffers[2].byte_size", 117),
        (72, "B", 3, "kv_role", 72),
        (77, "B", 2, "block_table_index_type", 77),
        (78, "B", 1, "layout_reserved", 78),
        (83, "B", 1, "layout_reserved", 78),
        (84, "B", 2, "buffer_count", 84),
        (84, "B", 4, "buffers", 85),
        (85, "Q", 639, "buffers[0].byte_size", 85),
        (101, "Q", 13, "buffers[1].byte_size", 101),
        (117, "Q", 8, "buffers[2].byte_size", 117),
        (93, "I", 0, "buffers[0].alignment", 93),
        (93, "I", 48, "buffers[0].alignment", 93),
        (109, "I", 32, "buffers[1].alignment", 109),
        (97, "B", 0x09, "buffers[0].device_tag", 97),
        (97, "B", 0xEF, "buffers[0].device_tag", 97),
        (97, "B", 0xFF, "buffers[0].device_tag", 97),
        (129, "B", 1, "buffers[2].device_tag", 129),
        (98, "B", 3, "buffers[0].sync_mode", 98),
        (99, "B", 3, "buffers[0].memory_class", 99),
        (99, "B", 4, "buffers[0].memory_class", 99),
        (99, "B", 0xF0, "buffers[0].memory_class", 99),
        (99, "B", 0xFF, "buffers[0].memory_class", 99),
        (115, "B", 1, "buffers[1].memory_class", 115),
        (100, "B", 1, "buffers[0].reserved", 100),
        (132, "B", 1, "buffers[2].reserved", 132),
    ],
)
def test_one_wrong_field_is_named_with_its_place(
    offset: int, code: str, value: int | bytes, field: str, at: int
) -> None:
    with pytest.raises(DescriptorError) as caught:
        decode(patched(BASE, offset, code, value))
    assert (caught.value.field, caught.value.offset) == (field, at)
    assert str(at) in str(caught.value)


@pytest.mark.parametrize("length", range(133))
def test_every_truncation_is_rejected(length: int) -> None:
    with pytest.raises(DescriptorError):
        decode(BASE[:length])


def test_bytes_behind_the_descriptor_are_not_looked_at() -> None:
    assert decode(BASE + b"\xff" * 100) == plain()


def test_any_contiguous_bytes_like_will_do() -> None:
    assert decode(bytearray(BASE)) == decode(memoryview(BASE)) == decode(BASE)


def test_unread_bytes_inside_are_rejected_in_version_1_0_and_skipped_in_a_later_minor() -> None:
    longer = patched(BASE + b"\xee" * 7, 6, "I", 140)
    with pytest.raises(DescriptorError, match="133"):
        decode(longer)
    assert decode(patched(longer, 5, "B", 1)) == plain()


@pytest.mark.parametrize(
    ("tag", "dialect", "name"),
    [(0x0A, "adr-024", "CSF"), (0x0B, "hurray-0.2", "composite head"), (0x07, None, "COO"), (0x08, None, "CSR")],
)
def test_other_layouts_are_rejected_by_name(tag: int, dialect: Any, name: str) -> None:
    with pytest.raises(DescriptorError, match=name):
        decode(patched(BASE, 15, "B", tag), dialect=dialect)


@pytest.mark.parametrize("rank", [0, 2, 3])
@pytest.mark.parametrize("dialect", [None, "adr-024", "hurray-0.2"])
def test_a_composite_head_is_rejected_by_name(rank: int, dialect: Any) -> None:
    body = struct.pack(f"<{rank}QQBBHIB", *range(1, rank + 1), 0, 1, 0, 0, 2, 0)
    head = b"HRRY\x01\x00" + struct.pack("<IIBBI", 20 + len(body), 0, 0x01, 0x0B, rank) + body
    with pytest.raises(DescriptorError, match="composite head"):
        decode(head, dialect=dialect)


def test_a_composite_head_with_a_private_rule_is_one_too() -> None:
    body = struct.pack("<QQQBBHIB", 9, 2, 0, 0xF1, 0, 0, 2, 0)
    head = b"HRRY\x01\x00" + struct.pack("<IIBBI", 20 + len(body), 0, 0x01, 0x0B, 2) + body
    with pytest.raises(DescriptorError, match="composite head"):
        decode(head)


def test_unknown_dialect() -> None:
    with pytest.raises(DescriptorError, match=r"adr-024, hurray-0\.2"):
        encode(plain(), dialect="hurray-0.3")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("total_tokens", -1),
        ("num_heads", U64),
        ("head_dim", 8.0),
        ("page_size", 0),
        ("page_size", 1 << 32),
        ("num_pages", 1 << 64),
        ("num_seqs", 1 << 32),
        ("kv_role", 1),
        ("layer_index", 0xFFFFFFFF),
        ("layer_index", -1),
        ("block_table_index_type", 0),
        ("paged_axis", 1),
    ],
)
def test_the_constructor_checks_what_the_decoder_checks(field: str, value: object) -> None:
    with pytest.raises(DescriptorError) as caught:
        replace(plain(), **{field: value})
    assert caught.value.field == field


def test_layers_that_have_no_index() -> None:
    data = encode(plain(layer_index=None, kv_role=KvRole.FUSED))
    assert data[73:77] == b"\xff\xff\xff\xff"
    assert decode(data).layer_index is None
    assert decode(data).kv_role is KvRole.FUSED


def test_wide_indices_double_the_index_buffers() -> None:
    descriptor = plain(index_type=IndexType.UINT64)
    assert [each.byte_size for each in descriptor.buffers[1:]] == [24, 24]
    assert descriptor.block_table_length == 3
    assert decode(encode(descriptor)) == descriptor


def test_an_empty_batch_has_an_empty_table() -> None:
    empty = plain(total_tokens=0, num_seqs=0, block_table_length=0)
    assert [each.byte_size for each in empty.buffers] == [640, 0, 4]
    assert decode(encode(empty)) == empty
    with pytest.raises(DescriptorError, match="empty when num_seqs is 0"):
        plain(total_tokens=0, num_seqs=0, block_table_length=3)
    with pytest.raises(DescriptorError, match="at most 0 tokens"):
        plain(total_tokens=1, num_seqs=0, block_table_length=0)


def test_a_table_into_no_pages_is_impossible() -> None:
    with pytest.raises(DescriptorError, match="num_pages is 0"):
        plain(num_pages=0)
    assert plain(num_pages=0, total_tokens=0, block_table_length=0).buffers[0].byte_size == 0


def test_tokens_must_fit_the_pages_of_the_table() -> None:
    assert plain(total_tokens=12).total_tokens == 12
    with pytest.raises(DescriptorError, match="at most 12 tokens"):
        plain(total_tokens=13)


def test_empty_buffers_may_have_any_power_of_two_as_alignment() -> None:
    buffers = (BufferEntry(640), BufferEntry(0, alignment=1), BufferEntry(4))
    descriptor = replace(plain(), buffers=buffers, num_seqs=0, total_tokens=0)
    assert decode(encode(descriptor)) == descriptor
    with pytest.raises(DescriptorError, match="power of two"):
        replace(descriptor, buffers=(BufferEntry(640), BufferEntry(0, alignment=3), BufferEntry(4)))


@pytest.mark.parametrize(
    ("device", "memory", "legal"),
    [
        (DeviceTag.CPU, MemoryClass.STANDARD, True),
        (DeviceTag.CPU, MemoryClass.HOST_PINNED, True),
        (DeviceTag.CPU, MemoryClass.UNIFIED, True),
        (DeviceTag.CPU, MemoryClass.PEER, False),
        (DeviceTag.CUDA, MemoryClass.PEER, True),
        (DeviceTag.CUDA, 0xF0, False),
        (DeviceTag.OPENCL, MemoryClass.STANDARD, True),
        (0xF0, MemoryClass.STANDARD, True),
        (0xFE, 0xF3, True),
        (0xFE, 0xFF, False),
        (0x09, MemoryClass.STANDARD, False),
    ],
)
def test_devices_and_memory_classes(device: int, memory: int, legal: bool) -> None:
    if legal:
        descriptor = plain(device_tag=device, memory_class=memory)
        again = decode(encode(descriptor))
        assert (again.device_tag, again.memory_class) == (device, memory)
        return
    with pytest.raises(DescriptorError, match=r"buffers\[0\]"):
        plain(device_tag=device, memory_class=memory)


def test_device_memory_is_aligned_to_host_pages() -> None:
    assert plain(alignment=64).buffers[0].alignment == 64
    with pytest.raises(DescriptorError, match="CUDA must be aligned to at least 4096"):
        plain(alignment=2048, device_tag=DeviceTag.CUDA)


def test_what_may_cross_machines() -> None:
    check_transferable(plain())
    with pytest.raises(DescriptorError, match="PRODUCER_SYNCED"):
        check_transferable(plain(sync_mode=SyncMode.EVENT))
    with pytest.raises(DescriptorError, match="4096"):
        check_transferable(plain(alignment=64))


def test_buffers_nobody_refers_to() -> None:
    surplus = (*plain().buffers, BufferEntry(64))
    with pytest.raises(DescriptorError, match="exactly 3 buffers"):
        replace(plain(), buffers=surplus)


@pytest.mark.parametrize(
    ("element_type", "nbytes"),
    [
        (ElementType.FLOAT128, 320 * 16),
        (ElementType.FLOAT64, 320 * 8),
        (ElementType.BFLOAT16, 640),
        (ElementType.FLOAT8_E4M3, 320),
        (ElementType.FLOAT6_E3M2, 240),
        (ElementType.FLOAT4_E2M1, 160),
        (ElementType.UINT2, 80),
        (ElementType.BOOL, 40),
    ],
)
def test_pool_size_of_each_width(element_type: ElementType, nbytes: int) -> None:
    descriptor = plain(element_type=element_type)
    assert descriptor.buffers[0].byte_size == nbytes
    assert decode(encode(descriptor)).element_type is element_type


@pytest.mark.parametrize(
    ("bits", "count", "nbytes"),
    [("BOOL", 9, 2), ("INT2", 5, 2), ("INT4", 3, 2), ("FLOAT6_E2M3", 1, 1), ("FLOAT6_E2M3", 5, 4)],
)
def test_packed_sizes_round_up_to_whole_bytes(bits: str, count: int, nbytes: int) -> None:
    assert ElementType[bits].nbytes(count) == nbytes


def test_private_types_bring_their_width() -> None:
    wide = ExtensionType(0xF0, 24, is_float=True, sign_bits=1, exponent_bits=8, mantissa_bits=15, exponent_bias=127)
    descriptor = plain(element_type=wide)
    assert descriptor.buffers[0].byte_size == 320 * 3
    data = encode(descriptor)
    assert data[10] == 1 << 2
    assert len(data) == 133 + 20
    assert decode(data) == descriptor
    assert plain(element_type=ExtensionType(0xFE, 2)).buffers[0].byte_size == 80


@pytest.mark.parametrize(
    ("offset", "value", "field"),
    [
        (0, 0, "bit_width"),
        (0, 3, "bit_width"),
        (0, 12, "bit_width"),
        (4, 2, "packing_factor"),
        (5, 2, "is_float"),
        (6, 2, "is_signed"),
        (7, 1, "sign_bits"),
        (8, 1, "exponent_bits"),
        (9, 1, "mantissa_bits"),
        (10, 1, "reserved"),
        (12, 1, "exponent_bias"),
        (16, 1, "has_nan"),
        (17, 1, "has_inf"),
        (19, 1, "reserved"),
    ],
)
def test_private_types_keep_their_rules(offset: int, value: int, field: str) -> None:
    data = encode(plain(element_type=ExtensionType(0xF1, 16)))
    with pytest.raises(DescriptorError) as caught:
        decode(patched(data, 133 + offset, "B", value))
    assert caught.value.field == f"extension_type.{field}"
    assert caught.value.offset in range(133, 153)


FULL = Statistics(
    nnz=7,
    sparsity_ratio=0.25,
    value_range=(-1.0, 2.0, 2.0),
    moments=(0.5, 0.25),
    nm_sparsity=(2, 4),
    has_nan_inf=(False, True),
)


@pytest.mark.parametrize("statistics", [Statistics(), Statistics(nnz=0), FULL])
def test_statistics_travel(statistics: Statistics) -> None:
    descriptor = plain(statistics=statistics)
    data = encode(descriptor)
    assert len(data) == 133 + 72
    assert decode(data) == descriptor


@pytest.mark.parametrize(
    ("offset", "code", "value"),
    [(0, "I", 1 << 6), (4, "I", 1), (16, "d", 1.5), (56, "d", -1.0), (64, "B", 5), (66, "B", 2), (71, "B", 1)],
)
def test_statistics_keep_their_rules(offset: int, code: str, value: Any) -> None:
    data = encode(plain(statistics=FULL))
    with pytest.raises(DescriptorError, match=r"statistics\."):
        decode(patched(data, 133 + offset, code, value))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Statistics(nnz=1.5), "statistics.nnz"),  # type: ignore[arg-type]
        (lambda: ExtensionType(0xF0, 8.0), "extension_type.bit_width"),  # type: ignore[arg-type]
        (lambda: ExtensionType(0xF0, 8, is_float=True, mantissa_bits=1.5), "extension_type.mantissa_bits"),  # type: ignore[arg-type]
    ],
)
def test_fields_of_sections_are_integers(make: Any, field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        make()
    assert caught.value.field == field


def test_values_whose_mask_bit_is_clear_are_unknown_whatever_their_bytes() -> None:
    data = patched(encode(plain(statistics=Statistics(nnz=7))), 133 + 56, "d", -1.0)
    assert decode(data).statistics == Statistics(nnz=7)


@pytest.mark.parametrize("role", list(MemberRole))
def test_composite_members_travel(role: MemberRole) -> None:
    descriptor = replace(plain(), composite_member=role)
    data = encode(descriptor)
    assert data[133:] == bytes([role]) + bytes(15)
    assert decode(data) == descriptor
    for offset, value in ((133, 2), (140, 1)):
        with pytest.raises(DescriptorError, match="composite_member"):
            decode(patched(data, offset, "B", value))


def test_a_permissive_reader_keeps_what_can_be_tolerated() -> None:
    data = patched(BASE, 64, "I", 1)
    lax = decode(data, strict=False)
    assert [(each.field, each.offset) for each in lax.findings] == [("paged_axis", 64)]
    with pytest.raises(DescriptorError, match="paged_axis"):
        encode(lax)
    with pytest.raises(DescriptorError, match="kv_role"):
        decode(patched(data, 72, "B", 3), strict=False)
    assert decode(BASE, strict=False).findings == ()


def test_names_of_roles_and_types() -> None:
    assert plain(kv_role="value", element_type="bfloat16").kv_role is KvRole.VALUE
    with pytest.raises(DescriptorError, match="key, value or fused"):
        plain(kv_role="query")
    with pytest.raises(DescriptorError, match="float8_e4m3"):
        plain(element_type="float7")


@pytest.mark.parametrize("value", [-1, 1.5, "4"])
def test_counts_are_integers(value: Any) -> None:
    with pytest.raises(DescriptorError) as caught:
        plain(page_size=value)
    assert caught.value.field == "page_size"


def test_descriptors_and_their_errors_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(plain())) == plain()
    with pytest.raises(DescriptorError) as caught:
        decode(patched(BASE, 72, "B", 3))
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.field, again.offset) == (str(caught.value), "kv_role", 72)
