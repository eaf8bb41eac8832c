"""The doctor's look at UCX's build and at RDMA devices. Asks UCX's own tool and the kernel."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from hurray_rdma.bench.findings import Finding, Verdict
from hurray_rdma.bench.gpus import check_gpus
from hurray_rdma.bench.machine import read_text
from hurray_rdma.bench.perftest import binary

__all__ = ["check_devices", "check_ucx", "rdma_devices"]

_TIMEOUT_S = 30
_RDMA_TRANSPORTS = re.compile(r"^(rc|dc|ud)_|^(rc|ud)$")


def check_ucx() -> list[Finding]:
    """Version, build and transports of the UCX that the engine loads, and what the environment tells it."""
    told = _ucx_info("-v")
    version = re.search(r"Library version: (\S+)", told)
    built = re.search(r"Configured with: (.+)", told)
    found = (
        f"{version[1] if version else 'version unknown'}; transports: {', '.join(sorted(_transports())) or 'unknown'}"
    )
    if built is not None:
        found += f"; built with {_options(built[1])}"
    findings = [Finding("UCX", Verdict.OK if version is not None else Verdict.NOTE, found)]
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith("UCX_")}
    if chosen:
        text = " ".join(f"{name}={value}" for name, value in chosen.items())
        findings.append(Finding("UCX_* in the environment", Verdict.NOTE, text))
    return findings


def rdma_devices() -> list[str]:
    """The kernel's RDMA devices with the state and rate of their ports."""
    told = []
    for device in sorted(Path("/sys/class/infiniband").glob("*")):
        ports = [
            f"port {port.name} {read_text(port / 'state').partition(': ')[2].lower()}, {read_text(port / 'rate')}"
            for port in sorted((device / "ports").glob("*"))
        ]
        told.append(f"{device.name} ({'; '.join(ports)})")
    return told


def check_devices(rdma: list[str]) -> list[Finding]:
    """RDMA devices and GPUs, and whether UCX can use them.

    Args:
        rdma: what `rdma_devices` said.
    """
    return [_rdma(rdma), *check_gpus(_transports())]


def _rdma(devices: list[str]) -> Finding:
    if not devices:
        return Finding("RDMA devices", Verdict.OK, "none: transfers to other hosts go over tcp")
    found = ", ".join(devices)
    if not any(_RDMA_TRANSPORTS.search(name) for name in _transports()):
        fix = "Install libibverbs1 and the device's provider (Debian: ibverbs-providers), and check /dev/infiniband"
        if "--without-verbs" in _ucx_info("-v"):
            fix = (
                "The libucx wheel is built without verbs: install a UCX that has them (of the cards' OFED, or "
                "conda-forge) and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"
            )
        return Finding("RDMA devices", Verdict.SLOW, f"{found}; UCX sees none of them, and uses tcp between hosts", fix)
    return Finding("RDMA devices", Verdict.OK, found)


def _transports() -> set[str]:
    return set(re.findall(r"Transport: (\S+)", _ucx_info("-d")))


def _ucx_info(option: str) -> str:
    path = binary()
    if path is None:
        return ""
    return _run([str(path.parent / "ucx_info"), option], LD_LIBRARY_PATH=str(path.parent.parent / "lib"))


def _run(command: list[str], **environment: str) -> str:
    try:
        done = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # told as "unknown"
    return done.stdout


def _options(configured: str) -> str:
    """The options of configure that say which devices UCX was built for."""
    words = [word for word in configured.split() if re.match(r"--(with|enable)-", word)]
    return " ".join(word for word in words if re.search(r"verbs|rdmacm|cuda|gdrcopy|mt|mlx5|rocm", word)) or "defaults"
