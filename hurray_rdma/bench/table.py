"""The benchmark's report as text for a terminal. Draws; computes nothing."""

from __future__ import annotations

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hurray_rdma.bench.messages import Party
from hurray_rdma.bench.results import BenchReport, SweepRow
from hurray_rdma.demo.report import lane_warning

__all__ = ["lane_text", "print_report", "size_text"]

_FASTEST = "bold green"
_QUIET_LOAD = 1.0


def print_report(report: BenchReport, *, console: Console) -> None:
    """Writes everything that was measured."""
    facts = report.facts
    console.print(
        f"{facts.cpu}, {facts.cores} cores, kernel {facts.kernel}, UCX {facts.ucx}; huge pages: {facts.huge_pages}; "
        f"load {facts.load_average:.2f} before; medians of {report.rounds} rounds, everyone in turn"
        + (f"; the receiver is {report.peer}" if report.peer else ""),
        style="dim",
        highlight=False,
    )
    if facts.load_average > _QUIET_LOAD:
        console.print(
            f"Other work was running when this began (load {facts.load_average:.2f}, over {_QUIET_LOAD}): do not trust "
            "the figures.",
            style="bold red",
        )
    for each in report.skipped:
        console.print(_skipped(each.party, each.lane, each.reason, each.fix))
    for lane in dict.fromkeys(row.lane for row in report.sweep):
        _print_sweep([row for row in report.sweep if row.lane == lane], lane, console)
    if report.latency:
        console.print(_latency(report))
    details = _details(report)
    if details.row_count:
        console.print(details)
    for carried_by in sorted({row.carried_by for row in report.sweep if row.party is Party.HURRAY and not row.lane}):
        warning = lane_warning(carried_by.partition(",")[0])
        if warning is not None:
            console.print(Panel(Text(warning), style="bold white on red"))


def lane_text(lane: str) -> str:
    """For titles."""
    return lane or "the lane that UCX chooses"


def size_text(nbytes: int) -> str:
    """``32 KiB``; bytes where it is no whole number of them."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes:,} B"


def _skipped(party: Party, lane: str, reason: str, fix: str) -> Text:
    text = Text("SKIPPED ", style="bold yellow")
    text.append(f"{party}" + (f" over {lane}" if lane else ""), style="bold")
    return text.append(f": {reason}" + (f". {fix}" if fix else ""), style="default")


def _print_sweep(rows: list[SweepRow], lane: str, console: Console) -> None:
    table = Table(
        title=f"transfers over {lane_text(lane)}: how fast, where memcpy of the same pages is 1.00",
        title_justify="left",
    )
    for name in ("pattern", "pages", "party", "carried by"):
        table.add_column(name)
    for name in ("ratio", "GiB/s", "median ms", "min .. max", "CPU s/GiB"):
        table.add_column(name, justify="right")
    cases = dict.fromkeys((row.pattern, row.page_nbytes, row.num_pages) for row in rows)
    for pattern, page_nbytes, num_pages in cases:
        some = [
            row for row in rows if (row.pattern, row.page_nbytes, row.num_pages) == (pattern, page_nbytes, num_pages)
        ]
        for at, row in enumerate(sorted(some, key=lambda row: -row.ratio)):
            cpu = "" if row.cpu_s_per_gib is None else f"{row.cpu_s_per_gib:.2f}"
            table.add_row(
                str(pattern) if at == 0 else "",
                f"{num_pages:,} x {size_text(page_nbytes)}" if at == 0 else "",
                Text(row.party, style=_FASTEST if row.party is Party.HURRAY else ""),
                row.carried_by,
                f"{row.ratio:.2f}",
                f"{row.gib_per_s:.2f}",
                f"{row.seconds.median * 1e3:.1f}",
                f"{row.seconds.min * 1e3:.1f} .. {row.seconds.max * 1e3:.1f}",
                cpu,
                end_section=at == len(some) - 1,
            )
    console.print(table)


def _latency(report: BenchReport) -> Table:
    told = "until the sender knows" if report.peer else "until the receiver may use it"
    table = Table(title=f"small transfers, us {told}", title_justify="left")
    table.add_column("pages")
    table.add_column("party")
    for name in ("p50", "p99", "min", "max", "sender's p50", "CPU us"):
        table.add_column(name, justify="right")
    for row in report.latency:
        table.add_row(
            f"{row.num_pages} x {size_text(row.page_nbytes)}",
            Text(row.party, style=_FASTEST if row.party is Party.HURRAY else ""),
            *(f"{value:,.0f}" for value in (row.p50_us, row.p99_us, row.min_us, row.max_us, row.sender_p50_us)),
            "" if row.cpu_us is None else f"{row.cpu_us:,.0f}",
        )
    return table


def _details(report: BenchReport) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold cyan", no_wrap=True)
    table.add_column()
    if (row := report.overlap) is not None:
        table.add_row(
            "layer by layer",
            f"[bold]{row.hidden:.1%}[/bold] of {row.transfer_s.median * 1e3:.1f} ms of transfer hidden behind "
            f"{row.compute_s.median * 1e3:.1f} ms of computing {row.num_layers} layers of "
            f"{size_text(row.layer_nbytes)}; of a plain copy in its place {row.copy_hidden:.1%} (at most "
            f"{row.possible:.1%}: the last layer has nothing to hide behind)",
        )
    if (overhead := report.overhead) is not None:
        table.add_row(
            "overhead of a page",
            f"[bold]{overhead.us_per_page:.3f} us[/bold] beyond its bytes: {overhead.num_pages:,} pages of "
            f"{size_text(overhead.page_nbytes)} in {overhead.send_s.median * 1e3:.1f} ms, memcpy "
            f"{overhead.memcpy_s.median * 1e3:.1f} ms",
        )
    for each in report.contact:
        table.add_row(
            "first contact",
            f"{each.party}: {each.seconds.median * 1e3:,.2f} ms ({each.seconds.min * 1e3:,.2f} .. "
            f"{each.seconds.max * 1e3:,.2f}) to the first page of a pool of {each.pool_pages:,} pages",
        )
    if (fresh := report.fresh) is not None:
        table.add_row(
            "fresh snapshot",
            f"{size_text(fresh.nbytes)} at [bold]{fresh.ratio:.2f}[/bold] of one contiguous copy past the cache "
            f"({fresh.send_s.median * 1e3:.1f} ms, the copy {fresh.copy_s.median * 1e3:.1f} ms)",
        )
    if (idle := report.idle) is not None:
        table.add_row("idle", f"{idle.cpu_share:.2%} of a core, both engines together, over {idle.seconds:.1f} s")
    for plan in report.planning:
        table.add_row(
            "planning",
            f"{plan.seconds.median * 1e3:,.2f} ms for {plan.num_pages:,} scattered pages, {plan.us_per_page:.3f} us "
            "each",
        )
    return table
