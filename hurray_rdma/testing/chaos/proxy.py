"""A TCP proxy before an engine's control channel that spoils the messages it is told to; TLS is beyond it.

It knows frames and rules; it decides nothing. Page bytes do not pass here: UCX has its own ways.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from types import TracebackType

from hurray_rdma.testing.chaos.faults import Close, Direction, FaultLine, Forward, Later, Pause, Rule, Step
from hurray_rdma.testing.chaos.frames import FrameCutter

__all__ = ["ChaosProxy"]

_READ_NBYTES = 256 * 1024


class ChaosProxy:
    """Passes connections on to ``host:port``; an async context manager.

    Args:
        host, port: of the engine; who need not be there yet, or may come and go: it is looked for at each connection.
    """

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._server: asyncio.Server | None = None
        self._rules: list[Rule] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_accepted = 0
        """Connections so far."""
        self.num_messages = Counter[tuple[Direction, int]]()
        """Messages that have come by, by direction and kind."""

    @property
    def address(self) -> str:
        """``"host:port"`` to connect to instead of the engine's."""
        assert self._server is not None, "not entered"
        host, port = self._server.sockets[0].getsockname()[:2]
        return f"{host}:{port}"

    @property
    def num_open(self) -> int:
        """Connections now."""
        return len(self._tasks)

    def arm(self, rule: Rule) -> Rule:
        """Puts a rule in force, for messages from now on; returns it, since it tells whether it fired."""
        self._rules.append(rule)
        return rule

    def disarm(self) -> None:
        """No rule is in force any more."""
        self._rules.clear()

    def cut(self) -> int:
        """Cuts every connection now; how many there were."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        return len(tasks)

    async def __aenter__(self) -> ChaosProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self.cut()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._server is not None:
            await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers, timers = [writer], list[asyncio.TimerHandle]()
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
            writers.append(there_writer)
            to_server = FaultLine(Direction.TO_SERVER, self._rules)
            to_client = FaultLine(Direction.TO_CLIENT, self._rules)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._carry(reader, there_writer, to_server, timers))
                both.create_task(self._carry(there_reader, writer, to_client, timers))
        except* OSError:  # nobody is there, one of them hung up, or a rule says so: both sides see it as TCP shows it
            pass
        finally:
            for timer in timers:
                timer.cancel()
            for each in writers:
                each.close()
                if each.transport.get_write_buffer_size():
                    each.transport.abort()  # what a stopped process does not take is not waited for

    async def _carry(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        line: FaultLine,
        timers: list[asyncio.TimerHandle],
    ) -> None:
        """One direction of one connection, to its end."""
        cutter = FrameCutter()
        while data := await reader.read(_READ_NBYTES):
            for frame in cutter.feed(data):
                self.num_messages[line.direction, frame.kind] += 1
                for step in line.push(frame):
                    await _do(step, writer, timers)
            await writer.drain()
        if not writer.transport.is_closing():
            writer.write(cutter.rest)
            writer.write_eof()


class _CutError(ConnectionError):
    """A rule ends the connection."""


async def _do(step: Step, writer: asyncio.StreamWriter, timers: list[asyncio.TimerHandle]) -> None:
    match step:
        case Forward(data):
            _write(writer, data)
        case Later(seconds, data):
            timers.append(asyncio.get_running_loop().call_later(seconds, _write, writer, data))
        case Pause(seconds):
            await asyncio.sleep(seconds)
        case Close():
            raise _CutError("a rule ends the connection")


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.transport.is_closing():
        writer.write(data)
