"""The benchmark's report as one HTML file that needs nothing else: plots as inline SVG, figures, machine facts."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from rich.console import Console

from hurray_rdma.bench import plots
from hurray_rdma.bench.document import machine_rows, section, table, write_document
from hurray_rdma.bench.drawing import require_matplotlib
from hurray_rdma.bench.results import BenchReport, SweepRow
from hurray_rdma.bench.table import lane_text, print_report, size_text

__all__ = ["write_page"]


def write_page(report: BenchReport, folder: Path) -> Path:
    """Writes ``index.html`` into the folder, which is made if it is not there; its path.

    Raises:
        ConfigError: it cannot be written, or matplotlib is not installed.
    """
    require_matplotlib()
    return write_document(folder, title="hurray_rdma bench", parts=_parts(report))


def _parts(report: BenchReport) -> list[str]:
    parts = [_facts(report), _skipped(report)]
    for lane, pattern in dict.fromkeys((row.lane, row.pattern) for row in report.sweep):
        rows = [row for row in report.sweep if (row.lane, row.pattern) == (lane, pattern)]
        parts.append(section(f"Transfers: {pattern} pages over {lane_text(lane)}", _ratios(rows)))
    if report.latency:
        parts.append(section("Small transfers", plots.latency_plot(report.latency)))
    if report.overlap is not None:
        row = report.overlap
        note = (
            f"{row.hidden:.1%} of {row.transfer_s.median * 1e3:.1f} ms of transfer are hidden behind the computing of "
            f"{row.num_layers} layers of {size_text(row.layer_nbytes)}, of a plain copy in its place "
            f"{row.copy_hidden:.1%}; at most {row.possible:.1%} can be."
        )
        parts.append(section("Layer by layer", f"<p>{escape(note)}</p>" + plots.overlap_plot(row)))
    parts.append(section("All figures", f"<pre>{escape(_text(report))}</pre>"))
    return parts


def _facts(report: BenchReport) -> str:
    rows = machine_rows(report.facts) | {
        "settings": f"{report.config}: medians of {report.rounds} rounds, everyone in turn in each",
        "receiver": report.peer or "a process of this machine",
        "compared": f"{report.compared_nbytes / 2**20:,.0f} MiB of first transfers, byte by byte: all equal",
    }
    return table(rows.items())


def _skipped(report: BenchReport) -> str:
    return "".join(
        f'<p class="skipped"><b>Skipped: {escape(each.party)}{escape(" over " + each.lane) if each.lane else ""}</b>: '
        f"{escape(each.reason)}. {escape(each.fix)}</p>"
        for each in report.skipped
    )


def _ratios(rows: Sequence[SweepRow]) -> str:
    counts = {row.num_pages * row.page_nbytes for row in rows}
    if len(counts) > 1:  # several transfer sizes: a plot of each
        return "".join(
            f"<h3>{size_text(nbytes)} a transfer</h3>"
            + plots.ratio_plot([row for row in rows if row.num_pages * row.page_nbytes == nbytes])
            for nbytes in sorted(counts)
        )
    return plots.ratio_plot(rows) + '<p class="note">Higher is faster; bars span its transfers.</p>'


def _text(report: BenchReport) -> str:
    text = io.StringIO()
    print_report(report, console=Console(width=150, file=text, force_terminal=False))
    return text.getvalue()
