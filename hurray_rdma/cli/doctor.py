"""``hurray-rdma doctor``: findings as a table; exit code 1 if the engine would be on a slow path or not work."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from hurray_rdma.cli.output import JsonFile, Output
from hurray_rdma.cli.progress import Bar

if TYPE_CHECKING:
    from hurray_rdma.bench.findings import Diagnosis

__all__ = ["doctor"]

_STYLES = {"ok": "green", "note": "yellow", "slow": "bold red", "broken": "bold white on red"}


def doctor(*, json: JsonFile = None) -> None:
    """Say which lanes two processes of this machine get and why, and what would make the engine slow.

    Takes some ten seconds, changes nothing; exit code 1 if something is slow or broken.
    """
    from hurray_rdma.bench.doctor import DOCTOR_STEPS, diagnose  # noqa: PLC0415 - loads UCX

    output = Output(json)
    try:
        with Bar(DOCTOR_STEPS) as bar:
            diagnosis = diagnose(on_step=bar.step)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for each in diagnosis.findings:
        told = Text(each.found)
        if each.fix:
            told.append(f"\n{each.fix}", style="cyan")
        table.add_row(Text(each.verdict.upper(), style=_STYLES[each.verdict]), each.what, told)
    facts = diagnosis.facts
    output.console.print(
        f"hurray_rdma {facts.hurray_rdma}, Python {facts.python}, Linux {facts.kernel}, {facts.cores} x {facts.cpu}",
        highlight=False,
    )
    output.console.print(table)
    output.console.print(_in_all(diagnosis), highlight=False)
    output.write({"well": diagnosis.well, **msgspec.to_builtins(diagnosis)})
    if not diagnosis.well:
        raise typer.Exit(1)


def _in_all(diagnosis: Diagnosis) -> str:
    verdicts = Counter(each.verdict.value for each in diagnosis.findings)
    bad = ", ".join(f"{verdicts[each]} {each}" for each in ("broken", "slow") if verdicts[each])
    notes = f" ({verdicts['note']} notes)" if verdicts["note"] else ""
    return f"{bad}{notes}: the line under each says what mends it" if bad else f"Nothing is slow or broken{notes}."
