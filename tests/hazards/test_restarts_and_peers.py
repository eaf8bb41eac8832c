"""Receivers that come back, peers that never speak, many engines at once, forks, and what a kill leaves behind."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
from multiprocessing.connection import Connection

import pytest

from hurray_rdma import Engine, HurrayError, PagePool, PeerLostError
from hurray_rdma.testing.processes import Child
from hurray_rdma.testing.shared_memory import SharedMemory
from tests.hazards.scenes import LANES, SPEC, connected, digest, fill, make_pool, receiver, run, settled, snapshot_of


@pytest.mark.parametrize("lane", ["mapped", "cma"])
def test_receiver_killed_and_restarted_on_its_port_takes_from_the_living_sender(lane: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            fill(pool, 1)
            sent = snapshot_of(pool, [3, 1, 2])
            async with Engine(pool, timeout_s=5) as engine:
                address = "127.0.0.1:0"
                for restart in range(2):
                    # Another size each time, so that addresses and keys of the first would lead astray in the second.
                    settings = {"lane": lane, "listen": address, "num_pages": 16 << restart * 3}
                    with Child(receiver, settings) as child:
                        address = await asyncio.to_thread(child.receive)
                        async with engine.connect(address) as peer:
                            await peer.send(sent, key=str(restart))
                            assert await asyncio.to_thread(child.receive) == (str(restart), digest(sent))
                            child.signal(signal.SIGKILL)
                            await asyncio.to_thread(child.join)
                            with pytest.raises(PeerLostError):
                                await peer.send(sent)
                            with pytest.raises(PeerLostError):
                                await peer.send(sent)
                with pytest.raises(PeerLostError):
                    async with engine.connect(address):
                        pass

    run(job())


def test_hundreds_of_connections_that_never_say_hello_keep_nobody_out() -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                host, port = engine.address.split(":")
                idle = [socket.create_connection((host, int(port))) for _ in range(100)]
                async with connected(pool, engine.address, timeout_s=5) as peer:
                    for _ in range(4):
                        idle += [socket.create_connection((host, int(port))) for _ in range(100)]
                        await peer.send(snapshot_of(pool, [1]))
                        (await anext(engine.arrivals())).release()
                        async with connected(pool, engine.address, timeout_s=5) as other:
                            await other.send(snapshot_of(pool, [2]))
                            (await anext(engine.arrivals())).release()
                for each in idle:
                    each.close()
                await settled(pool, 16, 0, 0)

    run(job())


def test_eight_engines_at_once_all_to_all() -> None:
    async def job() -> None:
        pools = [make_pool(SPEC, 16) for _ in range(8)]
        engines = [Engine(pool, listen="127.0.0.1:0", timeout_s=10) for pool in pools]
        for seed, (pool, engine) in enumerate(zip(pools, engines, strict=True)):
            fill(pool, seed)
            await engine.start()
            pool.allocator.lease(8)  # pages 0 to 7 are what it sends
        assert len({engine.address for engine in engines}) == 8

        async def one(source: int, target: int) -> None:
            async with engines[source].connect(engines[target].address) as peer:
                await peer.send(snapshot_of(pools[source], [source]), key=str(source))

        pairs = [(a, b) for a in range(8) for b in range(8) if a != b]
        await asyncio.gather(*(one(a, b) for a, b in pairs))
        for engine in engines:
            keys = set()
            for _ in range(7):
                arrival = await anext(engine.arrivals())
                keys.add(arrival.key)
                source = int(arrival.key)
                assert digest(await arrival.snapshot()) == digest(snapshot_of(pools[source], [source]))
                arrival.release()
            assert len(keys) == 7
        for pool, engine in zip(pools, engines, strict=True):
            await engine.close()
            assert pool.allocator.accounts().free == 8
            pool.close()

    run(job())


@pytest.mark.parametrize("address", ["[::1]:0", "127.0.0.1:0", "localhost:0"])
def test_address_as_a_person_writes_it(address: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen=address) as engine:
                if "::" in address:
                    assert engine.address.startswith("[::1]:")
                async with connected(pool, engine.address, timeout_s=5) as peer:
                    await peer.send(snapshot_of(pool, [7]))

    if "::" in address:
        with socket.socket(socket.AF_INET6) as probe:
            try:
                probe.bind(("::1", 0))
            except OSError:
                pytest.skip("no IPv6 on this machine")
    run(job())


def forked(pool: PagePool, connection: Connection) -> None:
    async def use() -> None:
        async with Engine(pool):
            pass

    for attempt in (lambda: asyncio.run(use()), lambda: PagePool.allocate(SPEC, 4)):
        try:
            attempt()
        except HurrayError as error:
            connection.send(str(error))
        else:
            connection.send("it worked")


def forking_engine(connection: Connection) -> None:
    """Forks with an engine running; both the child's answers and a transfer after it are reported."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with (
                Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine,
                connected(pool, engine.address, timeout_s=5) as peer,
            ):
                fork = multiprocessing.get_context("fork")
                ours, theirs = fork.Pipe()
                # A daemon, which `Child` is, may have no children: here it reaps its own.
                multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
                process = fork.Process(target=forked, args=(pool, theirs))
                process.start()
                answers = [await asyncio.to_thread(ours.recv) for _ in range(2)]
                await asyncio.to_thread(process.join, 10)
                connection.send((answers, process.exitcode))
                await peer.send(snapshot_of(pool, [7]))
                connection.send("sent")

    asyncio.run(job())


def test_forked_child_is_refused_by_name_and_its_parent_goes_on() -> None:
    with Child(forking_engine) as child:
        answers, exit_code = child.receive()
        assert all("fork" in answer for answer in answers), answers
        assert exit_code == 0
        assert child.receive() == "sent"


@pytest.mark.parametrize("lane", LANES)
def test_killed_receiver_leaves_no_shared_memory_behind(lane: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            memory = SharedMemory()
            with Child(receiver, {"lane": lane}) as child:
                async with connected(pool, await asyncio.to_thread(child.receive), timeout_s=5) as peer:
                    await peer.send(snapshot_of(pool, [1, 2]))
                    memory.look([child.pid])
                    assert lane == "tcp" or memory.left()
                    child.signal(signal.SIGKILL)
                    await asyncio.to_thread(child.join)
            assert not memory.left()

    run(job())
