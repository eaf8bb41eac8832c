"""Traces through real processes: every count is what the trace says, whoever dies, and nothing is left behind."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

import hurray_rdma.replay.run as run_room
from hurray_rdma.demo import MismatchError
from hurray_rdma.demo.supervisor import Process, Supervisor
from hurray_rdma.errors import ConfigError
from hurray_rdma.replay import NUM_STEPS, ReplayReport, load_config, print_report, read_trace, run_replay
from hurray_rdma.testing.shared_memory import SharedMemory
from tests.replay.traces import PUBLIC, line, lines_of, make_trace

COMMAND = [sys.executable, "-m", "hurray_rdma.cli", "replay"]
BLOCK_NBYTES = 8 * 64 * 2 * 4  # 8 tokens of 64 bfloat16 in two roles of two layers
NUM_PUBLIC = 150


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    memory, pids = SharedMemory(), list[int]()

    class Noting(Supervisor):
        def start(self, name: str, *args: Any) -> Process:
            process = super().start(name, *args)
            pids.append(process.pid)
            return process

        def __exit__(self, *args: object) -> None:
            memory.look(pids)
            super().__exit__(*args)

    monkeypatch.setattr(run_room, "Supervisor", Noting)
    yield
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert memory.left() == set()


def settings(*, run: dict[str, Any] | None = None, **workers: int) -> Any:
    return load_config(
        overrides={
            "workers": {"prefill_pages": 512, **workers},
            "run": {"speed": float("inf"), "deadline_s": 110.0, **(run or {})},
        }
    )


def replayed(path: Path, config: Any, *, limit: int | None = None, kill_decode_at: int | None = None) -> ReplayReport:
    steps: list[str] = []
    trace = read_trace(path, skip_malformed=False, limit=limit)
    report = run_replay(config, trace, name=path.name, kill_decode_at=kill_decode_at, on_step=steps.append)
    assert len(steps) == NUM_STEPS
    assert report.problems == ()
    assert report.num_requests == len(trace)
    return report


@pytest.fixture(params=["made", "public"])
def trace(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The made one always; the start of the public one where it lies beside the checkout."""
    if request.param == "made":
        return make_trace(tmp_path, requests=NUM_PUBLIC)
    if not PUBLIC.is_file():
        pytest.skip(f"no public trace at {PUBLIC}")
    path = tmp_path / PUBLIC.name
    with PUBLIC.open() as lines:
        path.write_text("".join(text for _, text in zip(range(NUM_PUBLIC), lines, strict=False)))
    return path


def test_with_room_for_all_each_block_travels_once(trace: Path) -> None:
    """One sender that sends one request at a time: what is resident follows from the trace alone."""
    requests = lines_of(trace)
    seen: set[int] = set()
    num_resident = num_entries = 0
    for request in sorted(requests, key=lambda each: each["timestamp"]):
        blocks = request["hash_ids"]
        num_entries += len(blocks)
        num_resident += sum(block in seen for block in blocks[: request["input_length"] // 512])
        seen.update(blocks)

    report = replayed(trace, settings(prefill=1, decode=1, in_flight=1, decode_pages=num_entries + 256))
    assert report.num_delivered == len(requests)
    assert (report.num_entries, report.num_unique, report.expected_unique) == (num_entries, len(seen), len(seen))
    assert (report.num_resident, report.resident_most) == (num_resident, num_resident)
    assert report.block_nbytes == BLOCK_NBYTES
    assert report.logical_nbytes == num_entries * BLOCK_NBYTES
    assert report.unique_nbytes == len(seen) * BLOCK_NBYTES
    assert report.sent_nbytes == (num_entries - num_resident) * BLOCK_NBYTES
    (life,) = report.lives
    assert (life.num_resident, life.expected_resident, life.num_evicted) == (num_resident, num_resident, 0)
    assert report.num_leases == len(requests)
    assert (report.num_refused, report.num_failed, report.num_again, report.num_leases_expired) == (0, 0, 0, 0)


def test_pools_too_small_for_the_working_set_wait_and_evict(trace: Path) -> None:
    largest = max(len(request["hash_ids"]) for request in lines_of(trace))
    report = replayed(trace, settings(prefill=2, decode=2, decode_pages=largest + 60, in_flight=8))
    assert report.num_delivered == NUM_PUBLIC
    assert len(report.lives) == 2
    for life in report.lives:
        assert life.expected_resident == life.num_resident  # also a problem of the report, which has none
        assert life.num_evicted is not None
        assert life.num_evicted > 0
        assert all(each.free + each.kept + each.in_use == largest + 60 for each in life.samples)
    token_nbytes = BLOCK_NBYTES // 8
    num_tokens = sum((n - 1) * 8 + (r * 8 // 512 or 1 if r else 8) for n, r in shapes(trace))
    assert report.compared_nbytes == num_tokens * token_nbytes


def shapes(path: Path) -> list[tuple[int, int]]:
    """Blocks of each request, and tokens of the last one that is not full."""
    return [(len(request["hash_ids"]), request["input_length"] % 512) for request in lines_of(path)]


def test_a_decode_worker_killed_in_the_middle_costs_no_request(trace: Path) -> None:
    largest = max(len(request["hash_ids"]) for request in lines_of(trace))
    pace = {"speed": 1e6, "token_ms": 1e6}  # each is decoded for a while: whoever is killed has some under way
    config = settings(run=pace, prefill=2, decode=2, decode_pages=largest + 200)
    report = replayed(trace, config, kill_decode_at=NUM_PUBLIC // 3)
    assert report.num_delivered == NUM_PUBLIC
    assert report.num_again > 0
    first, other, second = report.lives
    assert (first.worker, other.worker, second.worker) == (0, 1, 0)
    assert (first.expected_resident, first.num_evicted) == (None, None)
    assert first.killed_s is not None
    assert second.began_s > first.killed_s
    assert second.expected_resident == second.num_resident
    assert second.num_requests > 0
    # What it had shown before its death counts once, what it had not is in its second life.
    assert sum(life.num_requests for life in report.lives) >= NUM_PUBLIC


@pytest.mark.parametrize(("lane", "left"), [("tcp", 20), ("", 1)])
def test_a_kill_costs_no_request_on_a_lane_with_errors_of_its_own_nor_when_it_comes_last(
    tmp_path: Path, lane: str, left: int
) -> None:
    """Over tcp UCX may say that the endpoint is gone before the session is; the last kill outlives the requests."""
    path = make_trace(tmp_path, requests=40)
    largest = max(len(request["hash_ids"]) for request in lines_of(path))
    config = settings(prefill=2, decode=2, decode_pages=largest + 200, run={"lane": lane})
    report = replayed(path, config, kill_decode_at=40 - left)
    assert report.num_delivered == 40
    first, _, second = report.lives
    assert (first.worker, second.worker) == (0, 0)
    assert first.killed_s is not None


def test_requests_larger_than_a_pool_are_refused_and_the_others_served(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(
        b"\n".join([line([1, 2]), line(list(range(100, 140))), line([1, 2, 3]), line(list(range(50, 90)))])
    )
    report = replayed(path, settings(prefill=1, decode=1, decode_pages=20))
    assert (report.num_delivered, report.num_refused, report.num_failed) == (2, 2, 0)
    assert report.refusals == {"PoolExhaustedError": 2}
    with pytest.raises(ConfigError, match=r"prefill_pages = 30: must be at least the 40 blocks of .* line 2"):
        replayed(path, settings(prefill_pages=30))
    with pytest.raises(ConfigError, match="--kill-decode-at = 4: must be from 0 to below the 4 requests"):
        replayed(path, settings(), kill_decode_at=4)


class LyingWork(run_room.Work):
    """Two blocks have one key: the second to be sent is taken for the first, and not sent."""

    def keys_of(self, request: int) -> NDArray[np.uint8]:
        return ((super().keys_of(request).view("<u8") + 1) // 2).view(np.uint8)


def test_a_block_that_is_another_is_found_by_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_room, "Work", LyingWork)
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([line([1, 2, 3]), line([4, 5, 6])]))
    config = settings(prefill=1, decode=1, in_flight=1)
    trace = read_trace(path, skip_malformed=False)
    with pytest.raises(MismatchError, match=r"key of layer 0: \d+ of 3072 bytes differ .* token 0") as caught:
        run_replay(config, trace, name="", on_step=lambda _: None)
    line_note, process_note = caught.value.__notes__
    assert line_note == "in the request of line 2"
    assert process_note.startswith("in the decode 0 process")


def test_what_is_not_as_the_trace_says_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that believe in another trace than the one they are held to."""
    path = make_trace(tmp_path, requests=20)
    trace = read_trace(path, skip_malformed=False)
    counted = run_room.Gathered.report

    def of_another(self: Any, *args: Any) -> ReplayReport:
        self._work = run_room.Work(self._work.config, read_trace(path, skip_malformed=False), self._work.decode_of)
        self._work.trace.blocks[:] = self._work.trace.blocks[::-1]
        return counted(self, *args)

    monkeypatch.setattr(run_room.Gathered, "report", of_another)
    report = run_replay(settings(decode=1), trace, name="", on_step=lambda _: None)
    assert any("blocks must be resident" in problem for problem in report.problems)


def test_a_trace_that_ends_after_the_deadline_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join([line([1]), line([2], timestamp=1_200_000)]))
    with pytest.raises(ConfigError, match=r"deadline_s = 110\.0: must be above the 120\.0 s .*--deadline.*--speed"):
        replayed(path, settings(run={"speed": 10.0}))


def test_offers_wait_while_the_pool_has_no_room_and_only_then(tmp_path: Path) -> None:
    """Outputs of two seconds: senders offer the next requests meanwhile."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(line([2 * each, 2 * each + 1], output=100) for each in range(3)))
    pace = {"speed": 1.0, "token_ms": 20.0}
    for pages, expected in ((2, {0, 1, 2}), (6, {0})):
        report = replayed(path, settings(prefill=1, decode=1, decode_pages=pages, in_flight=3, run=pace))
        (life,) = report.lives
        waiting = {each.num_waiting for each in life.samples}
        assert waiting <= expected
        assert (max(waiting) > 0) == (len(expected) > 1)


def test_a_replay_that_delivers_nothing_is_told_as_wrong(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(line([1, 2, 3]))
    trace = read_trace(path, skip_malformed=False)
    report = run_replay(
        settings(prefill=1, decode=1, decode_pages=2), trace, name="[/] made [bold]", on_step=lambda _: None
    )
    assert report.problems == ("no request was delivered",)
    console = Console(file=io.StringIO(), width=120)
    print_report(report, console=console)
    assert "[/] made [bold]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_command_writes_what_it_prints(tmp_path: Path) -> None:
    path, facts, page = make_trace(tmp_path, requests=40), tmp_path / "facts.json", tmp_path / "page"
    path.write_text("not a request\n" + path.read_text())
    arguments = ["--speed", "inf", "--decode", "1", "--prefill", "1", "--json", str(facts), "--report", str(page)]

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, str(path), *arguments, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)

    refused = run()
    assert refused.returncode == 2
    assert "line 1 is no request" in refused.stderr
    assert not facts.exists()

    done = run("--skip-malformed", "--requests", "30")
    assert done.returncode == 0, done.stderr
    told = json.loads(facts.read_text())
    assert (told["num_requests"], told["num_delivered"], told["problems"]) == (30, 30, [])
    assert [each["line"] for each in told["malformed"]] == [1]
    assert "line 1 was skipped" in done.stdout
    assert f"{told['num_resident']:,} blocks" in done.stdout
    html = (page / "index.html").read_text()
    assert "<svg" in html
    assert "Pages of decode worker 0" in html
    assert not any(word in html for word in ("<script", "<link", "<img", "src="))
