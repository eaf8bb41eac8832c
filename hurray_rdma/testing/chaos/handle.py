"""A process of a scene as the schedule holds it: started, told, heard, stopped, killed, and always reaped.

It knows processes and pipes; what their words mean is the scene's business.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from hurray_rdma.testing.chaos.words import REPORTS, Command, End, ReceiverSettings, Report, SenderSettings

__all__ = ["Process", "Role"]

Role = Literal["receiver", "sender"]

_ENDS_IN_S = 15.0


class Process:
    """One process.

    Args:
        role: which module it runs.
        settings: its settings.
        folder: where it runs, and its ``stderr`` goes.
        hear: gets each of its reports, on the event loop.
    """

    def __init__(
        self,
        role: Role,
        settings: ReceiverSettings | SenderSettings,
        *,
        folder: Path,
        hear: Callable[[Report], None],
    ) -> None:
        self._command = [
            sys.executable,
            "-m",
            f"hurray_rdma.testing.chaos.{role}",
            msgspec.json.encode(settings).decode(),
            str(os.getpid()),
        ]
        self._folder = folder
        self._hear = hear
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._errors = folder / "stderr"
        self._stopped = False
        self._ending = False

    async def start(self) -> None:
        """Starts it; what it says is heard from now on."""
        self._folder.mkdir()
        with self._errors.open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                cwd=self._folder,
                env={**os.environ, "TMPDIR": str(self._folder)},
            )
        self._reading = asyncio.create_task(self._read())

    @property
    def pid(self) -> int:
        return self._running.pid

    @property
    def died(self) -> str | None:
        """How it ended, if nobody asked it to."""
        code = self._running.returncode
        return None if code is None or self._ending else f"process {self.pid} ended with {code}: {self.last_words()}"

    def last_words(self, num_lines: int = 12) -> str:
        """The end of its standard error."""
        return "\n".join(self._errors.read_text(errors="replace").splitlines()[-num_lines:])

    def tell(self, command: Command) -> None:
        """Hands it a command; nothing happens if it is dead."""
        assert self._running.stdin is not None
        if not self._running.stdin.is_closing():
            self._running.stdin.write(msgspec.json.encode(command) + b"\n")

    def stop(self) -> None:
        """SIGSTOP."""
        self._stopped = True
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT."""
        self._stopped = False
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL; returns when it is reaped and all that it said was heard. Harmless when repeated, or not started."""
        if self._process is None:
            return
        self._ending = True
        self._signal(signal.SIGKILL)
        await self._reaped()

    async def end(self) -> str | None:
        """Asks it to end; what was wrong with that, None if nothing."""
        self._ending = True
        if self._stopped:
            self.go_on()
        self.tell(End())
        try:
            async with asyncio.timeout(_ENDS_IN_S):
                await self._running.wait()
        except TimeoutError:
            await self.kill()
            return f"process {self.pid} did not end within {_ENDS_IN_S} s: {self.last_words()}"
        await self._reaped()
        if self._running.returncode or "Traceback" in self._errors.read_text(errors="replace"):
            return f"process {self.pid} ended with {self._running.returncode}: {self.last_words()}"
        return None

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "not started"
        return self._process

    def _signal(self, number: signal.Signals) -> None:
        if self._running.returncode is None:
            self._running.send_signal(number)

    async def _reaped(self) -> None:
        await self._running.wait()
        if self._reading is not None:
            await self._reading
        assert self._running.stdin is not None
        self._running.stdin.close()

    async def _read(self) -> None:
        assert self._running.stdout is not None
        while line := await self._running.stdout.readline():
            if line.endswith(b"\n"):  # else it was killed in the middle of a word
                self._hear(REPORTS.decode(line))
