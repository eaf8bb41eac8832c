"""Ratios, statistics and the report's JSON, from numbers whose results are known by hand."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hurray_rdma.bench.case import Case, Pattern
from hurray_rdma.bench.machine import machine_facts
from hurray_rdma.bench.measured import Measured, Stat
from hurray_rdma.bench.messages import Party
from hurray_rdma.bench.results import BenchReport, latency_row, sweep_rows

# 256 pages of 1 MiB: a quarter of a GiB.
CASE = Case(page_nbytes=2**20, num_pages=256, pattern=Pattern.RANDOM, seed=1)


def rounds(*seconds: float, cpu_s: float | None = 0.5) -> list[Measured]:
    return [Measured(np.array([each]), np.array([each]), cpu_s) for each in seconds]


def test_ratios_are_of_who_ran_in_the_same_round() -> None:
    rows = sweep_rows(
        CASE,
        lane="",
        carried_by={Party.HURRAY: "sysv, mapped"},
        measured={
            Party.HURRAY: rounds(0.1, 0.9, 0.2),  # 1.5, 0.5 and 2.0 of memcpy
            Party.MEMCPY: rounds(0.15, 0.45, 0.4),
            Party.UCX_PERFTEST: rounds(0.6, 0.6, cpu_s=None),  # 0.25 and 0.75; it is slow, and left out of the last
        },
    )
    hurray, memcpy, perftest = rows
    assert hurray.ratio == pytest.approx(1.5)
    assert hurray.seconds == Stat(median=0.2, min=0.1, max=0.9, count=3)
    assert hurray.gib_per_s == pytest.approx(0.25 / 0.2)
    assert hurray.cpu_s_per_gib == pytest.approx(1.5 / 0.75)  # three rounds of half a second, a quarter GiB each
    assert hurray.carried_by == "sysv, mapped"
    assert memcpy.ratio == pytest.approx(1.0)
    assert perftest.ratio == pytest.approx(0.5)
    assert perftest.cpu_s_per_gib is None


def test_several_times_in_a_round_count_by_their_middle() -> None:
    twice = {Party.MEMCPY: (0.2, 0.4), Party.HURRAY: (0.1, 0.1)}  # 2.0 and 4.0 of memcpy
    measured = {
        party: [Measured(np.array([s, s, 9.0]), np.array([s, s, 9.0]), 1.0) for s in each]
        for party, each in twice.items()
    }
    _, hurray = sweep_rows(CASE, lane="", carried_by={}, measured=measured)
    assert hurray.ratio == pytest.approx(3.0)
    assert hurray.seconds.count == 6


def test_latency_is_of_all_rounds_together() -> None:
    usable = np.arange(1, 101) * 1e-6
    row = latency_row(
        CASE, Party.NIXL, [Measured(usable[:50] * 2, usable[:50], 0.001), Measured(usable[50:], usable[50:], 0.002)]
    )
    assert (row.count, row.min_us, row.max_us) == (100, pytest.approx(1), pytest.approx(100))
    assert row.p50_us == pytest.approx(50.5)
    assert row.p99_us == pytest.approx(99.01)
    assert row.cpu_us == pytest.approx(30)


def test_json_is_the_report() -> None:
    rows = sweep_rows(CASE, lane="tcp", carried_by={}, measured={Party.MEMCPY: rounds(0.5)})
    report = BenchReport(facts=machine_facts(), config="quick", rounds=1, peer="", compared_nbytes=7, sweep=rows)
    assert msgspec.json.decode(msgspec.json.encode(report), type=BenchReport) == report


def test_facts_are_this_machines() -> None:
    facts = machine_facts()
    assert facts.cores >= 1
    assert facts.memory_nbytes > 2**28
    assert facts.ucx[0].isdigit()
    assert facts.cpu
