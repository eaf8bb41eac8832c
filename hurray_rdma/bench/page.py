"""The benchmark's report as one HTML file that needs nothing else: plots as inline SVG, figures, machine facts."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from rich.console import Console

from hurray_rdma.bench import plots
from hurray_rdma.bench.results import BenchReport, SweepRow
from hurray_rdma.bench.table import lane_text, print_report, size_text
from hurray_rdma.errors import ConfigError

__all__ = ["check_report_folder", "write_page"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-weight: 600; } h2 { margin-top: 2.5rem; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
pre { font-size: 12px; line-height: 1.25; overflow-x: auto; } .skipped { color: #9a5b00; } .note { color: #666; }
"""


def check_report_folder(folder: Path) -> None:
    """Raises ConfigError where `write_page` would fail: better known before the run."""
    plots.require_matplotlib()
    if folder.exists() and not folder.is_dir():
        raise ConfigError("must be a folder", field="--report", value=str(folder))


def write_page(report: BenchReport, folder: Path) -> Path:
    """Writes ``index.html`` into the folder, which is made if it is not there; its path.

    Raises:
        ConfigError: it cannot be written, or matplotlib is not installed.
    """
    plots.require_matplotlib()
    text = _page(report)
    path = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", field="--report", value=str(folder)) from error
    return path


def _page(report: BenchReport) -> str:
    parts = ["<h1>hurray_rdma bench</h1>", _facts(report), _skipped(report)]
    for lane, pattern in dict.fromkeys((row.lane, row.pattern) for row in report.sweep):
        rows = [row for row in report.sweep if (row.lane, row.pattern) == (lane, pattern)]
        parts.append(_section(f"Transfers: {pattern} pages over {lane_text(lane)}", _ratios(rows)))
    if report.latency:
        parts.append(_section("Small transfers", plots.latency_plot(report.latency)))
    if report.overlap is not None:
        row = report.overlap
        note = (
            f"{row.hidden:.1%} of {row.transfer_s.median * 1e3:.1f} ms of transfer are hidden behind the computing of "
            f"{row.num_layers} layers of {size_text(row.layer_nbytes)}; at most {row.possible:.1%} can be."
        )
        parts.append(_section("Layer by layer", f"<p>{escape(note)}</p>" + plots.overlap_plot(row)))
    parts.append(_section("All figures", f"<pre>{escape(_text(report))}</pre>"))
    head = f'<meta charset="utf-8"><title>hurray_rdma bench</title><style>{_STYLE}</style>'
    body = "\n".join(parts)
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n'


def _facts(report: BenchReport) -> str:
    facts = report.facts
    rows = {
        "processor": f"{facts.cpu}, {facts.cores} cores",
        "memory": f"{facts.memory_nbytes / 2**30:.1f} GiB; huge pages: {facts.huge_pages}",
        "kernel": facts.kernel,
        "versions": f"hurray_rdma {facts.hurray_rdma}, UCX {facts.ucx}, Python {facts.python}",
        "load before": f"{facts.load_average:.2f}",
        "settings": f"{report.config}: medians of {report.rounds} rounds, everyone in turn in each",
        "receiver": report.peer or "a process of this machine",
        "compared": f"{report.compared_nbytes / 2**20:,.0f} MiB of first transfers, byte by byte: all equal",
    }
    return _table(rows.items())


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
    return plots.ratio_plot(rows) + '<p class="note">Higher is faster; bars span the rounds.</p>'


def _section(title: str, body: str) -> str:
    return f"<h2>{escape(title)}</h2>\n{body}"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _text(report: BenchReport) -> str:
    text = io.StringIO()
    print_report(report, console=Console(width=150, file=text, force_terminal=False))
    return text.getvalue()
