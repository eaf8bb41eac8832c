"""A side is stopped or killed with half of a transfer written: typed errors in time, no late byte in a reused page."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import (
    Arrival,
    CacheSpec,
    DeadlineExceededError,
    Engine,
    HurrayError,
    LeaseExpiredError,
    PagePool,
    PeerLostError,
    TransferAbortedError,
)
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, RemoteMemory, StopFlag, default_context
from tests.hazards.scenes import (
    LANES,
    SPEC,
    connected,
    counts,
    digest,
    fill,
    make_pool,
    raw,
    receiver,
    run,
    settled,
    snapshot_of,
    stopped,
)

pytestmark = pytest.mark.both_loops

BIG = CacheSpec(num_layers=2, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")  # pages of 32 KiB


def interrupt_writes(happens: Callable[[], None]) -> None:
    """The next plan, or the next whole pages, are written in two halves, with something between them; the second heeds
    no stop."""
    write, write_rows = RemoteMemory.write, RemoteMemory.write_rows

    def in_halves(works: Callable[..., Any], columns: tuple[str, ...]) -> Callable[..., Any]:
        def halved(self: RemoteMemory, src: Any, **plan: Any) -> Any:
            RemoteMemory.write, RemoteMemory.write_rows = write, write_rows  # type: ignore[method-assign]
            half = len(plan[columns[0]]) // 2
            works(self, src, **plan | {name: plan[name][:half] for name in columns})
            happens()
            return works(self, src, **plan | {name: plan[name][half:] for name in columns} | {"stop": StopFlag()})

        return halved

    RemoteMemory.write = in_halves(write, ("src_offsets", "dst_offsets", "lengths"))  # type: ignore[method-assign]
    RemoteMemory.write_rows = in_halves(write_rows, ("places",))  # type: ignore[method-assign]


def halting_sender(connection: Connection, address: str, lane: str) -> None:
    """Stops itself in the middle of its write; reports the error it got."""

    async def run() -> None:
        default_context(LANES[lane][1])
        with make_pool(SPEC, 32) as pool:
            fill(pool, 1)
            async with connected(pool, address, timeout_s=10) as peer:
                interrupt_writes(lambda: os.kill(os.getpid(), signal.SIGSTOP))
                connection.send("connected")
                try:
                    await peer.send(snapshot_of(pool, [1, 3, 5, 7]), key="halted")  # no runs: four operations and more
                except HurrayError as error:
                    connection.send(type(error).__name__)
                await asyncio.to_thread(connection.recv)

    asyncio.run(run())


def guarded(pool: PagePool) -> None:
    for tensor in pool.spec.tensors:
        raw(pool, *tensor)[...] = 0xEE


def written_pages(pool: PagePool, page_ids: np.ndarray) -> int:
    """Of these pages, of all tensors, how many hold anything."""
    return sum(int((raw(pool, *tensor)[page_ids] != 0xEE).any(axis=1).sum()) for tensor in pool.spec.tensors)


@pytest.mark.parametrize("lane", LANES)
def test_no_byte_of_a_stopped_sender_lands_in_a_page_of_another(lane: str) -> None:
    kind, options = LANES[lane]

    async def job() -> None:
        context = Context(options)
        with make_pool(SPEC, 8, kind, context) as pool, make_pool(SPEC, 16, context=context) as source:
            guarded(pool)
            fill(source, 2)
            async with Engine(pool, listen="127.0.0.1:0", lease_s=1, timeout_s=10) as engine:
                with Child(halting_sender, engine.address, lane) as child:
                    arrivals = engine.arrivals()
                    first = await anext(arrivals)
                    pages = np.unique(first.block_table)
                    await stopped(child.pid)
                    first.abort("not wanted")
                    with pytest.raises(TransferAbortedError):
                        await first.snapshot()
                    assert counts(pool) == (4, 4, 0)  # the sender has not said QUIET: its pages are not free

                    async with connected(source, engine.address, timeout_s=10) as peer:
                        others = snapshot_of(source, [8, 6, 4, 2]), snapshot_of(source, [9, 10, 11])
                        sending = [asyncio.create_task(peer.send(each)) for each in others]
                        second = await anext(arrivals)
                        assert digest(await second.snapshot()) == digest(others[0])
                        assert not set(pages) & set(second.block_table)
                        if lane == "tcp":  # the lease ran out, twice: nothing of a page stream can be late after that
                            third = await anext(arrivals)
                            assert digest(await third.snapshot()) == digest(others[1])
                        else:
                            await settled(pool, 0, 4, 4)
                        before = written_pages(pool, pages)
                        child.signal(signal.SIGCONT)
                        assert await asyncio.to_thread(child.receive) == "connected"
                        assert await asyncio.to_thread(child.receive) == "TransferAbortedError"
                        if lane != "tcp":  # its QUIET gives the pages back; the third transfer waited for them
                            third = await anext(arrivals)
                        assert set(third.block_table) <= set(pages)
                        assert digest(await third.snapshot()) == digest(others[1])
                        await asyncio.gather(*sending)
                        child.send("end")
                        await asyncio.to_thread(child.join)
                        assert before > 0, "it was stopped before it wrote anything"
                        assert digest(await second.snapshot()) == digest(others[0])
                        assert digest(await third.snapshot()) == digest(others[1])
                        second.release()
                        third.release()
                        await settled(pool, 8, 0, 0)

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_a_killed_sender_costs_nothing(lane: str) -> None:
    kind, options = LANES[lane]

    async def job() -> None:
        context = Context(options)
        with make_pool(SPEC, 8, kind, context) as pool, make_pool(SPEC, 16, context=context) as source:
            fill(source, 3)
            patient = {"lease_s": 600, "timeout_s": 600, "peer_timeout_s": 600}  # nothing but the death itself tells
            async with Engine(pool, listen="127.0.0.1:0", **patient) as engine:
                with Child(halting_sender, engine.address, lane) as child:
                    arrival: Arrival = await anext(engine.arrivals())
                    await stopped(child.pid)
                    child.signal(signal.SIGKILL)
                    with pytest.raises(PeerLostError):
                        await arrival.snapshot()
                    assert await asyncio.to_thread(child.join) == -signal.SIGKILL
                    arrival.release()
                    await settled(pool, 8, 0, 0)
                    async with connected(source, engine.address, timeout_s=10) as peer:
                        sent = snapshot_of(source, [2, 4, 6, 8])
                        await peer.send(sent)
                        after = await anext(engine.arrivals())
                        assert digest(await after.snapshot()) == digest(sent)

    run(job())


def sender_that_halts_its_peer(
    connection: Connection, address: str, lane: str, peer_pid: int, number: signal.Signals
) -> None:
    """Signals the receiver in the middle of its write; reports the error, and whether it is well."""

    async def run() -> None:
        default_context(LANES[lane][1])
        with make_pool(BIG, 512) as pool:
            async with Engine(pool, timeout_s=10) as engine:
                async with engine.connect(address) as peer:
                    interrupt_writes(lambda: os.kill(peer_pid, number))
                    try:
                        timeout_s = 0.8 if number == signal.SIGSTOP else 10
                        await peer.send(snapshot_of(pool, list(range(0, 512, 2))), timeout_s=timeout_s)
                    except HurrayError as error:
                        connection.send(type(error))
                    else:
                        connection.send(None)
                    with pytest.raises(HurrayError):
                        await peer.send(snapshot_of(pool, [1]), timeout_s=0.1)
                    await asyncio.to_thread(connection.recv)
                connection.send("closed")
        connection.send("well")

    asyncio.run(run())


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stopped", "killed"])
def test_sender_survives_a_receiver_halted_in_mid_transfer(lane: str, number: signal.Signals) -> None:
    with Child(receiver, {"lane": lane, "spec": BIG, "num_pages": 512}) as target:
        address = target.receive()
        with Child(sender_that_halts_its_peer, address, lane, target.pid, number) as child:
            kind = child.receive()
            # Whoever notices a death first, UCX or the control channel, it is one error.
            assert kind in ([DeadlineExceededError] if number == signal.SIGSTOP else [PeerLostError]), kind
            target.signal(signal.SIGKILL)  # closing to one that stays stopped over tcp takes UCX some seconds more
            child.send("go on")
            assert child.receive() == "closed"
            assert child.receive() == "well"


def test_abort_and_release_are_harmless_at_any_time_and_repeatable() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            fill(source, 4)
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                connected(source, engine.address, timeout_s=10) as peer,
            ):
                async with peer.begin(snapshot_of(source, [1, 2])) as transfer:
                    await transfer.send_rest()
                await transfer.abort("too late")  # complete: nothing to end
                await transfer.abort("too late")
                assert transfer.stats.num_pages == 2
                arrival = await anext(engine.arrivals())
                await arrival.snapshot()
                arrival.abort("too late")
                assert counts(pool) == (6, 2, 0)
                for _ in range(2):
                    arrival.release()
                    arrival.abort()
                assert counts(pool) == (8, 0, 0)
                with pytest.raises(LeaseExpiredError):
                    await arrival.snapshot()

                # Cancelled by the receiver while the sender still completes it, layer by layer.
                with pytest.raises(TransferAbortedError, match="second thoughts"):
                    async with peer.begin(snapshot_of(source, [1, 2])) as transfer:
                        await transfer.send_layer(0)
                        arrival = await anext(engine.arrivals())
                        await arrival.wait_layer(0)
                        arrival.abort("second thoughts")
                        arrival.abort("third thoughts")
                        while True:
                            await transfer.send_layer(1)
                            await transfer._acknowledged
                await settled(pool, 8, 0, 0)
                assert (await peer.send(snapshot_of(source, [5]))).num_pages == 1

    run(job())
