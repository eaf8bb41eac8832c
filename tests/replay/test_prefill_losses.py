"""A send that fails is repeated where its session was lost, while the budget lasts; anything else is a failure."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import hurray_rdma.replay.prefill as room
from hurray_rdma import Engine, PagePool, Peer, Snapshot
from hurray_rdma.engine import TransferStats
from hurray_rdma.errors import (
    DeadlineExceededError,
    GeometryError,
    HurrayError,
    PeerLostError,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.replay import load_config
from hurray_rdma.replay.messages import Killed, PrefillNews, Restarted
from hurray_rdma.replay.trace import parse_trace
from hurray_rdma.replay.work import Work
from hurray_rdma.testing.chaos import ChaosProxy
from tests.replay.traces import line


def work_of(num_requests: int, *, timeout_s: float = 60.0) -> Work:
    settings = {"speed": float("inf"), "timeout_s": timeout_s}
    config = load_config(overrides={"workers": {"prefill": 1, "decode": 1, "in_flight": 1}, "run": settings})
    trace = parse_trace([line([2 * each, 2 * each + 1]) for each in range(num_requests)], skip_malformed=False)
    return Work(config, trace, np.zeros(num_requests, np.int64))


class FakePeer:
    """Fails as it is told to, then delivers."""

    def __init__(self, *errors: HurrayError, connected: bool = False) -> None:
        self.errors = list(errors)
        self.connected = connected
        self.keys: list[str] = []

    async def send(self, snapshot: Any, *, key: str, page_keys: Any) -> Any:
        self.keys.append(key)
        if self.errors:
            raise self.errors.pop(0)
        return _Stats


class _Stats:
    num_table_entries = 2
    num_resident = logical_nbytes = sent_nbytes = 0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(room, "_PAUSE_S", 0.01)
    monkeypatch.setattr(room, "_NOTICE_S", 0.1)
    return


def run(work: Work, peer: Any, *, until: Callable[[list[PrefillNews]], bool], meanwhile: Any = None) -> list[Any]:
    """Lets a desk work until its news say so."""

    async def job() -> list[PrefillNews]:
        with PagePool.allocate(work.spec, num_pages=64) as pool:
            desk = room._Desk(work, pool, [peer], worker=0, start_s=time.monotonic())
            heard: list[PrefillNews] = []
            async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
                dispatching = tasks.create_task(desk.dispatch(tasks))
                while not until(heard):
                    await asyncio.sleep(0.01)
                    heard.append(desk.news())
                    if meanwhile is not None:
                        meanwhile(desk, heard)
                dispatching.cancel()
            assert pool.allocator.accounts().num_leases == 0
            return heard

    return asyncio.run(job())


def delivered(heard: Sequence[PrefillNews]) -> list[int]:
    return [each.request for news in heard for each in news.deliveries]


def failed(heard: Sequence[PrefillNews]) -> list[tuple[int, str]]:
    return [(each.request, each.kind) for news in heard for each in news.failures]


def again(heard: Sequence[PrefillNews]) -> list[int]:
    return [each for news in heard for each in news.again]


def test_requests_of_a_session_that_broke_without_a_kill_are_sent_again() -> None:
    peer = FakePeer(*(PeerLostError("by hand") for _ in range(4)))
    heard = run(work_of(3), peer, until=lambda heard: len(delivered(heard)) == 3)
    assert sorted(delivered(heard)) == [0, 1, 2]
    assert failed(heard) == []
    assert set(again(heard)) == {0, 1, 2}
    assert peer.keys[:3] == ["0", "1", "2"]


def test_what_stays_lost_is_a_failure_once_the_budget_is_spent() -> None:
    peer = FakePeer(*(PeerLostError("by hand") for _ in range(100_000)))
    heard = run(work_of(3, timeout_s=0.2), peer, until=lambda heard: len(failed(heard)) == 3)
    assert sorted(failed(heard)) == [(request, "PeerLostError") for request in range(3)]
    assert delivered(heard) == []


@pytest.mark.parametrize("kind", [TransportError, TransferAbortedError, DeadlineExceededError])
def test_other_errors_count_as_losses_where_the_session_broke(kind: type[HurrayError]) -> None:
    heard = run(work_of(2), FakePeer(kind("by hand")), until=lambda heard: len(delivered(heard)) == 2)
    assert (sorted(delivered(heard)), failed(heard), again(heard)) == ([0, 1], [], [0])


@pytest.mark.parametrize("kind", [TransportError, TransferAbortedError, DeadlineExceededError, GeometryError])
def test_and_are_failures_where_it_holds(kind: type[HurrayError]) -> None:
    peer = FakePeer(kind("by hand"), connected=True)
    heard = run(work_of(2), peer, until=lambda heard: len(delivered(heard)) + len(failed(heard)) == 2)
    assert (delivered(heard), failed(heard), again(heard)) == ([1], [(0, kind.__name__)], [])


def test_a_killed_worker_gets_again_what_it_had_not_shown() -> None:
    told: list[bool] = []

    def kill(desk: room._Desk, heard: list[PrefillNews]) -> None:
        if delivered(heard) == [0, 1] and not told:
            desk.hear(Killed(0))
            desk.hear(Restarted(0, frozenset({0})))
            told.append(True)

    heard = run(work_of(2), FakePeer(), until=lambda heard: len(delivered(heard)) == 3, meanwhile=kill)
    assert (delivered(heard), failed(heard), again(heard)) == ([0, 1, 1], [], [1])


def test_the_return_of_a_killed_worker_is_waited_for_beyond_the_budget() -> None:
    peer = FakePeer(*(TransportError("by hand") for _ in range(100_000)))

    def kill(desk: room._Desk, heard: list[PrefillNews]) -> None:
        if len(heard) == 1:
            desk.hear(Killed(0))
        if len(heard) == 30:
            assert len(peer.keys) <= 3  # nobody knocks at the dead
            peer.errors.clear()
            desk.hear(Restarted(0, frozenset()))

    heard = run(work_of(1, timeout_s=0.05), peer, until=lambda heard: len(delivered(heard)) == 1, meanwhile=kill)
    assert (failed(heard), set(again(heard))) == ([], {0})


class CuttingPeer:
    """Cuts the wire in the middle of the first and the sixth request's first transfer."""

    def __init__(self, peer: Peer, proxy: ChaosProxy) -> None:
        self._peer = peer
        self._proxy = proxy
        self._to_cut = {"0", "5"}

    @property
    def connected(self) -> bool:
        return self._peer.connected

    async def send(self, snapshot: Snapshot, *, key: str, page_keys: Any) -> TransferStats:
        async with self._peer.begin(snapshot, key=key, page_keys=page_keys) as transfer:
            await transfer.send_layer(0)
            if key in self._to_cut:
                self._to_cut.remove(key)
                self._proxy.cut()
            await transfer.send_rest()
        return transfer.stats


def test_a_session_that_is_cut_on_the_wire_costs_no_request() -> None:
    work = work_of(12)

    async def job() -> None:
        with (
            PagePool.allocate(work.spec, num_pages=64) as far_pool,
            PagePool.allocate(work.spec, num_pages=64) as pool,
        ):
            async with asyncio.timeout(90), Engine(far_pool, listen="127.0.0.1:0") as far, Engine(pool) as engine:
                host, port = far.address.split(":")
                async with ChaosProxy(host, int(port)) as proxy, engine.connect(proxy.address) as peer:
                    cutting: Any = CuttingPeer(peer, proxy)
                    desk = room._Desk(work, pool, [cutting], worker=0, start_s=time.monotonic())

                    async def take() -> None:
                        async for arrival in far.arrivals():
                            with contextlib.suppress(HurrayError):
                                await arrival.snapshot()
                            arrival.release()

                    heard: list[PrefillNews] = []
                    async with asyncio.TaskGroup() as tasks:
                        running = [tasks.create_task(desk.dispatch(tasks)), tasks.create_task(take())]
                        while len(delivered(heard)) < len(work.trace):
                            await asyncio.sleep(0.02)
                            heard.append(desk.news())
                            assert failed(heard) == []
                        for task in running:
                            task.cancel()
                    assert sorted(delivered(heard)) == list(range(12))
                    assert set(again(heard)) >= {0, 5}
                    assert proxy.num_accepted >= 3

    asyncio.run(job())
