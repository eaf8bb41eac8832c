"""Annotations: every byte in one row, the rule beside the byte that breaks it, messages of every type."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.format import (
    Annotation,
    Descriptor,
    DescriptorError,
    ExtensionType,
    MemberRole,
    PerBlockAffine,
    Statistics,
    annotate,
    decode,
    encode,
)

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]
ONE = bytes.fromhex(VECTORS[0]["hex"])


def rows(annotation: Annotation) -> dict[str, str]:
    return {each.field: each.meaning for each in annotation.fields}


def whole(annotations: list[Annotation]) -> bytes:
    return b"".join(each.raw for annotation in annotations for each in annotation.fields)


@pytest.mark.parametrize("vector", VECTORS, ids=[each["name"] for each in VECTORS])
def test_vectors_get_their_verdict_in_the_right_row(vector: dict[str, Any]) -> None:
    data = bytes.fromhex(vector["hex"])
    if vector["name"] == "bad-magic":
        data = b"HRRY" + data[4:]  # without its magic it would be taken for a message
        data = data[:4] + b"\x07" + data[5:]
    told = annotate(data)
    assert told[0].verdict == vector["verdict"]
    at = 0
    for each in told[0].fields:
        assert each.offset == at
        at += len(each.raw)
    if vector["verdict"] == "reject":
        with pytest.raises(DescriptorError) as caught:
            decode(data)
        (row,) = (each for each in told[0].fields if each.problem)
        assert caught.value.rule in str(row.problem)
        assert row.offset <= caught.value.offset < row.offset + max(len(row.raw), 1)


def test_every_section_has_rows() -> None:
    sample = Descriptor.paged(
        element_type="int8",
        total_tokens=9,
        num_heads=2,
        head_dim=8,
        page_size=4,
        num_pages=5,
        num_seqs=2,
        block_table_length=3,
        quantization=PerBlockAffine(0, 4, 3),
        statistics=Statistics(nnz=7),
    )
    sample = replace(sample, composite_member=MemberRole.BASE)
    (told,) = annotate(encode(sample))
    assert told.verdict == "accept"
    assert whole([told]) == encode(sample)
    says = rows(told)
    assert says["flags"] == "HAS_QUANTIZATION | HAS_STATISTICS | HAS_COMPOSITE_MEMBER"
    assert says["quantization: scheme_tag"] == "per-block affine"
    assert says["quantization: scale_buffer_index"] == "buffers[3]"
    assert says["quantization: zero_point_buffer_index"] == "none"
    assert says["buffers[3].byte_size"] == "80 bytes of parameters"
    assert says["statistics: nnz"] == "7"
    assert says["composite_member: role"] == "base"
    (private,) = annotate(encode(replace(decode(ONE), element_type=ExtensionType(0xF0, 16))))
    assert rows(private)["type_tag"] == "private"
    assert rows(private)["extension_type: bit_width"] == "16"
    assert private.verdict == "accept"


def test_a_stream_goes_on_behind_a_bad_descriptor() -> None:
    bad = bytearray(ONE)
    bad[72] = 9
    told = annotate(ONE + bytes(bad) + ONE)
    assert [each.verdict for each in told] == ["accept", "reject", "accept"]
    assert [each.offset for each in told] == [0, 133, 266]
    told = annotate(ONE + b"HRRX" + ONE[4:])
    assert [(each.verdict, each.name) for each in told][1] == ("reject", "not a descriptor")


@pytest.mark.parametrize("length", [1, 3, 9, 19, 50, 85, 100, 132])
def test_a_cut_descriptor_shows_what_is_there(length: int) -> None:
    (told,) = annotate(ONE[:length])
    assert told.verdict == "reject"
    assert whole([told]) == ONE[:length]


def test_other_layouts_and_ranks_are_not_walked() -> None:
    data = bytearray(ONE)
    data[15] = 0x08
    (told,) = annotate(data)
    assert rows(told)["layout_tag"] == "CSR"
    assert "not read" in rows(told)["rest"]


def message(kind: int, payload: bytes = b"", stream: int = 1) -> bytes:
    return struct.pack("<III", kind, stream, len(payload)) + payload


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


LAYOUTS = struct.pack("<HBB", 2, 0x0B, 0xF0) + struct.pack("<H", 3) + b"abc"
HELLO = struct.pack("<IIQ", 1, 1 << 20, 4) + LAYOUTS + struct.pack("<HBBHB", 2, 0, 1, 1, 3)


@pytest.mark.parametrize(
    ("data", "name", "says"),
    [
        (message(1, HELLO), "CLIENT_HELLO", {"capability_flags": "RDMA_DATA_PLANE", "device_tags": "cpu, cuda"}),
        (message(2, HELLO), "SERVER_HELLO", {"layouts[1].bytes": "b'abc'", "memory_classes": "peer"}),
        (
            message(3, text("kv") + LAYOUTS + struct.pack("<BII", 1, 4096, 3)),
            "TENSOR_REQUEST",
            {"key": "'kv'", "preferred_device": "cuda", "request_flags": "ALLOW_TRANSCODE | PARALLEL_OK"},
        ),
        (
            message(4, ONE + struct.pack("<QII", 664, 0, 1)),
            "TENSOR_DESCRIPTOR",
            {"descriptor: layer_index": "3", "total_data_bytes": "664", "total_shards": "1"},
        ),
        (message(5, struct.pack("<Q", 64) + b"abc"), "TENSOR_DATA", {"byte_offset_in_buffer": "64", "data": "3 bytes"}),
        (message(6), "TENSOR_DATA_END", {}),
        (
            message(7, text("req-17") + struct.pack("<I", len(ONE)) + ONE + struct.pack("<Q", 664)),
            "TENSOR_PUT",
            {"key": "'req-17'", "descriptor: num_pages": "5", "total_data_bytes": "664"},
        ),
        (message(8), "TENSOR_PUT_ACK", {}),
        (message(9, struct.pack("<I", 7) + text("ü")), "ERROR", {"error_code": "MESSAGE_TOO_LARGE", "message": "'ü'"}),
        (message(9, struct.pack("<I", 0xF3) + text("")), "ERROR", {"error_code": "implementation 0xF3"}),
        (message(10), "PING", {}),
        (message(11), "PONG", {}),
        (
            message(12, struct.pack("<QQI", 0xABC0, 4096, 2) + b"rk"),
            "RDMA_REGISTER",
            {"remote_addr": "0xABC0", "length": "4096 bytes", "rkey": "packed UCX rkey"},
        ),
        (message(13), "RDMA_READY", {}),
        (message(0xF7, b"secret"), "private 0xF7", {"payload": "6 bytes, private"}),
    ],
)
def test_messages(data: bytes, name: str, says: dict[str, str]) -> None:
    (told,) = annotate(data)
    assert told.problem is None
    assert told.kind == "message"
    assert told.name == f"{name} on stream 1"
    assert whole([told]) == data
    assert {key: rows(told)[key] for key in says} == says
    for length in range(1, len(data)):
        cut = annotate(data[:length])
        assert cut[-1].verdict == "reject"
        assert whole(cut) == data[:length]


def test_a_capture_of_several_messages() -> None:
    capture = message(1, HELLO) + message(0xF0, b"xyz") + message(6, stream=5)
    told = annotate(capture, private_names={0xF0: "SESSION"})
    assert [each.name for each in told] == [
        "CLIENT_HELLO on stream 1",
        "SESSION on stream 1",
        "TENSOR_DATA_END on stream 5",
    ]
    assert whole(told) == capture


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (message(10, stream=0), "stream 0 is reserved"),
        (message(14), "must be 1..13 or private"),
        (message(0xFF), "must be 1..13 or private"),
        (message(10, b"x"), "longer than its fields"),
        (message(10)[:-1], "needs 4 bytes, 3 are left"),
        (message(5, b"12345678abc")[:-1], "ends 1 bytes early"),
        (message(9, struct.pack("<II", 1, 2) + b"\xff\xfe"), "UTF-8"),
        (message(4, b"HRRY" + bytes(20)), "major version 1"),
        (message(4, ONE[:72] + b"\x09" + ONE[73:] + bytes(16)), "must be 0 (key)"),
        (message(7, text("k") + struct.pack("<I", 140) + ONE + bytes(7) + bytes(8)), "shorter than the 140 bytes"),
    ],
)
def test_broken_messages(data: bytes, says: str) -> None:
    (told,) = annotate(data)
    assert told.verdict == "reject"
    assert says in str(told.problem)


def test_the_bytes_behind_what_is_no_descriptor_are_shown_too() -> None:
    payload = text("k") + struct.pack("<I", 133) + bytes(133) + struct.pack("<Q", 664)
    told = annotate(message(7, payload) + message(10))
    assert [each.verdict for each in told] == ["reject", "accept"]
    assert whole(told) == message(7, payload) + message(10)
    assert told[0].fields[-1].raw == struct.pack("<Q", 664)


@given(st.binary(max_size=300))
def test_any_bytes_are_shown_whole_until_they_make_no_sense(data: bytes) -> None:
    shown = whole(annotate(data))
    assert data.startswith(shown)
    assert bool(shown) == bool(data)
