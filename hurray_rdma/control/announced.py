"""What a client keeps of the pools that its server announces: the latest of each, within bounds.

This module knows that generations of a pool rise, and that no number is given to a second pool. It knows neither bytes
nor events.
"""

from __future__ import annotations

from hurray_rdma.control.pools import Pool
from hurray_rdma.errors import ProtocolError

__all__ = ["MAX_POOLS", "MAX_POOLS_NBYTES", "AnnouncedPools"]

MAX_POOLS = 1024
"""Pools that one session may know at a time."""
MAX_POOLS_NBYTES = 64 * 1024 * 1024
"""What they may take of memory (`Pool.memory_nbytes`). The caches of eight GPUs with 128 layers each, where pages,
scales and zero points of all keys and values are regions of their own, take 5 MiB; the largest pool that there can be,
with rkeys of 400 bytes, 13 MiB."""
_MAX_REMOVED = 1024
"""Removed pools whose generation is still known."""


class AnnouncedPools:
    """Hears announcements, which may come late, again, or after newer ones.

    Args:
        pools: what there is by number, kept up to date here.
    """

    def __init__(self, pools: dict[int, Pool]) -> None:
        self._pools = pools
        self._nbytes = 0
        self._removed: dict[int, int] = {}
        self._forgotten = -1
        """Of the pools with numbers up to this one there are only those that are known: others are removed for good."""

    def hear(self, pool: Pool) -> bool:
        """Takes an announcement, or the end of a pool.

        Returns:
            Whether the pools are other than before; False as well for what is late or repeated.

        Raises:
            ProtocolError: there are more, or they take more, than a session may have; nothing has changed.
        """
        number, old = pool.pool_id, self._pools.get(pool.pool_id)
        if old is None and number <= self._forgotten:
            return False
        known = old.generation if old is not None else self._removed.get(number, -1)
        if pool.generation < known or (pool.generation == known and not pool.removed):
            return False
        if pool.removed:
            if old is not None:
                self._nbytes -= old.memory_nbytes
                del self._pools[number]
            self._note_removed(pool)
            return old is not None
        nbytes = self._nbytes + pool.memory_nbytes
        if old is not None:
            nbytes -= old.memory_nbytes
        self._check(len(self._pools) + (old is None), nbytes)
        self._pools[number] = pool
        self._nbytes = nbytes
        self._removed.pop(number, None)
        return True

    @staticmethod
    def _check(num_pools: int, nbytes: int) -> None:
        if num_pools > MAX_POOLS:
            raise ProtocolError(
                f"must be at most {MAX_POOLS} that a session knows at a time",
                field="number of pools announced",
                value=num_pools,
                fix="Remove pools that nobody uses (Engine.remove_pool), or share them among several engines",
            )
        if nbytes > MAX_POOLS_NBYTES:
            raise ProtocolError(
                f"must be at most {MAX_POOLS_NBYTES} bytes, which all pools that a session knows take together",
                field="bytes of pools announced",
                value=nbytes,
                fix="Remove pools that nobody uses (Engine.remove_pool), or make them of fewer regions "
                "(PagePool.allocate needs one)",
            )

    def _note_removed(self, pool: Pool) -> None:
        """An announcement of it may still come, late. The lowest numbers are the oldest: they are forgotten first."""
        if pool.pool_id <= self._forgotten:
            return
        self._removed[pool.pool_id] = pool.generation
        if len(self._removed) > _MAX_REMOVED:
            self._forgotten = min(self._removed)
            del self._removed[self._forgotten]
