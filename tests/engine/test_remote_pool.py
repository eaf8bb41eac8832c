"""A peer's pool of several regions, of which this process can map only the first: all of it goes in one other way."""

from __future__ import annotations

import asyncio
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Engine, PagePool
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, Moved, Path, Region, RemoteMemory, default_context
from tests.engine.test_whole_push import LARGE
from tests.hazards.scenes import counts, digest, eventually, fill, make_pool, run, snapshot_of

WAYS: dict[str, dict[str, str]] = {
    "put": {},
    "stream": {"TLS": "^cma"},
}
"""UCX options of both sides, by how memory is reached that is not mapped."""


def mixed_pool() -> PagePool:
    """Over arrays, of which only the first in memory is such as others can map."""
    replace, places = Context.replace, list[int]()

    def first_only(context: Context, address: int, nbytes: int, *, owner: object) -> Region:
        places.append(address)
        if len(places) == 1:
            return replace(context, address, nbytes, owner=owner)
        return context.register(address, nbytes, owner=owner)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Context, "replace", first_only)
        arrays = {
            role: [np.empty((16, *LARGE.page_shape), LARGE.storage_dtype) for _ in range(LARGE.num_layers)]
            for role in LARGE.roles
        }
        pool = PagePool.from_arrays(LARGE, arrays, mappable=True)
    assert [region.allocated for region in pool.regions] == [True] + [False] * (len(pool.regions) - 1)
    assert len(pool.regions) > 1
    return pool


def owner(connection: Connection, options: dict[str, str]) -> None:
    """Takes a snapshot, and publishes it as it came."""

    async def job() -> None:
        default_context(options)
        with mixed_pool() as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                connection.send(engine.address)
                arrival = await anext(engine.arrivals())
                snapshot = await arrival.snapshot()
                engine.publish("back", snapshot)
                connection.send(digest(snapshot))
                await asyncio.to_thread(connection.recv)
                assert engine.unpublish("back")
                arrival.release()
                await eventually(lambda: counts(pool) == (16, 0, 0))

    asyncio.run(job())


@pytest.mark.parametrize("way", WAYS)
def test_a_pool_that_is_mapped_in_part_is_not_and_its_small_snapshots_leave_the_event_loop_alone(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves: list[tuple[str, Path | None, int]] = []

    def noted(what: str) -> None:
        call = getattr(RemoteMemory, what)

        def called(self: RemoteMemory, *args: Any, **options: Any) -> Moved:
            moves.append((what, options.get("path"), threading.get_ident()))
            moved: Moved = call(self, *args, **options)
            return moved

        monkeypatch.setattr(RemoteMemory, what, called)

    async def job() -> None:
        for what in ("write", "read", "write_rows", "read_rows"):
            noted(what)
        with make_pool(LARGE, 16, context=Context(WAYS[way])) as pool, Child(owner, WAYS[way]) as child:
            fill(pool, 1)
            sent = snapshot_of(pool, [3, 1])
            expected = digest(sent)  # the fetch may take its pages
            address = await asyncio.to_thread(child.receive)
            async with Engine(pool, timeout_s=10) as engine, engine.connect(address) as peer:
                stats = await peer.send(sent, key="there")
                assert await asyncio.to_thread(child.receive) == expected
                assert (stats.path, stats.lane) == (way, {"put": "cma", "stream": "tcp"}[way])
                with await peer.fetch("back") as fetched:
                    assert digest(fetched) == expected
                    assert fetched.stats.path == way
                assert peer._connection is not None
                remote = peer._connection.first_pool()
                assert remote.memories[0].path is Path.MAPPED
                assert {memory.path.value for memory in remote.memories[1:]} == {way}
                child.send("end")
            assert counts(pool) == (16, 0, 0)
        assert {what for what, _, _ in moves} == {"write", "read"}
        assert {path for _, path, _ in moves} == {Path(way)}, "one way for every byte"
        assert threading.get_ident() not in {thread for _, _, thread in moves}

    run(job())
