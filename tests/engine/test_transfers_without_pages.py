"""Transfers that need no page, of empty sequences or of pages that are here: nothing of them can be lost or pile up."""

from __future__ import annotations

import asyncio
import logging
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Engine, HurrayError, PagePool, Snapshot
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.control import Acknowledged, Granted, PeerBusyError, PoolsAnnounced, Refused
from hurray_rdma.engine import ArrivalState, receiver, untaken
from hurray_rdma.engine.processes import process_id
from hurray_rdma.testing.processes import Child
from tests.engine.hands import shaken
from tests.hazards.scenes import SPEC, connected, counts, digest, eventually, fill, make_pool, run, settled, snapshot_of

NUM_BOUND = 5


def empty(pool: PagePool, num_seqs: int = 0) -> Snapshot:
    return Snapshot.from_block_tables(pool, [[]] * num_seqs, seq_lens=[0] * num_seqs)


@pytest.mark.parametrize("what", ["no sequences", "empty sequences", "all resident"])
def test_a_lost_sender_of_no_pages_leaves_nothing_in_quarantine(what: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its process lives on: pages of it would have to wait for its end."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            fill(source, 1)
            sent = snapshot_of(source, [1, 2])
            keys = snapshot_keys(sent, [np.arange(2 * SPEC.page_size)])
            domain = pool.regions[0].context.memory_domain
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                arrivals = engine.arrivals()
                async with connected(source, engine.address, timeout_s=10) as peer:
                    await peer.send(sent, page_keys=keys)
                held = await anext(arrivals)
                async with shaken(engine.address, says_quiet=False, host_id=domain, process_id=process_id()) as hand:
                    await hand.expect(PoolsAnnounced)
                    if what == "all resident":
                        hand.offer(sent, path="put", lane="cma", page_keys=keys)
                    else:
                        hand.offer(empty(source, 2 * (what == "empty sequences")), path="put", lane="cma")
                    granted = await hand.expect(Granted)
                    assert granted.grant.resident.tolist() == [True, True] * (what == "all resident")
                    arrival = await anext(arrivals)
                    assert hand.channel is not None
                    hand.channel.abort()
                    with pytest.raises(HurrayError):
                        await arrival.snapshot()
                assert arrival.state is ArrivalState.RELEASED
                assert counts(pool) == (6, 2, 0)
                assert pool.allocator.quarantined() == ()
                assert not engine._reception._owing  # type: ignore[union-attr]
                assert engine.stats().num_quarantined == 0
                assert digest(await held.snapshot()) == digest(sent)
                held.release()
                await settled(pool, 8, 0, 0)

    with caplog.at_level(logging.WARNING):
        run(job())
    assert not [record for record in caplog.records if "quarantine" in record.getMessage()]


def test_arrivals_that_nobody_takes_are_refused_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        monkeypatch.setattr(untaken, "_MAX_ARRIVALS", NUM_BOUND)
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)

                async def sent() -> None:
                    transfer_id = hand.offer(empty(pool))
                    await hand.expect(Granted)
                    for index in range(len(SPEC.tensors)):
                        hand.do("data_end", transfer_id, index)
                    await hand.expect(Acknowledged)

                for _ in range(NUM_BOUND):
                    await sent()
                for _ in range(2):
                    refused = hand.offer(empty(pool))
                    event = await hand.expect(Refused)
                    assert event.transfer_id == refused
                    assert isinstance(event.error, PeerBusyError)
                    assert f"untaken = {NUM_BOUND}" in str(event.error)
                arrivals = engine.arrivals()
                (await anext(arrivals)).release()
                await sent()
                hand.offer(empty(pool))
                assert isinstance((await hand.expect(Refused)).error, PeerBusyError)
                for _ in range(NUM_BOUND):
                    (await anext(arrivals)).release()
                await sent()
                (await anext(arrivals)).release()
                await settled(pool, 8, 0, 0)

    run(job())


def test_arrivals_that_nobody_takes_are_bounded_by_what_their_tables_take(monkeypatch: pytest.MonkeyPatch) -> None:
    num_seqs = 100
    nbytes = 4 * (num_seqs + 1) + 4 * num_seqs

    async def job() -> None:
        monkeypatch.setattr(untaken, "_MAX_NBYTES", 2 * nbytes - 1)
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine, shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                arrivals = engine.arrivals()
                for _ in range(3):
                    for _ in range(2):
                        hand.offer(empty(pool, num_seqs))
                        await hand.expect(Granted)
                    hand.offer(empty(pool, num_seqs))
                    refused = (await hand.expect(Refused)).error
                    assert isinstance(refused, PeerBusyError)
                    assert f"nbytes = {2 * nbytes}" in str(refused)
                    for _ in range(2):
                        (await anext(arrivals)).release()
                await settled(pool, 8, 0, 0)

    run(job())


def diligent_sender(connection: Connection, address: str, num_sends: int) -> None:
    """Sends pages, so that some are granted ahead, then empty snapshots; reports what became of those."""

    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            outcomes = []
            async with connected(pool, address, timeout_s=10) as peer:
                for n in range(3):
                    await peer.send(snapshot_of(pool, [n]))
                for _ in range(num_sends):
                    try:
                        await peer.send(empty(pool))
                        outcomes.append("sent")
                    except HurrayError as error:
                        outcomes.append(type(error).__name__)
            connection.send(outcomes)

    asyncio.run(job())


def test_the_bound_holds_for_pages_that_were_granted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        num_untaken, committed = list[int](), receiver.Receiver._committed

        def seen(self: receiver.Receiver, *args: Any) -> None:
            num_untaken.append(self._arrivals.qsize())
            committed(self, *args)

        monkeypatch.setattr(untaken, "_MAX_ARRIVALS", NUM_BOUND)
        monkeypatch.setattr(receiver.Receiver, "_committed", seen)
        with make_pool(SPEC, 128) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10, ahead_pages=64) as engine:
                with Child(diligent_sender, engine.address, 20) as child:
                    outcomes = await asyncio.to_thread(child.receive)
                    assert outcomes == ["sent"] * (NUM_BOUND - 3) + ["PeerBusyError"] * (20 - NUM_BOUND + 3)
                    assert NUM_BOUND in num_untaken, "none came over pages granted ahead, so that this says nothing"
                    arrivals = engine.arrivals()
                    for _ in range(NUM_BOUND):
                        (await anext(arrivals)).release()
                    await eventually(lambda: counts(pool) == (128, 0, 0))

    run(job())
