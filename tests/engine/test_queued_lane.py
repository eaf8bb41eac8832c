"""Where UCX has only messages through shared memory: one sender that was killed half-way through one stops no other."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from hurray_rdma import DeadlineExceededError, Engine
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, RemoteRegion, StopFlag
from tests.engine.test_stream_permits import OTHERS, arrays_of, slice_of
from tests.hazards.scenes import SPEC, connected, counts, digest, fill, make_pool, run, snapshot_of

MESSAGES = {"TLS": "posix,sysv,self"}
QUEUE_NBYTES = 36864
"""Of UCX's queue of messages (``uct_mm_fifo_ctl`` and 256 places of 128 bytes), in whole pages of memory."""
PID_AT = 136


@pytest.fixture(scope="module")
def context() -> Context:
    return Context(MESSAGES)


def queues() -> set[int]:
    """Where this process has memory that may be queues of UCX's workers."""
    found = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        start, end = (int(each, 16) for each in line.split()[0].split("-"))
        if end - start == QUEUE_NBYTES and ("ucx_shm" in line or "SYSV" in line):
            found.add(start)
    return found


def take_a_place(queue: int) -> None:
    """The next one, as a sender does before it writes its message; nobody writes that one."""
    assert ctypes.c_int32.from_address(queue + PID_AT).value == os.getpid(), "UCX keeps its queues in another way"
    ctypes.c_uint64.from_address(queue).value += 1


def writer_of_messages(connection: Connection, address: bytes, remote: RemoteRegion) -> None:
    context = Context(MESSAGES)
    source, page = context.allocate(SPEC.page_nbytes), np.zeros(1, np.uint64)
    memory = context.open_worker().connect(address, timeout_s=10).open_region(remote)
    lengths = np.full(1, SPEC.page_nbytes, np.uint64)
    for timeout_s in (10, 0.5):
        try:
            memory.write(
                source, src_offsets=page, dst_offsets=page, lengths=lengths, stop=StopFlag(), timeout_s=timeout_s
            )
            connection.send((memory.lane, "written"))
        except DeadlineExceededError:
            connection.send((memory.lane, "stuck"))
        connection.recv()


def test_a_sender_that_dies_half_way_through_a_message_stops_no_other(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    async def job() -> None:
        arrays = arrays_of(2 * SPEC.num_heads)
        with (
            make_pool(SPEC, 16, "caller's", context) as pool,
            slice_of(arrays, context) as strided,
            make_pool(SPEC, 16, context=context) as mapped,
            make_pool(SPEC, 16, context=context) as source,
        ):
            fill(source, 1)
            before = queues()
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                engine.add_pool(strided, name="strided")
                engine.add_pool(mapped, name="mapped")
                assert engine._worker is not None
                taken = queues() - before
                assert taken
                with Child(writer_of_messages, engine._worker.address, pool.regions[0].remote()) as child:
                    assert await asyncio.to_thread(child.receive) == ("posix (emulated)", "written")
                    for queue in taken:
                        take_a_place(queue)
                    child.send("again")
                    assert await asyncio.to_thread(child.receive) == ("posix (emulated)", "stuck")
                    child.signal(signal.SIGKILL)

                async with connected(source, engine.address, timeout_s=10) as peer:
                    for name, lane, path in (
                        ("default", "tcp", "stream"),
                        ("strided", "control channel", "frames"),
                        ("mapped", "sysv", "mapped"),
                    ):
                        sent = snapshot_of(source, [1, 3, 5], [1, 4])
                        stats = await peer.send(sent, key=name, pool=name)
                        assert (stats.lane.replace("posix", "sysv"), stats.path) == (lane, path)
                        arrival = await anext(engine.arrivals())
                        assert digest(await arrival.snapshot()) == digest(sent)
                        arrival.release()
                    for n, (each, path) in enumerate(((pool, "stream"), (strided, "frames"), (mapped, "mapped"))):
                        fill(each, 2 + n)
                        engine.publish("key", snapshot_of(each, [2, 9, 4]))
                        with await peer.fetch("key") as fetched:
                            assert fetched.stats.path == path
                            assert digest(fetched) == digest(snapshot_of(each, [2, 9, 4]))
                        engine.unpublish("key")
                assert counts(pool) == counts(strided) == counts(mapped) == counts(source) == (16, 0, 0)
            for of_role in arrays.values():
                for array in of_role:
                    assert (array[:, :, SPEC.num_heads :].view(np.uint8) == OTHERS).all()

    with caplog.at_level(logging.WARNING, "hurray_rdma"):
        run(job())
    assert sum("a sender that is killed stops all others" in record.getMessage() for record in caplog.records) == 1


def test_of_two_pools_the_one_that_cannot_be_mapped_is_read_by_stream(context: Context) -> None:
    """A reader says how it reaches the first pool, and may be told of another."""

    async def job() -> None:
        with (
            make_pool(SPEC, 16, context=context) as first,
            make_pool(SPEC, 16, "caller's", context) as second,
            make_pool(SPEC, 16, context=context) as mine,
        ):
            fill(second, 2)
            async with Engine(first, listen="127.0.0.1:0") as engine, connected(mine, engine.address) as peer:
                engine.add_pool(second, name="second")
                engine.publish("key", snapshot_of(second, [2, 9, 4]))
                assert peer.path == "mapped"
                with await peer.fetch("key") as fetched:
                    assert (fetched.stats.lane, fetched.stats.path) == ("tcp", "stream")
                    assert digest(fetched) == digest(snapshot_of(second, [2, 9, 4]))
                assert counts(mine) == (16, 0, 0)

    run(job())
