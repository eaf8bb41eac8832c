"""The places of a scene: at each one process at a time plays, and what all that ever sat there said is kept.

It knows processes and their reports, and judges nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from hurray_rdma.testing.chaos.handle import Process, Role
from hurray_rdma.testing.chaos.proxy import ChaosProxy
from hurray_rdma.testing.chaos.words import (
    Failed,
    Published,
    Ready,
    Received,
    ReceiverSettings,
    Report,
    Reregistered,
    SenderSettings,
    Sent,
    Status,
    Tell,
    Violation,
)

__all__ = ["ReceiverSeat", "SceneFailedError", "Seat", "SenderSeat", "together", "until"]

_STARTS_IN_S = 40.0
_ANSWERS_IN_S = 15.0


class SceneFailedError(AssertionError):
    """Something does not hold that must; the message says what."""


async def together(*work: Coroutine[Any, Any, None]) -> None:
    """Runs all at once; the first failure ends the others, and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def until(holds: Callable[[], bool], what: str, *, within_s: float) -> None:
    """Returns as soon as ``holds()``.

    Raises:
        SceneFailedError: it does not in time.
    """
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise SceneFailedError(f"{what} not within {within_s} s")
        await asyncio.sleep(0.002)


class Seat:
    """One place.

    Args:
        name: for logs and folders.
        folder: where the processes' folders are made.
        log: takes a line for the scene's log.
    """

    role: Role

    def __init__(self, name: str, folder: Path, log: Callable[[str], None]) -> None:
        self.name = name
        self.process: Process | None = None
        self.pids: list[int] = []
        """Of all processes that sat here."""
        self.problems: list[str] = []
        """What must never be said, and was."""
        self._folder = folder
        self._log = log
        self._num_ready = 0
        self._statuses: list[Status] = []

    @property
    def running(self) -> Process:
        assert self.process is not None, "not seated"
        return self.process

    @property
    def epoch(self) -> int:
        """Engines that have run here so far."""
        return self._num_ready

    def settings(self) -> ReceiverSettings | SenderSettings:
        """Of the next process."""
        raise AssertionError("a seat is a receiver's or a sender's")

    async def sit(self) -> None:
        """Starts a process here, and waits for its engine.

        Raises:
            SceneFailedError: it does not start.
        """
        folder = self._folder / f"{self.name}.{len(self.pids)}"
        self.process = Process(self.role, self.settings(), folder=folder, hear=self._hear)
        ready = self._num_ready
        await self.process.start()
        self.pids.append(self.process.pid)
        await self.ready(ready)

    async def ready(self, before: int) -> None:
        """Waits for an engine after number ``before``.

        Raises:
            SceneFailedError: none comes, or the process died.
        """
        await self.holds(lambda: self._num_ready > before, "an engine is ready", within_s=_STARTS_IN_S)

    async def holds(self, what: Callable[[], bool], name: str, *, within_s: float) -> None:
        """As `until`, but the process's death and what it says that must not be said end it at once."""

        def over() -> bool:
            if self.running.died is not None:
                raise SceneFailedError(f"{self.name}: {self.running.died}")
            if self.problems:
                raise SceneFailedError(f"{self.name}: {self.problems[0]}")
            return what()

        await until(over, f"{self.name}: {name}", within_s=within_s)

    async def status(self) -> Status:
        """Asks for it.

        Raises:
            SceneFailedError: no answer.
        """
        self._statuses.clear()
        self.running.tell(Tell())
        await self.holds(lambda: bool(self._statuses), "its status is told", within_s=_ANSWERS_IN_S)
        return self._statuses[0]

    async def settled(self, well: Callable[[Status], bool], what: str, *, within_s: float) -> Status:
        """Asks until the status is well.

        Raises:
            SceneFailedError: it never is.
        """
        deadline = time.monotonic() + within_s
        while not well(status := await self.status()):
            if time.monotonic() > deadline:
                raise SceneFailedError(f"{self.name}: {what} not within {within_s} s: {status}")
            await asyncio.sleep(0.01)
        return status

    def _hear(self, report: Report) -> None:
        match report:
            case Ready():
                self._num_ready += 1
            case Status():
                self._statuses.append(report)
                return
            case Violation(detail=detail) | Failed(trace=detail):
                self.problems.append(detail)
            case _:
                pass
        self._log(f"{self.name}: {report}")


class ReceiverSeat(Seat):
    """A receiver's place; it keeps its port, whoever sits there."""

    role: Role = "receiver"

    def __init__(self, name: str, folder: Path, log: Callable[[str], None], settings: ReceiverSettings) -> None:
        super().__init__(name, folder, log)
        self._settings = settings
        self.address = settings.listen
        self.num_reregistered = 0
        self.published: set[str] = set()
        self.received: dict[str, list[Received]] = {}
        """By name of the transfer."""

    def settings(self) -> ReceiverSettings:
        fields = {name: getattr(self._settings, name) for name in self._settings.__struct_fields__}
        return ReceiverSettings(**fields | {"listen": self.address})

    def _hear(self, report: Report) -> None:
        super()._hear(report)
        if isinstance(report, Ready):
            self.address = report.address
        elif isinstance(report, Published):
            self.published.add(report.name)
        elif isinstance(report, Reregistered):
            self.num_reregistered += 1
        elif isinstance(report, Received):
            self.received.setdefault(report.name, []).append(report)


class SenderSeat(Seat):
    """A sender's place, with the proxy between it and its receiver."""

    role: Role = "sender"

    def __init__(
        self,
        name: str,
        folder: Path,
        log: Callable[[str], None],
        settings: SenderSettings,
        *,
        receiver: ReceiverSeat,
        proxy: ChaosProxy,
    ) -> None:
        super().__init__(name, folder, log)
        self._settings = settings
        self.receiver = receiver
        self.proxy = proxy
        self.sent: dict[str, Sent] = {}
        """By name of the transfer."""

    def settings(self) -> SenderSettings:
        return self._settings

    def _hear(self, report: Report) -> None:
        super()._hear(report)
        if isinstance(report, Sent):
            self.sent[report.name] = report
