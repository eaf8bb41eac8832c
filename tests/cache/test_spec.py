"""CacheSpec: sizes by hand, and each field refused by name."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest

from hurray_rdma.cache import CacheSpec, PageOrder
from hurray_rdma.errors import GeometryError

LLAMA: dict[str, Any] = {"num_layers": 32, "num_heads": 8, "head_dim": 128, "page_size": 16, "dtype": "bfloat16"}


def test_llama_3_8b() -> None:
    spec = CacheSpec(**LLAMA)
    assert spec.page_nbytes == 16 * 8 * 128 * 2 == 32768
    assert spec.page_shape == (16, 8, 128)
    assert (spec.itemsize, spec.row_nbytes, spec.row_items) == (2, 256, 128)
    assert spec.tensors[:3] == (("key", 0), ("value", 0), ("key", 1))
    assert len(spec.tensors) == 64
    assert spec.index("value", 31) == 63


def test_heads_before_tokens() -> None:
    spec = CacheSpec(**LLAMA, order="HND")
    assert spec.page_shape == (8, 16, 128)
    assert spec.with_order("NHD").order is PageOrder.NHD


def test_packed_elements_are_bytes() -> None:
    spec = CacheSpec(**(LLAMA | {"dtype": "int4"}))
    assert (spec.row_nbytes, spec.row_items, spec.storage_dtype) == (64, 64, "uint8")


def test_a_latent_cache_has_one_fused_role() -> None:
    spec = CacheSpec(num_layers=61, num_heads=1, head_dim=576, page_size=64, dtype="bfloat16", roles=("fused",))
    assert spec.page_nbytes == 64 * 576 * 2
    assert spec.tensors == tuple(("fused", layer) for layer in range(61))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_layers", 0, "num_layers = 0: must be an integer from 1"),
        ("num_heads", -1, "num_heads = -1"),
        ("head_dim", 1.5, r"head_dim = 1\.5"),
        ("page_size", True, "page_size = True"),
        ("dtype", "bfloat17", "dtype = 'bfloat17': the format has no such element type"),
        ("roles", ("key", "key"), "roles = .* at most once"),
        ("roles", ("key", "fused"), "roles = .* stands alone"),
        ("roles", ("query",), r"roles = \('query',\)"),
        ("order", "DHN", "order = 'DHN'"),
    ],
)
def test_each_field_is_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        CacheSpec(**(LLAMA | {field: value}))


def test_half_a_byte_is_no_head() -> None:
    with pytest.raises(GeometryError, match="head_dim = 3: elements of 4 bits make it 12 bits"):
        CacheSpec(**(LLAMA | {"dtype": "int4", "head_dim": 3}))


def test_unknown_places_are_refused() -> None:
    spec = CacheSpec(**LLAMA)
    with pytest.raises(GeometryError, match="layer = 32: must be from 0 to 31"):
        spec.index("key", 32)
    with pytest.raises(GeometryError, match="role = 'fused'"):
        spec.index("fused", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (0, 1)}, r"len\(layers\) = 2: must be num_layers 32"),
        ({"num_layers": 2, "layers": (4, 4)}, r"layers = \(4, 4\): must ascend"),
        ({"num_layers": 1, "layers": (-1,)}, r"layers = \(-1,\): must ascend"),
        ({"head_offset": 1, "total_heads": 8}, "head_offset = 1: the cache's 8 heads .* below total_heads 8"),
        ({"head_offset": -1}, "head_offset = -1"),
        ({"zero_points": True}, "zero_points = True: zero points need scales"),
        ({"scale_dtype": "float16"}, "dtype = 'bfloat16': must be one of int8"),
        ({"dtype": "int8", "scale_dtype": "float64"}, "scale_dtype = 'float64'"),
        ({"dtype": "int8", "scale_dtype": "float16", "page_size": 12}, "page_size = 12: must be a power of two"),
    ],
)
def test_slices_groups_and_scales_are_checked(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(GeometryError, match=message):
        CacheSpec(**(LLAMA | changes))


def test_a_slice_of_heads_and_some_of_the_layers() -> None:
    spec = CacheSpec(**(LLAMA | {"num_layers": 2, "layers": (5, 11), "num_heads": 2, "head_offset": 6}))
    assert (spec.heads, spec.heads_of_model) == ((6, 8), 8)
    assert spec.tensors == (("key", 5), ("value", 5), ("key", 11), ("value", 11))
    assert spec.index("value", 11) == 3
    with pytest.raises(GeometryError, match=r"layer = 6: must be one of \(5, 11\)"):
        spec.index("key", 6)


def test_a_changed_spec_keeps_what_was_given_and_the_rest_follows() -> None:
    spec = CacheSpec(**LLAMA)
    assert replace(spec, num_layers=2).tensors == (("key", 0), ("value", 0), ("key", 1), ("value", 1))
    assert replace(spec, num_heads=16).heads_of_model == 16
    said = replace(spec, total_heads=8, num_layers=2, layers=(1, 3))
    quarter = replace(said, num_heads=2, head_offset=2)
    assert (quarter.heads, quarter.heads_of_model, quarter.layer_indices) == ((2, 4), 8, (1, 3))
    with pytest.raises(GeometryError, match=r"head_offset = 0: the cache's 16 heads .* below total_heads 8"):
        replace(said, num_heads=16)
    with pytest.raises(GeometryError, match=r"len\(layers\) = 2: must be num_layers 3"):
        replace(said, num_layers=3)


def test_equal_specs_are_equal_however_they_were_said() -> None:
    assert CacheSpec(**LLAMA) == CacheSpec(**LLAMA, layers=list(range(32)), total_heads=8)  # type: ignore[arg-type]
    offset = LLAMA | {"num_heads": 2, "head_offset": 6}
    assert CacheSpec(**offset) == CacheSpec(**offset, total_heads=8) != CacheSpec(**offset, total_heads=9)
    assert pickle.loads(pickle.dumps(CacheSpec(**offset))) == CacheSpec(**offset)
    assert hash(CacheSpec(**offset)) == hash(CacheSpec(**offset, total_heads=8))
