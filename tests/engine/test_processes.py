"""Which process a peer is and when it has ended; what makes a late write of each kind of sender impossible."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hurray_rdma.engine import processes
from hurray_rdma.engine.processes import ProcessWatch, process_id
from hurray_rdma.engine.reach import Reach, reach_of

pytestmark = pytest.mark.both_loops


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def identity(pid: int) -> bytes:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return (
        f"{boot_id}/{namespace}:{pid}:{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}".encode()
    )


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def told(who: bytes, *, within_s: float) -> int:
    """How often a watch tells of the end within a time."""
    calls: list[None] = []
    watch = ProcessWatch(who, lambda: calls.append(None))
    await asyncio.sleep(within_s)
    watch.close()
    watch.close()
    await asyncio.sleep(0)
    return len(calls)


def test_a_process_names_itself_as_others_see_it() -> None:
    assert process_id() == identity(os.getpid())
    assert len(process_id()) <= 128


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_end_of_a_process_is_told_once_and_its_stop_is_not(
    number: signal.Signals, sleeper: subprocess.Popen[bytes]
) -> None:
    async def job() -> None:
        ended = asyncio.Event()
        calls = []

        def tell() -> None:
            calls.append(None)
            ended.set()

        before = num_open_files()
        watch = ProcessWatch(identity(sleeper.pid), tell)
        os.kill(sleeper.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.1)
        os.kill(sleeper.pid, signal.SIGCONT)
        os.kill(sleeper.pid, number)
        await asyncio.wait_for(ended.wait(), 5)  # nobody has reaped it: that it has ended is enough
        await asyncio.sleep(0.05)
        assert calls == [None]
        watch.close()
        assert num_open_files() == before

    asyncio.run(job())


def test_a_closed_watch_tells_nothing(sleeper: subprocess.Popen[bytes]) -> None:
    async def job() -> None:
        before = num_open_files()
        watch = ProcessWatch(identity(sleeper.pid), lambda: pytest.fail("told"))
        watch.close()
        watch.close()
        sleeper.kill()
        await asyncio.to_thread(sleeper.wait)
        await asyncio.sleep(0.05)
        assert num_open_files() == before

    asyncio.run(job())


def test_a_process_that_has_gone_and_one_that_got_its_pid_are_ended(sleeper: subprocess.Popen[bytes]) -> None:
    async def job() -> None:
        before = num_open_files()
        who = identity(sleeper.pid)
        namespace, pid, start_time = who.decode().split(":")
        assert await told(f"{namespace}:{pid}:{int(start_time) - 1}".encode(), within_s=0.05) == 1
        assert await told(who, within_s=0.05) == 0
        sleeper.kill()
        await asyncio.to_thread(sleeper.wait)
        assert await told(who, within_s=0.05) == 1
        assert num_open_files() == before

    asyncio.run(job())


@pytest.mark.parametrize(
    "who",
    [
        b"",
        b"\xff\xfe garbage",
        b"1:2",
        b"{other}:{pid}:{start}",
        b"{namespace}:-1:0",
        b"{namespace}:0:0",
        b"{namespace}::",
        b"{namespace}:99999999999999999999:0",
        b"{namespace}:" + b"9" * 100 + b":0",
        b"{namespace}:1e3:0",
    ],
)
def test_whoever_cannot_be_seen_is_not_watched(who: bytes) -> None:
    async def job() -> None:
        namespace, pid, start = process_id().split(b":")
        filled = who.replace(b"{namespace}", namespace).replace(b"{pid}", pid).replace(b"{start}", start)
        before = num_open_files()
        with pytest.raises(ValueError, match="process"):
            ProcessWatch(filled.replace(b"{other}", b"1"), lambda: pytest.fail("told"))
        await asyncio.sleep(0)
        assert num_open_files() == before

    asyncio.run(job())


def test_a_process_that_runs_unseen_is_not_taken_for_dead(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """/proc may be mounted in such a way (hidepid) that other users' processes seem not to be there."""

    def unseen(pid: int) -> str:
        raise FileNotFoundError(pid)

    async def job() -> None:
        who = identity(sleeper.pid)
        monkeypatch.setattr(processes, "_start_time", unseen)
        before = num_open_files()
        with pytest.raises(ValueError, match="runs, but cannot be seen"):
            ProcessWatch(who, lambda: pytest.fail("told"))
        assert num_open_files() == before
        sleeper.kill()
        await asyncio.to_thread(os.waitid, os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
        assert await told(who, within_s=0.05) == 1
        assert num_open_files() == before

    asyncio.run(job())


@pytest.mark.parametrize(
    ("path", "lane", "reach"),
    [
        ("frames", "control channel", Reach.FRAMES),
        ("frames", "", Reach.FRAMES),
        ("mapped", "sysv", Reach.MAPPING),
        ("mapped", "posix", Reach.MAPPING),
        ("mapped", "shared", Reach.MAPPING),
        ("mapped", "private", Reach.MAPPING),
        ("mapped", "cma", Reach.ADDRESS),  # there is no such thing: the stricter one
        ("put", "cma", Reach.ADDRESS),
        ("put", "knem", Reach.ADDRESS),
        ("put", "xpmem", Reach.ADDRESS),
        ("put", "cuda_ipc", Reach.ADDRESS),
        ("put", "cma+tcp", Reach.ADDRESS),
        ("mapped", "xpmem", Reach.ADDRESS),  # what is mapped follows the address: other memory there is reached, too
        ("put", "tcp", Reach.SOCKET),
        ("put", "tcp (emulated)", Reach.SOCKET),
        ("put", "posix (emulated)", Reach.SOCKET),
        ("put", "posix+tcp (emulated)", Reach.SOCKET),
        ("put", "rc_mlx5+tcp", Reach.SOCKET),  # a new key does not keep out what tcp brings by address
        ("put", "rc_mlx5", Reach.KEY),
        ("put", "rc_mlx5+dc_mlx5", Reach.KEY),
        ("put", "", Reach.KEY),
        ("put", "something new", Reach.KEY),
    ],
)
def test_how_bytes_come_in_says_when_none_can_come_any_more(path: str, lane: str, reach: Reach) -> None:
    assert reach_of(path, lane) is reach
