"""Figures as SVG text, by matplotlib, which is imported here only."""

from __future__ import annotations

import io
from typing import Any

from hurray_rdma.errors import ConfigError

__all__ = ["legend_beside", "new_figure", "require_matplotlib", "svg"]


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


def new_figure(*, height: float) -> tuple[Any, Any]:
    """A figure and its axes, as wide as a page."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - of the [bench] extra

    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="both", color="#eeeeee")
    axes.set_axisbelow(True)
    return figure, axes


def legend_beside(axes: Any) -> None:
    """The legend, where it hides nothing."""
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")


def svg(figure: Any) -> str:
    """The figure as an ``<svg>`` element."""
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    written = text.getvalue()
    return written[written.index("<svg") :]
