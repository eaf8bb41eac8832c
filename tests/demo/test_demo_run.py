"""The demo as a person runs it: two real processes, every byte compared, and nothing left whoever is killed."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hurray_rdma.demo.decode as decode_room
from hurray_rdma import CacheSpec, PagePool, Snapshot
from hurray_rdma.demo import MismatchError, load_config, num_steps, run_demo
from hurray_rdma.demo.batch import draw_batch
from hurray_rdma.demo.content import Content
from hurray_rdma.demo.decode import compare
from hurray_rdma.testing.shared_memory import SharedMemory

COMMAND = [sys.executable, "-m", "hurray_rdma.cli"]
SMALL = ["--layers", "2", "--heads", "2", "--head-dim", "64", "--rounds", "2", "--deadline", "60"]


def small(**run: object) -> dict[str, dict[str, object]]:
    return {"cache": {"num_layers": 2, "num_heads": 2, "head_dim": 64}, "run": {"rounds": 2, "deadline_s": 60.0} | run}


def test_the_report_has_the_numbers_that_the_batch_implies() -> None:
    config = load_config(overrides=small())
    steps: list[str] = []
    report = run_demo(config, on_step=steps.append)
    assert len(steps) == num_steps(config)

    batch = draw_batch(config.batch, page_size=16)
    page_nbytes, num_tensors = 16 * 2 * 64 * 2, 4
    references = sum(len(table) for table in batch.block_tables)
    shared = config.batch.shared_prefix_tokens // 16
    assert report.num_table_entries == references
    assert report.num_pages == references - shared * (config.batch.num_sharing - 1)
    assert report.logical_nbytes == references * page_nbytes * num_tensors
    assert report.sent_nbytes == report.num_pages * page_nbytes * num_tensors
    assert report.compared_nbytes == int(batch.seq_lens.sum()) * 2 * 64 * 2 * num_tensors * config.run.rounds
    assert 0 < report.num_operations <= report.num_pages * num_tensors
    # The default lane of one host is never software emulation, and never the network stack.
    assert "emulated" not in report.lane
    assert "tcp" not in report.lane

    new_ids = {}
    for row, table in zip(report.block_tables, batch.block_tables, strict=True):
        assert row.src_page_ids == tuple(table.tolist())
        for before, after in zip(row.src_page_ids, row.dst_page_ids, strict=True):
            assert new_ids.setdefault(before, after) == after  # an alias stays an alias
    assert len(set(new_ids.values())) == len(new_ids) == report.num_pages


def test_a_slow_lane_is_used_only_when_asked_for_and_is_named() -> None:
    report = run_demo(load_config(overrides=small(lane="tcp", rounds=1)), on_step=lambda _: None)
    assert report.lane.startswith("tcp")
    assert report.path == "stream"


def test_a_page_that_arrived_damaged_is_found() -> None:
    spec = CacheSpec(num_layers=2, num_heads=2, head_dim=64, page_size=16, dtype="bfloat16")
    batch = draw_batch(load_config().batch, page_size=16)
    content = Content(1, page_nbytes=spec.page_nbytes, num_pages=batch.pool_pages)
    with PagePool.allocate(spec, num_pages=batch.pool_pages) as pool:
        for tensor, (role, layer) in enumerate(spec.tensors):
            content.fill(pool.pages(role, layer), tensor=tensor, page_ids=batch.page_ids)
        snapshot = Snapshot.from_block_tables(pool, batch.block_tables, seq_lens=batch.seq_lens)
        assert compare(snapshot, batch, content) == int(batch.seq_lens.sum()) * 2 * 64 * 2 * 4

        pages = pool.pages("value", 1)
        page_id = int(batch.block_tables[5][3])
        pages[page_id, 2] = pages[page_id, 3]
        with pytest.raises(MismatchError, match=r"value of layer 1: .* the first at token 50, byte 0"):
            compare(snapshot, batch, content)
        shorter = dataclasses.replace(batch, seq_lens=batch.seq_lens - 1)
        with pytest.raises(MismatchError, match="seq_lens"):
            compare(snapshot, shorter, content)
    assert decode_room.__all__  # the comparison under test is the one that the decode process uses


class Running:
    """The command in a session of its own, and what it leaves behind."""

    def __init__(self, *arguments: str) -> None:
        self.memory = SharedMemory()
        self.process = subprocess.Popen(
            [*COMMAND, "demo", *SMALL, "--rounds", "10000", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def children(self) -> dict[str, int]:
        """``{"decode": pid, "prefill": pid}`` once one has mapped memory of the other: they are connected."""
        until = time.monotonic() + 40
        while time.monotonic() < until:
            pids = [pid for pid in session_pids(self.process.pid) if "spawn_main" in command_line(pid)]
            if len(pids) == 2 and shared_mappings(pids[0]) & shared_mappings(pids[1]):
                self.memory.look(session_pids(self.process.pid))
                return dict(zip(("decode", "prefill"), pids, strict=True))
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.05)
        raise AssertionError(f"the demo did not get going: {session_pids(self.process.pid)}")

    def end(self) -> tuple[int, str]:
        """Exit code and standard error; asserts that no process and no shared memory is left."""
        _, told = self.process.communicate(timeout=30)
        until = time.monotonic() + 10
        while time.monotonic() < until and (session_pids(self.process.pid) or self.memory.left()):
            time.sleep(0.05)
        assert session_pids(self.process.pid) == []
        assert self.memory.left() == set()
        return self.process.returncode, told


@pytest.fixture
def running() -> Iterator[Running]:
    demo = Running()
    yield demo
    for pid in session_pids(demo.process.pid):
        os.kill(pid, signal.SIGKILL)
    demo.process.communicate(timeout=10)


def session_pids(session: int) -> list[int]:
    """Living processes of a session, oldest first."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            fields = (path / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append((int(fields[19]), int(path.name)))
    return [pid for _, pid in sorted(found)]


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")


def shared_mappings(pid: int) -> set[str]:
    """Inodes of the shared memory that a process has mapped."""
    lines = (line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    return {fields[4] for fields in lines if len(fields) > 5 and fields[5].startswith(("/SYSV", "/dev/shm"))}


@pytest.mark.parametrize("victim", ["decode", "prefill"])
def test_a_killed_child_is_named_and_nothing_is_left(running: Running, victim: str) -> None:
    os.kill(running.children()[victim], signal.SIGKILL)
    code, told = running.end()
    assert code == 1
    assert re.search(rf"the {victim} process \(pid \d+\) was killed by SIGKILL", told)


def test_a_killed_parent_leaves_nothing(running: Running) -> None:
    running.children()
    running.process.kill()
    code, _ = running.end()
    assert code == -signal.SIGKILL


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_reaches_all_and_leaves_nothing(running: Running, number: signal.Signals, expected: int) -> None:
    running.children()
    os.killpg(running.process.pid, number)
    code, told = running.end()
    assert code == expected
    assert "Traceback" not in told


def test_a_stopped_child_costs_the_deadline() -> None:
    demo = Running("--deadline", "12")
    os.kill(demo.children()["decode"], signal.SIGSTOP)
    code, told = demo.end()
    assert code == 1
    assert "error: " in told


def test_drawing_a_huge_batch_costs_the_deadline() -> None:
    started = time.monotonic()
    demo = Running("--sequences", "1000000", "--deadline", "1.5")
    code, told = demo.end()
    assert code == 1
    assert "deadline_s = 1.5: " in told
    assert time.monotonic() - started < 30


def test_the_command_prints_the_report_and_writes_the_same_facts(tmp_path: Path) -> None:
    path = tmp_path / "facts.json"
    done = subprocess.run(
        [*COMMAND, "demo", *SMALL, "--json", str(path)], capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(path.read_text())
    again = subprocess.run([*COMMAND, "demo", *SMALL, "--json", "-"], capture_output=True, timeout=90, check=False)
    assert (again.returncode, again.stderr) == (0, b"")
    assert json.loads(again.stdout)["block_tables"] == facts["block_tables"]
    assert f"{facts['num_operations']:,} for {facts['num_pages'] * 4:,} pages" in " ".join(
        done.stdout.replace("│", " ").split()
    )
    assert facts["lane"] in done.stdout
    assert "every byte equal" in done.stdout
