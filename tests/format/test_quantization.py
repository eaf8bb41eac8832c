"""Quantization schemes: their bytes, their rules, and how they compose with pages (ADR-024 section 6)."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from typing import Any

import pytest

from hurray_rdma.format import (
    MXFP,
    NF4,
    BufferEntry,
    Descriptor,
    DescriptorError,
    ElementType,
    KvRole,
    OpaqueScheme,
    PerBlockAffine,
    PerChannelAffine,
    PerTensorAffine,
    Quantization,
    decode,
    decode_quantization,
    encode,
    encode_quantization,
)

NONE = 0xFFFFFFFF
LITERALS: list[tuple[Quantization, bytes]] = [
    (PerTensorAffine(0.5, -3), struct.pack("<BBHfi4x", 1, 1, 0, 0.5, -3)),
    (PerChannelAffine(1, 3), struct.pack("<BBHIIIB3x", 2, 1, 1, 1, 3, NONE, 3)),
    (PerChannelAffine(2, 3, 4), struct.pack("<BBHIIIB3x", 2, 1, 0, 2, 3, 4, 3)),
    (PerBlockAffine(0, 16, 3), struct.pack("<BBHIIIIB3x", 3, 1, 1, 0, 16, 3, NONE, 3)),
    (
        PerBlockAffine(0, 16, 4, 3, ElementType.BFLOAT16),
        struct.pack("<BBHIIIIB3x", 3, 1, 0, 0, 16, 4, 3, 2),
    ),
    (NF4(2, 64, 3), struct.pack("<BBHIII", 4, 1, 0, 2, 64, 3)),
    (MXFP(2, 32, 3), struct.pack("<BBHIII", 5, 1, 0, 2, 32, 3)),
]


@pytest.mark.parametrize(("scheme", "data"), LITERALS)
def test_one_literal_proves_both_directions(scheme: Quantization, data: bytes) -> None:
    assert encode_quantization(scheme) == data
    assert decode_quantization(data) == scheme
    assert decode_quantization(data + b"\x07pad") == scheme


@pytest.mark.parametrize(("scheme", "data"), LITERALS)
def test_every_truncation_is_rejected(scheme: Quantization, data: bytes) -> None:
    for length in range(len(data)):
        with pytest.raises(DescriptorError):
            decode_quantization(data[:length])


@pytest.mark.parametrize(
    ("which", "offset", "code", "value", "field"),
    [
        (0, 0, "B", 0x00, "scheme_tag"),
        (0, 0, "B", 0xFF, "scheme_tag"),
        (0, 0, "B", 0x06, "scheme_tag"),
        (0, 0, "B", 0x60, "scheme_tag"),
        (0, 0, "B", 0xEF, "scheme_tag"),
        (0, 0, "B", 0xF0, "scheme_tag"),
        (0, 1, "B", 0, "scheme_version"),
        (0, 1, "B", 2, "scheme_version"),
        (0, 2, "H", 1, "flags"),
        (1, 2, "H", 2, "flags"),
        (3, 2, "H", 0x8000, "flags"),
        (5, 2, "H", 1, "flags"),
        (0, 4, "f", 0.0, "scale"),
        (0, 4, "f", math.inf, "scale"),
        (0, 4, "f", math.nan, "scale"),
        (0, 15, "B", 1, "reserved"),
        (1, 12, "I", 4, "zero_point_buffer_index"),
        (1, 16, "B", 1, "scale_type_tag"),
        (1, 19, "B", 1, "reserved"),
        (3, 8, "I", 0, "block_size"),
        (3, 8, "I", 1, "block_size"),
        (3, 8, "I", 12, "block_size"),
        (3, 16, "I", 4, "zero_point_buffer_index"),
        (3, 20, "B", 4, "scale_type_tag"),
        (3, 23, "B", 1, "reserved"),
        (5, 8, "I", 4, "block_size"),
        (6, 8, "I", 8, "block_size"),
        (6, 8, "I", 4096, "block_size"),
    ],
)
def test_one_wrong_field_is_named(which: int, offset: int, code: str, value: Any, field: str) -> None:
    data = bytearray(LITERALS[which][1])
    struct.pack_into(f"<{code}", data, offset, value)
    with pytest.raises(DescriptorError) as caught:
        decode_quantization(data)
    assert caught.value.field == f"quantization.{field}"
    assert caught.value.offset is not None
    assert caught.value.offset <= offset


def test_scales_are_float32_as_they_travel() -> None:
    assert PerTensorAffine(0.1).scale == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    for scale in (1e-60, 1e60):  # 0 and infinity in float32
        with pytest.raises(DescriptorError, match="float32"):
            PerTensorAffine(scale)


def test_unknown_schemes_are_skipped_by_permissive_readers_only() -> None:
    data = bytes([0xF7, 9, 1, 2, 3])
    assert decode_quantization(data, strict=False) == OpaqueScheme(0xF7, data)
    with pytest.raises(DescriptorError, match="private"):
        decode_quantization(data)
    with pytest.raises(DescriptorError, match="invalid"):
        decode_quantization(bytes([0xFF, 1, 0, 0]), strict=False)
    with pytest.raises(DescriptorError, match="never written"):
        encode_quantization(OpaqueScheme(0xF7, data))


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: PerTensorAffine("x"), "scale"),  # type: ignore[arg-type]
        (lambda: PerTensorAffine(0.5, 1.5), "zero_point"),  # type: ignore[arg-type]
        (lambda: PerChannelAffine(1.0, 3), "axis"),  # type: ignore[arg-type]
        (lambda: PerChannelAffine(1, 3, 4.0), "zero_point_buffer_index"),  # type: ignore[arg-type]
        (lambda: PerBlockAffine(0, 16.0, 3), "block_size"),  # type: ignore[arg-type]
        (lambda: PerBlockAffine(0, 16, 3, None, "f2"), "scale_type_tag"),  # type: ignore[arg-type]
        (lambda: NF4(2, 64, "3"), "scale_buffer_index"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_is_named_before_it_is_written(make: Any, field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        make()
    assert caught.value.field == f"quantization.{field}"


def test_a_section_in_a_view_of_wide_items() -> None:
    data = encode_quantization(PerTensorAffine(0.5, -3))
    assert decode_quantization(memoryview(data).cast("I")) == PerTensorAffine(0.5, -3)


# Composition with block-paged.


def paged(element_type: str, scheme: Quantization | None, **changes: Any) -> Descriptor:
    geometry: dict[str, Any] = {
        "total_tokens": 100,
        "num_heads": 8,
        "head_dim": 64,
        "page_size": 16,
        "num_pages": 32,
        "num_seqs": 3,
        "block_table_length": 10,
        "kv_role": KvRole.KEY,
        "layer_index": 0,
    }
    return Descriptor.paged(element_type=element_type, quantization=scheme, **(geometry | changes))


@pytest.mark.parametrize(
    ("element_type", "scheme", "parameter_nbytes"),
    [
        ("int8", PerTensorAffine(0.02, -128), []),
        ("uint2", PerTensorAffine(0.02, 3), []),
        ("int32", PerChannelAffine(1, 3), [8 * 4]),
        ("uint4", PerChannelAffine(2, 3, 4), [64 * 4, 64 * 4]),
        ("int8", PerBlockAffine(0, 16, 3), [32 * 16 * 4]),
        ("int8", PerBlockAffine(0, 16, 3, 4, ElementType.FLOAT16), [32 * 16 * 2, 32 * 16 * 4]),
        ("uint4", PerBlockAffine(0, 16, 4, 3, ElementType.BFLOAT16), [32 * 16 * 4, 32 * 16 * 2]),
        ("int8", PerBlockAffine(0, 16, 3, 3), [32 * 16 * 4 + 32 * 16 * 4]),
        ("int8", PerChannelAffine(1, 3, 3), [8 * 4 + 8 * 4]),
    ],
)
def test_what_composes_travels(element_type: str, scheme: Quantization, parameter_nbytes: list[int]) -> None:
    descriptor = paged(element_type, scheme)
    assert [each.byte_size for each in descriptor.buffers[3:]] == parameter_nbytes
    data = encode(descriptor)
    assert data[10] == 1
    again = decode(data)
    assert again == descriptor
    assert again.quantization == scheme


def test_a_batch_shorter_than_a_page_can_be_quantized() -> None:
    short = paged("int8", PerBlockAffine(0, 16, 3), total_tokens=3, num_seqs=1, block_table_length=1)
    assert decode(encode(short)) == short


@pytest.mark.parametrize(
    ("element_type", "scheme", "says"),
    [
        ("float16", PerTensorAffine(1.0), "storage type of int8"),
        ("int64", PerTensorAffine(1.0), "not int64"),
        ("int8", PerTensorAffine(1.0, 128), "-128..127"),
        ("uint8", PerTensorAffine(1.0, -1), "0..255"),
        ("int4", PerTensorAffine(1.0, 8), "-8..7"),
        ("int8", PerChannelAffine(0, 3), "Use per-block affine"),
        ("int8", PerChannelAffine(3, 3), "axis 1 .heads. or 2"),
        ("int16", PerBlockAffine(0, 16, 3), "not int16"),
        ("int8", PerBlockAffine(1, 16, 3), "axis 0, the paged one"),
        ("int8", PerBlockAffine(0, 8, 3), "page_size 16"),
        ("uint4", NF4(2, 64, 3), "NF4 has no paging rule"),
        ("uint4", NF4(1, 8, 3), "NF4 has no paging rule"),
        ("uint8", NF4(2, 64, 3), "NF4 needs a storage type of uint4"),
        ("float8_e4m3", MXFP(2, 32, 3), "MXFP has no paging rule"),
        ("bfloat16", MXFP(2, 32, 3), "MXFP needs"),
    ],
)
def test_what_does_not_compose_is_rejected_with_the_reason(element_type: str, scheme: Quantization, says: str) -> None:
    with pytest.raises(DescriptorError, match=says):
        paged(element_type, scheme)


def test_page_sizes_that_are_no_power_of_two_cannot_be_quantized_per_slot() -> None:
    with pytest.raises(DescriptorError, match="power of two"):
        PerBlockAffine(0, 24, 3)


@pytest.mark.parametrize("index", [0, 1, 2, 5, NONE])
@pytest.mark.parametrize("which", ["scale_buffer_index", "zero_point_buffer_index"])
def test_parameters_lie_in_buffers_of_their_own(which: str, index: int) -> None:
    good = paged("int8", PerBlockAffine(0, 16, 3, 4))
    data = bytearray(encode(good))
    start = 85 + 16 * 5 + 4
    struct.pack_into("<I", data, start + (12 if which == "scale_buffer_index" else 16), index)
    with pytest.raises(DescriptorError) as caught:
        decode(data)
    assert caught.value.field == f"quantization.{which}"
    assert caught.value.offset == start + (12 if which == "scale_buffer_index" else 16)


@pytest.mark.parametrize(("index", "nbytes"), [(3, 32 * 16 * 4 - 4), (3, 32 * 16 * 4 + 1), (4, 0)])
def test_parameter_buffers_have_exact_sizes(index: int, nbytes: int) -> None:
    good = paged("int8", PerBlockAffine(0, 16, 3, 4))
    buffers = list(good.buffers)
    buffers[index] = BufferEntry(nbytes)
    with pytest.raises(DescriptorError) as caught:
        replace(good, buffers=tuple(buffers))
    assert caught.value.field == f"buffers[{index}].byte_size"
    assert "512" in caught.value.rule


def test_a_parameter_buffer_too_many_is_tolerable_only() -> None:
    good = paged("int8", PerTensorAffine(1.0))
    surplus = (*good.buffers, BufferEntry(64))
    with pytest.raises(DescriptorError, match="so there are 3 buffers"):
        replace(good, buffers=surplus)
    lax = replace(good, buffers=surplus, permissive=True)
    assert [each.field for each in lax.findings] == ["buffer_count"]


def _with_section(section: bytes, element_type: str = "uint4") -> bytes:
    """A descriptor with one parameter buffer and this quantization section, written by hand."""
    data = bytearray(encode(paged(element_type, None)))
    data[84] = 4
    data += struct.pack("<QIBBBB", 4096, 4096, 0, 0, 0, 0)
    data += struct.pack("<I", len(section)) + section
    struct.pack_into("<II", data, 6, len(data), 1)
    return bytes(data)


def test_a_permissive_reader_gets_nf4_and_mxfp_with_the_finding() -> None:
    for scheme, element_type in ((NF4(2, 64, 3), "uint4"), (MXFP(2, 32, 3), "float8_e5m2")):
        data = _with_section(encode_quantization(scheme), element_type)
        with pytest.raises(DescriptorError, match="no paging rule in ADR-024"):
            decode(data)
        lax = decode(data, strict=False)
        assert lax.quantization == scheme
        assert [each.field for each in lax.findings] == ["quantization.scheme_tag"]


@pytest.mark.parametrize(
    "scheme", [NF4(3, 64, 3), NF4(2, 64, 0), NF4(2, 64, 4), MXFP(3, 32, 3), MXFP(2, 128, 3), MXFP(1, 16, 3)]
)
def test_even_a_permissive_reader_refuses_what_cannot_be(scheme: NF4 | MXFP) -> None:
    element_type = "uint4" if isinstance(scheme, NF4) else "float8_e4m3"
    with pytest.raises(DescriptorError, match=r"axis|buffer|divide"):
        decode(_with_section(encode_quantization(scheme), element_type), strict=False)


def test_a_permissive_reader_skips_unknown_schemes() -> None:
    data = _with_section(bytes([0xF1, 1, 0, 0, 42]))
    lax = decode(data, strict=False)
    assert lax.quantization == OpaqueScheme(0xF1, bytes([0xF1, 1, 0, 0, 42]))
    assert [each.field for each in lax.findings] == ["quantization.scheme_tag"]
    with pytest.raises(DescriptorError, match="private"):
        decode(data)


def test_offsets_count_from_the_descriptor() -> None:
    data = bytearray(encode(paged("int8", PerTensorAffine(1.0))))
    data[133 + 4 + 1] = 9
    with pytest.raises(DescriptorError) as caught:
        decode(data)
    assert (caught.value.field, caught.value.offset) == ("quantization.scheme_version", 138)
