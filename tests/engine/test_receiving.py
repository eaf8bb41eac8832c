"""Pushes that are awaited by their keys, and pushes whose layers are said to be ready one by one, without waiting."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np
import pytest

from hurray_rdma import DeadlineExceededError, HurrayError, Placement, TransferAbortedError, sync
from hurray_rdma.engine.arrival import ArrivalState
from hurray_rdma.errors import ConfigError
from tests.engine.test_expected import pair
from tests.engine.test_placement import GUARD, external_pool, written
from tests.hazards.scenes import SPEC, counts, digest, eventually, fill, make_pool, raw, run, snapshot_of


def test_a_push_is_received_by_its_key_and_not_among_the_arrivals() -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            snapshot = snapshot_of(theirs, [3, 1, 7])
            receiving = asyncio.create_task(engine.receive("mine", Placement(mine, [6, 0, 4]), timeout_s=10))
            await asyncio.sleep(0)
            with pytest.raises(ConfigError, match="is expected already"):
                await engine.receive("mine", Placement(mine, [1]))
            await peer.send(snapshot, key="mine")
            arrival = await receiving
            assert (arrival.key, arrival.state) == ("mine", ArrivalState.COMPLETE)
            assert digest(await arrival.snapshot()) == digest(snapshot)
            arrival.release()
            assert written(mine) == {0, 4, 6}
            assert (counts(mine), mine.allocator.accounts().num_leases) == ((0, 8, 0), 1)
            engine.expect("other", Placement(mine, [1, 2, 3]))
            await peer.send(snapshot, key="other")
            first = await anext(engine.arrivals())
            assert first.key == "other"
            first.release()

    run(job())


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_what_nobody_offers_is_not_expected_any_more(end: str) -> None:
    async def job() -> None:
        async with pair() as (mine, engine, _, _):
            timeout_s = 0.2 if end == "deadline" else 20
            receiving = asyncio.create_task(engine.receive("mine", Placement(mine, [6]), timeout_s=timeout_s))
            await asyncio.sleep(0)
            if end == "cancel":
                receiving.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await receiving
            else:
                with pytest.raises(DeadlineExceededError, match="nobody offered 'mine' in time"):
                    await receiving
            assert engine.unexpect("mine") is False
            assert counts(mine) == (0, 8, 0)

    run(job())


def test_the_time_of_a_push_begins_with_its_offer_where_that_may_take_long() -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            placement, snapshot = Placement(mine, [6, 0, 4]), snapshot_of(theirs, [3, 1, 7])
            receiving = asyncio.create_task(engine.receive("mine", placement, timeout_s=1.0, wait_s=20))
            await asyncio.sleep(1.2)  # past timeout_s, with nothing offered
            assert not receiving.done()
            await peer.send(snapshot, key="mine")
            (await receiving).release()
            with pytest.raises(DeadlineExceededError, match="nobody offered") as caught:
                await engine.receive("mine", placement, timeout_s=20, wait_s=0.1)
            assert (caught.value.field, caught.value.value) == ("wait_s", 0.1)
            late = asyncio.create_task(engine.receive("mine", placement, timeout_s=0.5, wait_s=20))
            with pytest.raises(TransferAbortedError, match="the receiver gave up"):
                async with peer.begin(snapshot, key="mine") as transfer:
                    with pytest.raises(DeadlineExceededError, match="did not arrive") as caught:
                        await late
                    assert (caught.value.field, caught.value.value) == ("timeout_s", 0.5)
                    await transfer.send_rest()
            assert counts(mine) == (0, 8, 0)

    run(job())


@pytest.mark.parametrize("end", ["deadline", "cancel"])
def test_a_push_under_way_has_ended_when_its_receiver_gives_up(end: str) -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            timeout_s = 1.0 if end == "deadline" else 20
            placement = Placement(mine, [6, 0, 4])
            receiving = asyncio.create_task(engine.receive("mine", placement, timeout_s=timeout_s))
            await asyncio.sleep(0)
            with pytest.raises(TransferAbortedError, match="the receiver gave up"):
                async with peer.begin(snapshot_of(theirs, [3, 1, 7]), key="mine") as transfer:
                    await transfer.send_layer(0)
                    if end == "cancel":
                        receiving.cancel()
                    with pytest.raises((asyncio.CancelledError, DeadlineExceededError)):
                        await receiving
                    assert mine.allocator.accounts().num_leases == 1, "nothing of it lands any more"
                    await transfer.send_rest()
            assert counts(mine) == (0, 8, 0)

    run(job())


def test_a_sender_that_gives_up_is_told_with_the_pages_free() -> None:
    async def job() -> None:
        async with pair() as (mine, engine, theirs, peer):
            receiving = asyncio.create_task(engine.receive("mine", Placement(mine, [6, 0, 4]), timeout_s=20))
            await asyncio.sleep(0)
            with pytest.raises(ZeroDivisionError):
                async with peer.begin(snapshot_of(theirs, [3, 1, 7]), key="mine") as transfer:
                    await transfer.send_layer(0)
                    raise ZeroDivisionError
            with pytest.raises(HurrayError):
                await receiving
            await eventually(lambda: mine.allocator.accounts().num_leases == 1)

    run(job())


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 15
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_layers_go_out_as_they_are_said_to_be_ready() -> None:
    with (
        external_pool(SPEC, 8) as mine,
        make_pool(SPEC, 8) as theirs,
        sync.Engine(mine, listen="127.0.0.1:0") as engine,
        sync.Engine(theirs) as sender,
        sender.connect(engine.address) as peer,
    ):
        snapshot = snapshot_of(theirs, [3, 1, 7])
        engine.expect("other", Placement(mine, [1]))  # before the first expectation offers are refused
        receiving = engine.receive_async("mine", Placement(mine, [6, 0, 4]), timeout_s=20)
        push = peer.begin_async(snapshot, key="mine")
        fill(theirs, 4)  # computed after it was begun
        first, *_, last = SPEC.layer_indices
        role = SPEC.roles[0]
        push.layer_ready(last)
        push.layer_ready(last)
        until(lambda: bool((raw(mine, role, last)[6] != GUARD).any()))
        assert (raw(mine, role, first) == GUARD).all(), "not said yet"
        assert not push.future.done()
        assert not receiving.done()
        push.layer_ready(len(SPEC.layer_indices))  # there is none
        push.rest_ready()
        stats = push.future.result(timeout=15)
        assert (stats.key, stats.num_pages) == ("mine", 3)
        arrival = receiving.result(timeout=15)
        np.testing.assert_array_equal(arrival.block_table, [6, 0, 4])
        assert digest(arrival.snapshot()) == digest(snapshot)
        arrival.release()


def test_a_push_that_is_cancelled_ends_at_both_sides() -> None:
    with (
        external_pool(SPEC, 8) as mine,
        make_pool(SPEC, 8) as theirs,
        sync.Engine(mine, listen="127.0.0.1:0") as engine,
        sync.Engine(theirs) as sender,
        sender.connect(engine.address) as peer,
    ):
        engine.expect("other", Placement(mine, [1]))  # before the first expectation offers are refused
        receiving = engine.receive_async("mine", Placement(mine, [6, 0, 4]), timeout_s=20)
        push = peer.begin_async(snapshot_of(theirs, [3, 1, 7]), key="mine")
        push.layer_ready(0)
        until(lambda: bool((raw(mine, SPEC.roles[0], 0)[6] != GUARD).any()))
        push.future.cancel()
        with pytest.raises(HurrayError):
            receiving.result(timeout=15)
        until(push.future.cancelled)  # its peer may hear of it first
        until(lambda: mine.allocator.accounts().num_leases == 1)
        push.rest_ready()  # of no use, and no harm
