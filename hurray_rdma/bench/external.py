"""Other transfer engines from the outside: two workers with a Python of their own, stopped while others are measured.

Knows the workers' protocol (`hurray_rdma/bench/peers/worker.py`); imports none of those engines.
"""

from __future__ import annotations

import base64
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hurray_rdma
from hurray_rdma.bench.measured import Measured, cpu_seconds
from hurray_rdma.bench.messages import Party
from hurray_rdma.errors import ConfigError, DeadlineExceededError, HurrayError

__all__ = ["INSTALL", "External", "PeerFailedError", "find_python"]

KINDS = {Party.NIXL: "nixl", Party.NIXL_DEFAULT: "nixl", Party.MOONCAKE: "mooncake"}
MODULES = {"nixl": "nixl_cu12", "mooncake": "mooncake"}
INSTALL = {
    kind: f"Run scripts/bench-peers {kind}, or name the Python of an environment with {package} and numpy: "
    f"--peer-python {kind}=PYTHON"
    for kind, package in (("nixl", "nixl-cu12"), ("mooncake", "mooncake-transfer-engine-non-cuda"))
}

_TIMEOUT_S = 90.0
_LAST_WORDS_S = 5.0
_POLL_S = 2e-5


class PeerFailedError(HurrayError):
    """A worker of another engine failed; ``text`` is what it printed last."""

    def __init__(self, rule: str, *, text: str = "", field: str | None = None, value: object = None) -> None:
        super().__init__(rule, field=field, value=value)
        self.text = text


def find_python(kind: str, *, given: str | None) -> str | None:
    """The interpreter in whose environment an engine is installed: ``given``, or the one `scripts/bench-peers` made.

    Args:
        kind: ``"nixl"`` or ``"mooncake"``.
        given: a path of the user's.

    Raises:
        ConfigError: ``given`` cannot import the engine.
    """
    package = Path(hurray_rdma.__file__).parent
    places = [Path(given)] if given else [root / f".venv-{kind}/bin/python" for root in (Path.cwd(), package.parent)]
    for place in places:
        if place.is_file() and _imports(place, MODULES[kind]):
            return str(place)
    if given:
        raise ConfigError(f"cannot import {MODULES[kind]}", field=f"--peer-python {kind}", value=given)
    return None


def _imports(python: Path, module: str) -> bool:
    find = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({module!r}) is None)"
    return subprocess.run([str(python), "-c", find], check=False, capture_output=True, timeout=60).returncode == 0


class _Worker:
    """One process of the other engine."""

    def __init__(self, python: str, kind: str, *, environment: dict[str, str]) -> None:
        answers, theirs = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        script = Path(__file__).parent / "peers" / "worker.py"
        self._process = subprocess.Popen(
            [python, str(script), kind, str(theirs)],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[theirs],
            env=os.environ | environment,
        )
        os.close(theirs)
        self._answers = os.fdopen(answers, encoding="utf-8")
        self._kind = kind
        self.pid = self._process.pid

    def ask(self, do: str, **arguments: Any) -> None:
        """Sends a request; the answer comes with `answer`."""
        assert self._process.stdin is not None, "made with a pipe"
        try:
            self._process.stdin.write(json.dumps({"do": do} | arguments).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def answer(self, *, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
        """The answer to the oldest request.

        Raises:
            PeerFailedError: the process has ended.
            DeadlineExceededError: it says nothing.
        """
        if not select.select([self._answers], [], [], timeout_s)[0]:
            raise DeadlineExceededError(f"{self._kind} did not answer in time", field="timeout_s", value=timeout_s)
        line = self._answers.readline()
        if not line:
            raise self._failure()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.ask(do, **arguments)
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def _failure(self) -> PeerFailedError:
        try:
            self._process.wait(_LAST_WORDS_S)  # it may still be writing what went wrong
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.seek(0)
        text = self._log.read().decode(errors="replace").strip()
        last = text.rpartition("\n")[2]
        return PeerFailedError(f"{self._kind}'s process ended: {last}", text=text[-2000:])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._answers.close()
        self._log.close()


class External:
    """A pair of workers: the first sends, the second receives. A context manager.

    Args:
        party: which engine, in which of its modes.
        python: its interpreter.
        lane: UCX transports; empty leaves the choice to the engine.
        cores: of the sender and the receiver; NIXL's default mode is left unpinned, since its threads spin.
        nbytes: memory of each side, for the largest case.
        huge_pages: as of the cases.

    Raises:
        PeerFailedError: it does not start.
    """

    def __init__(
        self,
        party: Party,
        *,
        python: str,
        lane: str,
        cores: tuple[int, int] | None,
        nbytes: int,
        huge_pages: bool,
    ) -> None:
        kind = KINDS[party]
        self._party = party
        environment = {"UCX_TLS": lane} if lane else {}
        self._sender = _Worker(python, kind, environment=environment)
        self._receiver = _Worker(python, kind, environment=environment)
        src_core, dst_core = (None, None) if cores is None or party is Party.NIXL_DEFAULT else cores
        options = {"progress_thread": party is Party.NIXL_DEFAULT}
        try:
            for worker, core in ((self._sender, src_core), (self._receiver, dst_core)):
                worker.call("start", core=core, options=options)
            self._sender.call("register", nbytes=nbytes, huge_pages=huge_pages)
            self._there = self._receiver.call("register", nbytes=nbytes, huge_pages=huge_pages)
            self._sender.call("join", metadata=self._there["metadata"])
        except BaseException:
            self.close()
            raise
        self._stop()

    def prepare(self, src: NDArray[np.uint32], dst: NDArray[np.uint32], *, page_nbytes: int) -> None:
        """Page IDs of both sides, uint32 ``[num_pages]``, for the transfers to come."""
        self._go_on()
        self._sender.call(
            "prepare",
            src_pages=base64.b64encode(src.tobytes()).decode(),
            dst_pages=base64.b64encode(dst.tobytes()).decode(),
            page_nbytes=page_nbytes,
            dst_address=self._there["address"],
        )
        self._stop()

    def measure(self, party: Party, count: int) -> Measured:
        """Moves everything ``count`` times; ``party`` is this one's."""
        assert party is self._party, "each has its own"
        told = party is not Party.MOONCAKE
        pids = (self._sender.pid, self._receiver.pid)
        self._go_on()
        before = cpu_seconds(pids)
        # Where NIXL has a thread for progress, its receiver rests between two looks, which leaves that thread a core.
        rests = party is Party.NIXL_DEFAULT
        if told:
            self._receiver.ask("expect", count=count, poll_s=_POLL_S if rests else 0.0)
        ran = self._sender.call("run", count=count)
        usable = self._receiver.answer()["usable_ns"] if told else ran["ended_ns"]
        cpu_s = cpu_seconds(pids) - before
        self._stop()
        started, ended = np.array(ran["started_ns"]), np.array(ran["ended_ns"])
        return Measured((ended - started) / 1e9, (np.array(usable) - started) / 1e9, cpu_s)

    def contact(self, *, num_pages: int, page_nbytes: int) -> float:
        """Seconds from the peer's metadata to its first page, the connection made anew, ``num_pages`` prepared."""
        self._go_on()
        self._receiver.ask("expect", count=1, poll_s=0.0)
        self._sender.ask(
            "contact",
            metadata=self._there["metadata"],
            dst_address=self._there["address"],
            num_pages=num_pages,
            page_nbytes=page_nbytes,
        )
        ran = self._sender.answer()
        self._receiver.answer()
        self._stop()
        return float(ran["ended_ns"][0] - ran["started_ns"][0]) / 1e9

    def _go_on(self) -> None:
        for worker in (self._sender, self._receiver):
            worker.signal(signal.SIGCONT)
        time.sleep(0.002)  # what spins gets going before it is measured

    def _stop(self) -> None:
        for worker in (self._sender, self._receiver):
            worker.signal(signal.SIGSTOP)

    def close(self) -> None:
        """Ends both processes."""
        self._sender.close()
        self._receiver.close()

    def __enter__(self) -> External:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
