"""The inside of a demo process: its pipe to the supervisor, its death with the supervisor, its time limit.

Knows pipes and signals; knows nothing of what the process does.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from hurray_rdma.errors import HurrayError, ProtocolError

__all__ = ["Failed", "Link", "child_main", "die_with"]

_PR_SET_PDEATHSIG = 1  # prctl(2)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failed:
    """The last message of a process that failed."""

    error: HurrayError | None
    """The failure, if it is one of the engine's kinds; of a group of failures the first."""
    text: str
    """The traceback."""


class Link:
    """A demo process's end of the pipe to its supervisor."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, message: object) -> None:
        """Hands a small picklable message to the supervisor."""
        self._connection.send(message)

    async def receive(self, kind: type[T]) -> T:
        """The supervisor's next message, without blocking the event loop; a cancelled wait loses none.

        Raises:
            ProtocolError: it is of another kind than ``kind``.
        """
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), readable.set)
        try:
            await readable.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        message = self._connection.recv()
        if not isinstance(message, kind):
            raise ProtocolError(f"the supervisor must send {kind.__name__}", field="message", value=message)
        return message


def child_main(
    function: Callable[..., Awaitable[None]],
    connection: Connection,
    parent_pid: int,
    deadline_s: float,
    args: tuple[Any, ...],
) -> None:
    """Runs ``await function(link, *args)`` as the whole life of this process.

    The kernel kills the process when its parent dies or when ``deadline_s`` seconds are over, whatever it is doing.
    Ctrl-C is the parent's business: it reaches the whole process group, and the parent ends its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, deadline_s)
    die_with(parent_pid)
    try:
        asyncio.run(_run(function, Link(connection), args))
    except Exception as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        known = first if isinstance(first, HurrayError) else None
        with contextlib.suppress(BrokenPipeError):  # the supervisor has given up on this process already
            connection.send(Failed(known, traceback.format_exc()))
        sys.exit(1)
    finally:
        connection.close()


async def _run(function: Callable[..., Awaitable[None]], link: Link, args: tuple[Any, ...]) -> None:
    await function(link, *args)


def die_with(parent_pid: int) -> None:
    """From now on the kernel kills this process when its parent dies; it ends at once if that has happened already.

    Args:
        parent_pid: the parent's number, as the parent itself knows it.

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent_pid:  # it died before the call
        sys.exit(1)
