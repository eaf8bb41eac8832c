"""The report: medians by hand, warnings that cannot be missed, JSON with the same facts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hurray_rdma.demo.report import DemoReport, PageIdRow, Timing, print_report

GIB = 2**30


def timing() -> Timing:
    return Timing.of(transfer_s=[2.0, 1.0, 4.0], write_s=[1.0, 0.5, 3.0], memcpy_s=[1.0, 1.5, 1.0], nbytes=2 * GIB)


def report(lane: str = "sysv") -> DemoReport:
    return DemoReport(
        num_layers=2,
        num_tensors=4,
        num_heads=3,
        head_dim=4,
        page_size=16,
        dtype="bfloat16",
        num_sequences=2,
        num_tokens=37,
        num_table_entries=4,
        num_pages=3,
        lane=lane,
        path="mapped",
        logical_nbytes=4 * 2**20,
        sent_nbytes=3 * 2**20,
        num_operations=12,
        compared_nbytes=5 * 2**20,
        timing=timing(),
        block_tables=(
            PageIdRow(seq=0, num_tokens=5, src_page_ids=(9,), dst_page_ids=(2,), num_shared=0),
            PageIdRow(seq=1, num_tokens=32, src_page_ids=(7, 4), dst_page_ids=(0, 1), num_shared=1),
        ),
    )


def printed(what: DemoReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_report(what, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_medians_are_of_the_rounds_and_the_ratio_is_within_a_round() -> None:
    found = timing()
    assert (found.rounds, found.transfer_s, found.write_s, found.memcpy_s) == (3, 2.0, 1.0, 1.0)
    assert (found.transfer_gib_per_s, found.write_gib_per_s, found.memcpy_gib_per_s) == (1.0, 2.0, 2.0)
    assert found.ratio_to_memcpy == 0.5  # of 0.5, 1.5 and 0.25


def test_a_newcomer_is_told_lane_bytes_operations_speed_and_page_ids() -> None:
    text = printed(report())
    for fact in (
        "sysv",
        "4.0 MiB",
        "3.0 MiB",
        "1.0 MiB spared",
        "12 for 12 pages",
        "1.00 GiB/s",
        "2.00 GiB/s",
        "0.50",
        "bfloat16",
    ):
        assert fact in text
    assert text.index("7 4") < text.index("0 1") < text.index("9 ")  # the row that shares comes first
    assert "SLOW" not in text


@pytest.mark.parametrize("lane", ["tcp (emulated)", "posix (emulated)", "tcp"])
def test_a_slow_lane_is_loud(lane: str) -> None:
    assert f"SLOW LANE: {lane}" in printed(report(lane))


@pytest.mark.parametrize("lane", ["cma", "sysv", "rc_mlx5", "cuda_ipc"])
def test_a_fast_lane_is_not(lane: str) -> None:
    assert "SLOW" not in printed(report(lane))
