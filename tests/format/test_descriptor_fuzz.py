"""Any bytes give a Descriptor or a DescriptorError, and what is accepted survives a round trip.

``HURRAY_RDMA_FUZZ_INPUTS`` sets how many mutated inputs the long run takes (default 20,000, a few seconds).
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.format import (
    Descriptor,
    DescriptorError,
    DeviceTag,
    Dialect,
    ElementType,
    ExtensionType,
    IndexType,
    KvRole,
    MemberRole,
    PerBlockAffine,
    PerChannelAffine,
    PerTensorAffine,
    Statistics,
    annotate,
    decode,
    decode_quantization,
    encode,
    encode_quantization,
    iter_descriptors,
)

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]
INPUTS = int(os.environ.get("HURRAY_RDMA_FUZZ_INPUTS", "20000"))


@st.composite
def descriptors(draw: st.DrawFn) -> Descriptor:
    page_size = draw(st.sampled_from([1, 2, 16, 24, 64]))
    num_seqs = draw(st.integers(0, 5))
    num_pages = draw(st.integers(1, 2**20))
    entries = draw(st.integers(0, 40)) if num_seqs else 0
    element_type: ElementType | ExtensionType = draw(
        st.one_of(
            st.sampled_from(list(ElementType)),
            st.builds(ExtensionType, st.integers(0xF0, 0xFE), st.sampled_from([1, 2, 4, 8, 24, 64])),
        )
    )
    scheme = None
    scale_type = draw(st.sampled_from([ElementType.FLOAT16, ElementType.BFLOAT16, ElementType.FLOAT32]))
    zero_buffer = draw(st.sampled_from([None, 3, 4]))
    kind = draw(st.sampled_from(["none", "tensor", "channel", "block"]))
    if kind == "tensor" and element_type in PerTensorAffine.storage:
        scheme = PerTensorAffine(draw(st.floats(0.125, 1024, width=32)), draw(st.integers(0, 1)))
    elif kind == "channel" and element_type in PerChannelAffine.storage:
        scheme = PerChannelAffine(draw(st.sampled_from([1, 2])), 3, zero_buffer)
    elif kind == "block" and element_type in PerBlockAffine.storage and page_size in (2, 16, 64):
        scheme = PerBlockAffine(0, page_size, 3, zero_buffer, scale_type)
    descriptor = Descriptor.paged(
        element_type=element_type,
        total_tokens=draw(st.integers(0, entries * page_size)),
        num_heads=draw(st.integers(0, 128)),
        head_dim=draw(st.integers(0, 512)),
        page_size=page_size,
        num_pages=num_pages,
        num_seqs=num_seqs,
        block_table_length=entries,
        kv_role=draw(st.sampled_from(KvRole)),
        layer_index=draw(st.none() | st.integers(0, 2**32 - 2)),
        index_type=draw(st.sampled_from(IndexType)),
        device_tag=draw(st.sampled_from([*DeviceTag, 0xF0, 0xFE])),
        quantization=scheme,
        statistics=draw(st.none() | st.builds(Statistics, nnz=st.none() | st.integers(0, 2**64 - 1))),
    )
    return replace(descriptor, composite_member=draw(st.none() | st.sampled_from(MemberRole)))


@given(descriptors(), st.sampled_from(Dialect))
def test_round_trip(descriptor: Descriptor, dialect: Dialect) -> None:
    data = encode(descriptor, dialect=dialect)
    again = decode(data)
    assert again == descriptor
    assert again.dialect is dialect
    assert encode(again, dialect=dialect) == data
    if descriptor.quantization is not None:
        assert decode_quantization(encode_quantization(descriptor.quantization)) == descriptor.quantization


def check(data: bytes) -> bool:
    """Whether a strict reader accepts; asserts that nothing but the two outcomes happens."""
    try:
        descriptor = decode(data)
    except DescriptorError as error:
        refused = error
    else:
        assert descriptor.dialect is not None
        written = encode(descriptor, dialect=descriptor.dialect)
        again = decode(written)
        assert encode(again, dialect=again.dialect or "adr-024") == written  # not ==: statistics may be NaN
        assert replace(again, statistics=None) == replace(descriptor, statistics=None)
        return True
    assert refused.field
    assert refused.offset is not None
    assert 0 <= refused.offset <= len(data)
    return False


@given(st.binary(max_size=400))
def test_any_bytes(data: bytes) -> None:
    check(data)
    check(b"HRRY\x01\x00" + data)


@given(descriptors(), st.data())
def test_one_changed_byte(descriptor: Descriptor, data: st.DataObject) -> None:
    mutated = bytearray(encode(descriptor))
    mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    check(bytes(mutated))
    try:
        lax = decode(mutated, strict=False)
    except DescriptorError:
        return
    if not lax.findings:
        assert encode(decode(mutated)) == encode(lax)


def test_many_mutated_inputs() -> None:
    """Bytes flipped, set to edges, cut out, doubled and spliced, from every vector and optional section."""
    seeds = [bytes.fromhex(each["hex"]) for each in VECTORS]
    sample = decode(seeds[0])
    full = replace(sample, statistics=Statistics(nnz=1), composite_member=MemberRole.BASE)
    seeds += [encode(full), encode(replace(full, element_type=ExtensionType(0xF0, 16)))]
    rng = random.Random(20261129)
    accepted = 0
    for _ in range(INPUTS):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 1, 2, 3, 8))):
            at = rng.randrange(len(data)) if data else 0
            kind = rng.randrange(6)
            if kind == 0 and data:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1 and data:
                data[at] = rng.choice((0, 1, 2, 3, 0x0A, 0x0B, 0x7F, 0x80, 0xF0, 0xFE, 0xFF))
            elif kind == 2:
                data[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff", b"\0\0\0\x80", b"\x10\0\0\0"))
            elif kind == 3:
                del data[at : at + rng.randrange(1, 20)]
            elif kind == 4:
                data[at:at] = data[at : at + rng.randrange(1, 20)]
            else:
                data[6:10] = len(data).to_bytes(4, "little")
        accepted += check(bytes(data))
    assert 0 < accepted < INPUTS


@settings(max_examples=200)
@given(st.lists(descriptors(), max_size=3), st.data())
def test_streams_and_annotations_of_damaged_bytes(many: list[Descriptor], data: st.DataObject) -> None:
    mutated = bytearray(b"".join(encode(each) for each in many))
    if mutated:
        mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
        del mutated[data.draw(st.integers(0, len(mutated))) :]
    told = annotate(mutated)
    try:
        read = list(iter_descriptors(mutated))
    except DescriptorError:
        assert any(each.problem for each in told)
    else:
        assert [each.verdict for each in told] == ["accept"] * len(read)


def test_the_largest_counts_cost_nothing() -> None:
    data = bytearray(encode(decode(bytes.fromhex(VECTORS[0]["hex"]))))
    for offset, size in ((16, 4), (20, 24), (52, 12), (68, 4), (84, 1)):
        huge = data.copy()
        huge[offset : offset + size] = b"\xff" * size
        with pytest.raises(DescriptorError):
            decode(huge)
