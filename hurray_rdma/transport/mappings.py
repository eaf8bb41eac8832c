"""What kind of memory backs an address of this process, as the kernel reports it in ``/proc/self/maps``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import TextIO

__all__ = ["is_anonymous", "mapping_kind", "shared_memory_kind", "ucx_copies"]

_LINE = re.compile(r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<mode>\S+) \S+ (?P<file>\S+ \S+)\s*(?P<path>.*)$")


_UCP = re.compile(r"/libucp[^/]*\.so[^/]*$")


def ucx_copies() -> list[str]:
    """Paths of the UCX libraries that this process has loaded, sorted."""
    with _maps() as maps:
        paths = {found["path"] for line in maps if (found := _LINE.match(line.rstrip("\n"))) is not None}
    return sorted(path for path in paths if _UCP.search(path))


def mapping_kind(address: int) -> str:
    """``"sysv"``, ``"posix"``, ``"xpmem"``, ``"shared"`` (another shared mapping) or ``"private"``."""
    found = next(_mappings(address, address + 1), None)
    return "private" if found is None else _kind(found)


def _kind(found: re.Match[str]) -> str:
    if found["mode"][3] != "s":
        return "private"
    path = found["path"]
    if path.startswith("/SYSV"):
        return "sysv"
    if path == "/dev/xpmem":
        return "xpmem"
    return "posix" if path.startswith("/dev/shm/") or "ucx_shm" in path else "shared"


def is_anonymous(start: int, end: int) -> bool:
    """Whether all bytes before ``end`` are writable, private to this process, and neither a file's, a stack's nor the
    heap's that ``brk`` moves."""
    return _all_are(
        lambda found: found["mode"].startswith("rw-p") and (not found["path"] or found["path"].startswith("[anon")),
        start,
        end,
    )


def shared_memory_kind(start: int, end: int) -> str | None:
    """As `mapping_kind`, if this process may load and store all bytes before ``end`` in one piece of memory that it can
    share with others: mapped for both, of one file or segment, and not a GPU's. Else None."""
    seen: set[tuple[str, str]] = set()

    def is_such(found: re.Match[str]) -> bool:
        seen.add((found["file"], kind := _kind(found)))
        return found["mode"].startswith("rw") and kind != "private" and not found["path"].startswith("/dev/nvidia")

    return seen.pop()[1] if _all_are(is_such, start, end) and len(seen) == 1 else None


def _all_are(such: Callable[[re.Match[str]], bool], start: int, end: int) -> bool:
    for found in _mappings(start, end):
        if not such(found):
            return False
        if int(found["start"], 16) > start:  # a gap
            return False
        start = int(found["end"], 16)
    return start >= end


def _mappings(start: int, end: int) -> Iterator[re.Match[str]]:
    """Those that have any of the bytes, in order, which is that of the file: of a thousand lines most are others'."""
    with _maps() as maps:
        for line in maps:
            first, _, last = line.partition(" ")[0].partition("-")
            if int(first, 16) >= end:
                return
            if start < int(last, 16) and (found := _LINE.match(line.rstrip("\n"))) is not None:
                yield found


def _maps() -> TextIO:
    # Of all that ends a line elsewhere, the kernel spares a file's name nothing but the line feed.
    return open("/proc/self/maps", encoding="utf-8", errors="replace", newline="\n")
