"""The doctor: what two processes of this machine get from UCX, and why; what is slow, and the line that mends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hurray_rdma.bench.case import Case, Pattern
from hurray_rdma.bench.devices import check_devices, check_ucx, rdma_devices
from hurray_rdma.bench.findings import Diagnosis, Finding, Verdict
from hurray_rdma.bench.gpu_trials import try_gpus
from hurray_rdma.bench.limits import check_limits
from hurray_rdma.bench.machine import machine_facts
from hurray_rdma.bench.messages import Party
from hurray_rdma.bench.pair import Pair
from hurray_rdma.demo import Supervisor
from hurray_rdma.errors import HurrayError

__all__ = ["DOCTOR_STEPS", "diagnose"]

DOCTOR_STEPS = 2
"""How often `diagnose` reports a step."""

_DEADLINE_S = 60.0
_CASE = Case(page_nbytes=32768, num_pages=64, pattern=Pattern.RANDOM, seed=1)
_SHARED_MEMORY = ("sysv", "posix", "sm", "shm", "all", "mm", "xpmem")
_SLOW_LANES = ("tcp", "control channel")
_CMA = ("cma", "sm", "shm", "all")


def diagnose(*, on_step: Callable[[str], None]) -> Diagnosis:
    """Looks at everything; starts two processes that send each other pages, which takes a few seconds."""
    on_step("asking UCX and the kernel")
    rdma = rdma_devices()
    findings = [*check_ucx(), *check_devices(rdma), *check_limits(has_rdma=bool(rdma)), _copies_of_ucx()]
    on_step("sending pages between two processes")
    findings += [*_lanes(), *try_gpus()]
    return Diagnosis(machine_facts(), tuple(findings))


def _copies_of_ucx() -> Finding:
    """This process has loaded what an engine loads."""
    maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    paths = sorted({line.split(maxsplit=5)[-1] for line in maps.splitlines() if "/libucp.so" in line})
    if len(paths) == 1:
        return Finding("copies of UCX in a process", Verdict.OK, f"one: {paths[0]}")
    return Finding(
        "copies of UCX in a process",
        Verdict.BROKEN,
        f"{len(paths)}: {', '.join(paths)}: two copies in one process hang or crash",
        "Take the other one out of LD_PRELOAD and LD_LIBRARY_PATH",
    )


def _lanes() -> list[Finding]:
    try:
        with Supervisor(deadline_s=_DEADLINE_S) as supervisor:
            pair = Pair(supervisor, lane="", cores=None)
            pair.open(_CASE, frozenset({Party.HURRAY, Party.HURRAY_CALLER}))
            carried_by = dict(pair.lanes)
            pair.close_case()
            pair.finish()
    except HurrayError as error:
        return [Finding("a transfer", Verdict.BROKEN, f"two processes of this machine could not: {error}", _chosen())]
    return [_allocated(carried_by[Party.HURRAY]), _callers(carried_by[Party.HURRAY_CALLER])]


def _allocated(carried_by: str) -> Finding:
    what = "lane into a pool that the engine allocated"
    if carried_by.endswith("mapped"):
        return Finding(what, Verdict.OK, f"{carried_by}: the sender stores into the receiver's pages")
    if not _allows(_SHARED_MEMORY):
        return Finding(what, Verdict.SLOW, f"{carried_by}: UCX_TLS has no shared memory", _chosen())
    return Finding(
        what,
        Verdict.SLOW,
        f"{carried_by}: the sender cannot map the receiver's memory",
        "In containers give both the same IPC namespace (--ipc host, or --ipc container:NAME)",
    )


def _callers(carried_by: str) -> Finding:
    what = "lane into the caller's memory"
    lane = carried_by.partition(",")[0]
    if "emulated" not in lane and lane not in _SLOW_LANES:
        return Finding(what, Verdict.OK, f"{carried_by}: one copy by the kernel or a device")
    if not _allows(_CMA):
        return Finding(what, Verdict.SLOW, f"{carried_by}: UCX_TLS has no cma", _chosen())
    if os.environ.get("UCX_CMA_MEMORY_INVALIDATE", "y").lower() not in ("y", "yes", "1", "on"):
        return Finding(
            what, Verdict.SLOW, f"{carried_by}: UCX leaves cma without it", "unset UCX_CMA_MEMORY_INVALIDATE"
        )
    return Finding(
        what,
        Verdict.SLOW,
        f"{carried_by}: no process may write into another's memory (process_vm_writev), or it does not see the other",
        "In containers --cap-add SYS_PTRACE and a common --pid namespace, elsewhere sysctl kernel.yama.ptrace_scope=0; "
        "or allocate pools by PagePool.allocate",
    )


def _allows(names: tuple[str, ...]) -> bool:
    chosen = os.environ.get("UCX_TLS", "all")
    listed = chosen.removeprefix("^").split(",")
    return (chosen.startswith("^")) != any(name in names for name in listed)


def _chosen() -> str:
    chosen = os.environ.get("UCX_TLS")
    return f"unset UCX_TLS (it is {chosen})" if chosen is not None else "Look at UCX_LOG_LEVEL=info"
