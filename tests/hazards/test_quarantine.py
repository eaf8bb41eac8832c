"""Pages of senders that fell silent: out of use while a late byte can land, and back by themselves when none can."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Arrival, DeadlineExceededError, Engine, HurrayError, PagePool, PeerLostError, RegistrationError
from hurray_rdma.control import Granted, Offer, PoolsAnnounced
from hurray_rdma.engine import ArrivalState, parts
from hurray_rdma.engine.processes import process_id
from hurray_rdma.engine.reach import Reach
from hurray_rdma.plan import PageMap
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, LaneReport, Worker, default_context
from tests.engine.hands import shaken
from tests.hazards.scenes import (
    LANES,
    SPEC,
    connected,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    no_page_streams,
    raw,
    run,
    settled,
    snapshot_of,
    stopped,
)
from tests.hazards.test_stop_and_kill import interrupt_writes

WAYS = LANES | {"emulated": ("caller's", {"TLS": "posix,sysv,self"}), "put over tcp": LANES["tcp"]}
"""Also messages through shared memory, which the receiver's UCX copies: our senders do without, and others may not.
And tcp of UCX's, without page streams."""
NAMES = {
    "mapped": ("mapped", {"sysv", "posix"}),
    "cma": ("put", {"cma"}),
    "tcp": ("stream", {"tcp"}),
    "emulated": ("put", {"posix (emulated)"}),
    "put over tcp": ("put", {"tcp"}),
}
SENT = [1, 3, 5, 7]  # no runs: four operations and more
GUARD = 0xEE


def halting_sender(connection: Connection, address: str, way: str, forked: bool) -> None:
    """Stops itself in the middle of its write; reports the error it got when it goes on, and ends when told.

    ``forked``: a child of its own, which does nothing, has all that it has, for a few seconds.
    """
    if way == "emulated":
        LaneReport.queued = property(lambda _: False)  # type: ignore[assignment]

    def halt() -> None:
        if forked and os.fork() == 0:
            signal.alarm(5)
            signal.pause()
        os.kill(os.getpid(), signal.SIGSTOP)

    async def job() -> None:
        default_context(WAYS[way][1])
        with make_pool(SPEC, 16) as pool:
            fill(pool, 1)
            async with connected(pool, address, timeout_s=30, peer_timeout_s=60) as peer:
                interrupt_writes(halt)
                try:
                    await peer.send(snapshot_of(pool, SENT), key="halted")
                except HurrayError as error:
                    connection.send(type(error).__name__)
                await asyncio.to_thread(connection.recv)

    asyncio.run(job())


@asynccontextmanager
async def half_written(
    way: str, *, forked: bool = False, **settings: Any
) -> AsyncIterator[tuple[PagePool, Engine, Child, Arrival]]:
    """A pool of eight pages, four of them in the hands of a sender that is stopped in the middle of its write."""
    kind, options = WAYS[way]
    without = no_page_streams() if way == "put over tcp" else contextlib.nullcontext()
    with without, make_pool(SPEC, 8, kind, Context(options)) as pool:
        guard(pool)
        async with Engine(pool, listen="127.0.0.1:0", timeout_s=10, **settings) as engine:
            with Child(halting_sender, engine.address, way, forked) as child:
                arrival = await anext(engine.arrivals())
                await stopped(child.pid)
                path, lanes = NAMES[way]
                assert (arrival.path, arrival.lane in lanes) == (path, True)
                assert np.concatenate([written(pool, *tensor) for tensor in SPEC.tensors]).any(), "nothing was written"
                yield pool, engine, child, arrival
                assert counts(pool) == (8, 0, 0)
        assert counts(pool) == (8, 0, 0)


def guard(pool: PagePool) -> None:
    for tensor in pool.spec.tensors:
        raw(pool, *tensor)[...] = GUARD


def written(pool: PagePool, role: str, layer: int) -> np.ndarray:
    """Whether each page holds anything but the guard, bool [num_pages]."""
    return (raw(pool, role, layer) != GUARD).any(axis=1)


def untouched(pool: PagePool) -> bool:
    return not any(written(pool, *tensor).any() for tensor in pool.spec.tensors)


async def whole_pool_is_usable(pool: PagePool, engine: Engine) -> None:
    with make_pool(SPEC, 16, context=pool.regions[0].context) as source:
        fill(source, 5)
        sent = snapshot_of(source, list(range(8, 16)))
        async with connected(source, engine.address, timeout_s=10) as peer:
            await peer.send(sent, key="all pages")
            arrival = await anext(engine.arrivals())
            assert digest(await arrival.snapshot()) == digest(sent)
            arrival.release()


@pytest.mark.parametrize("forked", [False, True], ids=["alone", "with a fork"])
@pytest.mark.parametrize("way", WAYS)
def test_pages_of_a_killed_sender_come_back_by_themselves(way: str, forked: bool) -> None:
    """A fork of it keeps the connection open: then only its silence tells of the end of the session."""

    async def job() -> None:
        async with half_written(way, forked=forked, lease_s=60, peer_timeout_s=2) as (pool, engine, child, arrival):
            child.signal(signal.SIGKILL)
            with pytest.raises(PeerLostError, match="nothing was heard" if forked else None):
                await arrival.snapshot()
            await settled(pool, 8, 0, 0)
            guard(pool)
            stats = engine.stats()
            quarantined = 0 if way == "tcp" else 4  # a page stream ends with the session: nothing of it can be late
            assert (stats.num_quarantined, stats.num_recovered, stats.num_leases_expired) == (
                quarantined,
                quarantined,
                0,
            )
            assert stats.receive.failures == {"PeerLostError": 1}
            assert (stats.num_sessions, stats.num_arriving) == (0, 0)
            assert arrival.state is ArrivalState.RELEASED
            arrival.release()
            await asyncio.sleep(0.1)
            assert untouched(pool)
            await whole_pool_is_usable(pool, engine)
            await asyncio.to_thread(child.join)

    run(job())


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_pool_registered_anew_is_out_of_reach_of_a_sender_that_maps_the_old_memory() -> None:
    async def job() -> None:
        async with half_written("mapped", lease_s=0.5, peer_timeout_s=60) as (pool, engine, child, arrival):
            with pytest.raises(DeadlineExceededError):
                await arrival.snapshot()
            await settled(pool, 4, 0, 4)  # it was asked to stop, and did not answer
            assert engine.stats().num_recovered == 0
            await engine.reregister()
            assert counts(pool) == (8, 0, 0)
            stats = engine.stats()
            assert (stats.num_quarantined, stats.num_recovered, stats.num_leases_expired) == (4, 4, 1)
            assert stats.generations == {"default": 2}
            guard(pool)
            child.signal(signal.SIGCONT)
            assert await asyncio.to_thread(child.receive) in {"LeaseExpiredError", "TransferAbortedError"}
            assert untouched(pool), "a byte landed in a page after its release"
            child.send("end")
            await asyncio.to_thread(child.join)
            assert untouched(pool)
            await whole_pool_is_usable(pool, engine)

    run(job())


@pytest.mark.parametrize("way", ["cma", "emulated"])
@pytest.mark.parametrize("goes_on", [False, True], ids=["killed", "goes on"])
def test_where_the_kernel_lets_a_sender_write_its_pages_wait_for_its_end_or_its_word(way: str, goes_on: bool) -> None:
    async def job() -> None:
        async with half_written(way, lease_s=0.5, peer_timeout_s=60) as (pool, engine, child, arrival):
            await settled(pool, 4, 0, 4)
            page_ids = np.unique(arrival.block_table)
            await engine.reregister()
            assert engine.stats().generations == {"default": 2}
            assert counts(pool) == (4, 0, 4), "the sender can still write"
            guard(pool)
            if goes_on:
                child.signal(signal.SIGCONT)
                assert await asyncio.to_thread(child.receive) in {"LeaseExpiredError", "TransferAbortedError"}
                await settled(pool, 8, 0, 0)  # it has said QUIET
                child.send("end")
            else:
                child.signal(signal.SIGKILL)
                await settled(pool, 8, 0, 0)
            await asyncio.to_thread(child.join)
            late = {int(page) for tensor in SPEC.tensors for page in np.flatnonzero(written(pool, *tensor))}
            assert late <= set(page_ids.tolist()), "a late byte landed in a page that was not in quarantine"
            assert engine.stats().num_recovered == 4
            await whole_pool_is_usable(pool, engine)

    run(job())


def test_a_sender_over_tcp_is_silent_once_its_own_worker_is_closed() -> None:
    async def job() -> None:
        async with half_written("put over tcp", lease_s=0.5, peer_timeout_s=6) as (pool, engine, child, arrival):
            with pytest.raises(DeadlineExceededError):
                await arrival.snapshot()
            await settled(pool, 4, 0, 4)
            # Not shared memory: it cannot be replaced in place; nor would a new key keep out what comes by address.
            with pytest.raises(RegistrationError, match="not as shared memory"):
                await engine.reregister()
            assert engine.stats().generations == {"default": 1}
            await settled(pool, 8, 0, 0)  # nothing was heard for 6 s: the session is over, and the worker closed
            assert engine.stats().num_sessions == 0
            guard(pool)
            child.signal(signal.SIGCONT)
            assert await asyncio.to_thread(child.receive)
            child.send("end")
            await asyncio.to_thread(child.join)
            assert untouched(pool), "a byte landed in a page after its release"
            stats = engine.stats()
            assert (stats.num_quarantined, stats.num_recovered) == (4, 4)
            assert stats.losses == {"PeerLostError": 1}
            await whole_pool_is_usable(pool, engine)

    run(job())


def test_what_may_come_by_address_or_as_messages_is_over_when_neither_can_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a GPU's pages: the end of the process is not enough while its messages may wait here to be taken."""
    closes = threading.Event()
    close = Worker.close

    def slowly(worker: Worker) -> None:
        if closing:
            assert closes.wait(20)
        close(worker)

    closing: list[bool] = []
    monkeypatch.setattr(Worker, "close", slowly)
    monkeypatch.setattr(parts, "reach_of", lambda path, lane: Reach.ADDRESS)

    async def job() -> None:
        async with half_written("put over tcp", lease_s=60, peer_timeout_s=2) as (pool, engine, child, arrival):
            closing.append(True)
            child.signal(signal.SIGKILL)
            with pytest.raises(PeerLostError):
                await arrival.snapshot()
            await settled(pool, 4, 0, 4)
            (link,) = engine._reception._owing  # type: ignore[union-attr]
            await eventually(lambda: link.process_ended)
            await asyncio.sleep(0)
            assert counts(pool) == (4, 0, 4), "its worker here is not closed"
            closes.set()
            await settled(pool, 8, 0, 0)
            closing.clear()

    run(job())


def test_senders_that_broke_off_are_watched_no_longer_than_they_owe() -> None:
    """Each is watched through a file descriptor: registering anew, and the word that it is quiet, must close it."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=30) as engine,
                Engine(source) as sender,
                sender.connect(engine.address) as peer,
            ):
                await peer.send(snapshot_of(source, [1]))
                (await anext(engine.arrivals())).release()
                before = num_open_files()
                for n in range(4):
                    transfer = peer.begin(snapshot_of(source, [n]))
                    await transfer.__aenter__()
                    (link,) = engine._reception._links.values()  # type: ignore[union-attr]
                    link.abort()
                    assert counts(pool) == (7, 0, 1)
                    if n % 2:
                        await engine.reregister()
                        await settled(pool, 8, 0, 0)
                    await eventually(lambda: not peer.connected)
                    await peer.send(snapshot_of(source, [1]))  # connects, and says that the old session is quiet
                    while (arrival := await anext(engine.arrivals())).state is not ArrivalState.COMPLETE:
                        pass
                    arrival.release()
                    await settled(pool, 8, 0, 0)
                await eventually(lambda: num_open_files() <= before)

    run(job())


@pytest.mark.parametrize("end", ["is lost", "never says QUIET"])
def test_quarantine_keeps_pages_and_no_tables(end: str) -> None:
    """It may last as long as the sender's process: what the offer said of its sequences is no use to anybody then."""

    def kept() -> Counter[str]:
        gc.collect()
        # By type, since other libraries' objects do things when they are asked what they are.
        kinds = {Arrival, Offer, PageMap}
        return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)

    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            domain, before = pool.regions[0].context.memory_domain, kept()
            async with Engine(pool, listen="127.0.0.1:0", lease_s=0.2, max_transfer_s=0.3) as engine:
                async with shaken(engine.address, says_quiet=False, host_id=domain, process_id=process_id()) as hand:
                    await hand.expect(PoolsAnnounced)
                    hand.offer(snapshot_of(source, [1, 2], [1, 2, 3]), path="put", lane="cma")
                    await hand.expect(Granted)
                    arrival = await anext(engine.arrivals())
                    assert hand.channel is not None
                    if end == "is lost":
                        hand.channel.abort()
                    await eventually(lambda: counts(pool) == (5, 0, 3))
                    assert arrival.block_table.size == 5, "it is there for who holds the arrival"
                    del arrival
                    hand.session._book.let_go_all()  # the sender's own
                    assert kept() == before
                    if end != "is lost":
                        hand.do("quiet", 2)
                        await settled(pool, 8, 0, 0)
                assert counts(pool) == ((5, 0, 3) if end == "is lost" else (8, 0, 0))
                # As when the process has ended.
                assert engine._reception is not None
                for receiver in engine._reception._all():
                    for link, _ in list(receiver.granted._loud):
                        receiver.silenced(link, set(Reach))
                await settled(pool, 8, 0, 0)
                assert engine.stats().num_quarantined == engine.stats().num_recovered

    run(job())
