"""Streams of CuPy and torch that fill pages and wait for them: the blocking engine, captures, tables. Needs a GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import ConfigError, Engine, PagePool, RegistrationError, Snapshot, sync
from hurray_rdma.testing.processes import Child
from tests.engine.gpus import SPEC, cupy_or_skip, digest, fill, spinning_fill, to_host, torch_or_skip
from tests.engine.test_gpu import publish, receive, send_layers, snapshot_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def cupy() -> Any:
    return cupy_or_skip()


@pytest.fixture
def torch() -> Any:
    cupy_or_skip()  # which the other process makes its pool with
    return torch_or_skip()


def test_the_blocking_engine_sends_what_a_stream_fills(cupy: Any) -> None:
    spin_and_fill = spinning_fill(cupy)
    with (
        Child(receive, "cuda:0", False) as child,
        PagePool.allocate(SPEC, 16, device="cuda:0") as pool,
        sync.Engine(pool) as engine,
        engine.connect(child.receive()) as peer,
    ):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            for number, tensor in enumerate(SPEC.tensors):
                spin_and_fill(pool.pages(*tensor), number + 7)
        assert not stream.done
        sending = peer.send_async(snapshot_of(pool), stream=stream)
        sending.result(timeout=20)
        assert stream.done
        told, *_ = child.receive()
        assert told == digest(snapshot_of(pool))
        assert int(pool.pages("value", 1)[9, 0, 0, 0]) == 10
        child.send("end")


def test_the_blocking_engine_lets_a_stream_wait_for_layers(cupy: Any) -> None:
    with (
        PagePool.allocate(SPEC, 16, device="cuda:0") as pool,
        sync.Engine(pool, listen="127.0.0.1:0") as engine,
        Child(send_layers, engine.address, 4) as child,
    ):
        arrival = next(engine.arrivals())
        stream, copies = cupy.cuda.Stream(non_blocking=True), []
        for layer in range(SPEC.num_layers):
            arrival.wait_layer(layer, stream=stream)
            with stream:
                copies += [pool.pages(role, layer).copy() for role in SPEC.roles]
        assert not stream.done
        for _ in range(SPEC.num_layers):
            child.send("go on")
        snapshot = arrival.snapshot()
        stream.synchronize()  # which may block this thread: the engine has one of its own
        ids = snapshot.seq_pages(0).astype(np.int64)
        for tensor, copied in zip(SPEC.tensors, copies, strict=True):
            assert (to_host(copied)[ids] == to_host(pool.pages(*tensor))[ids]).all()
        assert child.receive() == digest(snapshot)
        arrival.release()


def test_the_blocking_engine_fetches_into_a_gpu_what_one_has_published(cupy: Any) -> None:
    with Child(publish, 5) as child:
        address, expected = child.receive()
        with (
            PagePool.allocate(SPEC, 16, device="cuda:0") as pool,
            sync.Engine(pool) as engine,
            engine.connect(address) as peer,
            peer.fetch("here") as fetched,
        ):
            assert digest(fetched) == expected
        child.send("end")


def test_a_stream_that_captures_is_refused_and_its_graph_stays_whole(cupy: Any) -> None:
    spin_and_fill = spinning_fill(cupy)

    async def job() -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool, PagePool.allocate(SPEC, 16) as host:
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(host) as sender,
                sender.connect(engine.address) as peer,
            ):
                stream = cupy.cuda.Stream(non_blocking=True)
                async with peer.begin(snapshot_of(host), pool="default") as transfer:
                    arrival = await anext(engine.arrivals())
                    with stream:
                        stream.begin_capture()
                        spin_and_fill(pool.pages("key", 0), 9, cycles=0)
                        with pytest.raises(ConfigError, match="captures a graph"):
                            await peer.send(snapshot_of(host), stream=stream, pool="default")
                        with pytest.raises(ConfigError, match="captures a graph"):
                            await arrival.wait_layer(0, stream=stream)
                        graph = stream.end_capture()
                    await transfer.send_rest()
                arrival.release()
                graph.launch(stream=stream)
                stream.synchronize()
                assert (to_host(pool.pages("key", 0)).view(np.uint16) == 9).all()

    asyncio.run(job())


def test_a_capture_in_another_thread_is_not_broken_by_events_that_are_asked(cupy: Any) -> None:
    """CUDA breaks captures of the global mode when another thread asks for an event, unless that has left them."""
    spin_and_fill = spinning_fill(cupy)
    begun, go_on, graphs = threading.Event(), threading.Event(), []

    def capture(pages: Any) -> None:
        with cupy.cuda.Device(0), cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            spin_and_fill(pages, 3, cycles=0)
            begun.set()
            go_on.wait(20)
            graphs.append(stream.end_capture())

    async def job(child: Child) -> None:
        with PagePool.allocate(SPEC, 16, device="cuda:0") as pool:
            fill(pool, 2)
            stream = cupy.cuda.Stream(non_blocking=True)
            async with Engine(pool) as engine, engine.connect(child.receive()) as peer:
                await peer.send(snapshot_of(pool), stream=stream)  # all that is made at first need is made
                child.receive()
                child.send("again")
                with stream:
                    spin_and_fill(pool.pages("key", 0), 4)
                thread = threading.Thread(target=capture, args=(cupy.zeros(8, np.uint16),))
                thread.start()
                assert await asyncio.to_thread(begun.wait, 20)
                try:
                    await peer.send(snapshot_of(pool), stream=stream)
                finally:
                    go_on.set()
                    await asyncio.to_thread(thread.join)
                assert len(graphs) == 1, "the capture was broken"
                assert child.receive()[0] == digest(snapshot_of(pool))
                child.send("end")

    with Child(receive, "cuda:0", False) as child:
        asyncio.run(job(child))


def torch_pool(torch: Any) -> tuple[PagePool, dict[str, list[Any]]]:
    shape = (16, *SPEC.page_shape)
    tensors = {
        role: [torch.zeros(shape, dtype=torch.bfloat16, device="cuda:0") for _ in range(SPEC.num_layers)]
        for role in SPEC.roles
    }
    torch.cuda.synchronize()
    return PagePool.from_arrays(SPEC, tensors), tensors


def test_a_stream_of_torch_fills_the_pages_that_are_sent(torch: Any) -> None:
    pool, tensors = torch_pool(torch)

    async def job(child: Child) -> None:
        async with Engine(pool) as engine, engine.connect(child.receive()) as peer:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(200_000_000)
                for number, (role, layer) in enumerate(SPEC.tensors):
                    tensors[role][layer].fill_(number + 1)
            assert not stream.query()
            await peer.send(snapshot_of(pool), stream=stream)
            assert stream.query()
            assert child.receive()[0] == digest_of(pool)
            child.send("end")

    with pool, Child(receive, "cuda:0", False) as child:
        asyncio.run(job(child))


def digest_of(pool: PagePool) -> str:
    """As `digest`, of torch's tensors: the same bits in a pool of the host."""
    with PagePool.allocate(SPEC, 16) as host:
        for role, layer in SPEC.tensors:
            bits = pool.pages(role, layer).cpu().view(dtype=host_bits()).numpy()
            host.pages(role, layer).view(np.uint16)[...] = bits.view(np.uint16)
        return digest(snapshot_of(host))


def host_bits() -> Any:
    return torch_or_skip().int16


def test_tables_follow_a_stream_of_torch_that_waits_for_pages(torch: Any) -> None:
    """They go there behind the gate, and whoever sends them there does not wait for it."""
    pool, tensors = torch_pool(torch)

    async def job() -> None:
        async with Engine(pool, listen="127.0.0.1:0") as engine:
            with Child(send_layers, engine.address, 4) as child:
                arrival = await anext(engine.arrivals())
                coming = Snapshot(pool, arrival.block_table, arrival.seq_ptr, arrival.seq_lens)
                stream = torch.cuda.Stream()

                def gather() -> tuple[Any, Any]:
                    with torch.cuda.stream(stream):
                        table, _, _ = coming.tables_like(tensors["key"][0])
                        return table, tensors["key"][0][table.long()]

                gather()  # kernels are loaded from now on, and memory is there
                stream.synchronize()
                await arrival.wait_layer(0, stream=stream)
                table, gathered = gather()
                assert not stream.query()
                for _ in range(SPEC.num_layers):
                    child.send("go on")
                snapshot = await arrival.snapshot()
                await asyncio.to_thread(stream.synchronize)
                expected = tensors["key"][0][torch.from_numpy(snapshot.block_table.astype(np.int64)).to("cuda:0")]
                assert torch.equal(gathered.view(torch.int16), expected.view(torch.int16))
                assert table.cpu().numpy().tolist() == snapshot.block_table.tolist()
                child.receive()
                arrival.release()

    with pool:
        asyncio.run(job())


def expandable(connection: Connection, address: str) -> None:
    """A pool of torch tensors in virtual memory; says what became of it."""
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    try:
        pool, tensors = torch_pool(torch_or_skip())
    except RegistrationError as error:
        connection.send(("refused", str(error)))
        return
    with pool, sync.Engine(pool) as engine, engine.connect(address) as peer:
        for number, (role, layer) in enumerate(SPEC.tensors):
            tensors[role][layer].fill_(number + 3)
        torch_or_skip().cuda.synchronize()
        stats = peer.send(snapshot_of(pool))
        connection.send((stats.lane, digest_of(pool)))


def test_expandable_segments_of_torch_are_refused_or_arrive_whole(torch: Any) -> None:
    """Those without the flag for GPUDirect are named with the way out; newer ones are registered, maybe staged."""
    with Child(receive, "cuda:0", False) as receiver, Child(expandable, receiver.receive()) as child:
        lane, told = child.receive(timeout_s=50)
        if lane == "refused":
            assert "expandable_segments" in told
            receiver.signal(signal.SIGKILL)  # it waits for an arrival
        else:
            assert receiver.receive()[0] == told
            receiver.send("end")
