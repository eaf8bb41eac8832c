"""Snapshots that are pushed into pages the receiver has chosen, before the offer or after it, and nowhere else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hurray_rdma import (
    Arrival,
    ConfigError,
    DeadlineExceededError,
    Engine,
    GeometryError,
    PagePool,
    Peer,
    Placement,
    TransferAbortedError,
    sync,
)
from hurray_rdma.control import AbortRequested, Granted, PoolsAnnounced
from tests.engine.hands import shaken
from tests.engine.test_placement import external_pool, written
from tests.hazards.scenes import SPEC, counts, digest, eventually, fill, make_pool, run, snapshot_of


@contextlib.asynccontextmanager
async def pair(num_pages: int = 8, **settings: Any) -> AsyncIterator[tuple[PagePool, Engine, PagePool, Peer]]:
    """A receiver over an external pool, and a sender."""
    with external_pool(SPEC, num_pages) as mine, make_pool(SPEC, 8) as theirs:
        fill(theirs, 4)
        async with (
            Engine(mine, listen="127.0.0.1:0", **settings) as engine,
            Engine(theirs) as sender,
            sender.connect(engine.address) as peer,
        ):
            yield mine, engine, theirs, peer


async def next_arrival(engine: Engine) -> Arrival:
    async with asyncio.timeout(10):
        return await anext(engine.arrivals())


@pytest.mark.parametrize("first", ["expect", "offer"])
def test_a_push_goes_where_it_is_expected(first: str) -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            snapshot, placement = snapshot_of(theirs, [3, 1, 7]), Placement(mine, [6, 0, 4])
            if first == "expect":
                engine.expect("mine", placement)
                await peer.send(snapshot, key="mine")
            else:
                with pytest.raises(ConfigError, match="handed out by its caller"):  # nobody might ever expect it
                    await peer.send(snapshot, key="mine")
                engine.let_offers_wait()
                sending = asyncio.create_task(peer.send(snapshot, key="mine"))
                await eventually(lambda: engine.stats().num_waiting == 1)
                engine.expect("mine", placement)
                await sending
            arrival = await next_arrival(engine)
            await arrival.settled()
            assert arrival.block_table.tolist() == [6, 0, 4]
            assert digest(await arrival.snapshot()) == digest(snapshot)
            assert written(mine) == {0, 4, 6}
            arrival.release()
            assert (counts(mine), mine.allocator.accounts().num_leases) == ((0, 8, 0), 1)
            assert engine.unexpect("mine") is False, "it has come"

    run(job())


def test_an_offer_that_nobody_expects_holds_nobody_up() -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            snapshot = snapshot_of(theirs, [3, 1])
            engine.expect("mine", Placement(mine, [6, 0]))
            waiting = asyncio.create_task(peer.send(snapshot, key="strange", timeout_s=1.5))
            await eventually(lambda: engine.stats().num_waiting == 1)
            await peer.send(snapshot, key="mine")
            assert (await next_arrival(engine)).key == "mine"
            with pytest.raises(DeadlineExceededError):
                await waiting
            assert engine.stats().num_waiting == 0
            assert written(mine) == {0, 6}

    run(job())


def test_pages_that_are_present_are_not_sent() -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            engine.expect("mine", Placement(mine, [6, 0, 4], present=[True, False, False]))
            stats = await peer.send(snapshot_of(theirs, [3, 1, 7]), key="mine")
            assert (stats.num_pages, stats.num_resident) == (2, 1)
            assert written(mine) == {0, 4}

    run(job())


def test_what_does_not_fit_is_refused_and_what_fits_may_still_come() -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            engine.expect("mine", Placement(mine, [6, 0]))
            with pytest.raises(GeometryError, match=r"len\(block_table\) = 2: must be the 3 entries"):
                await peer.send(snapshot_of(theirs, [3, 1, 7]), key="mine")
            assert written(mine) == set()
            await peer.send(snapshot_of(theirs, [3, 1]), key="mine")
            assert written(mine) == {0, 6}
            with pytest.raises(ConfigError, match="none of this engine's pools"):
                engine.expect("other", Placement(theirs, [1]))
            engine.expect("twice", Placement(mine, [1]))
            with pytest.raises(ConfigError, match="expected already"):
                engine.expect("twice", Placement(mine, [1]))
            assert engine.unexpect("twice") is True

    run(job())


def test_the_pages_of_a_push_that_failed_are_free_once_nothing_can_land_in_them() -> None:
    async def job() -> None:
        with external_pool(SPEC, 8) as mine:
            async with (
                Engine(mine, listen="127.0.0.1:0", lease_s=0.3) as engine,
                shaken(engine.address, says_quiet=False) as hand,
            ):
                await hand.expect(PoolsAnnounced)
                engine.expect("by hand", Placement(mine, [6, 0]))
                with make_pool(SPEC, 8) as theirs:
                    asked = hand.offer(snapshot_of(theirs, [1, 2]), path="put", lane="tcp")
                await hand.expect(Granted)
                arrival = await next_arrival(engine)
                settling = asyncio.create_task(arrival.settled())
                arrival.abort("not wanted")
                await hand.expect(AbortRequested)
                await eventually(lambda: bool(mine.allocator.quarantined()))
                assert not settling.done(), "the sender may still write"
                hand.do("quiet", asked)
                with pytest.raises(TransferAbortedError):
                    await asyncio.wait_for(settling, 5)
                assert mine.allocator.accounts().num_leases == 1

    run(job())


def test_without_asyncio() -> None:
    with external_pool(SPEC, 8) as mine, make_pool(SPEC, 8) as theirs:
        fill(theirs, 4)
        snapshot = snapshot_of(theirs, [3, 1])
        with (
            sync.Engine(mine, listen="127.0.0.1:0") as engine,
            sync.Engine(theirs) as sender,
            sender.connect(engine.address) as peer,
        ):
            engine.expect("mine", sync.Placement(mine, [6, 0]))
            sending = peer.send_async(snapshot, key="mine")
            arrival = next(iter(engine.arrivals()))
            arrival.settled_async().result(timeout=10)
            arrival.settled()
            sending.result(timeout=10)
            assert digest(arrival.snapshot()) == digest(snapshot)
            arrival.release()
            engine.expect("never", sync.Placement(mine, [1]))
            assert engine.unexpect("never", mine) is True
