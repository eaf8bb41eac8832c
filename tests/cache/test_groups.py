"""Hybrid models: groups of layers with pages, heads and tables of their own."""

from __future__ import annotations

from typing import Any

import pytest

from hurray_rdma.cache import CacheSpec, PoolGroups, Snapshot, SnapshotGroups
from hurray_rdma.errors import GeometryError

FULL = CacheSpec(num_layers=1, layers=(2,), num_heads=2, head_dim=4, page_size=4, dtype="float16")
WINDOW = CacheSpec(num_layers=2, layers=(0, 1), num_heads=1, head_dim=8, page_size=2, dtype="float16")


def test_each_group_has_its_own_pages_and_tables() -> None:
    with PoolGroups.allocate({"full": (FULL, 6), "window": (WINDOW, 8)}) as pools:
        assert list(pools) == ["full", "window"]
        assert pools["window"].pages("key", 1).shape == (8, 2, 1, 8)
        assert pools["full"].pages("value", 2).shape == (6, 4, 2, 4)
        assert (pools.group_of("key", 1), pools.group_of("key", 2)) == ("window", "full")
        full = Snapshot.from_block_tables(pools["full"], [[0, 1], [0]], seq_lens=[7, 4])
        window = Snapshot.from_block_tables(pools["window"], [[3, 4], [5]], seq_lens=[3, 2])
        groups = SnapshotGroups(pools, {"window": window, "full": full})
        assert groups.num_seqs == 2
        assert [(each.layer_index, each.page_size) for each in groups.descriptors()] == [
            (2, 4),
            (2, 4),
            (0, 2),
            (0, 2),
            (1, 2),
            (1, 2),
        ]
    assert all(pool.closed for pool in pools.values())


def test_a_layer_is_in_one_group() -> None:
    with pytest.raises(GeometryError, match=r"pools\['b'\] = \('key', 2\): is in group 'a' too"):
        PoolGroups.allocate({"a": (FULL, 2), "b": (FULL, 2)})
    with pytest.raises(GeometryError, match=r"len\(pools\) = 0"):
        PoolGroups({})


def test_snapshots_fit_their_groups() -> None:
    with PoolGroups.allocate({"full": (FULL, 6), "window": (WINDOW, 8)}) as pools:
        with pytest.raises(GeometryError, match="is in no group"):
            pools.group_of("key", 3)
        full = Snapshot.from_block_tables(pools["full"], [[0]], seq_lens=[4])
        window = Snapshot.from_block_tables(pools["window"], [[3], [4]], seq_lens=[2, 2])
        cases: list[tuple[dict[str, Any], str]] = [
            ({"full": full}, "snapshots = .*: must be the groups"),
            ({"full": full, "window": window}, "num_seqs = .*: must be the same in every group"),
            ({"full": window, "window": window}, r"snapshots\['full'\] = .*: is of another pool"),
        ]
        for snapshots, message in cases:
            with pytest.raises(GeometryError, match=message):
                SnapshotGroups(pools, snapshots)
