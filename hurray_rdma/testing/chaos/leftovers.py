"""What processes leave behind on this machine, read from /proc: themselves, sockets, shared memory, files."""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection
from pathlib import Path

from hurray_rdma.testing.shared_memory import SharedMemory

__all__ = ["leftovers"]

_TIME_WAIT = "06"


def leftovers(pids: Collection[int], addresses: Collection[str], folder: Path, *, memory: SharedMemory) -> list[str]:
    """What is left of ended processes, a phrase each.

    Args:
        pids: the processes.
        addresses: ``ipv4:port`` that they listened at.
        folder: where they ran; what their engine put there is left, their ``stderr`` is not.
        memory: what they had of it, noted while they lived.
    """
    left = [f"process {pid}" for pid in pids if Path(f"/proc/{pid}").exists()]
    ours = {_as_in_proc(address) for address in addresses}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state != _TIME_WAIT and {local, remote} & ours:
            left.append(f"socket {local} to {remote} in state {state}")
    left += memory.left()
    left += [f"file {path}" for path in folder.rglob("*") if path.is_file() and path.name != "stderr"]
    return left


def _as_in_proc(address: str) -> str:
    host, _, port = address.rpartition(":")
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{int(port):04X}"
