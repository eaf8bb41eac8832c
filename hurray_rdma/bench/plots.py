"""Plots of a report as SVG text, by matplotlib, which is imported here only."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from hurray_rdma.bench.messages import Party
from hurray_rdma.bench.results import LatencyRow, OverlapRow, SweepRow
from hurray_rdma.bench.table import size_text
from hurray_rdma.errors import ConfigError

__all__ = ["latency_plot", "overlap_plot", "ratio_plot", "require_matplotlib"]

_COLORS = {
    Party.HURRAY: "#c0392b",
    Party.HURRAY_CALLER: "#e67e22",
    Party.HURRAY_PULL: "#f1948a",
    Party.MEMCPY: "#7f8c8d",
    Party.STREAM: "#bdc3c7",
    Party.CMA: "#2980b9",
    Party.UCX_PUT: "#8e44ad",
    Party.SOCKET: "#16a085",
    Party.UCX_PERFTEST: "#34495e",
    Party.NIXL: "#27ae60",
    Party.NIXL_DEFAULT: "#a9dfbf",
    Party.MOONCAKE: "#f1c40f",
}


def require_matplotlib() -> None:
    """Better known before a run than after it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import matplotlib  # noqa: F401, PLC0415
    except ImportError as error:
        raise ConfigError(
            f"--report needs matplotlib: {error}",
            fix="pip install 'hurray-rdma[bench]', in a checkout pip install '.[bench]'",
        ) from error


def ratio_plot(rows: Sequence[SweepRow]) -> str:
    """Ratio to memcpy by page size, one line a party, bars from its slowest to its fastest round.

    Args:
        rows: of one lane, pattern and size of transfers.
    """
    figure, axes = _figure(height=4.2)
    for party in dict.fromkeys(row.party for row in rows):
        mine = sorted((row for row in rows if row.party is party), key=lambda row: (row.page_nbytes, row.num_pages))
        middle = [row.ratio for row in mine]
        low = [row.ratio * (1 - row.seconds.median / row.seconds.max) for row in mine]
        high = [row.ratio * (row.seconds.median / row.seconds.min - 1) for row in mine]
        axes.errorbar(
            [row.page_nbytes for row in mine],
            middle,
            yerr=[low, high],
            label=party,
            color=_COLORS[party],
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=2.2 if party is Party.HURRAY else 1.3,
        )
    sizes = sorted({row.page_nbytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes])
    axes.minorticks_off()
    axes.axhline(1, color="#7f8c8d", linewidth=0.8, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("page size")
    axes.set_ylabel("memcpy = 1.00")
    _legend_beside(axes)
    return _svg(figure)


def latency_plot(rows: Sequence[LatencyRow]) -> str:
    """p50 of every party as bars, p99 as a whisker, by the number of pages; logarithmic."""
    figure, axes = _figure(height=3.8)
    counts = sorted({row.num_pages for row in rows})
    parties = list(dict.fromkeys(row.party for row in rows))
    width = 0.8 / len(parties)
    for at, party in enumerate(parties):
        mine = {row.num_pages: row for row in rows if row.party is party}
        places = [index + (at - (len(parties) - 1) / 2) * width for index, count in enumerate(counts) if count in mine]
        shown = [mine[count] for count in counts if count in mine]
        axes.bar(
            places,
            [row.p50_us for row in shown],
            width,
            yerr=[[0.0] * len(shown), [row.p99_us - row.p50_us for row in shown]],
            label=party,
            color=_COLORS[party],
            error_kw={"linewidth": 0.8},
        )
    axes.set_yscale("log")
    axes.set_xticks(range(len(counts)), [f"{count} x {size_text(rows[0].page_nbytes)}" for count in counts])
    axes.set_ylabel("us, p50 (whisker: p99)")
    _legend_beside(axes)
    return _svg(figure)


def overlap_plot(row: OverlapRow) -> str:
    """The layers of one round as bars over time."""
    figure, axes = _figure(height=0.6 + 0.11 * row.num_layers)
    layers = range(row.num_layers)
    for name, color, offset, spans in (
        ("computed", "#95a5a6", 0.2, [each.computed for each in row.timeline]),
        ("sent", _COLORS[Party.HURRAY], -0.2, [each.sent for each in row.timeline]),
    ):
        axes.barh(
            [layer + offset for layer in layers],
            [(end - start) * 1e3 for start, end in spans],
            0.4,
            left=[start * 1e3 for start, _ in spans],
            label=name,
            color=color,
        )
    axes.plot([each.usable * 1e3 for each in row.timeline], layers, "k|", markersize=5, label="usable at the receiver")
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms")
    axes.set_ylabel("layer")
    _legend_beside(axes)
    return _svg(figure)


def _figure(*, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the [bench] extra

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#eeeeee")
    axes.set_axisbelow(True)
    return figure, axes


def _legend_beside(axes: Any) -> None:
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")


def _svg(figure: Any) -> str:
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
