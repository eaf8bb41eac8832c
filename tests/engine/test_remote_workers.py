"""UCX workers of senders on other hosts: made off the event loop, and closed when nobody is told of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hurray_rdma import Engine, PeerLostError
from hurray_rdma.errors import TransportError
from hurray_rdma.transport import Context, Worker
from tests.engine.hands import shaken
from tests.hazards.scenes import SPEC, eventually, fill, make_pool, run, snapshot_of


class SlowWorkers:
    """Workers take until `go` is set; ``made`` has them, ``threads`` who made each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self.made: list[Worker] = []
        self.threads: list[int] = []
        open_worker = Context.open_worker

        def slowly(context: Context) -> Worker:
            self.begun.set()
            assert self.go.wait(30)
            self.threads.append(threading.get_ident())
            self.made.append(open_worker(context))
            return self.made[-1]

        monkeypatch.setattr(Context, "open_worker", slowly)


def test_a_sender_from_elsewhere_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def remote(address: str) -> bytes:
        async with shaken(address) as hand:
            assert hand.session.peer is not None
            return hand.session.peer.worker_address

    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            fill(source, 3)
            async with Engine(pool, listen="127.0.0.1:0") as engine, Engine(source) as sender:
                workers = SlowWorkers(monkeypatch)
                coming = asyncio.create_task(remote(engine.address))
                await eventually(workers.begun.is_set)
                async with sender.connect(engine.address) as peer:  # from this host: it gets the engine's own
                    await peer.send(snapshot_of(source, [1, 2]))
                assert not coming.done()
                workers.go.set()
                told = await coming
                assert [worker.address for worker in workers.made] == [told]
                assert threading.get_ident() not in workers.threads

    run(job())


@pytest.mark.parametrize("who", ["sender", "engine"])
def test_nobody_waits_for_it_any_more(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """The sender gives up, or the engine closes: the worker is closed, too."""

    async def remote(address: str) -> None:
        async with shaken(address):
            raise AssertionError("it was let in")

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                workers = SlowWorkers(monkeypatch)
                coming = asyncio.create_task(remote(engine.address))
                await eventually(workers.begun.is_set)
                closing = asyncio.create_task(engine.close()) if who == "engine" else None
                if who == "sender":
                    coming.cancel()
                with pytest.raises((asyncio.CancelledError, PeerLostError)):
                    await coming
                await eventually(lambda: engine._reception is not None and not unheard(engine))
                workers.go.set()
                if closing is not None:
                    await closing
                    (worker,) = workers.made
                    assert closed(worker)
                else:
                    await eventually(lambda: bool(workers.made) and closed(workers.made[0]))
                assert engine.stats().num_sessions == 0

    def unheard(engine: Engine) -> int:
        assert engine._reception is not None
        assert engine._reception._listener is not None
        return len(engine._reception._listener._entering)

    def closed(worker: Worker) -> bool:
        try:
            return worker.handle == 0
        except TransportError:
            return True

    run(job())


def test_none_is_made_for_a_sender_that_left_while_others_got_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are made one after the other: who has gone by its turn gets none."""

    async def remote(address: str) -> bytes:
        async with shaken(address) as hand:
            assert hand.session.peer is not None
            return hand.session.peer.worker_address

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                reception = engine._reception
                assert reception is not None
                assert reception._listener is not None
                entering = reception._listener._entering
                workers = SlowWorkers(monkeypatch)
                first = asyncio.create_task(remote(engine.address))
                await eventually(workers.begun.is_set)
                second = asyncio.create_task(remote(engine.address))
                await eventually(lambda: len(entering) == 2 and reception._num_opening == 2)
                second.cancel()
                await asyncio.wait((second,))
                await eventually(lambda: len(entering) == 1)
                workers.go.set()
                told = await first
                await eventually(lambda: reception._num_opening == 0)
                assert [worker.address for worker in workers.made] == [told]

    run(job())


def test_one_that_cannot_be_made_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Context) -> Worker:
        raise TransportError("UCX could not make a worker: no memory")

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                monkeypatch.setattr(Context, "open_worker", fails)
                with pytest.raises(TransportError, match="could not make a worker: no memory"):
                    async with shaken(engine.address):
                        pass

    run(job())
