"""A replay's report as one HTML file that needs nothing else: pool use over time as inline SVG, figures, machine."""

from __future__ import annotations

import io
from html import escape
from pathlib import Path

from rich.console import Console

from hurray_rdma.bench.document import machine_rows, section, table, write_document
from hurray_rdma.bench.drawing import legend_beside, new_figure, require_matplotlib, svg
from hurray_rdma.replay.results import Life, ReplayReport
from hurray_rdma.replay.table import print_report

__all__ = ["write_page"]


def write_page(report: ReplayReport, folder: Path) -> Path:
    """Writes ``index.html`` into the folder, which is made if it is not there; its path.

    Raises:
        ConfigError: it cannot be written, or matplotlib is not installed.
    """
    require_matplotlib()
    parts = [table(machine_rows(report.facts).items())]
    for worker in range(report.config.workers.decode):
        lives = [life for life in report.lives if life.worker == worker]
        parts.append(section(f"Pages of decode worker {worker}", _pool_plot(lives)))
    text = io.StringIO()
    print_report(report, console=Console(width=150, file=text, force_terminal=False))
    parts.append(section("All figures", f"<pre>{escape(text.getvalue())}</pre>"))
    return write_document(folder, title="hurray_rdma replay", parts=parts)


def _pool_plot(lives: list[Life]) -> str:
    """Pages in use, kept and free over time, stacked; a death is a dashed line."""
    figure, axes = new_figure(height=2.8)
    for at, life in enumerate(lives):
        axes.stackplot(
            [each.at_s for each in life.samples],
            [each.in_use for each in life.samples],
            [each.kept for each in life.samples],
            [each.free for each in life.samples],
            labels=["in use by requests", "kept prefixes", "free"] if at == 0 else [],
            colors=["#c0392b", "#2980b9", "#ecf0f1"],
        )
        if life.killed_s is not None:
            axes.axvline(life.killed_s, color="#222222", linestyle="--", linewidth=1, label="killed")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("s")
    axes.set_ylabel("pages")
    legend_beside(axes)
    return svg(figure)
