"""A replay's report as text for a terminal. Draws; computes nothing."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hurray_rdma.bench.table import size_text
from hurray_rdma.demo.report import facts_table, mib, print_lane_warning
from hurray_rdma.replay.results import Percentiles, ReplayReport

__all__ = ["print_report"]

_MALFORMED_SHOWN = 5


def print_report(report: ReplayReport, *, console: Console) -> None:
    """Writes everything that was counted."""
    facts = facts_table()
    for name, text in _rows(report):
        facts.add_row(name, text)
    console.print(Panel(facts, title=Text(f"hurray_rdma replay: {report.trace}"), title_align="left", expand=False))
    console.print(_lives(report))
    for each in report.malformed[:_MALFORMED_SHOWN]:
        console.print(Text(f"line {each.line} was skipped: {each.rule}", style="yellow"), soft_wrap=True)
    if (more := len(report.malformed) - _MALFORMED_SHOWN) > 0:
        console.print(Text(f"{more:,} more lines were skipped", style="yellow"))
    print_lane_warning(report.lane, console=console)
    for problem in report.problems:
        console.print(Text(f"WRONG: {problem}", style="bold red"), soft_wrap=True)


def _rows(report: ReplayReport) -> list[tuple[str, str]]:
    cache, workers, run = report.config.cache, report.config.workers, report.config.run
    again = f", {report.num_again:,} sent again after a worker's death or a broken session" if report.num_again else ""
    failed = f", [bold red]{report.num_failed:,} failed[/bold red]" if report.num_failed else ""
    ended = ", ".join(f"{count:,} {name}" for name, count in sorted(report.refusals.items())) or "none"
    return [
        (
            "cache",
            f"a block of 512 tokens is a page of {cache.page_size}: {cache.num_layers} layers x {cache.num_heads} "
            f"heads x {cache.head_dim} dims, {cache.dtype}, {size_text(report.block_nbytes)} a block",
        ),
        (
            "workers",
            f"{workers.prefill} prefill of {workers.prefill_pages:,} pages, {workers.decode} decode of "
            f"{workers.decode_pages:,}; {run.speed:g} s of the trace in one",
        ),
        (
            "requests",
            f"{report.num_delivered:,} of {report.num_requests:,} delivered, {report.num_refused:,} refused{failed}"
            f"{again}; {len(report.malformed):,} malformed lines",
        ),
        (
            "blocks",
            f"{report.num_entries:,} in all transfers; {report.num_unique:,} distinct ones sent, "
            f"{report.expected_unique:,} by the trace",
        ),
        (
            "resident",
            f"[bold]{report.hit_rate:.1%}[/bold], {report.num_resident:,} blocks; endless caches would have held "
            f"{report.resident_most:,}",
        ),
        (
            "bytes",
            f"{mib(report.logical_nbytes)} logical, {mib(report.unique_nbytes)} unique, "
            f"[bold]{mib(report.sent_nbytes)} sent[/bold] over {report.lane}",
        ),
        ("compared", f"{mib(report.compared_nbytes)}, every byte of every delivered request: all equal"),
        ("speed", f"{report.transfers_per_s:,.0f} transfers/s in {report.seconds:.1f} s"),
        ("send", _percentiles(report.send_s)),
        ("since due", _percentiles(report.late_s)),
        (
            "leases",
            f"{report.num_leases:,} grants, {report.num_leases_expired:,} expired; {report.num_waits:,} came more "
            f"than 1 ms after their offer; {report.wait_s:.2f} s of waiting in all",
        ),
        ("ended early", ended),
    ]


def _lives(report: ReplayReport) -> Table:
    table = Table(title="decode workers", title_justify="left", title_style="bold")
    table.add_column("worker")
    for name in ("requests", "blocks", "resident", "by the model", "evicted", "fewest free", "most in use", "waiting"):
        table.add_column(name, justify="right")
    for life in report.lives:
        killed = f", killed at {life.killed_s:.1f} s" if life.killed_s is not None else ""
        since = f", since {life.began_s:.1f} s" if life.began_s else ""
        table.add_row(
            f"{life.worker}{since}{killed}",
            f"{life.num_requests:,}",
            f"{life.num_entries:,}",
            f"{life.num_resident:,}",
            f"{life.expected_resident:,}" if life.expected_resident is not None else "not known",
            f"{life.num_evicted:,}" if life.num_evicted is not None else "not known",
            f"{min((each.free for each in life.samples), default=0):,}",
            f"{max((each.in_use for each in life.samples), default=0):,}",
            f"{max((each.num_waiting for each in life.samples), default=0):,}",
        )
    return table


def _percentiles(times: Percentiles) -> str:
    texts = (times.p50, times.p90, times.p99, times.max)
    return "p50 {}, p90 {}, p99 {}, max {} ms".format(*(f"{each * 1e3:,.1f}" for each in texts))
