"""What one sender says of the snapshots that it has put into pages granted ahead, held to the same rules as offers.

Knows one pool's geometry; knows no pages and no leases.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from hurray_rdma.cache import CacheSpec
from hurray_rdma.control import Commit, Reserve
from hurray_rdma.engine.compat import MAX_KNOWN_NBYTES, Source, counts_beside, source_of
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import DescriptorForm, Dialect, counts_of, descriptor_length
from hurray_rdma.plan import PageMap, common_heads

__all__ = ["Commits"]


class _Known(NamedTuple):
    """Descriptors that were checked: those of another snapshot of the same cache are the same bytes but for counts."""

    form: DescriptorForm
    order: str
    head_offset: int
    total_heads: int
    source: Source


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
        self._known: _Known | None = None

    def check(self, commit: Commit, reserve: Reserve) -> PageMap:
        """Which pages of the grant hold what, in order.

        Raises:
            GeometryError: also where they hold some of the heads of a page only.
            HurrayError: as of `check_snapshot`.
        """
        known = self._known
        source = known.source if known is not None and _is_of(known, commit) else self._learn(commit, reserve)
        return source.page_map(commit, self._dest)

    def _learn(self, commit: Commit, reserve: Reserve) -> Source:
        told = commit.of_pool(reserve.pool_id, reserve.generation)
        source = source_of(told, self._dest, dialect=self._dialect, devices=self._devices)
        if (heads := common_heads(source.spec, self._dest)) != self._dest.heads:
            raise GeometryError(f"pages granted ahead are for {self._dest.heads}", field="heads", value=heads)
        first = told.descriptors[: len(told.descriptors) // told.num_descriptors]
        if len(first) <= MAX_KNOWN_NBYTES and counts_of(first) is not None and descriptor_length(first) == len(first):
            form = DescriptorForm(first, self._dest.tensor_marks)
            known = _Known(form, told.order, told.head_offset, told.total_heads, source)
            self._known = known if _is_of(known, commit) else None
        return source


def _is_of(known: _Known, commit: Commit) -> bool:
    return (
        known.form.encode(counts_beside(commit)) == commit.descriptors
        and known.order == commit.order
        and known.head_offset == commit.head_offset
        and known.total_heads == commit.total_heads
    )
