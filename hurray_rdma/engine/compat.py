"""Whether two sides fit: the announced pool against the sender's, the offered descriptors against the receiver's.

Field by field, never by an all-equal hash: the error names the field and both values.
"""

from __future__ import annotations

from collections.abc import Iterable

from hurray_rdma.cache import CacheSpec, PagePool
from hurray_rdma.control import Offer, Pool, PoolRegion, PoolSegment
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import Descriptor, Dialect, KvRole, decode, encode_many, iter_descriptors

__all__ = ["announcement", "check_offer", "check_pool"]


def announcement(pool: PagePool, *, pool_id: int, generation: int) -> Pool:
    """The POOL message for a receive pool: geometry, and what a peer needs to write into it."""
    spec = pool.spec
    remotes = [region.remote() for region in pool.regions]
    segments = [pool.segment(role, layer) for role, layer in spec.tensors]
    return Pool(
        pool_id=pool_id,
        generation=generation,
        num_pages=pool.num_pages,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=spec.dtype,
        roles=spec.roles,
        order=spec.order,
        device=pool.regions[0].device,
        regions=tuple(PoolRegion(remote_addr=r.remote_addr, nbytes=r.nbytes, rkey=r.rkey) for r in remotes),
        segments=tuple(PoolSegment(s.region_index, s.offset_nbytes, s.page_stride_nbytes) for s in segments),
    )


def check_pool(spec: CacheSpec, pool: Pool) -> None:
    """Raises GeometryError where the peer's pool cannot take pages of ``spec``."""
    _check_fields(
        (name, getattr(spec, name), getattr(pool, name))
        for name in ("num_layers", "num_heads", "head_dim", "page_size", "dtype", "roles", "order")
    )


def check_offer(offer: Offer, pool: PagePool) -> Descriptor:
    """Checks the offered descriptors against the rules of the format, each other, the tables and the pool.

    Returns:
        The first of them; the others differ only in role and layer.

    Raises:
        DescriptorError: a descriptor breaks a rule of the format.
        GeometryError: it is valid, but this pool cannot take it, or the tables say otherwise than the descriptors.
    """
    spec = pool.spec
    tensors = spec.tensors
    _check_fields([("order", offer.order, spec.order)])
    if offer.num_descriptors != len(tensors):
        raise GeometryError(
            f"must be the {len(tensors)} of {spec.num_layers} layers of {spec.roles}",
            field="len(descriptors)",
            value=offer.num_descriptors,
        )
    first = decode(offer.descriptors)
    expected = first.for_tensors((KvRole[role.upper()], layer) for role, layer in tensors)
    if encode_many(expected, dialect=first.dialect or Dialect.ADR_024) == offer.descriptors:
        # What a sender writes, to the byte: what holds for one of them holds for all.
        _check_descriptor(first, *tensors[0], index=0, first=first, offer=offer, spec=spec)
    else:
        for index, descriptor in enumerate(iter_descriptors(offer.descriptors)):
            _check_descriptor(descriptor, *tensors[index], index=index, first=first, offer=offer, spec=spec)
    return first


def _check_descriptor(
    descriptor: Descriptor, role: str, layer: int, *, index: int, first: Descriptor, offer: Offer, spec: CacheSpec
) -> None:
    _check_fields(
        (f"descriptors[{index}].{name}", theirs, ours)
        for name, theirs, ours in (
            ("kv_role", descriptor.kv_role.name.lower(), role),
            ("layer_index", descriptor.layer_index, layer),
            ("element_type", descriptor.element_type, spec.element_type),
            ("page_size", descriptor.page_size, spec.page_size),
            ("num_heads", descriptor.num_heads, spec.num_heads),
            ("head_dim", descriptor.head_dim, spec.head_dim),
            ("quantization", descriptor.quantization, None),
            ("num_pages", descriptor.num_pages, first.num_pages),
            ("num_seqs", descriptor.num_seqs, len(offer.seq_lens)),
            ("total_tokens", descriptor.total_tokens, int(offer.seq_lens.sum(dtype="uint64"))),
            ("block_table_length", descriptor.block_table_length, len(offer.block_table)),
        )
    )


def _check_fields(fields: Iterable[tuple[str, object, object]]) -> None:
    for name, theirs, ours in fields:
        if theirs != ours:
            raise GeometryError(f"the receiving side has {ours!r}", field=name, value=theirs)
