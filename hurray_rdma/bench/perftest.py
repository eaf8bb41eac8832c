"""``ucx_perftest`` of the libucx wheel: a check of the lane. It writes one buffer over and over, hot in the cache."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import subprocess
import time
from pathlib import Path

import numpy as np

from hurray_rdma.bench.measured import Measured
from hurray_rdma.errors import TransportError

__all__ = ["binary", "measure"]

_TIMEOUT_S = 60.0
_TRIES = 5
_FINAL = re.compile(r"^Final:\s+\d+\s+(?:\S+\s+){3}(?P<mib_per_s>[\d.]+)\s", re.MULTILINE)
_MIB = 1 << 20


def binary() -> Path | None:
    """Where the libucx wheel has it; None if it has not."""
    spec = importlib.util.find_spec("libucx")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(place) / "bin" / "ucx_perftest"
        if path.is_file():
            return path
    return None


def measure(
    path: Path,
    *,
    page_nbytes: int,
    num_pages: int,
    lane: str,
    cores: tuple[int, int] | None,
    memory: str = "host",
) -> Measured:
    """Puts of ``page_nbytes``, ``num_pages`` times, between two fresh processes.

    Args:
        path: of `binary`.
        page_nbytes: of a put.
        num_pages: puts.
        lane: UCX transports; empty leaves the choice to UCX.
        cores: of the two processes.
        memory: what is put: UCX's name of a memory type.

    Raises:
        TransportError: it failed, or printed no bandwidth.
    """
    environment = (
        os.environ | {"LD_LIBRARY_PATH": str(path.parent.parent / "lib")} | ({"UCX_TLS": lane} if lane else {})
    )
    test = ["-t", "ucp_put_bw", "-s", str(page_nbytes), "-n", str(num_pages), "-m", memory]
    pins = [["-c", str(core)] for core in cores] if cores else [[], []]
    told = ""
    for _ in range(_TRIES):  # the port may be taken by somebody else in between
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        common = [str(path), "-p", str(port), *test]
        server = subprocess.Popen(
            common + pins[1], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            if _listens(port, server):
                told = _run_client([common[0], "127.0.0.1", *common[1:], *pins[0]], environment)
        finally:
            server.kill()
            told += server.communicate()[0]
        found = _FINAL.search(told)
        if found is not None:
            seconds = np.array([page_nbytes * num_pages / (float(found["mib_per_s"]) * _MIB)])
            return Measured(seconds, seconds, None)
    raise TransportError(f"ucx_perftest printed no bandwidth: {told.strip()[-300:]}")


def _run_client(command: list[str], environment: dict[str, str]) -> str:
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TransportError("ucx_perftest did not end in time", field="timeout_s", value=_TIMEOUT_S) from error
    return done.stdout + done.stderr


def _listens(port: int, server: subprocess.Popen[str]) -> bool:
    """Waits until it does, or has ended. Asks the kernel: a connection, to try, would be the server's only one."""
    until = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < until and server.poll() is None:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            lines = Path(table).read_text(encoding="ascii").splitlines()[1:] if Path(table).exists() else []
            if any(line.split()[3] == "0A" and line.split()[1].endswith(f":{port:04X}") for line in lines):
                return True
        time.sleep(0.01)
    return False
