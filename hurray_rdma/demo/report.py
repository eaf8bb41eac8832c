"""What the demo found out, as values, and as a text for somebody who sees the project for the first time."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

__all__ = [
    "DemoReport",
    "PageIdRow",
    "Timing",
    "facts_table",
    "lane_text",
    "lane_warning",
    "mib",
    "print_lane_warning",
    "print_report",
]

_GIB = 2**30
_IDS_SHOWN = 6
_ROWS_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians over the rounds."""

    rounds: int
    transfer_s: float
    """From the offer to the receiver's acknowledgement."""
    write_s: float
    """Of those, spent moving pages."""
    memcpy_s: float
    """A memcpy of the same pages within the sending process."""
    transfer_gib_per_s: float
    write_gib_per_s: float
    memcpy_gib_per_s: float
    ratio_to_memcpy: float
    """Median over the rounds of memcpy_s / transfer_s; 1 is as fast as memcpy."""

    @classmethod
    def of(cls, *, transfer_s: list[float], write_s: list[float], memcpy_s: list[float], nbytes: int) -> Timing:
        """From the seconds of each round, and the bytes that one round moves."""
        transfer, write, memcpy = (statistics.median(seconds) for seconds in (transfer_s, write_s, memcpy_s))
        return cls(
            rounds=len(transfer_s),
            transfer_s=transfer,
            write_s=write,
            memcpy_s=memcpy,
            transfer_gib_per_s=nbytes / transfer / _GIB,
            write_gib_per_s=nbytes / write / _GIB,
            memcpy_gib_per_s=nbytes / memcpy / _GIB,
            ratio_to_memcpy=statistics.median(m / t for m, t in zip(memcpy_s, transfer_s, strict=True)),
        )


@dataclass(frozen=True, slots=True)
class PageIdRow:
    """One sequence's block table, before and after."""

    seq: int
    num_tokens: int
    src_page_ids: tuple[int, ...]
    dst_page_ids: tuple[int, ...]
    num_shared: int
    """Leading pages that other sequences name too."""


@dataclass(frozen=True, slots=True)
class DemoReport:
    """Facts of one run of the demo; all counts are of one round, except ``compared_nbytes``."""

    num_layers: int
    num_tensors: int
    """Layers times roles: key and value of each layer."""
    num_heads: int
    head_dim: int
    page_size: int
    dtype: str
    num_sequences: int
    num_tokens: int
    num_table_entries: int
    num_pages: int
    """Physical pages of one layer and role."""
    lane: str
    """UCX transport that carried the pages."""
    path: str
    """``mapped``, ``put`` or ``stream``."""
    logical_nbytes: int
    """Bytes if each sequence were sent by itself."""
    sent_nbytes: int
    """Bytes moved: each shared page once."""
    num_operations: int
    compared_nbytes: int
    """Bytes compared on the receiving side, all rounds together."""
    timing: Timing
    block_tables: tuple[PageIdRow, ...]


def lane_warning(lane: str) -> str | None:
    """A loud line for a slow lane; None for a fast one."""
    if "emulated" in lane:
        return (
            f"SLOW LANE: {lane}. UCX has no one-sided transport between the two processes and copies every byte in "
            "software. Check UCX_TLS and --lane; in a container allow ptrace (--cap-add SYS_PTRACE) and share /dev/shm."
        )
    if lane.partition("+")[0] == "tcp":
        return f"SLOW LANE: {lane}. The bytes go through the network stack; on one host leave --lane and UCX_TLS unset."
    return None


def print_lane_warning(lane: str, *, console: Console) -> None:
    """Says aloud that ``lane`` is slow, if it is."""
    warning = lane_warning(lane)
    if warning is not None:
        console.print(Panel(Text(warning), style="bold white on red"))


def print_report(report: DemoReport, *, console: Console) -> None:
    """Writes the report for a newcomer."""
    timing = report.timing
    spared = report.logical_nbytes - report.sent_nbytes
    facts = facts_table()
    facts.add_row(
        "cache",
        f"{report.num_layers} layers x {report.num_heads} KV heads x {report.head_dim} dims, {report.dtype}, "
        f"pages of {report.page_size} tokens",
    )
    facts.add_row(
        "batch",
        f"{report.num_sequences} sequences, {report.num_tokens:,} tokens, {report.num_table_entries:,} page references "
        f"to {report.num_pages:,} pages per layer and role",
    )
    facts.add_row("lane", lane_text(report.lane, report.path))
    facts.add_row("logical bytes", f"{mib(report.logical_nbytes)}, were each sequence sent by itself")
    facts.add_row("bytes sent", f"{mib(report.sent_nbytes)}: each shared page once, {mib(spared)} spared")
    facts.add_row(
        "operations",
        f"{report.num_operations:,} for {report.num_pages * report.num_tensors:,} pages, straight from page to page: "
        "neighbours travel together, nothing is staged",
    )
    facts.add_row(
        "speed",
        f"[bold]{timing.transfer_gib_per_s:.2f} GiB/s[/bold] from offer to acknowledgement "
        f"({timing.write_gib_per_s:.2f} while moving pages)",
    )
    facts.add_row(
        "beside memcpy",
        f"{timing.memcpy_gib_per_s:.2f} GiB/s for the same pages inside one process; in the median of "
        f"{timing.rounds} rounds the transfer runs at [bold]{timing.ratio_to_memcpy:.2f}[/bold] of its own memcpy",
    )
    facts.add_row(
        "compared",
        f"[bold green]every byte equal[/bold green]: each token of each sequence, layer and role on the receiving "
        f"side, {mib(report.compared_nbytes)} in {timing.rounds} rounds",
    )
    console.print(Panel(facts, title="hurray_rdma demo: prefill process -> decode process", title_align="left"))
    console.print(_page_id_table(report.block_tables))
    console.print("Page IDs in [cyan]cyan[/cyan] are a shared prefix: sent once, and still shared after.", style="dim")
    print_lane_warning(report.lane, console=console)


def facts_table() -> Table:
    """Names and what there is to say of them, without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    return table


def lane_text(lane: str, path: str) -> str:
    """A lane, and how it carries pages."""
    how = {
        "mapped": "the sender maps the receiver's pages and stores into them",
        "put": "one-sided puts (ucp_put_nbx)",
        "stream": "a connection for pages, straight from page to page",
    }
    return f"[bold]{lane}[/bold], {how.get(path, path)}"


def _page_id_table(rows: tuple[PageIdRow, ...]) -> Table:
    table = Table(title="block table: page IDs of the same tokens", title_justify="left", title_style="bold")
    table.add_column("seq", justify="right")
    table.add_column("tokens", justify="right")
    table.add_column("before, in the prefill pool")
    table.add_column("after, in the decode pool")
    # Rows that share come first: that is what there is to see.
    for row in sorted(rows, key=lambda row: row.num_shared == 0)[:_ROWS_SHOWN]:
        table.add_row(
            str(row.seq),
            str(row.num_tokens),
            _ids_text(row.src_page_ids, row.num_shared),
            _ids_text(row.dst_page_ids, row.num_shared),
        )
    return table


def _ids_text(page_ids: tuple[int, ...], num_shared: int) -> Text:
    """The pages around the end of the shared prefix, so that both kinds are seen."""
    start = max(0, min(num_shared - _IDS_SHOWN // 2, len(page_ids) - _IDS_SHOWN))
    width = len(str(max(page_ids)))
    text = Text("... " if start else "", no_wrap=True)
    for index, page_id in enumerate(page_ids[start : start + _IDS_SHOWN], start):
        text.append(f"{page_id:>{width}} ", style="cyan" if index < num_shared else "")
    if start + _IDS_SHOWN < len(page_ids):
        text.append("...")
    return text


def mib(nbytes: int) -> str:
    """As MiB, to a tenth."""
    return f"{nbytes / 2**20:,.1f} MiB"
