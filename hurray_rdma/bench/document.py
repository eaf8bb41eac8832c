"""Reports as one HTML file that needs nothing else. Knows tags and a style; knows nothing of what is reported."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from hurray_rdma.bench.drawing import require_matplotlib
from hurray_rdma.bench.machine import MachineFacts
from hurray_rdma.errors import ConfigError

__all__ = ["check_report_folder", "machine_rows", "section", "table", "write_document"]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1000px; margin: 2rem auto; padding: 0 1rem; }
h1, h2 { font-weight: 600; } h2 { margin-top: 2.5rem; } svg { max-width: 100%; height: auto; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
pre { font-size: 12px; line-height: 1.25; overflow-x: auto; } .skipped { color: #9a5b00; } .note { color: #666; }
"""


def check_report_folder(folder: Path) -> None:
    """Raises ConfigError where a report could not be written: better known before the run."""
    require_matplotlib()
    if folder.exists() and not folder.is_dir():
        raise ConfigError("must be a folder", field="--report", value=str(folder))


def write_document(folder: Path, *, title: str, parts: Iterable[str]) -> Path:
    """Writes ``index.html`` into the folder, which is made if it is not there; its path.

    Args:
        folder: where.
        title: plain text.
        parts: HTML of the body after the title.

    Raises:
        ConfigError: it cannot be written.
    """
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{_STYLE}</style>'
    body = "\n".join((f"<h1>{escape(title)}</h1>", *parts))
    path = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n{body}\n</body></html>\n', encoding="utf-8"
        )
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", field="--report", value=str(folder)) from error
    return path


def machine_rows(facts: MachineFacts) -> dict[str, str]:
    """The machine, for `table`."""
    return {
        "processor": f"{facts.cpu}, {facts.cores} cores",
        "memory": f"{facts.memory_nbytes / 2**30:.1f} GiB; huge pages: {facts.huge_pages}",
        "kernel": facts.kernel,
        "versions": f"hurray_rdma {facts.hurray_rdma}, UCX {facts.ucx}, Python {facts.python}",
        "load before": f"{facts.load_average:.2f}",
    }


def section(title: str, body: str) -> str:
    """A heading, plain text, over HTML."""
    return f"<h2>{escape(title)}</h2>\n{body}"


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Names and values, plain text both."""
    cells = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"
