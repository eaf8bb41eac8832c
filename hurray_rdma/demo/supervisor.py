"""The outside of the demo's processes: starts them, listens to all at once, ends all whatever happens.

Knows processes, pipes and one deadline; knows nothing of what the processes do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

from hurray_rdma.demo.child import Failed, child_main
from hurray_rdma.errors import DeadlineExceededError, HurrayError, PeerLostError, ProtocolError

__all__ = ["Process", "ProcessFailedError", "Supervisor"]

_LAST_WORDS_S = 0.5
"""Grace: when one process fails because another died, the other's end is known within this time; and the kernel's alarm
comes this much later than the supervisor's deadline, which has the better message."""

T = TypeVar("T")


class ProcessFailedError(HurrayError):
    """A demo process raised; ``text`` is its traceback. An error of the engine's kinds has this one as its cause."""

    def __init__(self, rule: str, *, text: str = "", field: str | None = None, value: object = None) -> None:
        super().__init__(rule, field=field, value=value)
        self.text = text


class Process:
    """One process of the demo, as its supervisor sees it. Made by `Supervisor.start`."""

    def __init__(self, name: str, process: SpawnProcess, connection: Connection) -> None:
        self.name = name
        self.process = process
        self.connection = connection
        self.inbox: deque[object] = deque()

    @property
    def pid(self) -> int:
        """Process ID."""
        assert self.process.pid is not None, "started by Supervisor.start"
        return self.process.pid

    def send(self, message: object) -> None:
        """Hands it a small picklable message.

        Raises:
            PeerLostError: it is gone.
        """
        try:
            self.connection.send(message)
        except OSError:  # broken, reset, or closed here when its end was read
            self.process.join(_LAST_WORDS_S)
            raise _lost(self) from None


class Supervisor:
    """Starts processes and reaps them: a context manager whose end no process survives.

    Args:
        deadline_s: time budget of everything, seconds; the kernel ends the processes after it even if this one hangs.
    """

    def __init__(self, *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._deadline = time.monotonic() + deadline_s
        self._processes: list[Process] = []

    def start(self, name: str, function: Callable[..., Awaitable[None]], *args: Any) -> Process:
        """Runs ``await function(link, *args)`` in a fresh interpreter.

        Args:
            name: for messages, e.g. ``"prefill"``.
            function: importable by name.
            args: picklable.
        """
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        budget_s = max(0.0, self._deadline - time.monotonic()) + _LAST_WORDS_S
        process = spawn.Process(target=child_main, args=(function, theirs, os.getpid(), budget_s, args), daemon=True)
        # Inherited: until the new interpreter ignores it, Ctrl-C must not make it print a traceback of its start-up.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
            started = Process(name, process, ours)
            self._processes.append(started)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        return started

    def receive(self, process: Process, kind: type[T]) -> T:
        """The next message of ``process``; a failure of any other process ends the wait.

        Raises:
            HurrayError: what a process raised.
            ProcessFailedError: a process raised something else.
            PeerLostError: a process died.
            DeadlineExceededError: the time budget is spent.
            ProtocolError: the message is of another kind than ``kind``.
        """
        while not process.inbox:
            self._pump(process)
        return self._checked(process, kind)

    def receive_any(self, processes: Sequence[Process], kind: type[T]) -> tuple[Process, T]:
        """The next message of any of ``processes``, and whose it is; otherwise as `receive`."""
        while (sender := next((each for each in processes if each.inbox), None)) is None:
            self._pump(*processes)
        return sender, self._checked(sender, kind)

    def kill(self, process: Process) -> None:
        """Ends ``process`` by SIGKILL, on purpose: its end is nobody's failure. What it said unheard is lost."""
        self._processes.remove(process)
        process.process.kill()
        process.process.join()
        process.connection.close()

    def _checked(self, process: Process, kind: type[T]) -> T:
        message = process.inbox.popleft()
        if not isinstance(message, kind):
            raise ProtocolError(
                f"the {process.name} process must send {kind.__name__}", field="message", value=type(message).__name__
            )
        return message

    def finish(self, process: Process) -> None:
        """Waits until ``process`` has ended by itself.

        Raises:
            PeerLostError: it ended with another exit code than 0.
            HurrayError: it raised.
            DeadlineExceededError: the time budget is spent.
        """
        while not process.connection.closed:
            self._pump(process)
        process.process.join(max(0.0, self._deadline - time.monotonic()))
        if process.process.exitcode is None:
            raise self._too_late(process)
        if process.process.exitcode != 0:
            raise _lost(process)

    def _pump(self, *awaited: Process) -> None:
        open_ones = {p.connection: p for p in self._processes if not p.connection.closed}
        for process in awaited:
            if process.connection not in open_ones:
                raise _lost(process)
        ready = wait(list(open_ones), timeout=max(0.0, self._deadline - time.monotonic()))
        if not ready:
            raise self._too_late(awaited[0])
        for connection in ready:
            self._read(open_ones[connection])  # type: ignore[index]

    def _read(self, process: Process) -> None:
        try:
            message = process.connection.recv()
        except (EOFError, ConnectionResetError):
            process.connection.close()
            process.process.join(_LAST_WORDS_S)
            if process.process.exitcode not in (0, None):  # None: on its way out, which can take seconds
                raise _lost(process) from None
            return
        if isinstance(message, Failed):
            raise self._failure(process, message)
        process.inbox.append(message)

    def _failure(self, process: Process, failed: Failed) -> HurrayError:
        """What to tell: a process that lost its peer is not the cause when the peer was killed."""
        until = time.monotonic() + _LAST_WORDS_S
        for other in self._processes:
            if other is not process:
                other.process.join(max(0.0, until - time.monotonic()))
                if (other.process.exitcode or 0) < 0:
                    return _lost(other)
        last_line = failed.text.strip().rpartition("\n")[2]
        told = ProcessFailedError(f"the {process.name} process failed: {last_line}", text=failed.text)
        if failed.error is None:
            return told
        failed.error.add_note(f"in the {process.name} process (pid {process.pid})")
        failed.error.__cause__ = told
        return failed.error

    def _too_late(self, process: Process) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"waiting for the {process.name} process: the time budget is spent",
            field="deadline_s",
            value=self._deadline_s,
            fix="Give it more time (--deadline), or send less",
        )

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.process.kill()
        for process in self._processes:
            process.process.join()
            process.connection.close()


def _lost(process: Process) -> PeerLostError:
    code = process.process.exitcode
    how = "closed its pipe" if code is None else f"ended with exit code {code}"
    if code == -signal.SIGALRM:
        how = "was ended by its deadline"
    elif code is not None and code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    return PeerLostError(f"the {process.name} process (pid {process.pid}) {how}")
