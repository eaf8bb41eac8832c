"""Shared memory that processes leave on this machine, told from everybody else's. It reads /proc and starts nothing."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

__all__ = ["SharedMemory"]

_FILES = "/dev/shm/"


class SharedMemory:
    """What some processes have of it, and what is left when they are gone."""

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._inodes: set[int] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Notes processes, and the files of shared memory that those of them that live have mapped now."""
        for pid in pids:
            self._pids.add(pid)
            try:
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            except (FileNotFoundError, ProcessLookupError):
                continue
            mapped = (line.split(maxsplit=5) for line in lines)
            self._inodes |= {int(fields[4]) for fields in mapped if len(fields) > 5 and fields[5].startswith(_FILES)}

    def remove(self, *beginnings: str) -> None:
        """Removes noted files that exist.

        Args:
            beginnings: of the names of those that are meant.
        """
        for path in Path(_FILES).iterdir():
            if path.name.startswith(beginnings) and _inode(path) in self._inodes:
                path.unlink(missing_ok=True)

    def left(self) -> set[str]:
        """System V segments that noted processes made, and noted files, as far as they exist."""
        segments = (line.split() for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:])
        files = Path(_FILES).iterdir()
        return {f"shared memory segment {fields[1]}" for fields in segments if int(fields[4]) in self._pids} | {
            f"file {path}" for path in files if _inode(path) in self._inodes
        }


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:  # its owner has just removed it
        return None
