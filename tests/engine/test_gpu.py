"""Pages on GPUs, between two processes: every byte compared, streams that fill and read them. Needs a GPU with CuPy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Engine, PagePool, Snapshot
from hurray_rdma.control import DeviceUnavailableError
from hurray_rdma.engine.reach import Reach, reach_of
from hurray_rdma.format import DeviceTag, MemoryClass
from hurray_rdma.testing.processes import Child
from tests.engine.gpus import SPEC, cupy_or_skip, digest, fill, spinning_fill, to_host

pytestmark = pytest.mark.gpu

TABLES, SEQ_LENS = [[7, 3, 9], [7, 3, 2]], [40, 45]


@pytest.fixture
def cupy() -> Any:
    return cupy_or_skip()


@pytest.fixture
def source(cupy: Any) -> Iterator[PagePool]:
    with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
        yield pool


def snapshot_of(pool: PagePool) -> Snapshot:
    return Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)


def receive(connection: Connection, device: str, pinned: bool) -> None:
    """Takes arrivals one by one; of each it tells digest, lane and path."""

    async def job() -> None:
        with PagePool.allocate(SPEC, 16, device=device, pinned=pinned) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                connection.send(engine.address)
                async for arrival in engine.arrivals():
                    snapshot = await arrival.snapshot()
                    connection.send((digest(snapshot), arrival.lane, arrival.path))
                    arrival.release()
                    if await asyncio.to_thread(connection.recv) == "end":
                        return

    asyncio.run(job())


def publish(connection: Connection, seed: int) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            fill(pool, seed)
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                engine.publish("here", snapshot_of(pool))
                connection.send((engine.address, digest(snapshot_of(pool))))
                await asyncio.to_thread(connection.recv)

    asyncio.run(job())


@pytest.mark.parametrize(("device", "pinned"), [("cuda:0", False), ("cpu", False), ("cpu", True)])
def test_pages_of_a_gpu_arrive_whole(source: PagePool, device: str, pinned: bool) -> None:
    fill(source, 1)
    snapshot = snapshot_of(source)

    async def job(child: Child) -> None:
        async with Engine(source) as engine, engine.connect(child.receive()) as peer:
            assert DeviceTag.CUDA in engine._config().devices
            if device == "cpu":
                with pytest.raises(DeviceUnavailableError):
                    await peer.send(snapshot)
            stats = await peer.send(snapshot, pool="default")
            told, lane, path = child.receive()
            assert told == digest(snapshot)
            assert path == stats.path == "put", "never the host's loads and stores"
            if device != "cpu":
                assert lane == f"{stats.lane} (expected)"
                assert stats.lane == "cuda_ipc" or reach_of(path, stats.lane) is Reach.KEY, "no lane of GPUs"
            child.send("end")

    with Child(receive, device, pinned) as child:
        asyncio.run(job(child))


def test_pages_of_the_host_arrive_on_a_gpu(cupy: Any) -> None:
    async def job(child: Child) -> None:
        with PagePool.allocate(SPEC, 16) as pool:
            fill(pool, 2)
            async with Engine(pool) as engine, engine.connect(child.receive()) as peer:
                await peer.send(snapshot_of(pool), pool="default")
                assert child.receive()[0] == digest(snapshot_of(pool))
                child.send("end")

    with Child(receive, "cuda:0", False) as child:
        asyncio.run(job(child))


def test_pages_are_fetched_into_a_gpu(cupy: Any) -> None:
    async def job(child: Child) -> None:
        address, expected = child.receive()
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            async with Engine(pool) as engine, engine.connect(address) as peer:
                with await peer.fetch("here") as fetched:
                    assert digest(fetched) == expected
        child.send("end")

    with Child(publish, 3) as child:
        asyncio.run(job(child))


def test_a_send_waits_for_the_kernels_on_its_stream(cupy: Any, source: PagePool) -> None:
    spin_and_fill = spinning_fill(cupy)

    async def job(child: Child) -> None:
        async with Engine(source) as engine, engine.connect(child.receive()) as peer:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                for number, tensor in enumerate(SPEC.tensors):
                    spin_and_fill(source.pages(*tensor), number + 1)
            assert not stream.done
            await peer.send(snapshot_of(source), stream=stream)
            assert stream.done
            assert child.receive()[0] == digest(snapshot_of(source))
            assert [int(source.pages(*each)[0, 0, 0, 0]) for each in SPEC.tensors] == [1, 2, 3, 4]
            child.send("end")

    with Child(receive, "cuda:0", False) as child:
        asyncio.run(job(child))


def send_layers(connection: Connection, address: str, seed: int) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            fill(pool, seed)
            async with Engine(pool) as engine, engine.connect(address) as peer:
                async with peer.begin(snapshot_of(pool)) as transfer:
                    for layer in range(SPEC.num_layers):
                        await asyncio.to_thread(connection.recv)
                        await transfer.send_layer(layer)
                connection.send(digest(snapshot_of(pool)))

    asyncio.run(job())


def test_a_stream_waits_for_layers_without_the_host(cupy: Any) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                with Child(send_layers, engine.address, 4) as child:
                    arrival = await anext(engine.arrivals())
                    stream, copies = cupy.cuda.Stream(non_blocking=True), []
                    for layer in range(SPEC.num_layers):
                        await arrival.wait_layer(layer, stream=stream)
                        with stream:
                            copies += [pool.pages(role, layer).copy() for role in SPEC.roles]
                    assert not stream.done
                    for _ in range(SPEC.num_layers):
                        child.send("go on")
                    snapshot = await arrival.snapshot()
                    await asyncio.to_thread(stream.synchronize)
                    ids = snapshot.seq_pages(0).astype(np.int64)
                    for (role, layer), copied in zip(SPEC.tensors, copies, strict=True):
                        assert (to_host(copied)[ids] == to_host(pool.pages(role, layer))[ids]).all()
                    assert child.receive() == digest(snapshot)
                    arrival.release()

    asyncio.run(job())


def test_a_stream_is_let_go_when_its_arrival_is_aborted(cupy: Any) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool, PagePool.allocate(SPEC, 16) as host:
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(host) as sender,
                sender.connect(engine.address) as peer,
            ):
                transfer = peer.begin(snapshot_of(host), pool="default")
                await transfer.__aenter__()
                arrival = await anext(engine.arrivals())
                stream = cupy.cuda.Stream(non_blocking=True)
                await arrival.wait_layer(0, stream=stream)
                assert not stream.done
                await transfer.abort()
                async with asyncio.timeout(10):
                    await asyncio.to_thread(stream.synchronize)

    asyncio.run(job())


def test_descriptors_and_tables_are_those_of_a_gpu(source: PagePool) -> None:
    snapshot = snapshot_of(source)
    for descriptor in snapshot.descriptors():
        assert (descriptor.device_tag, descriptor.buffers[0].memory_class) == (DeviceTag.CUDA, MemoryClass.STANDARD)
    tables = snapshot.tables_like(source.pages("key", 0))
    assert [to_host(each).tolist() for each in tables] == [[7, 3, 9, 7, 3, 2], [0, 3, 6], SEQ_LENS]
    assert {each.device.id for each in tables} == {0}
