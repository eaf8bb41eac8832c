"""A second real process for tests: always with a deadline, always reaped.

`Child` runs a function of a test module in a process of its own, joined to the test by a pipe. Its failures arrive as
failures of the test, with the child's traceback. Processes are forked from a small server that has imported what all of
them need, since importing it takes longer than most tests. UCX is loaded there, too, but nothing of it made: contexts
bear no fork, and read their environment when they are made.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from hurray_rdma.testing.loops import take_event_loop

__all__ = ["Child", "ChildFailedError"]

_PRELOADED = [
    "asyncio",
    "hurray_rdma.engine",
    *(f"hurray_rdma.{room}" for room in ("bench", "cli.main", "demo", "replay")),
]


class ChildFailedError(AssertionError):
    """The child raised, died, or said nothing in time."""


class Child:
    """Runs ``function(connection, *args)`` in a process of its own.

    Args:
        function: importable by name; gets the other end of the pipe, then ``args``.
        args: picklable.
        deadline_s: the child is killed when it lives longer than this, whatever the test does.
    """

    def __init__(self, function: Callable[..., None], *args: Any, deadline_s: float = 60.0) -> None:
        context = multiprocessing.get_context("forkserver")
        # In the server numpy is imported before the child's environment is there: OpenBLAS must start no threads, since
        # those that run while it forks are missing afterwards.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        context.set_forkserver_preload([*_PRELOADED, *sys.modules.keys() & {"pytest"}])
        self._connection, theirs = context.Pipe()
        self._killed_by: int | None = None
        self._deadline = time.monotonic() + deadline_s
        environment = dict(os.environ)  # the server's is that of the first child
        call = (function, theirs, deadline_s, environment, args)
        self._process = context.Process(target=_run, args=call, daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        pid = self._process.pid
        if pid is None:
            raise ChildFailedError("the child was never started")
        return pid

    def send(self, message: object) -> None:
        """Hands a picklable message to the child.

        Raises:
            ChildFailedError: it has ended; with its traceback, if it raised.
        """
        try:
            self._connection.send(message)
        except OSError:
            while True:  # what it said before it ended, its failure at last
                self.receive(timeout_s=5)

    def receive(self, *, timeout_s: float = 30.0) -> Any:
        """The child's next message.

        Raises:
            ChildFailedError: it raised, died, or said nothing for ``timeout_s`` seconds.
        """
        if not self._connection.poll(min(timeout_s, max(0.0, self._deadline - time.monotonic()))):
            raise ChildFailedError(f"child {self.pid} said nothing in {timeout_s} s")
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise ChildFailedError(f"child {self.pid} ended with exit code {self._process.exitcode}") from None
        if isinstance(message, _Failure):
            raise ChildFailedError(f"child {self.pid} failed:\n{message.text}")
        return message

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, e.g. SIGSTOP, SIGCONT or SIGKILL; the end that SIGKILL or SIGTERM causes is no failure.

        Nothing happens if it has ended.
        """
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._killed_by = number
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def join(self, *, timeout_s: float = 15.0) -> int | None:
        """Waits for its end; the exit code, None if it still runs."""
        self._process.join(timeout_s)
        return self._process.exitcode

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        exit_code = self.join() if kind is None else None
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()
        if kind is None and exit_code is None:
            raise ChildFailedError(f"child {self.pid} did not end by itself")
        if kind is None and exit_code != 0 and (self._killed_by is None or exit_code != -self._killed_by):
            raise ChildFailedError(f"child {self.pid} ended with exit code {exit_code} after its last message")


class _Failure:
    """A traceback on its way to the parent."""

    def __init__(self, text: str) -> None:
        self.text = text


def _run(
    function: Callable[..., None],
    connection: Connection,
    deadline_s: float,
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    take_event_loop()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    try:
        function(connection, *args)
    except BaseException:
        connection.send(_Failure(traceback.format_exc()))
        sys.exit(1)
    finally:
        connection.close()
