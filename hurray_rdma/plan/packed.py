"""Pages one after the other in one buffer for each role of each layer: how they travel where no memory can be reached.

Both sides derive the same buffers from an offer and its grant: the pages that the grant wants sent, in its order, in
the destination's page size and interchange order (NHD), the heads that both sides hold; then their scales, then their
zero points. Knows layouts and page IDs only.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PageOrder, Part, PoolLayout, Segment, page_nbytes_of, parts_of
from hurray_rdma.plan.mapping import map_pages
from hurray_rdma.plan.negotiate import check_pair, common_heads
from hurray_rdma.plan.pagemap import PageMap
from hurray_rdma.plan.transfer import TransferPlan, plan_transfer

__all__ = ["pack", "packed_nbytes", "unpack"]


def packed_nbytes(source: CacheSpec, dest: CacheSpec, num_pages: int) -> int:
    """Length of each buffer in bytes.

    Args:
        source, dest: the two caches.
        num_pages: pages that travel.
    """
    spec = _packed_spec(source, dest)
    return num_pages * sum(page_nbytes_of(spec, part) for part in parts_of(spec))


def pack(
    source: PoolLayout,
    dest: CacheSpec,
    page_map: PageMap,
    *,
    resident: NDArray[np.bool_] | None,
    zero_tails: bool,
) -> TransferPlan:
    """Plans the copy of a source's pages into buffers; ``dst_region_index`` of a move is its place in ``spec.tensors``.

    Slots that no move writes are undefined at the destination: fill buffers with zeros first.

    Args:
        source: layout of the pool that holds the pages.
        dest: the pool that is to receive them.
        page_map: of the offer.
        resident: pages that the destination has, bool ``[page_map.num_pages]``: they take no room.
        zero_tails: as of `plan_transfer`.

    Raises:
        GeometryError: the two cannot exchange pages.
    """
    check_pair(source.spec, dest)
    stays = np.zeros(page_map.num_pages, np.bool_) if resident is None else resident
    # Pages that travel come first; the others get places behind the buffer, which nothing writes.
    places = np.empty(page_map.num_pages, np.uint32)
    places[np.argsort(stays, kind="stable")] = np.arange(page_map.num_pages, dtype=np.uint32)
    num_sent = page_map.num_pages - int(stays.sum())
    layout = _packed(source.spec, dest, max(1, page_map.num_pages), num_sent=num_sent)
    return plan_transfer(source, layout, page_map, places, resident=stays, zero_tails=zero_tails, in_stretches=True)


def unpack(source: CacheSpec, dest: PoolLayout, page_ids: NDArray[np.uint32]) -> TransferPlan:
    """Plans the copy out of buffers into pages; ``src_region_index`` of a move is its place in ``source.tensors``.

    Args:
        source: the sender's cache.
        dest: layout of the pool that receives.
        page_ids: the granted pages that travel, in the grant's order, uint32 ``[num_pages]``.

    Raises:
        GeometryError: the two cannot exchange pages.
    """
    count = len(page_ids)
    layout = _packed(source, dest.spec, max(1, count), num_sent=count)
    size = dest.spec.page_size
    one_each = np.arange(count + 1, dtype=np.uint32)
    full = np.full(count, size, np.uint32)
    page_map = map_pages(one_each[:-1], one_each, full, num_pages=max(1, count), src_page_size=size, dst_page_size=size)
    return plan_transfer(layout, dest, page_map, page_ids, in_stretches=True)


def _packed_spec(source: CacheSpec, dest: CacheSpec) -> CacheSpec:
    first, last = common_heads(source, dest)
    return replace(
        source,
        num_heads=last - first,
        head_offset=first,
        total_heads=source.heads_of_model,
        page_size=dest.page_size,
        order=PageOrder.NHD,
    )


def _packed(source: CacheSpec, dest: CacheSpec, num_pages: int, *, num_sent: int) -> PoolLayout:
    spec = _packed_spec(source, dest)
    segments = []
    for region_index in range(len(spec.tensors)):
        offset = 0
        for part in parts_of(spec):
            page = page_nbytes_of(spec, part)
            token = page // spec.page_size
            head = token // spec.num_heads if part is Part.PAGES else 0
            segments.append(Segment(region_index, offset, page, token, head))
            offset += num_sent * page
    return PoolLayout(spec=spec, num_pages=num_pages, segments=tuple(segments))
