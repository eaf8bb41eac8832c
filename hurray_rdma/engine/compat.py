"""What two sides tell each other of their pools, as messages and back, and whether they fit.

Nothing a peer says is used before it is checked here: its layout against its regions, its descriptors against the
format, each other, the tables beside them and the receiver's pool.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import (
    CacheSpec,
    PagePool,
    PoolLayout,
    Segment,
    Snapshot,
    page_nbytes_of,
    parts_of,
    spec_from,
    spec_of,
)
from hurray_rdma.cache.indices import dedupe, place_pages, total_of, valid_pages
from hurray_rdma.control import (
    Commit,
    DeviceUnavailableError,
    Pool,
    PoolRegion,
    PoolSegment,
    Published,
    SnapshotFields,
)
from hurray_rdma.control.pools import segment_values
from hurray_rdma.errors import ConfigError, GeometryError, HurrayError
from hurray_rdma.format import (
    Counts,
    DeviceTag,
    Dialect,
    check_transferable,
    counts_of,
    decode,
    descriptor_length,
    iter_descriptors,
    mark_bytes,
    with_counts,
)
from hurray_rdma.plan import PageMap, PlacedTables, check_pair, map_pages
from hurray_rdma.transport import Context

__all__ = [
    "MAX_KNOWN_NBYTES",
    "Source",
    "announced_layout",
    "announcement",
    "check_context",
    "check_published",
    "check_snapshot",
    "counts_beside",
    "page_map_of",
    "pages_nbytes",
    "pages_of",
    "same_kind",
    "same_tensors",
    "source_of",
]


def announcement(pool: PagePool, *, pool_id: int, generation: int, name: str) -> Pool:
    """The POOL message for a receive pool: geometry, and what a peer needs to write into it."""
    layout, spec = pool.layout, pool.spec
    remotes = [region.remote() for region in pool.regions]
    return Pool(
        pool_id=pool_id,
        generation=generation,
        name=name,
        num_pages=layout.num_pages,
        layers=spec.layer_indices,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=spec.dtype,
        roles=spec.roles,
        order=str(spec.order),
        head_offset=spec.head_offset,
        total_heads=spec.heads_of_model,
        scale_dtype=spec.scale_dtype,
        zero_points=spec.zero_points,
        device=pool.device,
        regions=tuple(PoolRegion(remote_addr=r.remote_addr, nbytes=r.nbytes, rkey=r.rkey) for r in remotes),
        segments=tuple(PoolSegment(*segment_values(segment)) for segment in layout.segments),
    )


def check_context(pool: PagePool, context: Context) -> None:
    """Raises unless an engine with that UCX context can use the pool.

    Raises:
        ConfigError: the pool was made with another.
    """
    if pool.context is not context:
        raise ConfigError(
            "the pool was made with another UCX context", field="context", value=context, fix="Pass the pool's own"
        )


def same_kind(device: str, other: str) -> bool:
    """Whether two devices are of one kind: ``"cuda:0"`` and ``"cuda:1"``."""
    return DeviceTag.of_device(device) is DeviceTag.of_device(other)


@lru_cache(maxsize=256)
def pages_nbytes(spec: CacheSpec) -> int:
    """Bytes of one page of every role and layer, scales and zero points included."""
    return len(spec.tensors) * sum(page_nbytes_of(spec, part) for part in parts_of(spec))


def announced_layout(pool: Pool) -> PoolLayout:
    """The layout of a pool that a peer announced.

    Raises:
        GeometryError: it is none, or a slot of it lies outside its region.
    """
    spec = CacheSpec(
        num_layers=len(pool.layers),
        num_heads=pool.num_heads,
        head_dim=pool.head_dim,
        page_size=pool.page_size,
        dtype=pool.dtype,
        roles=pool.roles,
        layers=pool.layers,
        head_offset=pool.head_offset,
        total_heads=pool.total_heads,
        scale_dtype=pool.scale_dtype,
        zero_points=pool.zero_points,
    ).with_order(pool.order)
    segments = tuple(Segment(*segment_values(segment)) for segment in pool.segments)
    layout = PoolLayout(spec=spec, num_pages=pool.num_pages, segments=segments)
    layout.check_inside([region.nbytes for region in pool.regions])
    return layout


def same_tensors(one: CacheSpec, other: CacheSpec) -> bool:
    """Whether two caches have the same layers and roles."""
    return one.layer_indices == other.layer_indices and set(one.roles) == set(other.roles)


def pages_of(snapshot: Snapshot) -> NDArray[np.uint32]:
    """Pages that hold tokens of it, each once: as of `page_map_of` where pages have one size, uint32, ascending."""
    spec, num_pages = snapshot.pool.spec, snapshot.pool.num_pages
    table, _ = valid_pages(snapshot.block_table, snapshot.seq_ptr, snapshot.seq_lens, spec.page_size)
    return dedupe(table, num_pages=num_pages)[0]


def page_map_of(snapshot: Snapshot, dest: CacheSpec) -> PageMap:
    """Which pages of a snapshot make up which pages of a pool like ``dest``.

    Raises:
        GeometryError: neither page size divides the other.
    """
    return map_pages(
        snapshot.block_table,
        snapshot.seq_ptr,
        snapshot.seq_lens,
        num_pages=snapshot.pool.num_pages,
        src_page_size=snapshot.pool.spec.page_size,
        dst_page_size=dest.page_size,
    )


def check_snapshot(
    told: SnapshotFields, dest: CacheSpec, *, dialect: Dialect, devices: Collection[int]
) -> tuple[CacheSpec, PageMap]:
    """The peer's cache as its descriptors describe it, and its pages in terms of a pool like ``dest``.

    Args:
        told: what the peer says of the snapshot.
        dest: the pool that takes its pages.
        dialect: the session's.
        devices: device tags that the peer has named.

    Raises:
        DescriptorError: a descriptor breaks a rule of the format, or is of another dialect than the session's.
        DeviceUnavailableError: the pages are in memory of a device that it has not named.
        GeometryError: descriptors, tables and pool do not fit together.
    """
    source = source_of(told, dest, dialect=dialect, devices=devices)
    return source.spec, source.page_map(told, dest)


@dataclass(frozen=True, slots=True)
class Source:
    """What descriptors tell of the pool that a snapshot is in."""

    spec: CacheSpec
    num_pages: int
    device_tag: int

    def page_map(self, told: SnapshotFields | Commit, dest: CacheSpec) -> PageMap:
        """The pages of a snapshot in it, in terms of a pool like ``dest``; its tables are checked.

        Raises:
            GeometryError: as of `map_pages`.
        """
        return map_pages(
            told.block_table,
            told.seq_ptr,
            told.seq_lens,
            num_pages=self.num_pages,
            src_page_size=self.spec.page_size,
            dst_page_size=dest.page_size,
        )

    def place(self, commit: Commit, dest: CacheSpec, page_ids: NDArray[np.uint32]) -> PlacedTables:
        """Its tables in pages of a pool like ``dest``, the first of ``page_ids``; uint32, as many or more.

        Raises:
            GeometryError: as of `map_pages`, or there are too few.
        """
        if self.spec.page_size != dest.page_size:
            page_map = self.page_map(commit, dest)
            num_pages, granted = page_map.num_pages, len(page_ids)
            if num_pages > granted:
                raise GeometryError(f"is above the {granted} that were granted", field="num_pages", value=num_pages)
            return page_map.placed(page_ids[:num_pages])
        block_table, seq_ptr, num_pages = place_pages(
            commit.block_table,
            commit.seq_ptr,
            commit.seq_lens,
            page_ids,
            num_pages=self.num_pages,
            page_size=dest.page_size,
        )
        return PlacedTables(block_table, seq_ptr, commit.seq_lens, num_pages)


def source_of(told: SnapshotFields, dest: CacheSpec, *, dialect: Dialect, devices: Collection[int]) -> Source:
    """The pool that a snapshot is in; it can exchange pages with one like ``dest``. Arguments as of `check_snapshot`.

    Raises:
        HurrayError: as of `check_snapshot`, of what descriptors say.
    """
    source = _known_source(told, dest, dialect) or _source(told, dest, dialect)
    check_pair(source.spec, dest)
    if source.device_tag not in devices:
        raise DeviceUnavailableError(
            f"the peer named the device tags {sorted(map(int, devices))}",
            field="device_tag",
            value=source.device_tag,
        )
    return source


def _source(told: SnapshotFields, dest: CacheSpec, dialect: Dialect) -> Source:
    """What descriptors tell, each of them checked, and that the tables beside them have what they count."""
    descriptors = list(iter_descriptors(told.descriptors, dialect=dialect))
    for descriptor in descriptors:
        check_transferable(descriptor)
    spec = spec_of(descriptors, order=told.order, head_offset=told.head_offset, total_heads=told.total_heads or None)
    first = descriptors[0]
    for name, described, given in (
        ("num_seqs", first.num_seqs, len(told.seq_lens)),
        ("total_tokens", first.total_tokens, counts_beside(told).total_tokens),
        ("block_table_length", first.block_table_length, len(told.block_table)),
    ):
        if described != given:
            raise GeometryError(f"the tables beside the descriptors have {given}", field=name, value=described)
    return Source(spec, first.num_pages, int(first.device_tag))


def counts_beside(told: SnapshotFields | Commit) -> Counts:
    """What the tables count, so that the descriptors beside them must."""
    total_tokens = total_of(told.seq_lens)
    return Counts.of(total_tokens=total_tokens, num_seqs=len(told.seq_lens), block_table_length=len(told.block_table))


_ANY_COUNTS = Counts.of(total_tokens=1, num_seqs=1, block_table_length=1)
MAX_KNOWN_NBYTES = 1024
"""Of a descriptor that is remembered; an ordinary one has 133."""


def _known_source(told: SnapshotFields, dest: CacheSpec, dialect: Dialect) -> Source | None:
    """As `_source`, of what senders of the same cache write: descriptors that are alike to the byte but for role and
    layer, and count what the tables have. The rest of such bytes is looked at once. None: it is not that, or wrong."""
    num_tensors, data = len(dest.tensor_marks), told.descriptors
    nbytes = len(data) // num_tensors
    if told.num_descriptors != num_tensors or nbytes > MAX_KNOWN_NBYTES or nbytes * num_tensors != len(data):
        return None
    first = data[:nbytes]
    counts = counts_of(first)
    if counts != counts_beside(told) or mark_bytes(first, dest.tensor_marks) != data:
        return None
    order, total_heads = told.order, told.total_heads or None
    return _looked_at(
        with_counts(first, _ANY_COUNTS),
        dest,
        dialect,
        order=order,
        head_offset=told.head_offset,
        total_heads=total_heads,
    )


@lru_cache(maxsize=64)
def _looked_at(
    data: bytes, dest: CacheSpec, dialect: Dialect, *, order: str, head_offset: int, total_heads: int | None
) -> Source | None:
    """What one descriptor tells, of whichever role and layer; None if anything is wrong."""
    try:
        if descriptor_length(data) != len(data):
            return None  # `decode` does not look at what follows
        first = decode(data, dialect=dialect)
        check_transferable(first)
        spec = spec_from(
            first,
            roles=dest.roles,
            layers=dest.layer_indices,
            order=order,
            head_offset=head_offset,
            total_heads=total_heads,
            known=dest,
        )
    except HurrayError:
        return None  # whoever looks at all of it says what
    return Source(spec, first.num_pages, int(first.device_tag))


def check_published(
    told: Published, source: PoolLayout, dest: CacheSpec, *, dialect: Dialect, device: str
) -> tuple[CacheSpec, PageMap]:
    """The cache of a published snapshot as its descriptors describe it, and its pages in terms of a pool like ``dest``.

    Args:
        told: what the peer says of the snapshot.
        source: the pool that it is said to be in, as the peer announced it.
        dest: of this side.
        dialect: the session's.
        device: of that pool.

    Raises:
        DescriptorError, GeometryError: as of `check_snapshot`, or the descriptors are not of that pool.
    """
    spec, page_map = check_snapshot(told, dest, dialect=dialect, devices={DeviceTag.of_device(device)})
    for name in ("page_size", "num_heads", "order"):
        if getattr(spec, name) != getattr(source.spec, name):
            raise GeometryError(
                f"the peer announced the pool with {getattr(source.spec, name)!r}",
                field=name,
                value=getattr(spec, name),
            )
    check_pair(spec, source.spec)
    if len(told.block_table) and int(told.block_table.max()) >= source.num_pages:
        raise GeometryError(
            f"is not below the {source.num_pages} pages of the pool as the peer announced it",
            field="max(block_table)",
            value=int(told.block_table.max()),
        )
    return spec, page_map
