"""From the descriptors of a batch back to the geometry of the cache that it is in.

A descriptor says nothing of the order inside pages or of which heads of the model they hold: both travel beside it.
Knows the format and specs; trusts nothing, since descriptors come from peers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hurray_rdma.cache.spec import CacheSpec, PageOrder
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import Descriptor, ElementType, PerBlockAffine

__all__ = ["spec_from", "spec_of"]

_MUST_EQUAL = (
    "element_type",
    "num_heads",
    "head_dim",
    "page_size",
    "quantization",
    "device_tag",
    "num_pages",
    "num_seqs",
    "total_tokens",
)


def spec_of(
    descriptors: Sequence[Descriptor],
    *,
    order: PageOrder | str = PageOrder.NHD,
    head_offset: int = 0,
    total_heads: int | None = None,
) -> CacheSpec:
    """The spec of the cache that the descriptors describe, one for each {kv_role, layer_index}, layer by layer.

    Args:
        descriptors: in the order of `CacheSpec.tensors`.
        order, head_offset, total_heads: as of `CacheSpec`.

    Raises:
        GeometryError: they contradict each other, leave out or repeat a role of a layer, or describe no cache that this
            engine moves.
    """
    if not descriptors:
        raise GeometryError("must be one for each role of each layer", field="len(descriptors)", value=0)
    first = descriptors[0]
    for index, each in enumerate(descriptors):
        for name in _MUST_EQUAL:
            if getattr(each, name) != getattr(first, name):
                raise GeometryError(
                    f"descriptors[0] has {getattr(first, name)!r}",
                    field=f"descriptors[{index}].{name}",
                    value=getattr(each, name),
                )
    layers = tuple(dict.fromkeys(_layer(index, each) for index, each in enumerate(descriptors)))
    roles = tuple(each.kv_role.name.lower() for each in descriptors if each.layer_index == layers[0])
    spec = spec_from(first, roles=roles, layers=layers, order=order, head_offset=head_offset, total_heads=total_heads)
    given = tuple((each.kv_role.name.lower(), each.layer_index) for each in descriptors)
    if given != spec.tensors:
        at = next((i for i, (a, b) in enumerate(zip(given, spec.tensors, strict=False)) if a != b), len(given))
        raise GeometryError(
            f"must be each of {roles} of each of {len(layers)} layers, layer by layer",
            field=f"descriptors[{at}]" if at < len(given) else "len(descriptors)",
            value=given[at] if at < len(given) else len(given),
        )
    return spec


def spec_from(
    first: Descriptor,
    *,
    roles: tuple[str, ...],
    layers: tuple[int, ...],
    order: PageOrder | str = PageOrder.NHD,
    head_offset: int = 0,
    total_heads: int | None = None,
    known: CacheSpec | None = None,
) -> CacheSpec:
    """As `spec_of`, of the descriptors that differ from ``first`` in role and layer alone.

    Args:
        first: of any of the roles and layers.
        roles, layers, order, head_offset, total_heads: as of `CacheSpec`.
        known: what it is likely to be; it is returned itself where it is.

    Raises:
        GeometryError: they describe no cache that this engine moves.
    """
    if not isinstance(first.element_type, ElementType):
        raise GeometryError(
            "is a private type", field="descriptors[0].element_type", value=first.element_type.wire_name
        )
    scales = _scales(first)
    spec_fields: dict[str, Any] = {
        "num_heads": first.num_heads,
        "head_dim": first.head_dim,
        "page_size": first.page_size,
        "dtype": first.element_type.wire_name,
        "roles": roles,
        "head_offset": head_offset,
        "scale_dtype": None if scales is None else scales.scale_type.wire_name,
        "zero_points": scales is not None and scales.zero_point_buffer_index is not None,
    }
    if (
        known is not None
        and layers == known.layer_indices
        and order == known.order
        and (head_offset + first.num_heads if total_heads is None else total_heads) == known.heads_of_model
        and all(getattr(known, name) == value for name, value in spec_fields.items())
    ):
        return known
    spec = CacheSpec(num_layers=len(layers), layers=layers, total_heads=total_heads, **spec_fields)
    return spec.with_order(order)


def _layer(index: int, descriptor: Descriptor) -> int:
    if descriptor.layer_index is None:
        raise GeometryError("must name a layer", field=f"descriptors[{index}].layer_index", value=None)
    return descriptor.layer_index


def _scales(descriptor: Descriptor) -> PerBlockAffine | None:
    scheme = descriptor.quantization
    if scheme is None or isinstance(scheme, PerBlockAffine):
        return scheme
    raise GeometryError(
        "must be none, or per-block affine: one scale for each page slot",
        field="descriptors[0].quantization",
        value=type(scheme).__name__,
    )
