"""What kind of memory backs an address of this process, as the kernel reports it in ``/proc/self/maps``."""

from __future__ import annotations

import re

__all__ = ["mapping_kind", "ucx_copies"]

_LINE = re.compile(r"^(?P<start>[0-9a-f]+)-(?P<end>[0-9a-f]+) (?P<mode>\S+) \S+ \S+ \S+\s*(?P<path>.*)$")


_UCP = re.compile(r"/libucp[^/]*\.so[^/]*$")


def ucx_copies() -> list[str]:
    """Paths of the UCX libraries that this process has loaded, sorted."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        paths = {found["path"] for line in maps if (found := _LINE.match(line.rstrip("\n"))) is not None}
    return sorted(path for path in paths if _UCP.search(path))


def mapping_kind(address: int) -> str:
    """``"sysv"``, ``"posix"``, ``"shared"`` (another shared mapping) or ``"private"``."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            found = _LINE.match(line.rstrip("\n"))
            if found is None or not int(found["start"], 16) <= address < int(found["end"], 16):
                continue
            if found["mode"][3] != "s":
                return "private"
            path = found["path"]
            if path.startswith("/SYSV"):
                return "sysv"
            return "posix" if path.startswith("/dev/shm/") or "ucx_shm" in path else "shared"
    return "private"
