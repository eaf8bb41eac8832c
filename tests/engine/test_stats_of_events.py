"""What each kind of event adds to the stats of both engines: exactly that, and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from hurray_rdma import (
    Arrival,
    DeadlineExceededError,
    Engine,
    EngineStats,
    GeometryError,
    HurrayError,
    PagePool,
    Peer,
    PoolExhaustedError,
    TransferAbortedError,
)
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.engine import Histogram, LaneStats
from hurray_rdma.errors import AuthenticationError
from tests.hazards.scenes import SPEC, eventually, make_pool, run, settled, snapshot_of

PAGE = SPEC.page_nbytes * len(SPEC.tensors)


def numbers(stats: EngineStats) -> dict[str, float]:
    """Every count by its path; of a histogram, how many there are."""
    found: dict[str, float] = {}

    def walk(path: str, value: Any) -> None:
        if isinstance(value, Histogram):
            found[path] = value.count
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                walk(f"{path}.{field.name}", getattr(value, field.name))
        elif isinstance(value, Mapping):
            for key, each in value.items():
                walk(f"{path}.{key}", each)
        elif isinstance(value, tuple):
            for lane in value:
                assert isinstance(lane, LaneStats)
                found[f"{path}.{lane.lane}.{lane.path}"] = lane.nbytes
        elif value is not None:
            found[path] = value

    walk("", stats)
    return {path.removeprefix("."): value for path, value in found.items()}


@dataclass
class Pair:
    """A sending engine and a receiving one, of four pages and of eight."""

    source: PagePool
    pool: PagePool
    sender: Engine
    receiver: Engine
    peer: Peer

    async def arrival(self) -> Arrival:
        return await anext(self.receiver.arrivals())


Event = Callable[[Pair], Awaitable[None]]


async def changes(event: Event, **settings: Any) -> tuple[dict[str, float], dict[str, float]]:
    """What an event adds to the numbers of the sender and of the receiver."""
    with make_pool(SPEC, 4) as source, make_pool(SPEC, 8) as pool:
        async with (
            Engine(pool, listen="127.0.0.1:0", timeout_s=10, token="t", **settings) as receiver,
            Engine(source, timeout_s=10, token="t") as sender,
            sender.connect(receiver.address) as peer,
        ):
            engines = sender, receiver
            await eventually(lambda: receiver.stats().num_sessions == 1)
            before = [numbers(engine.stats()) for engine in engines]
            await event(Pair(source, pool, *engines, peer))
            after = [numbers(engine.stats()) for engine in engines]
            ignored = ("num_operations", "num_free_runs", "num_leases")
            sent, received = (
                {
                    path: now[path] - then.get(path, 0)
                    for path in now
                    if now[path] != then.get(path, 0) and not path.endswith(ignored)
                }
                for then, now in zip(before, after, strict=True)
            )
            return sent, received


def moved(direction: str, num_pages: int) -> dict[str, float]:
    """What a complete transfer adds to one side's direction."""
    return {
        f"{direction}.num_transfers": 1,
        f"{direction}.nbytes": num_pages * PAGE,
        f"{direction}.num_pages": num_pages,
        f"{direction}.seconds": 1,
        f"{direction}.lanes.sysv.mapped": num_pages * PAGE,
    }


async def complete(pair: Pair) -> None:
    await pair.peer.send(snapshot_of(pair.source, [1, 3], [1, 2]))
    await pair.arrival()


async def resident(pair: Pair) -> None:
    snapshot = snapshot_of(pair.source, [1, 3])
    keys = snapshot_keys(snapshot, [np.arange(8)])
    arrivals = []
    for _ in range(2):
        await pair.peer.send(snapshot, page_keys=keys)
        arrivals.append(await pair.arrival())
    for arrival in arrivals:
        arrival.release()


async def too_large(pair: Pair) -> None:
    with make_pool(SPEC, 16, context=pair.source.regions[0].context) as large, pytest.raises(PoolExhaustedError):
        await pair.peer.send(snapshot_of(large, list(range(9))))


async def unknown_pool(pair: Pair) -> None:
    with pytest.raises(GeometryError):
        await pair.peer.send(snapshot_of(pair.source, [1]), pool="other")


async def given_up(pair: Pair) -> None:
    with pair.pool.allocator.lease(8):
        sending = asyncio.create_task(pair.peer.send(snapshot_of(pair.source, [1])))
        await eventually(lambda: pair.receiver.stats().num_waiting == 1)
        sending.cancel()
        await asyncio.wait({sending})
        await eventually(lambda: pair.receiver.stats().num_waiting == 0)


async def waiting(pair: Pair) -> None:
    lease = pair.pool.allocator.lease(8)
    sending = asyncio.create_task(pair.peer.send(snapshot_of(pair.source, [1])))
    await eventually(lambda: pair.receiver.stats().num_waiting == 1)
    assert pair.receiver.stats().num_arriving == 0
    lease.release()
    await sending
    assert pair.receiver.stats().num_waiting == 0
    (await pair.arrival()).release()


async def under_way(pair: Pair) -> None:
    async with pair.peer.begin(snapshot_of(pair.source, [1])) as transfer:
        await transfer.send_layer(1)
        stats = pair.receiver.stats()
        assert (stats.num_arriving, stats.pools["default"].leased, stats.receive.num_transfers) == (1, 1, 0)
        assert pair.sender.stats().send.num_transfers == 0
        await transfer.send_rest()
    (await pair.arrival()).release()


async def aborted_by_sender(pair: Pair) -> None:
    with pytest.raises(TransferAbortedError):
        async with pair.peer.begin(snapshot_of(pair.source, [1])) as transfer:
            await transfer.send_layer(0)
            await transfer.abort()
            await transfer.abort()
            await transfer.send_layer(1)
    await settled(pair.pool, 8, 0, 0)


async def aborted_by_receiver(pair: Pair) -> None:
    with pytest.raises(TransferAbortedError):
        async with pair.peer.begin(snapshot_of(pair.source, [1])) as transfer:
            arrival = await pair.arrival()
            arrival.abort()
            arrival.release()
            await transfer._acknowledged
    await settled(pair.pool, 8, 0, 0)


async def lease_ran_out(pair: Pair) -> None:
    with pytest.raises(HurrayError, match="lease"):
        async with pair.peer.begin(snapshot_of(pair.source, [1, 2]), timeout_s=0.1) as transfer:
            await transfer._acknowledged
    await settled(pair.pool, 8, 0, 0)


async def broken(pair: Pair) -> None:
    with pytest.raises(ConnectionError):
        async with pair.peer.begin(snapshot_of(pair.source, [1, 2])) as transfer:
            (link,) = pair.receiver._reception._links.values()  # type: ignore[union-attr]
            link.abort()
            assert pair.receiver.stats().pools["default"].quarantined == 2
            await transfer._acknowledged
    await pair.peer.send(snapshot_of(pair.source, [1]))
    while (arrival := await pair.arrival()).block_table.size != 1:
        pass
    await arrival.snapshot()
    arrival.release()
    await settled(pair.pool, 8, 0, 0)


async def connected_and_left(pair: Pair) -> None:
    async with pair.sender.connect(pair.receiver.address):
        stats = pair.sender.stats(), pair.receiver.stats()
        assert (stats[0].num_peers, stats[1].num_sessions) == (2, 2)
    await eventually(lambda: pair.receiver.stats().num_sessions == 1)


async def not_let_in(pair: Pair) -> None:
    async with Engine(pair.source, token="wrong") as other:
        with pytest.raises(AuthenticationError):
            async with other.connect(pair.receiver.address):
                pass
        assert numbers(other.stats())["num_connects"] == 0


async def renewed(pair: Pair) -> None:
    lease = pair.pool.allocator.lease(8)
    sending = asyncio.create_task(pair.peer.send(snapshot_of(pair.source, [1])))
    await eventually(lambda: pair.receiver.stats().num_waiting == 1)
    await pair.receiver.reregister()
    lease.release()
    await sending
    (await pair.arrival()).release()


LEFT = {"num_connects": 1, "num_disconnects": 1}
AGAIN = {"num_connects": 1, "num_disconnects": 1, "num_reconnects": 1, "losses.PeerLostError": 1}


@pytest.mark.parametrize(
    ("event", "sent", "received"),
    [
        (
            complete,
            moved("send", 3) | {"send.logical_nbytes": 4 * PAGE},
            moved("receive", 3) | {"grant_wait": 1, "pools.default.free": -3, "pools.default.leased": 3},
        ),
        (
            resident,
            moved("send", 2)
            | {"send.num_transfers": 2, "send.seconds": 2, "send.num_resident": 2, "send.logical_nbytes": 4 * PAGE},
            moved("receive", 2)
            | {"receive.num_transfers": 2, "receive.seconds": 2, "receive.num_resident": 2, "grant_wait": 2},
        ),
        (too_large, {"send.failures.PoolExhaustedError": 1}, {"receive.failures.PoolExhaustedError": 1}),
        (unknown_pool, {"send.failures.GeometryError": 1}, {}),
        (given_up, {"send.failures.CancelledError": 1}, {"receive.failures.TransferAbortedError": 1}),
        (waiting, moved("send", 1) | {"send.logical_nbytes": PAGE}, moved("receive", 1) | {"grant_wait": 1}),
        (under_way, moved("send", 1) | {"send.logical_nbytes": PAGE}, moved("receive", 1) | {"grant_wait": 1}),
        (aborted_by_sender, {"send.failures.TransferAbortedError": 1}, {"receive.failures.TransferAbortedError": 1}),
        (aborted_by_receiver, {"send.failures.TransferAbortedError": 1}, {"receive.failures.TransferAbortedError": 1}),
        (
            lease_ran_out,
            {"send.failures.LeaseExpiredError": 1},
            {"receive.failures.DeadlineExceededError": 1, "num_leases_expired": 1},
        ),
        (
            broken,
            moved("send", 1) | AGAIN | {"send.logical_nbytes": PAGE, "send.failures.PeerLostError": 1},
            moved("receive", 1)
            | LEFT
            | {"grant_wait": 1, "receive.failures.TransferAbortedError": 1, "num_quarantined": 2, "num_recovered": 2},
        ),
        (connected_and_left, LEFT, LEFT),
        (not_let_in, {}, {}),
        (
            renewed,
            moved("send", 1) | {"send.logical_nbytes": PAGE},
            moved("receive", 1) | {"grant_wait": 1, "generations.default": 1},
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_an_event_adds_what_it_is_and_nothing_else(
    event: Event, sent: dict[str, float], received: dict[str, float]
) -> None:
    async def job() -> None:
        assert await changes(event, lease_s=0.2 if event is lease_ran_out else 30) == (sent, received)

    run(job())


def test_an_offer_that_waits_too_long_is_one_failure_whoever_notices_first() -> None:
    async def too_late(pair: Pair) -> None:
        with pair.pool.allocator.lease(8), pytest.raises(DeadlineExceededError):
            await pair.peer.send(snapshot_of(pair.source, [1]), timeout_s=0.1)
        await eventually(lambda: bool(pair.receiver.stats().receive.failures))
        await pair.peer.send(snapshot_of(pair.source, [1]))
        (await pair.arrival()).release()

    async def job() -> None:
        sent, received = await changes(too_late)
        assert sent["send.failures.DeadlineExceededError"] == 1
        failures = {path: count for path, count in received.items() if "failures" in path}
        assert failures in (
            {"receive.failures.DeadlineExceededError": 1},
            {"receive.failures.TransferAbortedError": 1},
        )

    run(job())
