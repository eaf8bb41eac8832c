"""Facts of this machine that figures depend on, read from the kernel. Knows no UCX context and starts nothing."""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv6Address
from itertools import pairwise
from pathlib import Path

__all__ = ["MachineFacts", "choose_cores", "machine_facts", "on_core", "own_addresses", "read_text", "spare_core"]


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a figure cannot be judged without."""

    cpu: str
    cores: int
    """That this process may use."""
    memory_nbytes: int
    kernel: str
    huge_pages: str
    """Transparent huge pages: kernel's setting for private and shared memory, and reserved ones."""
    python: str
    ucx: str
    """Version of the libucx package."""
    hurray_rdma: str
    load_average: float
    """Of the last minute, when the run began: other work on the machine spoils figures."""


def machine_facts() -> MachineFacts:
    """The facts of this machine, now."""
    meminfo = dict(line.split(":", 1) for line in read_text("/proc/meminfo").splitlines())
    thp = Path("/sys/kernel/mm/transparent_hugepage")
    private, shared = (_chosen(read_text(thp / name)) for name in ("enabled", "shmem_enabled"))
    return MachineFacts(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_nbytes=int(meminfo["MemTotal"].split()[0]) * 1024,
        kernel=platform.release(),
        huge_pages=f"private {private}, shared {shared}, {meminfo.get('HugePages_Total', '0').strip()} reserved",
        python=platform.python_version(),
        ucx=_ucx_version(),
        hurray_rdma=version("hurray-rdma"),
        load_average=os.getloadavg()[0],
    )


def choose_cores() -> tuple[int, int] | None:
    """Cores for the sending and the receiving process; None if there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) >= 2 else None


def spare_core() -> int | None:
    """A core for somebody else than the two processes: the third, or the second where there are two (`on_core`)."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[min(2, len(cores) - 1)] if len(cores) >= 2 else None


@contextlib.contextmanager
def on_core(pid: int, core: int) -> Iterator[None]:
    """Has all threads of a process share another core meanwhile."""
    before = {thread: os.sched_getaffinity(thread) for thread in map(int, os.listdir(f"/proc/{pid}/task"))}
    for thread in before:
        os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        for thread, cores in before.items():
            os.sched_setaffinity(thread, cores)


def own_addresses(*, ipv6: bool) -> list[str]:
    """Addresses that other machines may know this one by: none of loopback's, none of one link's alone (proc(5))."""
    if ipv6:
        rows = [line.split() for line in read_text("/proc/net/if_inet6").splitlines()]
        return [str(IPv6Address(int(digits, 16))) for digits, _, _, scope, *_ in rows if scope == "00"]
    lines = read_text("/proc/net/fib_trie").splitlines()
    found = [before.split()[-1] for before, line in pairwise(lines) if line.strip() == "/32 host LOCAL"]
    return [each for each in dict.fromkeys(found) if not each.startswith("127.")]


def read_text(path: str | Path) -> str:
    """The text of a file of the kernel's; empty if there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _chosen(text: str) -> str:
    """``always [madvise] never`` -> ``madvise``."""
    return text.partition("[")[2].partition("]")[0] or "unknown"


def _cpu_model() -> str:
    for line in read_text("/proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _ucx_version() -> str:
    for name in ("libucx-cu12", "libucx-cu13", "libucx"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
