"""Pages between unlike places: two GPUs, a GPU and the host, managed memory; and killed processes. Needs GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, Engine, HurrayError, PagePool, PeerLostError, RegistrationError, Snapshot
from hurray_rdma.bench.doctor import diagnose
from hurray_rdma.bench.findings import Verdict
from hurray_rdma.engine.reach import Reach, reach_of
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Backing
from hurray_rdma.transport.cuda import Trait, driver
from tests.engine.gpus import SPEC, cupy_or_skip, digest, fill, to_host, two_gpus_or_skip
from tests.engine.test_gpu import publish, receive, snapshot_of
from tests.hazards.scenes import counts, settled, stopped
from tests.hazards.test_stop_and_kill import interrupt_writes

pytestmark = pytest.mark.gpu

BIG = CacheSpec(num_layers=2, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")


@pytest.fixture
def cupy() -> Any:
    return cupy_or_skip()


def test_pages_go_from_one_gpu_to_another() -> None:
    two_gpus_or_skip()
    reachable = driver().can_access(0, 1)

    async def job(child: Child) -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            fill(pool, 3)
            async with Engine(pool) as engine, engine.connect(child.receive()) as peer:
                stats = await peer.send(snapshot_of(pool))
                assert child.receive()[0] == digest(snapshot_of(pool))
                assert (stats.lane == "cuda_ipc") is reachable or reach_of("put", stats.lane) is Reach.KEY
                child.send("end")

    with Child(receive, "cuda:1", False) as child:
        asyncio.run(job(child))


def test_an_engine_sends_from_pools_on_two_gpus() -> None:
    two_gpus_or_skip()

    async def job(child: Child) -> None:
        with (
            PagePool.allocate(SPEC, 16, device="cuda:0") as one,
            PagePool.allocate(SPEC, 16, device="cuda:1") as other,
        ):
            async with Engine(one) as engine, engine.connect(child.receive()) as peer:
                for seed, pool in enumerate((one, other, one, other)):
                    fill(pool, seed)
                    await peer.send(snapshot_of(pool), zero_tails=True)
                    assert child.receive()[0] == digest(snapshot_of(pool))
                    child.send("end" if seed == 3 else "go on")

    with Child(receive, "cuda:0", False) as child:
        asyncio.run(job(child))


@pytest.mark.parametrize("pinned", [False, True])
def test_pages_of_a_host_pool_arrive_on_a_gpu(cupy: Any, pinned: bool) -> None:
    async def job(child: Child) -> None:
        with PagePool.allocate(SPEC, 16, pinned=pinned) as pool:
            assert pool.backing is (Backing.PINNED if pinned else Backing.PLAIN)
            fill(pool, 4)
            async with Engine(pool) as engine, engine.connect(child.receive()) as peer:
                stats = await peer.send(snapshot_of(pool), pool="default", zero_tails=True)
                told, _, path = child.receive()
                assert (told, path, stats.path) == (digest(snapshot_of(pool)), "put", "put")
                child.send("end")

    with Child(receive, "cuda:0", False) as child:
        asyncio.run(job(child))


@pytest.mark.parametrize("pinned", [False, True])
def test_pages_of_a_gpu_are_fetched_into_a_host_pool(cupy: Any, pinned: bool) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 16, pinned=pinned) as pool:
            async with Engine(pool) as engine, engine.connect(address) as peer:
                with await peer.fetch("here", into=pool) as fetched:
                    assert digest(fetched) == expected
        child.send("end")

    with Child(publish, 6) as child:
        address, expected = child.receive()
        asyncio.run(job())


def receive_tails(connection: Connection) -> None:
    """Tells of one arrival what is behind the tokens of each sequence's last page: the sums of their bits."""

    async def job() -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            for tensor in SPEC.tensors:
                pool.pages(*tensor).fill(0xEEEE)
            cupy_or_skip().cuda.Device(0).synchronize()
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                connection.send(engine.address)
                arrival = await anext(engine.arrivals())
                snapshot = await arrival.snapshot()
                tails = []
                for tensor in SPEC.tensors:
                    pages = to_host(pool.pages(*tensor)).view(np.uint16)
                    for seq, length in enumerate(snapshot.seq_lens.tolist()):
                        last = int(snapshot.seq_pages(seq)[-1])
                        tails.append(int(pages[last, length % SPEC.page_size :].sum()))
                connection.send((digest(snapshot), tails))
                arrival.release()

    asyncio.run(job())


def test_tails_arrive_as_zeros_by_the_lane_of_the_pages(cupy: Any) -> None:
    async def job(child: Child) -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            fill(pool, 5)
            async with Engine(pool) as engine, engine.connect(child.receive()) as peer:
                stats = await peer.send(snapshot_of(pool), zero_tails=True)
                told, tails = child.receive()
                assert told == digest(snapshot_of(pool))
                assert tails == [0] * len(tails)
                assert not stats.lane.endswith("(staged)"), "nor are the pages"

    with Child(receive_tails) as child:
        asyncio.run(job(child))


def test_managed_memory_goes_by_the_lane_that_is_named_or_is_refused(cupy: Any) -> None:
    shape = (16, *SPEC.page_shape)
    nbytes = 2 * int(np.prod(shape))
    arrays = {
        role: [cupy.ndarray(shape, np.uint16, cupy.cuda.malloc_managed(nbytes)) for _ in range(SPEC.num_layers)]
        for role in SPEC.roles
    }
    if not driver().trait(0, Trait.USES_HOST_PAGE_TABLES):
        with pytest.raises(RegistrationError, match="managed memory"):
            PagePool.from_arrays(SPEC, arrays)
        return

    async def job(child: Child) -> None:
        with PagePool.from_arrays(SPEC, arrays) as pool:
            assert pool.backing is Backing.MANAGED
            fill(pool, 7)
            cupy.cuda.Device(0).synchronize()
            async with Engine(pool) as engine, engine.connect(child.receive()) as peer:
                stats = await peer.send(snapshot_of(pool))
                assert child.receive()[0] == digest(snapshot_of(pool))
                assert "cuda_ipc" not in stats.lane, "which carries no managed memory"
                child.send("end")

    with Child(receive, "cuda:0", False) as child:
        asyncio.run(job(child))


def big_snapshot(pool: PagePool) -> Snapshot:
    return Snapshot.from_block_tables(pool, [[*range(1, 64, 2)]], seq_lens=[32 * BIG.page_size])  # no runs


def halting_sender(connection: Connection, address: str) -> None:
    """Stops itself in the middle of its puts out of GPU memory."""

    async def job() -> None:
        with PagePool.allocate(BIG, 64, device="cuda:0") as pool:
            fill(pool, 8)
            async with Engine(pool, timeout_s=30, peer_timeout_s=60) as engine, engine.connect(address) as peer:
                interrupt_writes(lambda: os.kill(os.getpid(), signal.SIGSTOP))
                await peer.send(big_snapshot(pool))

    asyncio.run(job())


def test_pages_of_a_killed_sender_come_back_to_a_gpu_pool_by_themselves(cupy: Any) -> None:
    async def job() -> None:
        with PagePool.allocate(BIG, 64, device="cuda:0") as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20, peer_timeout_s=2, lease_s=60) as engine:
                with Child(halting_sender, engine.address) as child:
                    arrival = await anext(engine.arrivals())
                    await stopped(child.pid)
                    child.signal(signal.SIGKILL)
                    with pytest.raises(PeerLostError):
                        await arrival.snapshot()
                    await settled(pool, 64, 0, 0)
                    assert engine.stats().num_recovered == 32
                with PagePool.allocate(BIG, 64, device="cuda:0") as source:  # all of the pool is of use
                    fill(source, 9)
                    async with Engine(source) as sender, sender.connect(engine.address) as peer:
                        await peer.send(big_snapshot(source))
                        arrival = await anext(engine.arrivals())
                        assert digest(await arrival.snapshot()) == digest(big_snapshot(source))
                        arrival.release()

    asyncio.run(job())


def big_receiver(connection: Connection) -> None:
    async def job() -> None:
        with PagePool.allocate(BIG, 64, device="cuda:0") as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                connection.send(engine.address)
                async for arrival in engine.arrivals():
                    connection.send(digest(await arrival.snapshot()))
                    arrival.release()

    asyncio.run(job())


def test_a_sender_outlives_the_process_whose_gpu_it_writes_into(cupy: Any) -> None:
    async def job() -> None:
        with PagePool.allocate(BIG, 64, device="cuda:0") as pool:
            fill(pool, 10)
            held = pool.allocator.lease(64)
            async with Engine(pool, timeout_s=20, peer_timeout_s=2) as engine:
                with Child(big_receiver) as child:
                    address = child.receive()
                    async with engine.connect(address) as peer:
                        interrupt_writes(lambda: (child.signal(signal.SIGKILL), child.join()))
                        with pytest.raises(HurrayError):
                            await peer.send(big_snapshot(pool))
                with Child(big_receiver) as other:
                    async with engine.connect(other.receive()) as peer:
                        await peer.send(big_snapshot(pool))
                        assert other.receive() == digest(big_snapshot(pool))
                    other.signal(signal.SIGKILL)
                held.release()
                assert counts(pool) == (64, 0, 0)

    asyncio.run(job())


def test_the_doctor_tries_the_gpus(cupy: Any) -> None:
    findings = {each.what: each for each in diagnose(on_step=lambda _: None).findings}
    assert "GPU 0" in findings
    tried = findings["pages from cuda:0 to cuda:0 of another process"]
    assert tried.verdict is not Verdict.BROKEN
    assert (tried.verdict is Verdict.SLOW) == ("(staged)" in tried.found)
