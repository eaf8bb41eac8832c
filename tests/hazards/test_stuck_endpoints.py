"""Peers that are stopped in the middle of a transfer over tcp and go on later: what was given up for them is made anew,
and whoever waited for the same endpoint is not stuck with it."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, DeadlineExceededError, Engine, HurrayError, Placement, TransferAbortedError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, Endpoint, StopFlag
from tests.hazards.scenes import (
    connected,
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
from tests.transport.test_moving import NBYTES, NUM_PAGES, PAGE, offsets, target

TCP = {"TLS": "tcp"}
LARGE = CacheSpec(num_layers=2, num_heads=8, head_dim=128, page_size=32, dtype="bfloat16")  # pages of 64 KiB
NUM_LARGE = 128  # 32 MiB: more than the sockets of both sides hold
TIMEOUT_S = 0.5
PEER_TIMEOUT_S = 30.0


def test_after_a_stopped_receiver_went_on_the_next_send_connects_anew_and_all_pages_come_back() -> None:
    """Its endpoint had been given up, the session lived on: every later send failed until somebody connected again."""

    async def job() -> None:
        settings: dict[str, Any] = {"lane": "tcp", "spec": LARGE, "num_pages": 3 * NUM_LARGE, "lease_s": 20.0}
        settings["peer_timeout_s"] = PEER_TIMEOUT_S
        with make_pool(LARGE, NUM_LARGE, context=Context(TCP)) as pool, Child(receiver, settings) as child:
            fill(pool, 1)
            lease = pool.allocator.lease(NUM_LARGE)
            sent = snapshot_of(pool, lease.page_ids.tolist())
            small = snapshot_of(pool, lease.page_ids[:3].tolist())
            address = await asyncio.to_thread(child.receive)
            async with connected(pool, address, timeout_s=10, peer_timeout_s=PEER_TIMEOUT_S) as peer:
                await peer.send(small, key="before")
                assert await asyncio.to_thread(child.receive) == ("before", digest(small))
                assert peer.lane == "tcp"
                with pytest.raises(DeadlineExceededError):
                    async with peer.begin(sent, key="stuck", timeout_s=TIMEOUT_S) as transfer:
                        child.signal(signal.SIGSTOP)
                        await stopped(child.pid)
                        await transfer.send_rest()
                assert not peer.connected
                child.signal(signal.SIGCONT)
                for n in range(2):
                    await peer.send(sent, key=f"after {n}", timeout_s=10)
                assert peer.lane == "tcp"

                expected = {"after 0": digest(sent), "after 1": digest(sent)}
                received = dict([await asyncio.to_thread(child.receive) for _ in range(3)])
                assert received.pop("stuck") in {"TransferAbortedError", "PeerLostError"}
                assert received == expected

                async def whole() -> bool:
                    child.send("counts")
                    return bool(await asyncio.to_thread(child.receive) == (3 * NUM_LARGE, 0, 0))

                await eventually(whole)  # long before a lease ends, or silence is a loss
                assert counts(pool) == (0, NUM_LARGE, 0)
            lease.release()
            await settled(pool, NUM_LARGE, 0, 0)
            child.send("end")

    run(job())


def publisher(connection: Connection) -> None:
    """Publishes a large snapshot, over tcp; ends when told."""

    async def job() -> None:
        with make_pool(LARGE, NUM_LARGE, context=Context(TCP)) as pool:
            fill(pool, 1)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                engine.publish("large", snapshot_of(pool, list(range(NUM_LARGE))), lease_s=60)
                connection.send(engine.address)
                await asyncio.to_thread(connection.recv)

    asyncio.run(job())


@pytest.mark.parametrize("number", [signal.SIGCONT, signal.SIGKILL], ids=["goes on", "is killed"])
def test_pages_chosen_for_a_fetch_are_given_back_when_its_stopped_source(number: signal.Signals) -> None:
    """The first attempt to close the endpoint fails, and nobody asked again: the fetch never returned."""

    async def job() -> None:
        pages = np.arange(NUM_LARGE)
        with make_pool(LARGE, NUM_LARGE, context=Context(TCP)) as pool, Child(publisher) as child:
            address = await asyncio.to_thread(child.receive)
            lease = pool.allocator.lease(NUM_LARGE)
            async with connected(pool, address, timeout_s=10, peer_timeout_s=1.0) as peer:
                (await peer.fetch("large", into=Placement(pool, pages))).release()
                fetching = asyncio.create_task(peer.fetch("large", into=Placement(pool, pages), timeout_s=3.0))
                await asyncio.sleep(0.005)  # wherever that finds it
                child.signal(signal.SIGSTOP)
                await stopped(child.pid)
                await asyncio.sleep(5)  # long enough for every deadline, and for one attempt to close
                child.signal(number)
                async with asyncio.timeout(20):
                    await asyncio.wait((fetching,))
                assert fetching.done()
                if fetching.exception() is None:
                    fetching.result().release()
                assert isinstance(fetching.exception(), HurrayError | None)
                assert not pool.allocator.quarantined()
                lease.release()
                await settled(pool, NUM_LARGE, 0, 0)
            if number is signal.SIGCONT:
                child.send("end")
            else:
                await asyncio.to_thread(child.join)

    run(job())


class Writing(threading.Thread):
    """Writes a whole region in a thread of its own; ``error`` is how it ended."""

    def __init__(self, memory: Any, src: Any, stop: StopFlag, *, times: int = 1) -> None:
        super().__init__()
        self.error: Exception | None = None
        self._plan = memory, src, stop, times
        self.start()

    def run(self) -> None:
        memory, src, stop, times = self._plan
        everything = offsets(np.tile(np.arange(NUM_PAGES), times))
        lengths = np.full(len(everything), PAGE, np.uint64)
        try:
            memory.write(src, src_offsets=everything, dst_offsets=everything, lengths=lengths, stop=stop, timeout_s=20)
        except Exception as error:
            self.error = error


def test_who_waits_for_an_endpoint_that_another_plan_keeps_busy_can_be_stopped() -> None:
    """An abort waited until the stuck plan's own deadline."""
    with Child(target, TCP, False) as child:
        address, remote = child.receive()
        context = Context(TCP)
        worker = context.open_worker()
        src = context.allocate(NBYTES)
        src.array()[:] = 7
        endpoint: Endpoint = worker.connect(address, timeout_s=10)
        memory = endpoint.open_region(remote)
        child.signal(signal.SIGSTOP)
        asyncio.run(stopped(child.pid))
        stuck = Writing(memory, src, StopFlag(), times=16)  # 64 MiB
        until = time.monotonic() + 5
        while not endpoint.holds_memory:
            assert time.monotonic() < until
            time.sleep(0.001)
        stop = StopFlag()
        waiting = Writing(memory, src, stop)
        waiting.join(0.3)
        assert waiting.is_alive(), "both wrote at once"
        stop.set()
        waiting.join(10)
        assert isinstance(waiting.error, TransferAbortedError)
        assert not waiting.error.in_doubt
        assert stuck.is_alive(), "it was stopped, too"
        child.signal(signal.SIGCONT)
        stuck.join(20)
        assert stuck.error is None
        child.send("read")
        assert (child.receive() == 7).all()
        child.send("end")
        assert endpoint.close()
        worker.close()
