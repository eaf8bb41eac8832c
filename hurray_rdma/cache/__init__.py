"""Paged caches in memory: what they look like, where their pages are, who holds them, and which sequences are in them.

Knows spans of memory from the room below (`hurray_rdma.transport`) and the format; knows no peers and moves nothing.
UCX is loaded when the first pool is made, not by importing this room.
"""

from hurray_rdma.cache.allocator import Lease, LeaseState, PageAccounts, PageAllocator
from hurray_rdma.cache.describe import spec_from, spec_of
from hurray_rdma.cache.groups import PoolGroups, SnapshotGroups
from hurray_rdma.cache.keys import KEY_NBYTES, page_keys, snapshot_keys
from hurray_rdma.cache.layout import Part, PoolLayout, Segment, page_nbytes_of, parts_of
from hurray_rdma.cache.pool import BELLS_NBYTES, PagePool
from hurray_rdma.cache.resident import Resident, ResidentIndex
from hurray_rdma.cache.snapshot import Snapshot, descriptor_form, known_snapshot
from hurray_rdma.cache.spec import CacheSpec, PageOrder

__all__ = [
    "BELLS_NBYTES",
    "KEY_NBYTES",
    "CacheSpec",
    "Lease",
    "LeaseState",
    "PageAccounts",
    "PageAllocator",
    "PageOrder",
    "PagePool",
    "Part",
    "PoolGroups",
    "PoolLayout",
    "Resident",
    "ResidentIndex",
    "Segment",
    "Snapshot",
    "SnapshotGroups",
    "descriptor_form",
    "known_snapshot",
    "page_keys",
    "page_nbytes_of",
    "parts_of",
    "snapshot_keys",
    "spec_from",
    "spec_of",
]
