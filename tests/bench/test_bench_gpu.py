"""The GPU benchmark where there is no GPU: its parties and rows with pages on the host, and the refusal."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import numpy as np
import pytest

from hurray_rdma.bench.gpu import Place, measure_moves, measure_tables

HOST = Place(library=np, device="cpu", other="cpu", wait=lambda: None)


def test_all_parties_move_the_pages_in_turn() -> None:
    steps: list[str] = []
    rows = measure_moves(HOST, page_nbytes=16 << 10, transfer_nbytes=1 << 20, rounds=2, step=steps.append)
    assert [row.what for row in rows] == [
        "send to cpu, another process",
        "send to a pool on the host, another process",
        "gather within one process",
        "ucx_perftest",
    ]
    assert [row.lane in {"sysv", "posix"} for row in rows] == [True, True, False, False]
    assert all(row.seconds.count == 2 and row.gib_per_s > 0 and row.page_nbytes == 16 << 10 for row in rows)
    assert len(steps) == 4


def test_tables_are_rewritten_there_and_here() -> None:
    rows = measure_tables(HOST, num_entries=1000, rounds=3)
    assert [row.what for row in rows] == [
        "rewrite of 1,000 entries on cpu",
        "rewrite of 1,000 entries on the host, NumPy",
    ]
    assert all(row.seconds.count == 3 and row.seconds.min > 0 for row in rows)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="CuPy is installed")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hurray_rdma.bench.gpu"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert done.stdout.startswith("no GPU can be used: ")
    assert done.stderr == ""
