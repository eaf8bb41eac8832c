"""Several caches that belong together: the layer groups of a hybrid model, each with pages and block tables of its own.

Knows pools and snapshots by name; what one group is, is in their own modules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from hurray_rdma.cache.pool import PagePool
from hurray_rdma.cache.snapshot import Snapshot
from hurray_rdma.cache.spec import CacheSpec
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import Descriptor

if TYPE_CHECKING:
    from hurray_rdma.transport import Context

__all__ = ["PoolGroups", "SnapshotGroups"]


class PoolGroups(Mapping[str, PagePool]):
    """The pools of a hybrid model by the name of their group; a context manager that closes all of them.

    Args:
        pools: groups with different page sizes, heads or windows, their layers told apart by `CacheSpec.layers`.

    Raises:
        GeometryError: no group, or a layer's role is in two groups.
    """

    def __init__(self, pools: Mapping[str, PagePool]) -> None:
        if not pools:
            raise GeometryError("must be one or more", field="len(pools)", value=0)
        home: dict[tuple[str, int], str] = {}
        for name, pool in pools.items():
            for tensor in pool.spec.tensors:
                if home.setdefault(tensor, name) != name:
                    raise GeometryError(
                        f"is in group {home[tensor]!r} too",
                        field=f"pools[{name!r}]",
                        value=tensor,
                        fix="Give each group's layers: CacheSpec(layers=...)",
                    )
        self._pools = MappingProxyType(dict(pools))
        self._home = home

    @classmethod
    def allocate(
        cls, groups: Mapping[str, tuple[CacheSpec, int]], *, device: str = "cpu", context: Context | None = None
    ) -> PoolGroups:
        """One pool for each group, as of `PagePool.allocate`.

        Args:
            groups: spec and number of pages of each.
            device, context: as of `PagePool.allocate`.

        Raises:
            GeometryError: as of the class; nothing stays allocated.
            RegistrationError: no memory; nothing stays allocated.
        """
        pools: dict[str, PagePool] = {}
        try:
            for name, (spec, num_pages) in groups.items():
                pools[name] = PagePool.allocate(spec, num_pages, device=device, context=context)
            return cls(pools)
        except BaseException:
            for pool in pools.values():
                pool.close()
            raise

    def __getitem__(self, name: str, /) -> PagePool:
        return self._pools[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._pools)

    def __len__(self) -> int:
        return len(self._pools)

    def group_of(self, role: str, layer: int, /) -> str:
        """The group that has a role of a layer.

        Raises:
            GeometryError: none has.
        """
        if (role, layer) not in self._home:
            raise GeometryError("is in no group", field="(role, layer)", value=(role, layer))
        return self._home[role, layer]

    def close(self) -> None:
        """Closes every pool, whatever becomes of the others; errors as of `PagePool.close`. Idempotent."""
        with contextlib.ExitStack() as closing:
            for pool in self._pools.values():
                closing.callback(pool.close)

    def __enter__(self) -> PoolGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SnapshotGroups(Mapping[str, Snapshot]):
    """The same sequences in every group of a hybrid model.

    A group with a window holds the last tokens of each sequence only, from a page boundary on: its ``seq_lens`` are
    smaller, and the position of its first token is the difference to the longest.

    Args:
        pools: the groups.
        snapshots: one for each of them.

    Raises:
        GeometryError: groups are missing or unknown, belong to another pool, or differ in their number of sequences.
    """

    def __init__(self, pools: PoolGroups, snapshots: Mapping[str, Snapshot]) -> None:
        if set(snapshots) != set(pools):
            raise GeometryError(f"must be the groups {tuple(pools)}", field="snapshots", value=tuple(snapshots))
        counts = {name: snapshots[name].num_seqs for name in pools}
        if len(set(counts.values())) != 1:
            raise GeometryError("must be the same in every group", field="num_seqs", value=counts)
        for name, pool in pools.items():
            if snapshots[name].pool is not pool:
                raise GeometryError("is of another pool", field=f"snapshots[{name!r}]", value=repr(snapshots[name]))
        self.pools = pools
        self._snapshots = MappingProxyType({name: snapshots[name] for name in pools})

    def __getitem__(self, name: str, /) -> Snapshot:
        return self._snapshots[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshots)

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def num_seqs(self) -> int:
        return next(iter(self._snapshots.values())).num_seqs

    def descriptors(self) -> list[Descriptor]:
        """Those of every group, group after group."""
        return [each for snapshot in self._snapshots.values() for each in snapshot.descriptors()]
