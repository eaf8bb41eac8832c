"""The doctor: its exit code says whether the engine would be fast, and every bad finding has a line that mends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hurray_rdma.bench import doctor, limits
from hurray_rdma.bench.findings import Verdict


def run(path: Path, **environment: str) -> tuple[subprocess.CompletedProcess[str], dict[str, dict[str, str]]]:
    done = subprocess.run(
        [sys.executable, "-m", "hurray_rdma.cli", "doctor", "--json", str(path)],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={key: value for key, value in os.environ.items() if not key.startswith("UCX_")} | environment,
    )
    told = json.loads(path.read_text())
    assert told["well"] == (done.returncode == 0)
    findings = {each["what"]: each for each in told["findings"]}
    for what, each in findings.items():
        assert what in done.stdout
        assert each["fix"] or each["verdict"] in ("ok", "note")
    return done, findings


def test_a_machine_as_it_is(tmp_path: Path) -> None:
    done, findings = run(tmp_path / "facts.json")
    assert done.stderr == ""
    assert findings["lane into a pool that the engine allocated"]["found"].startswith(("sysv, mapped", "posix, mapped"))
    assert findings["copies of UCX in a process"]["verdict"] == "ok"
    assert "cma" in findings["UCX"]["found"]
    bad = {each["verdict"] for each in findings.values()} & {"slow", "broken"}
    assert done.stdout.startswith(f"hurray_rdma {version('hurray-rdma')}, Python ")
    assert ("Nothing is slow or broken" in done.stdout.splitlines()[-1]) == (not bad)
    assert done.returncode == (1 if bad else 0)


def test_tcp_between_processes_of_one_host_is_slow(tmp_path: Path) -> None:
    done, findings = run(tmp_path / "facts.json", UCX_TLS="tcp")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith("2 slow (")
    for what in ("lane into a pool that the engine allocated", "lane into the caller's memory"):
        assert findings[what]["verdict"] == "slow"
        assert findings[what]["fix"] == "unset UCX_TLS (it is tcp)"
    assert findings["UCX_* in the environment"]["found"] == "UCX_TLS=tcp"


def test_a_transport_that_does_not_exist_is_broken(tmp_path: Path) -> None:
    done, findings = run(tmp_path / "facts.json", UCX_TLS="carrier_pigeon")
    assert done.returncode == 1
    assert findings["a transfer"]["verdict"] == "broken"


@pytest.mark.parametrize(
    ("chosen", "allowed"),
    [
        (None, True),
        ("all", True),
        ("tcp", False),
        ("tcp,cma", True),
        ("^cma", False),
        ("^tcp", True),
        ("sm,tcp", True),
    ],
)
def test_whether_ucx_tls_allows_cma(monkeypatch: pytest.MonkeyPatch, chosen: str | None, allowed: bool) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("UCX_TLS", chosen)
    lane = doctor._callers("tcp (emulated), put")
    assert lane.verdict is Verdict.SLOW
    assert ("UCX_TLS has no cma" not in lane.found) == allowed
    assert doctor._callers("control channel, frames").verdict is Verdict.SLOW
    assert doctor._callers("cma, put").verdict is Verdict.OK


def test_limits_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/proc/sys/kernel/yama/ptrace_scope": "1",
        "/proc/self/status": "CapEff:\t0000000000000000",
        "/proc/sys/kernel/shmmax": str(32 * 2**20),
        "/proc/sys/kernel/shmall": "100",
        "/sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never",
        "/sys/kernel/mm/transparent_hugepage/shmem_enabled": "always within_size [advise] never deny force",
    }
    monkeypatch.setattr(limits, "read_text", lambda path: files[str(path)])
    monkeypatch.setattr(limits.resource, "getrlimit", lambda _: (64 * 2**10, 64 * 2**10))
    found = {each.what: each for each in limits.check_limits(has_rdma=True)}
    assert found["ptrace"].verdict is Verdict.NOTE
    assert found["locked memory"].verdict is Verdict.SLOW
    assert "ulimit -l unlimited" in found["locked memory"].fix
    assert found["shared memory"].verdict is Verdict.NOTE
    assert found["huge pages"].verdict is Verdict.OK
    files["/proc/self/status"] = "CapEff:\t0000000000080000"  # bit 19: CAP_SYS_PTRACE
    files["/proc/sys/kernel/shmmax"] = files["/proc/sys/kernel/shmall"] = str(2**62)
    files["/sys/kernel/mm/transparent_hugepage/shmem_enabled"] = "always advise [never]"
    found = {each.what: each for each in limits.check_limits(has_rdma=False)}
    assert found["ptrace"].verdict is Verdict.OK
    assert found["locked memory"].verdict is Verdict.OK
    assert found["shared memory"].verdict is Verdict.OK
    assert found["huge pages"].verdict is Verdict.NOTE
