"""The doctor's look at the kernel: permissions, limits, shared memory, huge pages. Reads files only."""

from __future__ import annotations

import multiprocessing
import os
import resource

from hurray_rdma.bench.findings import Finding, Verdict
from hurray_rdma.bench.machine import read_text

__all__ = ["check_limits"]

_GIB = 2**30
_CAP_SYS_PTRACE = 19
_YAMA_ANY_OF_USER = 0
_PAGE_NBYTES = os.sysconf("SC_PAGE_SIZE")


def check_limits(*, has_rdma: bool) -> list[Finding]:
    """What the kernel allows.

    Args:
        has_rdma: whether there is a device that pins memory.
    """
    return [_ptrace(), _memlock(has_rdma), _shared_memory(), _huge_pages(), _fork()]


def _ptrace() -> Finding:
    scope = read_text("/proc/sys/kernel/yama/ptrace_scope")
    capable = _capabilities() >> _CAP_SYS_PTRACE & 1 == 1
    found = f"Yama's ptrace_scope is {scope}" if scope else "no Yama"
    found += f", CAP_SYS_PTRACE is {'there' if capable else 'not there'}"
    if capable or not scope or int(scope) == _YAMA_ANY_OF_USER:
        return Finding("ptrace", Verdict.OK, f"{found}: cma between processes of one user is allowed")
    return Finding(
        "ptrace",
        Verdict.NOTE,
        f"{found}: cma works only if UCX may ask for permission; see the lane into the caller's memory",
        "As root: sysctl kernel.yama.ptrace_scope=0; in a container: --cap-add SYS_PTRACE",
    )


def _capabilities() -> int:
    for line in read_text("/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _memlock(has_rdma: bool) -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", Verdict.OK, "unlimited")
    found = f"{soft / 2**20:,.0f} MiB may be locked"
    if has_rdma:
        return Finding(
            "locked memory",
            Verdict.SLOW,
            f"{found}: RDMA devices lock every page of a pool, and registration fails beyond that",
            "ulimit -l unlimited (in a container: --ulimit memlock=-1)",
        )
    return Finding("locked memory", Verdict.OK, f"{found}; nothing here locks any")


def _shared_memory() -> Finding:
    largest = int(read_text("/proc/sys/kernel/shmmax") or 0)
    total = int(read_text("/proc/sys/kernel/shmall") or 0) * _PAGE_NBYTES
    found = f"System V segments of {_size(min(largest, total))}"
    if os.path.isdir("/dev/shm"):
        space = os.statvfs("/dev/shm")
        free, whole = (blocks * space.f_frsize / _GIB for blocks in (space.f_bavail, space.f_blocks))
        found += f"; {free:,.1f} of {whole:,.1f} GiB of /dev/shm are free"
    if min(largest, total) < _GIB:
        return Finding(
            "shared memory",
            Verdict.NOTE,
            f"{found}: a larger pool cannot be allocated by the engine",
            "As root: sysctl kernel.shmmax=18446744073692774399 kernel.shmall=18446744073692774399",
        )
    return Finding("shared memory", Verdict.OK, found)


def _huge_pages() -> Finding:
    chosen = {}
    for kind, name in (("private", "enabled"), ("shared", "shmem_enabled")):
        text = read_text(f"/sys/kernel/mm/transparent_hugepage/{name}")
        chosen[kind] = text.partition("[")[2].partition("]")[0] or "unknown"
    found = f"transparent ones: private memory {chosen['private']}, shared memory {chosen['shared']}"
    if chosen["shared"] in ("never", "deny", "unknown"):
        return Finding(
            "huge pages",
            Verdict.NOTE,
            f"{found}; pools that the engine allocates are in small pages, which costs scattered copies some speed",
            "As root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    return Finding("huge pages", Verdict.OK, found)


def _fork() -> Finding:
    method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    if method != "fork":
        return Finding("fork", Verdict.OK, f"multiprocessing starts processes by {method}")
    return Finding(
        "fork",
        Verdict.NOTE,
        "multiprocessing forks by default here: pools and engines cannot be used in a forked child, and refuse to",
        "In your program: multiprocessing.set_start_method('spawn'), or fork before the first pool is made",
    )


def _size(nbytes: int) -> str:
    return f"up to {nbytes / _GIB:,.1f} GiB" if nbytes < 2**50 else "any size"
