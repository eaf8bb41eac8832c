"""What ``--llm`` found out, as values, and as a text for somebody who sees the project for the first time."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hurray_rdma.demo.llm_messages import Arrived, Drift, Prefilled, Reread
from hurray_rdma.demo.report import facts_table, lane_text, mib, print_lane_warning

__all__ = ["LlmReport", "Overlap", "PromptReport", "VariantReport", "print_llm_report"]


@dataclass(frozen=True, slots=True)
class Overlap:
    """Medians over the rounds of one way of sending, seconds."""

    rounds: int
    reading_s: float
    """The pass over the prompts, writing pages included."""
    exposed_s: float
    """From its end until all keys and values were out of the decode process's pages: what sending adds."""
    first_token_s: float
    """From the beginning of the pass to the first token that the decode process generated."""

    @classmethod
    def of(cls, rounds: Sequence[tuple[Prefilled, Arrived]]) -> Overlap:
        """From what the two processes said in each round."""
        return cls(
            rounds=len(rounds),
            reading_s=statistics.median(sent.read_at_s - sent.started_at_s for sent, _ in rounds),
            exposed_s=statistics.median(got.ready_at_s - sent.read_at_s for sent, got in rounds),
            first_token_s=statistics.median(got.token_at_s - sent.started_at_s for sent, got in rounds),
        )


@dataclass(frozen=True, slots=True)
class VariantReport:
    """One way of keeping the cache in the pages of the two sides."""

    dtype: str
    scale_dtype: str | None
    src_page_size: int
    dst_page_size: int
    num_pages: int
    """Pages written at the receiver, of one layer and role."""
    num_table_entries: int
    sent_nbytes: int
    """Bytes moved, scales included: each shared page once."""
    logical_nbytes: int
    """Bytes if each sequence had been sent by itself."""
    num_operations: int
    num_tokens: int
    """Generated; equal to what a single process generates from the same keys and values."""
    num_texts_as_computed: int
    """Texts that are those of the unquantised cache."""
    num_texts_equal: int
    """Texts that are those of a single process from the same keys and values, quantised alike."""


@dataclass(frozen=True, slots=True)
class PromptReport:
    """One sequence."""

    prompt: str
    prompt_tokens: int
    """The system prompt and the chat format included."""
    decode_text: str
    """Of the decode process, from pages as the model computes."""
    single_text: str
    """Of a single process."""
    int8_text: str
    """Of the decode process, from int8 pages."""


@dataclass(frozen=True, slots=True)
class LlmReport:
    """Facts of one run with a language model."""

    model: str
    num_layers: int
    num_heads: int
    head_dim: int
    dtype: str
    prefix_tokens: int
    """Tokens in the pages that all prompts share."""
    lane: str
    path: str
    layer_by_layer: Overlap
    after_the_last: Overlap
    variants: tuple[VariantReport, ...]
    drift: Drift
    reread: Reread
    system_prompt: str
    prompts: tuple[PromptReport, ...]


def print_llm_report(report: LlmReport, *, console: Console) -> None:
    """Writes the report for a newcomer."""
    lens = [prompt.prompt_tokens for prompt in report.prompts]
    first, drift, reread = report.variants[0], report.drift, report.reread
    facts = facts_table()
    facts.add_row(
        "model",
        f"{report.model}: {report.num_layers} layers x {report.num_heads} KV heads x {report.head_dim} dims, "
        f"{report.dtype}",
    )
    facts.add_row(
        "prefill process",
        f"read {len(lens)} prompts of {min(lens)} to {max(lens)} tokens in one pass; the first {report.prefix_tokens} "
        f"tokens of all are the same: computed once, kept in {report.prefix_tokens // first.src_page_size} pages that "
        "every block table names",
    )
    facts.add_row("decode process", "never saw a prompt; got pages, block tables, lengths, and one token ID for each")
    facts.add_row("lane", lane_text(report.lane, report.path))
    facts.add_row(
        "bytes sent",
        f"{mib(first.sent_nbytes)} for {mib(first.logical_nbytes)}, were each sequence sent by itself: "
        f"{mib(first.logical_nbytes - first.sent_nbytes)} spared",
    )
    facts.add_row(
        "compared",
        f"[bold green]all {sum(variant.num_tokens for variant in report.variants)} tokens equal[/bold green] to those "
        "of a single process that continues from its own tensors, batched alike" + ", and all logits to the last bit",
    )
    facts.add_row(
        "read again",
        f"{reread.num_same} of {reread.num_tokens} tokens are the likeliest ones, too, when each text is read alone in "
        "one pass, without batch or cache"
        + (
            ""
            if reread.num_same == reread.num_tokens
            else f" (logits short of the highest by {reread.max_shortfall:.2g})"
        ),
    )
    facts.add_row(
        "int8",
        f"logits {drift.mean_abs:.2g} off on average and {drift.max_abs:.2g} at most, where they spread by "
        f"{drift.spread:.2g}; the likeliest token is the same {drift.num_same} of {drift.num_tokens} times",
    )
    console.print(Panel(facts, title="hurray_rdma demo --llm", title_align="left"))
    console.print(_overlap_table(report))
    console.print(_variant_table(report))
    console.print(
        "equal texts: those that one process continues from the same keys and values, quantised alike.", style="dim"
    )
    _print_texts(report, console)
    print_lane_warning(report.lane, console=console)


def _overlap_table(report: LlmReport) -> Table:
    table = Table(
        title=f"time to the first token, medians of {report.layer_by_layer.rounds}",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("the pages leave")
    for name in ("reading", "until all is there", "first token of decode"):
        table.add_column(name, justify="right")
    for name, times in (("layer by layer", report.layer_by_layer), ("after the last layer", report.after_the_last)):
        table.add_row(
            name, f"{times.reading_s:.2f} s", f"{1000 * times.exposed_s:.1f} ms", f"{times.first_token_s:.2f} s"
        )
    return table


def _variant_table(report: LlmReport) -> Table:
    table = Table(
        title="the same cache in other pages, prefill -> decode",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("pages", no_wrap=True)
    for name in ("tokens each", "sent", "unshared", "equal texts", f"as {report.dtype}"):
        table.add_column(name, justify="right")
    texts = len(report.prompts)
    for each in report.variants:
        table.add_row(
            each.dtype if each.scale_dtype is None else f"{each.dtype} + scales",
            f"{each.src_page_size} -> {each.dst_page_size}",
            mib(each.sent_nbytes),
            mib(each.logical_nbytes),
            f"{each.num_texts_equal} of {texts}",
            f"{each.num_texts_as_computed} of {texts}",
        )
    return table


def _print_texts(report: LlmReport, console: Console) -> None:
    console.print(Text("system prompt: ", style="bold") + Text(report.system_prompt, style="dim"))
    for prompt in report.prompts:
        console.print()
        told = facts_table()
        told.add_row("prompt", Text(prompt.prompt, style="dim"))
        told.add_row("decode process", Text(prompt.decode_text, style="bold"))
        told.add_row("single process", Text(prompt.single_text))
        if prompt.int8_text != prompt.decode_text:
            told.add_row("from int8 pages", Text(prompt.int8_text))
        console.print(told)
