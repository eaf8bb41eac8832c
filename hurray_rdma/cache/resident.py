"""Pages that are here already, found by the keys of their content.

Knows keys (opaque bytes, compared whole) and pages that some lease holds: an entry ends with the last lease of its
page, so nothing is kept alive here, and whoever wants a cache keeps a lease. Keys are made in `hurray_rdma.cache.keys`.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache.allocator import Lease, PageAllocator
from hurray_rdma.errors import GeometryError

__all__ = ["Resident", "ResidentIndex"]


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """What of a list of pages is here."""

    found: NDArray[np.bool_]
    """Which of them, ``[count]``."""
    page_ids: NDArray[np.uint32]
    """Where they are, ``[count]``; 0 where not found. No page is there twice."""
    lease: Lease
    """Of the pages found, in order; release it to let go of them."""


class ResidentIndex:
    """Which complete pages a pool holds, by key. Thread-safe; at most one entry for each page.

    Args:
        allocator: of the pool. Keys must stand for all that a page's content depends on, the model included.
    """

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator
        self._lock = threading.Lock()
        self._page_of: dict[bytes, int] = {}
        self._older: dict[bytes, dict[int, None]] = {}
        """Further pages of a key, oldest first, for when its page is gone: two senders may bring one content."""
        self._key_of: dict[int, bytes] = {}
        self._births = np.zeros(allocator.num_pages, np.uint32)

    def __len__(self) -> int:
        """Keys, those of pages that are gone since included until their pages are entered anew."""
        return len(self._page_of)

    def insert(self, keys: NDArray[np.uint8], lease: Lease, /) -> None:
        """Enters pages whose content is complete in every role and layer.

        Args:
            keys: uint8 ``[len(lease), key_nbytes]``; a row of zeros is no key, and its page is not entered.
            lease: holds the pages.

        Raises:
            GeometryError: not one key for each page.
            LeaseExpiredError: the lease does not hold its pages any more.
        """
        page_ids = lease.page_ids
        _check_keys(keys, len(page_ids))
        keyed = np.asarray(keys.any(axis=1))
        page_ids = page_ids[keyed]
        births = self._allocator.births(page_ids)
        rows, pages = _rows(keys[keyed]), page_ids.tolist()
        with self._lock:
            for page, old in zip(pages, map(self._key_of.get, pages), strict=True):
                if old is not None:
                    self._forget(page, old)
            for page, row in zip(pages, rows, strict=True):
                if (standing := self._page_of.setdefault(row, page)) != page:
                    self._older.setdefault(row, {})[standing] = None
                    self._page_of[row] = page
            self._key_of.update(zip(pages, rows, strict=True))
            self._births[page_ids] = births

    def acquire(self, keys: NDArray[np.uint8], /) -> Resident:
        """Finds and retains the pages that are here, whichever part of the list they are in.

        Args:
            keys: uint8 ``[count, key_nbytes]``; rows of zeros are not looked for. Of equal keys the first is found.

        Raises:
            GeometryError: ``keys`` is no such array.
        """
        _check_keys(keys, len(keys))
        rows = _rows(keys)
        with self._lock:
            if self._older:
                self._look_for_living(list(dict.fromkeys(row for row in rows if row in self._older)))
            known = np.fromiter(map(self._page_of.get, rows, repeat(-1)), np.int64, len(keys))
            births = self._births[known]
        _, first = np.unique(known, return_index=True)
        places = np.sort(first[known[first] >= 0])
        kept, lease = self._allocator.retain_current(known[places], births[places])
        found = np.zeros(len(keys), np.bool_)
        found[places[kept]] = True
        return Resident(found=found, page_ids=np.where(found, known, 0).astype(np.uint32), lease=lease)

    def _forget(self, page: int, key: bytes) -> None:
        """The page holds something else now."""
        if (older := self._older.get(key)) is not None and page in older:
            del older[page]
            if not older:
                del self._older[key]
        elif self._page_of.get(key) == page:
            self._step_back(key)

    def _step_back(self, key: bytes) -> None:
        """The key's page is gone; the one before it stands in for it."""
        older = self._older.get(key)
        if older is None:
            del self._page_of[key]
            return
        self._page_of[key], _ = older.popitem()
        if not older:
            del self._older[key]

    def _look_for_living(self, keys: list[bytes]) -> None:
        """Of several pages of each key the last that somebody still holds is its page; later ones are forgotten."""
        while keys:
            pages = np.array([self._page_of[key] for key in keys], np.uint32)
            current = self._allocator.current(pages, self._births[pages]).tolist()
            keys = [key for key, living in zip(keys, current, strict=True) if not living and key in self._older]
            for key in keys:
                self._step_back(key)


def _check_keys(keys: NDArray[np.uint8], count: int) -> None:
    if keys.ndim != 2 or keys.dtype != np.uint8 or len(keys) != count or keys.shape[1] == 0:
        raise GeometryError(
            f"must be uint8 with a row for each of the {count} pages", field="keys", value=f"{keys.dtype} {keys.shape}"
        )


def _rows(keys: NDArray[np.uint8]) -> list[bytes]:
    whole = np.ascontiguousarray(keys)
    rows: list[bytes] = whole.view(f"V{keys.shape[1]}").reshape(-1).tolist()
    return rows
