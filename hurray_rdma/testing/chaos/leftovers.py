"""What processes leave behind on this machine, read from /proc: themselves, sockets, shared memory, files."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

__all__ = ["leftovers"]

_TIME_WAIT = "06"


def leftovers(pids: Collection[int], addresses: Collection[str], folder: Path) -> list[str]:
    """What is left of ended processes, a phrase each.

    Args:
        pids: the processes.
        addresses: ``ipv4:port`` that they listened at.
        folder: where they ran; what their engine put there is left, their ``stderr`` is not.
    """
    left = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    ports = {f"{int(address.rpartition(':')[2]):04X}" for address in addresses}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state != _TIME_WAIT and {local.rpartition(":")[2], remote.rpartition(":")[2]} & ports:
            left.append(f"socket {local} to {remote} in state {state}")
    for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
        _, segment, _, _, creator, *_ = line.split()
        if int(creator) in pids:
            left.append(f"shared memory segment {segment}")
    left += [f"file {path}" for path in Path("/dev/shm").iterdir() if any(str(pid) in path.name for pid in pids)]
    left += [f"file {path}" for path in folder.rglob("*") if path.is_file() and path.name != "stderr"]
    return left
