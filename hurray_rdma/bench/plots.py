"""Plots of a report as SVG text."""

from __future__ import annotations

from collections.abc import Sequence

from hurray_rdma.bench.drawing import legend_beside, new_figure, svg
from hurray_rdma.bench.messages import Party
from hurray_rdma.bench.results import LatencyRow, OverlapRow, SweepRow
from hurray_rdma.bench.table import size_text

__all__ = ["latency_plot", "overlap_plot", "ratio_plot"]

_COLORS = {
    Party.HURRAY: "#c0392b",
    Party.HURRAY_CALLER: "#e67e22",
    Party.HURRAY_PULL: "#f1948a",
    Party.MEMCPY: "#7f8c8d",
    Party.STREAM: "#bdc3c7",
    Party.MAPPED: "#95a5a6",
    Party.CMA: "#2980b9",
    Party.UCX_PUT: "#8e44ad",
    Party.SOCKET: "#16a085",
    Party.UCX_PERFTEST: "#34495e",
    Party.NIXL: "#27ae60",
    Party.NIXL_DEFAULT: "#a9dfbf",
    Party.MOONCAKE: "#f1c40f",
}


def ratio_plot(rows: Sequence[SweepRow]) -> str:
    """Ratio to memcpy by page size, one line a party, bars from its slowest to its fastest transfer.

    Args:
        rows: of one lane, pattern and size of transfers.
    """
    figure, axes = new_figure(height=4.2)
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
    legend_beside(axes)
    return svg(figure)


def latency_plot(rows: Sequence[LatencyRow]) -> str:
    """p50 of every party as bars, p99 as a whisker, by the number of pages; logarithmic."""
    figure, axes = new_figure(height=3.8)
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
    legend_beside(axes)
    return svg(figure)


def overlap_plot(row: OverlapRow) -> str:
    """The layers of one round as bars over time."""
    figure, axes = new_figure(height=0.6 + 0.11 * row.num_layers)
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
    legend_beside(axes)
    return svg(figure)
