"""`vllm serve` and the proxy as processes of their own, for tests over HTTP.

Like `hurray_rdma.testing.vllm_instances`, but as users run them: the command line, an engine process behind each
server, everything over HTTP on this host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from hurray_rdma.testing.shared_memory import SharedMemory

__all__ = ["Server", "free_port", "vllm_serve"]

_WITH_PARENT = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which outlives exec
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that does not outlive who started it, though that is killed."""
_STOP_S = 30
_PYTHONS_OWN = ("psm_", "sem.mp-")
"""What Python's multiprocessing calls its shared memory and semaphores. Those of a process that is killed stay."""


def free_port() -> int:
    """A port of this host that nothing listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


class Server:
    """A process that answers HTTP, with all that it starts. A context manager: it is gone afterwards, whatever happens.

    Args:
        command: what to run.
        port: where it answers then, on this host.
        log: where its output goes.
        environment: beyond this process's.
    """

    def __init__(
        self, command: Sequence[str], *, port: int, log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._shared = SharedMemory()
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(os.environ) | dict(environment or {}),
                start_new_session=True,
            )

    def ready(self, *, timeout_s: float = 300) -> Server:
        """Waits until it is well."""
        until = time.monotonic() + timeout_s
        while True:
            assert self._process.poll() is None, f"it ended with {self._process.returncode}:\n{self.log()[-4000:]}"
            assert time.monotonic() < until, f"it is not ready after {timeout_s} s:\n{self.log()[-4000:]}"
            try:
                if self.get("/health", timeout_s=10)[0] == 200:
                    return self
            except OSError:
                time.sleep(0.2)

    def get(self, path: str, *, timeout_s: float = 30) -> tuple[int, str]:
        """Status and body."""
        return _answer(urllib.request.Request(self.url + path), timeout_s)

    def post(self, path: str, body: Mapping[str, Any], *, timeout_s: float = 120) -> tuple[int, Any]:
        """Status and what the body says."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        status, text = _answer(request, timeout_s)
        return status, json.loads(text)

    def metric(self, name: str) -> float:
        """The sum of a series over its labels; 0 where there is none."""
        status, text = self.get("/metrics")
        assert status == 200, text
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)

    def log(self) -> str:
        """What it has written so far."""
        return self._log.read_text(errors="replace")

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Sends a signal to it and all that it has started."""
        self._look()
        os.killpg(self._process.pid, number)

    def _look(self) -> None:
        """Notes what shared memory its processes have, for the time when they have none any more."""
        self._shared.look(pid for pid in _pids() if _session_of(pid) == self._process.pid)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._look()
        try:
            self._process.terminate()
            self._process.wait(_STOP_S if kind is None else 1)
        except subprocess.TimeoutExpired:
            if kind is None:
                raise
        finally:
            with contextlib.suppress(ProcessLookupError):
                self.kill()
            self._process.wait()
            self._shared.remove(*_PYTHONS_OWN)


def vllm_serve(options: Sequence[str], *, port: int, core: int | str, log: Path, **settings: Any) -> Server:
    """One vLLM server.

    Args:
        options: what follows ``vllm serve``.
        port: among them.
        core: the CPU that it computes on; of several workers one each, as ``"0|1"``.
        log: where its output goes.
        settings: options that make it small.
    """
    settings = {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 4, "dtype": "bfloat16"} | settings
    more = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", *options, "--host=127.0.0.1", "--enforce-eager", *more]
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_SLEEP_WHEN_IDLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    return Server(command, port=port, log=log, environment=environment)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def _answer(request: urllib.request.Request, timeout_s: float) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
