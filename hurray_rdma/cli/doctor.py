"""``hurray-rdma doctor``: findings as a table; exit code 1 if the engine would be on a slow path or not work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hurray_rdma.cli.progress import Bar

__all__ = ["doctor"]

_PIPED_WIDTH = 132
_STYLES = {"ok": "green", "note": "yellow", "slow": "bold red", "broken": "bold white on red"}


def doctor(*, json: Annotated[Path | None, typer.Option(help="Write the same to this file.")] = None) -> None:
    """Say which lanes two processes of this machine get and why, and what would make the engine slow."""
    from hurray_rdma.bench.doctor import DOCTOR_STEPS, diagnose  # noqa: PLC0415 - loads UCX
    from hurray_rdma.bench.findings import write_diagnosis  # noqa: PLC0415
    from hurray_rdma.demo.report import check_json_path  # noqa: PLC0415

    check_json_path(json)
    try:
        with Bar(DOCTOR_STEPS) as bar:
            diagnosis = diagnose(on_step=bar.step)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for each in diagnosis.findings:
        told = Text(each.found)
        if each.fix:
            told.append(f"\n{each.fix}", style="cyan")
        table.add_row(Text(each.verdict.upper(), style=_STYLES[each.verdict]), each.what, told)
    console.print(table)
    if json is not None:
        write_diagnosis(diagnosis, json)
    if not diagnosis.well:
        raise typer.Exit(1)
