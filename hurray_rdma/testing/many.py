"""Many senders on one receiver, in real processes: what each costs the receiver, and how evenly they are served.

It starts processes and counts; what is too much is for its callers to say. Page bytes are few on purpose.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from hurray_rdma.cache import Snapshot
from hurray_rdma.control.codes import MessageType
from hurray_rdma.engine import Engine
from hurray_rdma.testing.chaos.child import make_pool
from hurray_rdma.testing.chaos.proxy import ChaosProxy
from hurray_rdma.testing.chaos.words import Lane
from hurray_rdma.testing.processes import Child

__all__ = ["Crowd", "Footprint", "Senders", "crowd"]

_POOL_PAGES = 2048
_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the receiving process has at a moment."""

    anonymous_nbytes: int
    """Memory of its own that it has touched: no pool, no code."""
    num_files: int
    """Open file descriptors."""
    num_threads: int
    """Without those in which the event loop has blocking calls done: a bounded pool, that grows now and then."""
    num_sessions: int
    num_transfers: int
    """Received so far."""
    cpu_s: float
    """Processor time so far."""


@dataclass(frozen=True, slots=True)
class Senders:
    """What the senders did at one go."""

    seconds: tuple[float, ...]
    """Of each, for all of its sends."""
    wall_s: float
    """From the first to the last of all."""

    @property
    def unfairness(self) -> float:
        """The slowest sender's time over the fastest's; 1 is fair."""
        return max(self.seconds) / min(self.seconds)


class Crowd:
    """One receiver and so many senders, all connected. Made by `crowd`."""

    def __init__(self, receiver: Child, senders: list[Child], proxy: ChaosProxy | None) -> None:
        self._receiver = receiver
        self._senders = senders
        self._proxy = proxy

    @property
    def messages(self) -> Mapping[str, int]:
        """Control messages so far, by name and direction, of all senders; none are counted without a proxy."""
        counts = Counter[str]()
        if self._proxy is not None:
            for (direction, kind), count in self._proxy.num_messages.items():
                counts[f"{MessageType(kind).name} {direction.value}"] += count
        return counts

    async def footprint(self) -> Footprint:
        """The receiver's, now."""
        self._receiver.send("footprint")
        told: Footprint = await asyncio.to_thread(self._receiver.receive)
        return told

    async def send(self, num_sends: int, *, num_pages: int) -> Senders:
        """Every sender sends so many snapshots, one after the other; all senders at once."""
        for child in self._senders:
            child.send((num_sends, num_pages))
        told = [await asyncio.to_thread(child.receive, timeout_s=_DEADLINE_S) for child in self._senders]
        started, ended = min(each[0] for each in told), max(each[1] for each in told)
        return Senders(tuple(seconds for each in told for seconds in each[2]), ended - started)


@asynccontextmanager
async def crowd(
    num_senders: int, *, num_processes: int, lane: Lane = "mapped", ahead_pages: int = 0, count_messages: bool = False
) -> AsyncIterator[tuple[Crowd, Footprint]]:
    """Starts the receiver, looks at it, and connects the senders.

    Args:
        num_senders: sessions with the receiver.
        num_processes: they are spread over, evenly.
        lane: how pages go.
        ahead_pages: as of the receiver's `Engine`.
        count_messages: a proxy in between counts them, which costs time.

    Yields:
        All of them, and what the receiver had before the first sender.
    """
    async with AsyncExitStack() as stack:
        receiver = stack.enter_context(Child(_receive, lane, ahead_pages, deadline_s=_DEADLINE_S))
        address = await asyncio.to_thread(receiver.receive)
        proxy = None
        if count_messages:
            host, _, port = address.rpartition(":")
            proxy = await stack.enter_async_context(ChaosProxy(host, int(port)))
            address = proxy.address
        shares = [len(range(first, num_senders, num_processes)) for first in range(min(num_processes, num_senders))]
        senders = [stack.enter_context(Child(_send, lane, address, share, deadline_s=_DEADLINE_S)) for share in shares]
        for child in senders:
            await asyncio.to_thread(child.receive)
        everybody = Crowd(receiver, senders, proxy)
        alone = await everybody.footprint()
        for child in senders:
            child.send("connect")
        for child in senders:
            await asyncio.to_thread(child.receive)
        yield everybody, alone
        for child in senders:
            child.send("end")
        for child in senders:
            await asyncio.to_thread(child.join)
        receiver.send("end")
        await asyncio.to_thread(receiver.join)


def _receive(connection: Connection, lane: Lane, ahead_pages: int) -> None:
    """The receiving process: takes what comes, and lets it go."""

    async def job() -> None:
        with make_pool(lane, "small", _POOL_PAGES) as pool:
            async with Engine(pool, listen="127.0.0.1:0", ahead_pages=ahead_pages) as engine:
                connection.send(engine.address)

                async def take() -> None:
                    async for arrival in engine.arrivals():
                        await arrival.snapshot()
                        arrival.release()

                taking = asyncio.create_task(take())
                while await asyncio.to_thread(connection.recv) != "end":
                    connection.send(_footprint(engine))
            await taking

    asyncio.run(job())


def _footprint(engine: Engine) -> Footprint:
    stats = engine.stats()
    memory = Path("/proc/self/smaps_rollup").read_text().partition("Anonymous:")[2].split()
    in_pool = [thread for thread in threading.enumerate() if thread.name.startswith(("asyncio_", "uvloop_"))]
    return Footprint(
        anonymous_nbytes=int(memory[0]) * 1024,
        num_files=len(os.listdir("/proc/self/fd")),
        num_threads=len(os.listdir("/proc/self/task")) - len(in_pool),
        num_sessions=stats.num_sessions,
        num_transfers=stats.receive.num_transfers,
        cpu_s=time.process_time(),
    )


def _send(connection: Connection, lane: Lane, address: str, num_senders: int) -> None:
    """A process of senders; told "connect" it says when all of them are, told what to send it says how long it took."""

    async def job() -> None:
        with make_pool(lane, "small", _POOL_PAGES) as pool:
            async with Engine(pool) as engine, AsyncExitStack() as stack:
                connection.send("up")
                await asyncio.to_thread(connection.recv)
                peers = [await stack.enter_async_context(engine.connect(address)) for _ in range(num_senders)]
                connection.send("connected")
                while (told := await asyncio.to_thread(connection.recv)) != "end":
                    num_sends, num_pages = told
                    table = list(range(num_pages))
                    snapshot = Snapshot.from_block_tables(pool, [table], seq_lens=[num_pages * pool.spec.page_size])

                    async def send_all(number: int, *, snapshot: Snapshot = snapshot, num: int = num_sends) -> float:
                        started = time.monotonic()
                        for turn in range(num):
                            await peers[number].send(snapshot, key=f"{os.getpid()}.{number}.{turn}")
                        return time.monotonic() - started

                    started = time.monotonic()
                    seconds = await asyncio.gather(*map(send_all, range(num_senders)))
                    connection.send((started, time.monotonic(), tuple(seconds)))

    asyncio.run(job())
