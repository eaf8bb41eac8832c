"""The vendored vectors: the verdict of a strict reader, both dialects, and byte-exact encoding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hurray_rdma.format import DescriptorError, Dialect, decode, encode

VECTORS: list[dict[str, Any]] = json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]
ACCEPTED = [each for each in VECTORS if each["verdict"] == "accept"]
REJECTED = [each for each in VECTORS if each["verdict"] == "reject"]


def _named(vectors: list[dict[str, Any]]) -> dict[str, Any]:
    return {"argvalues": vectors, "ids": [each["name"] for each in vectors]}


@pytest.mark.parametrize("vector", **_named(ACCEPTED))
@pytest.mark.parametrize("dialect", list(Dialect))
def test_accepted_vectors_say_what_they_should(vector: dict[str, Any], dialect: Dialect) -> None:
    data = bytearray.fromhex(vector["hex"])
    data[15] = dialect.layout_tag
    descriptor = decode(data)
    assert descriptor.dialect is dialect
    assert decode(data, dialect=dialect) == descriptor
    assert encode(descriptor, dialect=dialect) == data
    told = {
        "page_size": descriptor.page_size,
        "num_pages": descriptor.num_pages,
        "num_seqs": descriptor.num_seqs,
        "kv_role": int(descriptor.kv_role),
        "layer_index": descriptor.layer_index,
        "shape": list(descriptor.shape),
        "dtype": descriptor.element_type.wire_name,
        "device_tag": int(descriptor.device_tag),
        "scheme": getattr(descriptor.quantization, "tag", None),
    }
    assert {name: told[name] for name in vector["expect"]} == vector["expect"]


@pytest.mark.parametrize("vector", **_named(REJECTED))
@pytest.mark.parametrize("tag", [0x0A, 0x0B])
def test_rejected_vectors_are_rejected_with_field_value_and_place(vector: dict[str, Any], tag: int) -> None:
    data = bytearray.fromhex(vector["hex"])
    data[15] = tag
    with pytest.raises(DescriptorError) as caught:
        decode(data)
    assert caught.value.field
    assert caught.value.rule
    assert caught.value.value is not None
    assert caught.value.offset is not None
    assert caught.value.offset < len(data)


def test_both_verdicts_are_there() -> None:
    assert len(ACCEPTED) == 9
    assert len(REJECTED) == 28
