"""Paged caches in memory: what they look like, where their pages are, who holds them, and which sequences are in them.

Knows spans of memory from the room below (`hurray_rdma.transport`) and the format; knows no peers and moves nothing.
"""

from hurray_rdma.cache.allocator import Lease, LeaseState, PageAccounts, PageAllocator
from hurray_rdma.cache.layout import Part, PoolLayout, Segment, parts_of
from hurray_rdma.cache.pool import PagePool
from hurray_rdma.cache.snapshot import Snapshot
from hurray_rdma.cache.spec import CacheSpec, PageOrder

__all__ = [
    "CacheSpec",
    "Lease",
    "LeaseState",
    "PageAccounts",
    "PageAllocator",
    "PageOrder",
    "PagePool",
    "Part",
    "PoolLayout",
    "Segment",
    "Snapshot",
    "parts_of",
]
