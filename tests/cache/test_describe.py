"""Specs to descriptors and back, through the bytes of the format."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot, spec_from, spec_of
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import Descriptor, PerBlockAffine, PerTensorAffine, decode, encode

BASE: dict[str, Any] = {"num_layers": 2, "num_heads": 2, "head_dim": 4, "page_size": 4, "dtype": "int8"}


def descriptors(spec: CacheSpec) -> list[Descriptor]:
    with PagePool.allocate(spec, 6) as pool:
        snapshot = Snapshot.from_block_tables(pool, [[5, 1], [5, 2]], seq_lens=[7, 8])
        return [decode(encode(each)) for each in snapshot.descriptors()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"dtype": "bfloat16"},
        {"roles": ("fused",), "num_heads": 1, "head_dim": 576},
        {"roles": ("value", "key"), "layers": (3, 7)},
        {"order": "HND", "head_offset": 2, "total_heads": 8},
        {"scale_dtype": "float16"},
        {"scale_dtype": "float32", "zero_points": True, "dtype": "uint4"},
    ],
    ids=str,
)
def test_a_spec_survives_its_descriptors(changes: dict[str, Any]) -> None:
    spec = CacheSpec(**(BASE | changes))
    found = spec_of(descriptors(spec), order=spec.order, head_offset=spec.head_offset, total_heads=spec.total_heads)
    assert found == spec
    for each in descriptors(spec):
        assert (
            spec_from(
                each,
                roles=spec.roles,
                layers=spec.layer_indices,
                order=spec.order,
                head_offset=spec.head_offset,
                total_heads=spec.total_heads,
            )
            == spec
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 1},
        {"head_dim": 8},
        {"page_size": 8},
        {"dtype": "uint8"},
        {"roles": ("value", "key")},
        {"layers": (0, 2)},
        {"order": "HND"},
        {"head_offset": 1},
        {"total_heads": 4},
        {"scale_dtype": "float16"},
        {"scale_dtype": "float16", "zero_points": True},
    ],
    ids=str,
)
def test_a_known_spec_is_returned_exactly_where_it_is_described(changes: dict[str, Any]) -> None:
    spec, other = CacheSpec(**BASE), CacheSpec(**(BASE | changes))
    for described, known in ((spec, other), (other, spec), (spec, spec), (other, replace(other))):
        found = spec_from(
            descriptors(described)[0],
            roles=described.roles,
            layers=described.layer_indices,
            order=described.order,
            head_offset=described.head_offset,
            total_heads=described.total_heads,
            known=known,
        )
        assert found == described
        assert (found is known) == (described == known)


def test_scales_are_buffers_of_the_descriptor() -> None:
    each = descriptors(CacheSpec(**BASE, scale_dtype="float16", zero_points=True))[0]
    assert each.quantization == PerBlockAffine(
        axis=0, block_size=4, scale_buffer_index=3, zero_point_buffer_index=4, scale_type=each.quantization.scale_type
    )
    assert [buffer.byte_size for buffer in each.buffers[3:]] == [6 * 4 * 2, 6 * 4 * 4]


def test_contradictions_are_refused_by_place_and_field() -> None:
    whole = descriptors(CacheSpec(**BASE))
    other = descriptors(CacheSpec(**(BASE | {"head_dim": 8})))
    with pytest.raises(GeometryError, match=r"descriptors\[1\]\.head_dim = 8: descriptors\[0\] has 4"):
        spec_of([whole[0], other[1], *whole[2:]])
    with pytest.raises(GeometryError, match=r"len\(descriptors\) = 3: must be each of \('key', 'value'\)"):
        spec_of(whole[:3])
    with pytest.raises(GeometryError, match=r"layers = \(1, 0\): must ascend"):
        spec_of(whole[2:] + whole[:2])
    with pytest.raises(GeometryError, match=r"roles = .*at most once"):
        spec_of([whole[0], whole[0]])
    with pytest.raises(GeometryError, match=r"len\(descriptors\) = 0"):
        spec_of([])
    with pytest.raises(GeometryError, match=r"descriptors\[0\]\.layer_index = None: must name a layer"):
        spec_of([replace(whole[0], layer_index=None)])
    with pytest.raises(GeometryError, match=r"quantization = 'PerTensorAffine'"):
        spec_of([replace(each, quantization=PerTensorAffine(scale=0.5)) for each in whole])
