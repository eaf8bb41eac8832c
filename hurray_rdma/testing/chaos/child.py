"""What both kinds of processes share: commands from standard input, reports to standard output, and a sure end.

It knows pipes and signals. What a command does is the business of `receiver` and `sender`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np

from hurray_rdma.cache import PagePool
from hurray_rdma.testing.chaos.words import COMMANDS, SIZES, Command, End, Failed, Lane, Report, Size, Status, Tell
from hurray_rdma.testing.loops import take_event_loop
from hurray_rdma.transport import default_context

__all__ = ["HANG_AFTER_S", "ChaosChild", "make_pool", "run_child"]

HANG_AFTER_S = 12.0
"""What is not over so long after it should be never will be."""


class ChaosChild(ABC):
    """A process of a scene.

    Args:
        pool: its pool, closed at the end.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._reports = os.dup(sys.stdout.fileno())
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # UCX logs to standard output
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @abstractmethod
    async def open(self) -> None:
        """Makes the engine and says that it is ready."""

    @abstractmethod
    async def do(self, command: Command) -> None:
        """Does what is asked; runs beside others."""

    @abstractmethod
    async def close(self) -> None:
        """Closes the engine."""

    @property
    @abstractmethod
    def num_busy(self) -> int:
        """Arrivals or sends that have not ended."""

    def say(self, report: Report) -> None:
        """One line to whoever started this process."""
        os.write(self._reports, msgspec.json.encode(report) + b"\n")

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside everything else; its failure is the process's."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failed.done():
            self._failed.set_exception(error)

    async def serve(self) -> None:
        """Until it is told to end, or its standard input does."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        listening = loop.create_task(self._obey(reader))
        await asyncio.wait({listening, self._failed}, return_when=asyncio.FIRST_COMPLETED)
        for done in (self._failed, listening):
            if done.done():
                done.result()
        await self.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=HANG_AFTER_S)

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            match COMMANDS.decode(line):
                case End():
                    return
                case Tell():
                    self.say(self._status())
                case command:
                    self.start(self.do(command))

    def _status(self) -> Status:
        accounts = self.pool.allocator.accounts()
        return Status(
            num_pages=accounts.num_pages,
            free=accounts.free,
            leased=accounts.leased,
            quarantined=accounts.quarantined,
            num_busy=self.num_busy,
            num_files=len(os.listdir("/proc/self/fd")),
        )


def make_pool(lane: Lane, size: Size, num_pages: int) -> PagePool:
    """A pool whose pages can be reached by the lane; the process's UCX context is made for it."""
    spec = SIZES[size]
    options = {"tcp": {"TLS": "tcp"}, "frames": {"TLS": "self"}}  # by itself no process reaches another
    context = default_context(options.get(lane, {}))
    if lane != "cma":
        return PagePool.allocate(spec, num_pages, context=context)
    arrays = {
        role: [np.zeros((num_pages, *spec.page_shape), spec.storage_dtype) for _ in range(spec.num_layers)]
        for role in spec.roles
    }
    return PagePool.from_arrays(spec, arrays, context=context)


def run_child(make: type[ChaosChild], deadline_s: float, pool: PagePool, *arguments: Any) -> None:
    """The process's main: ``make(pool, *arguments)`` serves; it dies at the deadline."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    take_event_loop()

    async def main() -> None:
        child = make(pool, *arguments)
        try:
            await child.open()
            await child.serve()
        except BaseException:
            child.say(Failed(traceback.format_exc()))
            raise

    with pool:
        asyncio.run(main())
