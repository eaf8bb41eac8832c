"""One process of another transfer engine: ``python worker.py nixl|mooncake FD``. Stands alone: it runs in that engine's
own environment and imports nothing of this package.

It reads one JSON object a line from standard input and answers each with one line on file descriptor FD (standard
output is the engine's, for its logs). It ends with its standard input, and with its parent.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import signal
import sys
import time
from typing import Any

import numpy as np

_HUGE_NBYTES = 2 << 20
_MADV_HUGEPAGE = 14
_PR_SET_PDEATHSIG = 1
_TIMEOUT_S = 60.0
_MOONCAKE_BATCH = 512


class Nixl:
    """NIXL over UCX. The list of pages and the transfer are prepared once and posted again and again.

    Args:
        options: ``progress_thread``: NIXL's default is True.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]  # noqa: PLC0415

        config = nixl_agent_config(enable_prog_thread=options["progress_thread"], backends=["UCX"])
        self.agent = nixl_agent(f"bench-{os.getpid()}", config)
        self.remote = ""
        self.handles: list[Any] = []
        self.xfer: Any = None

    def register(self, address: int, nbytes: int) -> str:
        """What the other side must know, as text."""
        self.agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        return base64.b64encode(self.agent.get_agent_metadata()).decode()

    def join(self, metadata: str) -> None:
        name = self.agent.add_remote_agent(base64.b64decode(metadata))
        self.remote = name.decode() if isinstance(name, bytes) else name
        self.agent.make_connection(self.remote)

    def leave(self) -> None:
        self.forget()
        self.agent.remove_remote_agent(self.remote)

    def prepare(self, src: Any, dst: Any, page_nbytes: int) -> None:
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", _rows(src, page_nbytes), "DRAM")
        remote = self.agent.prep_xfer_dlist(self.remote, _rows(dst, page_nbytes), "DRAM")
        self.handles = [local, remote]
        self.choose(np.arange(len(src), dtype=np.int32))

    def choose(self, indices: Any) -> None:
        self.xfer = self.agent.make_prepped_xfer("WRITE", self.handles[0], indices, self.handles[1], indices, b"done")

    def forget(self) -> None:
        if self.xfer is not None:
            self.agent.release_xfer_handle(self.xfer)
            for handle in self.handles:
                self.agent.release_dlist_handle(handle)
        self.xfer, self.handles = None, []

    def move(self) -> None:
        state = self.agent.transfer(self.xfer, b"done")
        until = time.monotonic() + _TIMEOUT_S
        while state != "DONE":
            if state == "ERR" or time.monotonic() > until:
                raise RuntimeError(f"NIXL's transfer ended in state {state}")
            state = self.agent.check_xfer_state(self.xfer)

    def notified(self) -> int:
        """Transfers that this process was told of since the last call."""
        return sum(len(each) for each in self.agent.get_new_notifs().values())


class Mooncake:
    """Mooncake's Transfer Engine over tcp, at most 512 pages a call."""

    def __init__(self, _: dict[str, Any]) -> None:
        from mooncake.engine import TransferEngine  # type: ignore[import-not-found]  # noqa: PLC0415

        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("Mooncake's engine did not start")
        self.remote = ""
        self.batches: list[tuple[list[int], list[int], list[int]]] = []

    def register(self, address: int, nbytes: int) -> str:
        if self.engine.register_memory(address, nbytes) != 0:
            raise RuntimeError("Mooncake did not register the memory")
        return f"127.0.0.1:{self.engine.get_rpc_port()}"

    def join(self, metadata: str) -> None:
        self.remote = metadata

    def leave(self) -> None:
        self.remote = ""

    def prepare(self, src: Any, dst: Any, page_nbytes: int) -> None:
        for start in range(0, len(src), _MOONCAKE_BATCH):
            some = slice(start, start + _MOONCAKE_BATCH)
            self.batches.append((src[some].tolist(), dst[some].tolist(), [page_nbytes] * len(src[some])))

    def choose(self, indices: Any) -> None:
        src, dst, lengths = self.batches[0]
        count = len(indices)
        self.batches = [(src[:count], dst[:count], lengths[:count])]

    def forget(self) -> None:
        self.batches = []

    def move(self) -> None:
        for batch in self.batches:
            if self.engine.batch_transfer_sync_write(self.remote, *batch) != 0:
                raise RuntimeError("Mooncake's transfer failed")

    def notified(self) -> int:
        raise RuntimeError("Mooncake's receiver is not told")


def _rows(addresses: Any, page_nbytes: int) -> Any:
    rows = np.zeros((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1] = addresses, page_nbytes
    return rows


def _memory(nbytes: int, huge_pages: bool, libc: ctypes.CDLL) -> Any:
    memory = np.frombuffer(mmap.mmap(-1, nbytes + _HUGE_NBYTES), np.uint8)
    start = -memory.ctypes.data % _HUGE_NBYTES
    memory = memory[start : start + nbytes]
    if huge_pages:
        libc.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(nbytes), _MADV_HUGEPAGE)
    memory.fill(1)
    return memory


class Worker:
    """Answers requests: each method is one, its arguments are the object's other fields."""

    def __init__(self, kind: str, libc: ctypes.CDLL) -> None:
        self._kind = kind
        self._libc = libc
        self._engine: Any = None
        self._memory: Any = None

    def start(self, core: int | None, options: dict[str, Any]) -> dict[str, Any]:
        """Makes the engine, on one core if one is given."""
        if core is not None:
            os.sched_setaffinity(0, {core})
        self._engine = {"nixl": Nixl, "mooncake": Mooncake}[self._kind](options)
        return {}

    def register(self, nbytes: int, huge_pages: bool) -> dict[str, Any]:
        """Memory for all cases."""
        self._memory = _memory(nbytes, huge_pages, self._libc)
        address = self._memory.ctypes.data
        return {"address": address, "metadata": self._engine.register(address, nbytes)}

    def join(self, metadata: str) -> dict[str, Any]:
        """Connects to the other worker."""
        self._engine.join(metadata)
        return {}

    def prepare(self, src_pages: str, dst_pages: str, page_nbytes: int, dst_address: int) -> dict[str, Any]:
        """Page IDs of both sides, base64 of uint32; moves them once."""
        self._engine.forget()
        src = np.frombuffer(base64.b64decode(src_pages), np.uint32).astype(np.uint64) * np.uint64(page_nbytes)
        dst = np.frombuffer(base64.b64decode(dst_pages), np.uint32).astype(np.uint64) * np.uint64(page_nbytes)
        self._engine.prepare(src + np.uint64(self._memory.ctypes.data), dst + np.uint64(dst_address), page_nbytes)
        return {}

    def run(self, count: int) -> dict[str, Any]:
        """Moves all pages ``count`` times."""
        started, ended = [], []
        for _ in range(count):
            started.append(time.monotonic_ns())
            self._engine.move()
            ended.append(time.monotonic_ns())
        return {"started_ns": started, "ended_ns": ended}

    def expect(self, count: int, poll_s: float) -> dict[str, Any]:
        """Polls until this process was told of ``count`` transfers."""
        usable: list[int] = []
        until = time.monotonic() + _TIMEOUT_S
        while len(usable) < count:
            told = self._engine.notified()
            usable.extend([time.monotonic_ns()] * told)
            if not told and poll_s:
                time.sleep(poll_s)
            if time.monotonic() > until:
                raise RuntimeError(f"told of {len(usable)} transfers of {count}")
        return {"usable_ns": usable}

    def contact(self, metadata: str, dst_address: int, num_pages: int, page_nbytes: int) -> dict[str, Any]:
        """From the other side's metadata to the first page, with every page of both pools prepared first."""
        self._engine.leave()
        offsets = np.arange(num_pages, dtype=np.uint64) * np.uint64(page_nbytes)
        src, dst = offsets + np.uint64(self._memory.ctypes.data), offsets + np.uint64(dst_address)
        started = time.monotonic_ns()
        self._engine.join(metadata)
        self._engine.prepare(src, dst, page_nbytes)
        self._engine.choose(np.zeros(1, np.int32))
        self._engine.move()
        return {"started_ns": [started], "ended_ns": [time.monotonic_ns()]}


def main() -> None:
    """Answers until standard input ends."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    worker = Worker(sys.argv[1], libc)
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as answers:
        for line in sys.stdin:
            request = json.loads(line)
            answer = getattr(worker, request.pop("do"))(**request)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
    os._exit(0)  # some engines hang in their destructors


if __name__ == "__main__":
    main()
