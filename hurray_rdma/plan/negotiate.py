"""Whether two caches can exchange pages, field by field, from what their descriptors and layouts say.

Knows specs only. What may differ: page sizes of which one divides the other, the order inside pages, strides, which
heads of the model each side holds. All else must be equal, and the error names the field that is not.
"""

from __future__ import annotations

from hurray_rdma.cache import CacheSpec
from hurray_rdma.errors import GeometryError

__all__ = ["check_pair", "common_heads"]

_MUST_EQUAL = ("dtype", "head_dim", "scale_dtype", "zero_points")


def check_pair(source: CacheSpec, dest: CacheSpec) -> None:
    """Raises unless pages of ``source`` can be written into pages of ``dest``.

    Raises:
        GeometryError: ``field`` and ``value`` are the source's; the message has the destination's.
    """
    if source == dest:
        return
    for field in _MUST_EQUAL:
        _check_equal(field, getattr(source, field), getattr(dest, field))
    if set(source.roles) != set(dest.roles):
        _check_equal("roles", source.roles, dest.roles)
    _check_equal("num_layers", source.num_layers, dest.num_layers)
    _check_equal("layers", source.layer_indices, dest.layer_indices)
    if source.heads_of_model != dest.heads_of_model:
        raise GeometryError(
            f"the destination has {dest.heads_of_model}",
            field="total_heads",
            value=source.heads_of_model,
            fix="A cache that holds some of the model's heads says so: CacheSpec(head_offset=..., total_heads=...)",
        )
    if source.page_size % dest.page_size and dest.page_size % source.page_size:
        raise GeometryError(
            f"must divide the destination's {dest.page_size}, or be a multiple of it",
            field="page_size",
            value=source.page_size,
        )
    first, last = common_heads(source, dest)
    if first >= last:
        raise GeometryError(
            f"its heads {source.heads[0]} to {source.heads[1] - 1} are none of the destination's "
            f"{dest.heads[0]} to {dest.heads[1] - 1}",
            field="head_offset",
            value=source.head_offset,
        )
    if source.scale_dtype is not None and not _covers(source, dest):
        raise GeometryError(
            f"the destination's heads {dest.heads[0]} to {dest.heads[1] - 1} would be scaled by slots that other "
            "senders scale too: a slot has one scale",
            field="num_heads",
            value=source.num_heads,
            fix="Join quantised caches before they are sent, or split them only",
        )


def common_heads(source: CacheSpec, dest: CacheSpec) -> tuple[int, int]:
    """The model's heads that both hold: first, and the one after the last."""
    return max(source.heads[0], dest.heads[0]), min(source.heads[1], dest.heads[1])


def _covers(source: CacheSpec, dest: CacheSpec) -> bool:
    return common_heads(source, dest) == dest.heads


def _check_equal(field: str, source: object, dest: object) -> None:
    if source != dest:
        raise GeometryError(f"the destination has {dest!r}", field=field, value=source)
