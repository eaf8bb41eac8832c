"""Pages granted ahead when things go wrong: they come back, what was sent arrives once or fails, others go on."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections import Counter
from typing import Any

import pytest

from hurray_rdma import HurrayError, PagePool, Peer, PeerLostError
from hurray_rdma.control import MessageType, Prepare
from hurray_rdma.engine.ahead import _AheadGrant
from hurray_rdma.engine.link import Link
from hurray_rdma.engine.receiver import Receiver
from hurray_rdma.testing.chaos import Action, Direction, Rule
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context
from tests.engine.ahead_scenes import (
    AHEAD_PAGES,
    NUM_PAGES,
    Traffic,
    ask,
    hear,
    receiving,
    send,
    sender,
    sending,
    until_answered,
    until_granted_ahead,
)
from tests.hazards.scenes import (
    LANES,
    SPEC,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    receiver,
    run,
    settled,
    snapshot_of,
    stopped,
)

C, S = Direction.TO_CLIENT, Direction.TO_SERVER


def unprepared() -> Rule:
    """Loses what is told while pages are copied through a mapping, so that COMMIT has to."""
    return Rule(action=Action.DROP, kind=MessageType.PREPARE, direction=S)


# Senders that fall silent.


@pytest.mark.parametrize("lane", LANES)
def test_pages_of_a_killed_sender_come_back(lane: str) -> None:
    async def job() -> None:
        async with receiving(lane=lane) as (engine, pool, taking):
            with Child(sender, engine.address, {"lane": lane}) as child:
                await hear(child)
                for n in range(4):
                    await send(child, str(n), [n, n + 1], taking)
                await eventually(lambda: counts(pool)[1] in (8, 16))
                child.signal(signal.SIGKILL)
                await settled(pool, NUM_PAGES, 0, 0)
            stats = engine.stats()
            assert stats.num_quarantined == stats.num_recovered

    run(job())


@pytest.mark.parametrize(
    ("action", "num_arrivals"), [(Action.DROP, 0), (Action.STALL, 1)], ids=["before it is heard", "after it was said"]
)
@pytest.mark.parametrize("lane", LANES)
def test_a_sender_killed_as_it_commits(lane: str, action: Action, num_arrivals: int) -> None:
    async def job() -> None:
        async with receiving(lane=lane) as (engine, pool, taking), Traffic(engine.address) as traffic:
            with Child(sender, traffic.address, {"lane": lane}) as child, make_pool(SPEC, 64) as same:
                fill(same, 1)
                await hear(child)
                for n in range(4):
                    await send(child, str(n), [n, n + 1], taking)
                await until_answered(traffic, child)
                traffic.arm(unprepared())
                rule = Rule(
                    action=action,
                    kind=MessageType.COMMIT,
                    direction=S,
                    seconds=0.1,
                    on_fired=lambda: child.signal(signal.SIGKILL),
                )
                traffic.arm(rule)
                taking.hold = True
                child.send(("send", "last", [5, 6, 7]))
                await asyncio.to_thread(child.join)
                assert rule.fired, "it went the usual way"
                await settled(pool, NUM_PAGES - 3 * num_arrivals, 3 * num_arrivals, 0)
                expected = [("last", digest(snapshot_of(same, [5, 6, 7])))] * num_arrivals
                assert taking.taken[4:] == expected
                for arrival in taking.held:
                    assert digest(await arrival.snapshot()) == expected[0][1]
                    arrival.release()

    run(job())


@pytest.mark.parametrize("num_pages", [1, 8])
def test_a_sender_killed_while_it_copies_leaves_all_of_a_snapshot_or_nothing(num_pages: int) -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking), Traffic(engine.address) as traffic:
            for turn in range(4):
                with Child(sender, traffic.address, {}) as child, make_pool(SPEC, 64) as same:
                    fill(same, 1)
                    await hear(child)
                    for n in range(3):
                        await send(child, f"{turn}.{n}", [n, n + 1], taking)
                    await until_answered(traffic, child)
                    rule = Rule(
                        action=Action.STALL,
                        kind=MessageType.PREPARE,
                        direction=S,
                        seconds=0.05,
                        on_fired=lambda: child.signal(signal.SIGKILL),
                    )
                    traffic.arm(rule)
                    before = len(taking.taken)
                    child.send(("send", "last", list(range(num_pages))))
                    await asyncio.to_thread(child.join)
                    assert rule.fired, "it went the usual way"
                    await settled(pool, NUM_PAGES, 0, 0)
                    assert taking.taken[before:] in ([], [("last", digest(snapshot_of(same, list(range(num_pages)))))])
            stats = engine.stats()
            assert stats.num_quarantined == stats.num_recovered

    run(job())


@pytest.mark.parametrize(
    "times", [{"lease_s": 0.4, "peer_timeout_s": 20}, {"lease_s": 20, "peer_timeout_s": 0.8}], ids=["leases", "session"]
)
def test_pages_of_a_stopped_sender_are_quarantined_until_it_speaks(times: dict[str, float]) -> None:
    async def job() -> None:
        async with receiving(64, **times) as (engine, pool, taking):
            with Child(sender, engine.address, {"peer_timeout_s": 20}) as child:
                await hear(child)
                for n in range(3):
                    await send(child, str(n), [n, n + 1], taking)
                await settled(pool, 56, 8, 0)
                child.signal(signal.SIGSTOP)
                await stopped(child.pid)
                await settled(pool, 56, 0, 8)
                child.signal(signal.SIGCONT)
                if times["lease_s"] < 1:
                    await settled(pool, 64, 0, 0)  # its QUIET
                else:  # it may not have noticed yet that its session is lost
                    assert (await ask(child, "send", "in between", [1]))[1] != "TransferAbortedError"
                await send(child, "after", [9, 8, 7], taking)  # the second time it connects anew, and says so
                await eventually(lambda: counts(pool)[2] == 0)
                assert Counter(key for key, _ in taking.taken)["in between"] <= 1
                stats = engine.stats()
                assert (stats.num_quarantined, stats.num_recovered) == (8, 8)
                assert stats.receive.failures == {}
                child.send("end")

    run(job())


def test_engines_that_close_leave_no_page_behind() -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking):
            with Child(sender, engine.address, {}) as child:
                await hear(child)
                for n in range(3):
                    await send(child, str(n), [n], taking)
                await eventually(lambda: counts(pool)[1] >= 8)
                assert await ask(child, "close") == "closed"
                await settled(pool, NUM_PAGES, 0, 0)
                assert engine.stats().num_quarantined == 0
                child.send("end")
            with Child(sender, engine.address, {}) as child:
                await hear(child)
                for n in range(3):
                    await send(child, str(n), [n], taking)
                await eventually(lambda: counts(pool)[1] >= 8)
                async with asyncio.timeout(0.9):  # it waits a second for those who do not answer
                    await engine.close()
                assert counts(pool) == (NUM_PAGES, 0, 0)
                assert (await ask(child, "send", "late", [1]))[1] == "PeerLostError"
                child.send("end")
            assert engine.stats().num_quarantined == 0

    run(job())


# Messages that are lost, repeated, late, or the last.

FAULTS = [
    *((kind, S, action) for kind in ("PREPARE", "COMMIT", "RESERVE") for action in Action),
    *((kind, C, action) for kind in ("TENSOR_PUT_ACK", "GRANT") for action in Action),
]
MAY_FAIL = {Action.TRUNCATE, Action.CUT}
"""The others break no connection."""


@pytest.mark.parametrize(
    ("kind", "direction", "action"), FAULTS, ids=[f"{action.value} {kind}" for kind, _, action in FAULTS]
)
def test_whatever_happens_to_a_message_a_snapshot_arrives_at_most_once(
    kind: str, direction: Direction, action: Action
) -> None:
    async def job() -> None:
        settings: dict[str, Any] = {"num_pages": NUM_PAGES, "ahead_pages": AHEAD_PAGES, "peer_timeout_s": 2}
        with make_pool(SPEC, 64) as pool, Child(receiver, settings) as child:
            fill(pool, 1)
            async with sending(await hear(child), pool, peer_timeout_s=2) as (engine, peer, traffic):
                first = snapshot_of(pool, [1])
                await until_granted_ahead(peer, first, traffic, child)
                await eventually(lambda: grants_ready(peer) > 0)  # else the first GRANT would be of an OFFER
                rule = Rule(action=action, kind=MessageType[kind], direction=direction, seconds=0.3, keep_nbytes=14)
                traffic.arm(rule)
                if kind == "COMMIT":
                    traffic.arm(unprepared())
                sent: dict[str, str] = {}
                done: set[str] = set()
                for n in range(12):
                    snapshot, key = snapshot_of(pool, [n, n + 30, n + 50]), str(n)
                    sent[key] = digest(snapshot)
                    try:
                        await peer.send(snapshot, key=key, timeout_s=5)
                        done.add(key)
                    except HurrayError:
                        assert action in MAY_FAIL
                assert rule.fired
                # The one that the fault hit may have failed; where bytes were lost, the one after it, too: the first
                # answer fills the gap, and the next one is found to be out of place.
                assert len(done) >= (10 if action is Action.TRUNCATE else 11)
                arrived: list[tuple[str, str]] = []
                while "11" not in dict(arrived):
                    arrived.append(await hear(child))
                # Where the connection was lost before all was sent, or the sender gave up, an arrival came to nothing.
                whole = [each for each in arrived if action not in MAY_FAIL or not each[1].endswith("Error")]
                times = Counter(key for key, _ in whole)
                assert set(times.values()) == {1}
                assert done <= set(times) if action not in MAY_FAIL else done <= {key for key, _ in whole}
                assert all(what == sent[key] for key, what in whole)
                assert sum(engine.stats().send.failures.values()) == 12 - len(done)
            await eventually(lambda: all_free(child))
            child.send("end")

    run(job())


def grants_ready(peer: Peer) -> int:
    assert peer._connection is not None
    return sum(grant.ready for grants in peer._connection.ahead._grants.values() for grant in grants)


async def all_free(child: Child) -> bool:
    answer = await ask(child, "counts")
    return bool(answer == (NUM_PAGES, 0, 0))


def test_a_cut_before_the_commit_is_heard_is_told_and_after_it_nothing_arrives_twice() -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking):
            with make_pool(SPEC, 8) as source:
                fill(source, 1)
                sent = snapshot_of(source, [3, 4])
                for kind, direction, arrives in (
                    (MessageType.PREPARE, S, False),
                    (MessageType.TENSOR_PUT_ACK, C, True),
                ):
                    async with sending(engine.address, source) as (_, peer, traffic):
                        await until_granted_ahead(peer, sent, traffic)
                        rule = traffic.arm(Rule(action=Action.CUT, kind=kind, direction=direction))
                        with pytest.raises(PeerLostError):
                            await peer.send(sent, key=kind.name)
                        assert rule.fired
                        await peer.send(sent, key="next")
                        keys = Counter(key for key, _ in taking.taken)
                        assert keys[kind.name] == arrives
            await settled(pool, NUM_PAGES, 0, 0)
            assert {what for _, what in taking.taken} == {taking.taken[0][1]}

    run(job())


def test_a_session_that_ends_before_its_bell_is_acknowledged_costs_no_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    close = Receiver._close_committed

    def cut(receiver: Receiver, link: Link, *committed: Any) -> None:
        link.cut()
        close(receiver, link, *committed)

    async def job() -> None:
        async with receiving() as (engine, pool, taking):
            with make_pool(SPEC, 8) as source:
                fill(source, 1)
                sent = snapshot_of(source, [3, 4])
                async with sending(engine.address, source) as (sender_engine, peer, traffic):
                    await until_granted_ahead(peer, sent, traffic)
                    with monkeypatch.context() as patched:
                        patched.setattr(Receiver, "_close_committed", cut)
                        with pytest.raises(PeerLostError):  # nobody can tell it
                            await peer.send(sent, key="last words")
                    await peer.send(sent, key="next")
                    assert sender_engine.stats().send.failures == {"PeerLostError": 1}
                assert [key for key, _ in taking.taken if key != "ahead"] == ["last words", "next"]
                assert {what for _, what in taking.taken} == {digest(sent)}
            await settled(pool, NUM_PAGES, 0, 0)
            assert engine.stats().receive.num_transfers == len(taking.taken)

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_a_send_into_pages_that_were_recalled_before_it_is_told_goes_the_usual_way(lane: str) -> None:
    """Over a page stream the pages are refused before the recall is heard."""

    async def job() -> None:
        _, options = LANES[lane]
        async with receiving(64, lane=lane) as (engine, pool, taking):
            with make_pool(SPEC, 8, context=Context(options) if options else None) as source:
                fill(source, 1)
                async with sending(engine.address, source) as (sender_engine, peer, traffic):
                    await until_granted_ahead(peer, snapshot_of(source, [1]), traffic)
                    await eventually(lambda: counts(pool) == (56, 8, 0))
                    kept = pool.allocator.lease(56)
                    rule = Rule(action=Action.STALL, kind=MessageType.ABORT, direction=C, seconds=0.3)
                    traffic.arm(rule)
                    async with sending(engine.address, source) as (_, other, _):
                        short = asyncio.create_task(other.send(snapshot_of(source, [2, 3]), key="other"))
                        await eventually(lambda: rule.fired)
                        sent = snapshot_of(source, [4, 5, 6])
                        await peer.send(sent, key="recalled")
                        await short
                    kept.release()
                    assert sender_engine.stats().send.failures == {}
                    assert [what for key, what in taking.taken if key == "recalled"] == [digest(sent)]

    run(job())


def test_a_renewal_of_the_source_that_begins_once_a_send_is_prepared_lets_it_arrive_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare, renewed = _AheadGrant._prepare, threading.Event()

    def renew(source: PagePool) -> None:
        with source.gate.renewal(timeout_s=10):
            renewed.set()

    def prepared(grant: _AheadGrant, told: Prepare) -> None:
        prepare(grant, told)
        threading.Thread(target=renew, args=(source,)).start()
        until = time.monotonic() + 10
        while not source.gate.renewing:
            assert time.monotonic() < until
            time.sleep(0)
        assert not renewed.is_set()

    async def job() -> None:
        async with receiving() as (engine, _, taking):
            async with sending(engine.address, source) as (sender_engine, peer, traffic):
                await until_granted_ahead(peer, sent, traffic)
                await eventually(lambda: traffic["GRANT"] == traffic["RESERVE"] + traffic["OFFER"])
                monkeypatch.setattr(_AheadGrant, "_prepare", prepared)
                traffic.arm(Rule(action=Action.DELAY, kind=MessageType.PREPARE, direction=S, seconds=0.1))
                await peer.send(sent, key="renewed")
                assert await asyncio.to_thread(renewed.wait, 10)
                await eventually(lambda: ("renewed", digest(sent)) in taking.taken)
                assert sender_engine.stats().send.failures == {}
            assert [key for key, _ in taking.taken].count("renewed") == 1

    with make_pool(SPEC, 8) as source:
        fill(source, 5)
        sent = snapshot_of(source, [1, 2])
        run(job())


def test_a_send_that_is_cancelled_after_its_commit_harms_no_other() -> None:
    async def job() -> None:
        async with receiving() as (engine, pool, taking):
            with make_pool(SPEC, 8) as source:
                fill(source, 1)
                sent, other = snapshot_of(source, [3, 4]), snapshot_of(source, [5])
                async with sending(engine.address, source) as (sender_engine, peer, traffic):
                    for kind, direction in ((MessageType.PREPARE, S), (MessageType.TENSOR_PUT_ACK, C)):
                        await until_granted_ahead(peer, other, traffic)
                        fired = asyncio.Event()
                        rule = Rule(
                            action=Action.STALL, kind=kind, direction=direction, seconds=0.2, on_fired=fired.set
                        )
                        traffic.arm(rule)
                        task = asyncio.create_task(peer.send(sent, key=kind.name))
                        await fired.wait()
                        task.cancel()
                        with pytest.raises(asyncio.CancelledError):
                            await task
                        await peer.send(other, key="next")
                    assert sender_engine.stats().send.failures == {"CancelledError": 2}
            await settled(pool, NUM_PAGES, 0, 0)
            times = Counter(key for key, _ in taking.taken)
            assert times["next"] == 2
            assert times["PREPARE"] <= 1
            assert times["TENSOR_PUT_ACK"] == 1

    run(job())


def test_many_sends_at_once_over_one_peer() -> None:
    async def job() -> None:
        async with receiving(256) as (engine, pool, taking):
            with make_pool(SPEC, 64) as source:
                fill(source, 1)
                expected = {}
                async with sending(engine.address, source) as (_, peer, traffic):
                    for turn in range(6):
                        each = {f"{turn}.{n}": snapshot_of(source, [8 * n + turn, 8 * n + 7]) for n in range(8)}
                        expected |= {key: digest(snapshot) for key, snapshot in each.items()}
                        await asyncio.gather(*(peer.send(snapshot, key=key) for key, snapshot in each.items()))
                    assert traffic["PREPARE"] >= 5
                    assert traffic["PREPARE"] + traffic["OFFER"] == 48
                await eventually(lambda: len(taking.taken) == 48)
                assert dict(taking.taken) == expected
            await settled(pool, 256, 0, 0)
            assert engine.stats().receive.num_transfers == 48

    run(job())


def test_a_receiver_under_pressure_recalls_in_the_midst_of_sends() -> None:
    """Whatever the moment: what is sent arrives, once."""

    async def job() -> None:
        async with receiving(64) as (engine, _, taking):
            with Child(sender, engine.address, {}) as child, make_pool(SPEC, 64) as source:
                fill(source, 2)
                await hear(child)
                expected = {}
                async with sending(engine.address, source) as (_, peer, _):

                    async def large() -> None:
                        for n in range(15):
                            sent = snapshot_of(source, [*range(n, 64), *range(n)])
                            expected[f"large {n}"] = digest(sent)
                            await peer.send(sent, key=f"large {n}")

                    sending_large = asyncio.create_task(large())
                    for n in range(60):
                        key, outcome, _ = await ask(child, "send", f"small {n}", [n, 63 - n] if n != 31 else [n])
                        expected[key] = outcome
                    await sending_large
                await eventually(lambda: len(taking.taken) == 75)
                assert dict(taking.taken) == expected
                assert (await ask(child, "stats")).send.failures == {}
                assert engine.stats().receive.failures == {}
                assert engine.stats().num_quarantined == 0
                child.send("end")

    run(job())
