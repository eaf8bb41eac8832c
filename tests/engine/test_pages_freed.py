"""Pages that come back one by one: the queue of offers is looked at, and the loop is not flooded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from hurray_rdma import Engine
from hurray_rdma.engine.nudge import Nudge
from tests.hazards.scenes import SPEC, counts, eventually, fill, make_pool, run, snapshot_of

NUM_PAGES = 300


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What an allocator's watchers, on whatever thread, have the running loop call from now on."""
    calls: list[object] = []
    loop = asyncio.get_running_loop()

    def count(name: str) -> None:
        call = getattr(loop, name)

        def counted(callback: object, *args: object, **more: object) -> asyncio.Handle:
            if isinstance(getattr(callback, "__self__", None), Nudge):
                calls.append(callback)
            return call(callback, *args, **more)  # type: ignore[no-any-return]

        monkeypatch.setattr(loop, name, counted)

    count("call_soon")
    count("call_soon_threadsafe")
    return calls


@pytest.mark.parametrize("thread", ["own", "other"])
def test_an_offer_that_waits_is_granted_by_one_look(monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, NUM_PAGES) as pool, make_pool(SPEC, NUM_PAGES) as source:
            fill(source, 3)
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(source) as sender,
                sender.connect(engine.address) as peer,
            ):
                leases = [pool.allocator.lease(1) for _ in range(NUM_PAGES)]
                sending = asyncio.create_task(peer.send(snapshot_of(source, list(range(NUM_PAGES)))))
                await eventually(lambda: engine.stats().num_waiting == 1)
                calls = count_calls(monkeypatch)

                def release_all() -> None:
                    for lease in leases:
                        lease.release()

                if thread == "own":
                    release_all()
                else:  # the loop runs nothing meanwhile
                    other = threading.Thread(target=release_all)
                    other.start()
                    other.join()
                assert len(calls) == 1
                await sending
                arrival = await anext(engine.arrivals())
                arrival.release()
                await eventually(lambda: counts(pool) == (NUM_PAGES, 0, 0))

    run(job())


def test_a_fetch_that_waits_for_pages_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        with make_pool(SPEC, NUM_PAGES) as pool, make_pool(SPEC, NUM_PAGES) as source:
            fill(source, 3)
            async with (
                Engine(source, listen="127.0.0.1:0") as engine,
                Engine(pool) as reader,
                reader.connect(engine.address) as peer,
            ):
                engine.publish("all", snapshot_of(source, list(range(NUM_PAGES))))
                leases = [pool.allocator.lease(1) for _ in range(NUM_PAGES)]
                fetching = asyncio.create_task(peer.fetch("all"))
                await eventually(lambda: len(pool.allocator._watchers) == 1)
                calls = count_calls(monkeypatch)
                for lease in leases:
                    lease.release()
                assert len(calls) == 1
                with await fetching as snapshot:
                    assert snapshot.total_tokens == NUM_PAGES * SPEC.page_size

    run(job())
