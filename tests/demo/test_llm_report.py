"""The report of --llm: medians by hand, every fact in words and as JSON, and the command that writes both."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hurray_rdma import demo as room
from hurray_rdma.cli.demo import demo
from hurray_rdma.demo import LlmReport, load_config
from hurray_rdma.demo.llm_messages import Arrived, Drift, Prefilled, Reread
from hurray_rdma.demo.llm_plan import moves
from hurray_rdma.demo.llm_report import Overlap, PromptReport, VariantReport, print_llm_report
from hurray_rdma.engine import TransferStats

MIB = 2**20
STATS = TransferStats("key", 2, 40, 4, 3, 0, 4 * MIB, 3 * MIB, 12, 0.1, 0.05, "sysv", "mapped")


def variant(dtype: str, *, sent: int, texts: int, scales: str | None = None) -> VariantReport:
    return VariantReport(
        dtype=dtype,
        scale_dtype=scales,
        src_page_size=16,
        dst_page_size=64,
        num_pages=3,
        num_table_entries=4,
        sent_nbytes=sent * MIB,
        logical_nbytes=4 * MIB,
        num_operations=12,
        num_tokens=20,
        num_texts_as_computed=texts,
        num_texts_equal=2,
    )


REPORT = LlmReport(
    model="tiny.gguf",
    num_layers=2,
    num_heads=3,
    head_dim=4,
    dtype="float32",
    prefix_tokens=32,
    lane="sysv",
    path="mapped",
    layer_by_layer=Overlap(3, reading_s=0.5, exposed_s=0.0017, first_token_s=0.61),
    after_the_last=Overlap(3, reading_s=0.4, exposed_s=0.076, first_token_s=0.72),
    variants=(variant("float32", sent=3, texts=2), variant("int8", sent=1, texts=1, scales="float16")),
    drift=Drift(max_abs=0.45, mean_abs=0.052, spread=6.5, num_same=18, num_tokens=19),
    reread=Reread(num_same=20, num_tokens=20, max_shortfall=0.0),
    system_prompt="You keep the light.",
    prompts=(
        PromptReport("Who are you?", 35, decode_text="The keeper.", single_text="The keeper.", int8_text="A keeper."),
        PromptReport("And whales?", 41, decode_text="Many.", single_text="Many.", int8_text="Many."),
    ),
)


def printed(report: LlmReport) -> str:
    console = Console(file=io.StringIO(), width=200)
    print_llm_report(report, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_times_are_medians_from_the_beginning_and_from_the_end_of_reading() -> None:
    rounds = [
        (Prefilled(STATS, started_at_s=10.0, read_at_s=12.0), Arrived(ready_at_s=12.5, token_at_s=13.0)),
        (Prefilled(STATS, started_at_s=20.0, read_at_s=21.0), Arrived(ready_at_s=21.25, token_at_s=22.0)),
        (Prefilled(STATS, started_at_s=30.0, read_at_s=38.0), Arrived(ready_at_s=38.125, token_at_s=39.0)),
    ]
    assert Overlap.of(rounds) == Overlap(3, reading_s=2.0, exposed_s=0.25, first_token_s=3.0)


def test_a_newcomer_is_told_everything() -> None:
    text = printed(REPORT)
    for fact in (
        "2 prompts of 35 to 41 tokens",
        "first 32 tokens",
        "in 2 pages",
        "3.0 MiB for 4.0 MiB",
        "1.0 MiB spared",
        "all 40 tokens equal",
        "to the last bit",
        "20 of 20 tokens are the likeliest ones",
        "0.052 off on average and 0.45 at most",
        "18 of 19 times",
        "medians of 3",
        "1.7 ms",
        "76.0 ms",
        "0.61 s",
        "0.72 s",
        "16 -> 64",
        "int8 + scales",
        "1 of 2",
    ):
        assert fact in text
    assert text.count("The keeper.") == 2  # of both processes
    assert text.count("from int8 pages") == 1  # where it differs
    assert "SLOW" not in text
    assert "short of" not in text


def test_what_is_not_as_it_should_be_is_told_too() -> None:
    assert "SLOW LANE: tcp" in printed(replace(REPORT, lane="tcp"))
    assert "0.003" in printed(replace(REPORT, reread=Reread(num_same=19, num_tokens=20, max_shortfall=0.003)))
    other = replace(REPORT.variants[1], num_texts_equal=0)
    assert "0 of 2" in printed(replace(REPORT, variants=(REPORT.variants[0], other)))


def test_the_command_prints_the_report_and_writes_the_same_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Any, *, model: Path | None, on_step: Any) -> LlmReport:
        assert (config.llm.page_size, config.llm.rounds, config.llm.deadline_s) == (32, 2, 77)
        assert model == Path("some.gguf")
        for number in range(room.num_llm_steps(config)):
            on_step(str(number))
        return REPORT

    monkeypatch.setattr(room, "run_llm", run)
    path = tmp_path / "facts.json"
    demo(llm=True, model=Path("some.gguf"), page_size=32, rounds=2, deadline=77, json=path)
    assert "The keeper." in capsys.readouterr().out
    facts = json.loads(path.read_text())
    assert facts["layer_by_layer"]["exposed_s"] == 0.0017
    assert facts["variants"][1]["scale_dtype"] == "float16"
    assert facts["prompts"][0]["int8_text"] == "A keeper."


def test_a_round_is_one_transfer_of_each_kind() -> None:
    config = load_config(overrides={"llm": {"rounds": 4}})
    assert [move.layer_by_layer for move in moves(config) if move.variant == 0] == [False, True] * 4
