"""Which process a peer is, if it runs on this host, and when it has ended: from then on it writes nothing any more."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from pathlib import Path

__all__ = ["ProcessWatch", "process_id"]


def process_id() -> bytes:
    """This process, told apart from every other anywhere: running kernel and pid namespace, pid, start time."""
    return f"{_namespace()}:{os.getpid()}:{_start_time(os.getpid())}".encode()


class ProcessWatch:
    """Calls ``ended`` on the event loop, once, when a process of this host has ended.

    The kernel tells (``pidfd_open``): nothing is polled, and a pid that is given anew is not taken for the old one.

    Args:
        identity: `process_id` as the process itself reported it.
        ended: what to call; soon, if the process has ended already.

    Raises:
        ValueError: the process cannot be seen from here.
    """

    def __init__(self, identity: bytes, ended: Callable[[], None]) -> None:
        namespace, _, rest = identity.decode("ascii", "replace").partition(":")
        pid, _, start_time = rest.partition(":")
        if namespace != _namespace() or not pid.isdecimal():
            raise ValueError("the process is of another host or pid namespace")
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._closed = False
        self._fd = -1
        try:
            self._fd = os.pidfd_open(int(pid))
        except ProcessLookupError:
            is_it = False
        except (OSError, OverflowError) as error:
            raise ValueError(f"the process cannot be watched: {error}") from error
        else:
            is_it = self._is_it(int(pid), start_time)
        if is_it:
            self._loop.add_reader(self._fd, self._tell)
        else:
            self._loop.call_soon(self._tell)

    def _is_it(self, pid: int, start_time: str) -> bool:
        """Whether the pid is still that process's; it is another's, or nobody's, only after its end."""
        try:
            return _start_time(pid) == start_time
        except OSError as error:
            ended = select.poll()
            ended.register(self._fd, select.POLLIN)
            if ended.poll(0):
                return False
            os.close(self._fd)
            raise ValueError(f"the process runs, but cannot be seen: {error}") from error

    def _tell(self) -> None:
        if not self._closed:
            self.close()
            self._ended()

    def close(self) -> None:
        """Stops watching. Idempotent."""
        self._closed = True
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


def _namespace() -> str:
    """Where pids mean what they mean here."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


def _start_time(pid: int) -> str:
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    return stat.rpartition(")")[2].split()[19]
