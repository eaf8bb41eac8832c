"""Descriptors of a whole snapshot at once, and streams of them."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.format import (
    Descriptor,
    DescriptorError,
    DescriptorReader,
    KvRole,
    decode,
    descriptor_length,
    encode,
    encode_many,
    encode_tensors,
    iter_descriptors,
    mark_bytes,
    mark_tensors,
)

ONE = Descriptor.paged(
    element_type="bfloat16",
    total_tokens=100,
    num_heads=8,
    head_dim=128,
    page_size=16,
    num_pages=64,
    num_seqs=3,
    block_table_length=9,
    kv_role="key",
    layer_index=0,
)
TENSORS = [(role, layer) for layer in range(80) for role in (KvRole.KEY, KvRole.VALUE)]
MANY = ONE.for_tensors(TENSORS)


@pytest.mark.parametrize("dialect", ["adr-024", "hurray-0.2"])
def test_encode_many_is_encode_of_each(dialect: str) -> None:
    whole = encode_many(MANY, dialect=dialect)  # type: ignore[arg-type]
    assert whole == b"".join(encode(each, dialect=dialect) for each in MANY)  # type: ignore[arg-type]
    again = list(iter_descriptors(whole))
    assert [(each.kv_role, each.layer_index) for each in again] == TENSORS
    assert again == list(MANY)


@pytest.mark.parametrize("dialect", ["adr-024", "hurray-0.2"])
def test_encode_tensors_is_encode_many_of_them(dialect: str) -> None:
    tensors = [*TENSORS, (KvRole.FUSED, None)]
    expected = b"".join(encode(each, dialect=dialect) for each in ONE.for_tensors(tensors))  # type: ignore[arg-type]
    assert encode_tensors(MANY[7], tensors, dialect=dialect) == expected  # type: ignore[arg-type]
    named = [(role.wire_name, layer) for role, layer in tensors]
    assert encode_tensors(ONE, iter(named), dialect=dialect) == expected  # type: ignore[arg-type]
    assert encode_tensors(ONE, []) == b""
    assert mark_bytes(encode(ONE, dialect=dialect), mark_tensors(named)) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tensor", "field"),
    [
        (("key", -1), "layer_index"),
        (("key", 0xFFFFFFFF), "layer_index"),
        (("key", 1.5), "layer_index"),
        (("query", 0), "kv_role"),
        ((1, 0), "kv_role"),
    ],
)
def test_encode_tensors_checks_what_it_changes(tensor: Any, field: str) -> None:
    with pytest.raises(DescriptorError) as caught:
        encode_tensors(ONE, [("key", 0), tensor])
    assert caught.value.field == field


def test_encode_many_notices_other_differences() -> None:
    other = replace(ONE, total_tokens=99)
    mixed = [ONE, other, MANY[5], ONE.for_tensor(kv_role=KvRole.FUSED, layer_index=None)]
    assert list(iter_descriptors(encode_many(mixed))) == mixed
    assert encode_many([]) == b""


@pytest.mark.parametrize(("role", "layer"), [(KvRole.KEY, -1), (KvRole.KEY, 0xFFFFFFFF), (KvRole.KEY, 1.5), (1, 0)])
def test_for_tensor_checks_what_it_changes(role: KvRole, layer: Any) -> None:
    with pytest.raises(DescriptorError):
        ONE.for_tensor(kv_role=role, layer_index=layer)


def test_a_bad_descriptor_in_a_buffer_is_placed_in_the_buffer() -> None:
    data = bytearray(encode_many(MANY[:3]))
    data[2 * 133 + 72] = 9
    stream = iter_descriptors(data)
    assert next(stream) == MANY[0]
    assert next(stream) == MANY[1]
    with pytest.raises(DescriptorError) as caught:
        next(stream)
    assert caught.value.offset == 2 * 133 + 72


def test_a_cut_buffer_and_a_size_limit() -> None:
    data = encode_many(MANY[:2])
    with pytest.raises(DescriptorError, match="132"):
        list(iter_descriptors(data[:-1]))
    with pytest.raises(DescriptorError, match="longer than the 132 bytes"):
        list(iter_descriptors(data, max_nbytes=132))
    assert list(iter_descriptors(b"")) == []


@given(st.lists(st.integers(1, 133), min_size=1))
def test_a_reader_takes_any_pieces_and_never_reads_beyond(sizes: list[int]) -> None:
    data = encode_many(MANY[:3])
    reader = DescriptorReader(max_nbytes=133)
    at, found, turn = 0, [], 0
    while at < len(data):
        size = min(reader.wanted, sizes[turn % len(sizes)])
        turn += 1
        descriptor = reader.feed(data[at : at + size])
        at += size
        if descriptor is not None:
            found.append(descriptor)
            assert at % 133 == 0
    assert found == list(MANY[:3])
    reader.finish()


def test_a_reader_refuses_a_long_descriptor_before_it_is_there() -> None:
    reader = DescriptorReader(max_nbytes=1000)
    with pytest.raises(DescriptorError, match="1000"):
        reader.feed(b"HRRY\x01\x00" + (1001).to_bytes(4, "little"))


def test_a_reader_wants_no_more_than_it_can_use_and_notices_the_end() -> None:
    reader = DescriptorReader()
    assert reader.wanted == 10
    with pytest.raises(DescriptorError, match="wants 10"):
        reader.feed(bytes(11))
    reader.feed(encode(ONE)[:10])
    assert reader.wanted == 123
    with pytest.raises(DescriptorError, match="123 bytes before"):
        reader.finish()


def test_a_socket_is_read_descriptor_by_descriptor_to_its_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(encode_many(MANY[:3]))
        theirs.shutdown(socket.SHUT_WR)
        reader, found = DescriptorReader(dialect="adr-024", max_nbytes=4096), []
        while piece := ours.recv(reader.wanted):
            if (descriptor := reader.feed(piece)) is not None:
                found.append(descriptor)
        reader.finish()
    assert found == list(MANY[:3])


def test_views_of_wide_items_count_in_bytes() -> None:
    def view(data: bytes) -> memoryview:
        return memoryview(data).cast("H")

    data = encode(ONE)
    assert descriptor_length(view(data[:12])) == 133
    reader = DescriptorReader()
    with pytest.raises(DescriptorError, match="wants 10"):
        reader.feed(view(data[:20]))
    reader.feed(view(data[:10]))
    assert reader.wanted == 123


def test_the_length_is_known_from_ten_bytes() -> None:
    assert descriptor_length(encode(ONE)[:10]) == 133
    with pytest.raises(DescriptorError):
        descriptor_length(encode(ONE)[:9])


def test_layers_of_a_read_descriptor_keep_its_dialect() -> None:
    read = decode(encode(ONE, dialect="hurray-0.2"))
    assert read.for_tensor(kv_role=KvRole.VALUE, layer_index=1).dialect == read.dialect
