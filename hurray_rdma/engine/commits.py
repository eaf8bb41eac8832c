"""What one sender says of its snapshots, in offers or once they are in pages granted ahead: descriptors that were
checked are compared from then on.

Knows one pool's geometry; knows no pages and no leases.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec
from hurray_rdma.control import Commit, Offer, Reserve, SnapshotFields
from hurray_rdma.engine.compat import MAX_KNOWN_NBYTES, Source, counts_beside, source_of
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import DescriptorForm, Dialect, counts_of, descriptor_length
from hurray_rdma.plan import PageMap, PlacedTables, common_heads

__all__ = ["Commits"]


class _Known(NamedTuple):
    """Descriptors that were checked: those of another snapshot of the same cache are the same bytes but for counts."""

    form: DescriptorForm
    order: str
    head_offset: int
    total_heads: int
    source: Source
    heads: tuple[int, int]
    """The model's heads that it brings: first, and the one after the last."""


class Commits:
    """Checks them; what has been found out of one is not looked for again in the next.

    Args:
        dest: the pool that takes their pages.
        dialect: the session's.
        devices: device tags that the sender has named.
    """

    def __init__(self, dest: CacheSpec, *, dialect: Dialect, devices: Collection[int]) -> None:
        self._dest = dest
        self._dialect = dialect
        self._devices = devices
        self._heads = dest.heads
        self._known: _Known | None = None

    def check(self, commit: Commit, reserve: Reserve, page_ids: NDArray[np.uint32]) -> PlacedTables:
        """What it says, in the pages that were granted ahead.

        Args:
            commit: its tables are kept: nobody writes into them.
            reserve: which these were granted for.
            page_ids: these, uint32.

        Raises:
            GeometryError: also where they hold some of the heads of a page only, or are too few.
            HurrayError: as of `check_snapshot`.
        """
        known = self._known
        if known is None or not _is_of(known, commit):
            known = self._learn(commit.of_pool(reserve.pool_id, reserve.generation))
        if known.heads != self._heads:
            raise GeometryError(f"pages granted ahead are for {self._heads}", field="heads", value=known.heads)
        return known.source.place(commit, self._dest, page_ids)

    def check_offer(self, offer: Offer) -> tuple[CacheSpec, tuple[int, int], PageMap]:
        """The sender's cache, the model's heads that it brings, and which pages of a grant are to hold what, in order.

        Raises:
            HurrayError: as of `check_snapshot`.
        """
        known = self._known
        if known is None or not _is_of(known, offer):
            known = self._learn(offer)
        return known.source.spec, known.heads, known.source.page_map(offer, self._dest)

    def _learn(self, told: SnapshotFields) -> _Known:
        source = source_of(told, self._dest, dialect=self._dialect, devices=self._devices)
        heads = common_heads(source.spec, self._dest)
        first = told.descriptors[: len(told.descriptors) // told.num_descriptors]
        form = DescriptorForm(first, self._dest.tensor_marks)
        known = _Known(form, told.order, told.head_offset, told.total_heads, source, heads)
        if len(first) <= MAX_KNOWN_NBYTES and counts_of(first) is not None and descriptor_length(first) == len(first):
            self._known = known if _is_of(known, told) else None
        return known


def _is_of(known: _Known, told: SnapshotFields | Commit) -> bool:
    return (
        known.form.encode(counts_beside(told)) == told.descriptors
        and known.order == told.order
        and known.head_offset == told.head_offset
        and known.total_heads == told.total_heads
    )
