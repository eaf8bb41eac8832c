"""``python -m hurray_rdma.testing.chaos``: options to a run, a progress bar meanwhile, the tables afterwards."""

from __future__ import annotations

import asyncio
import json as json_text
import secrets
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from hurray_rdma.testing.chaos.faults import Action
from hurray_rdma.testing.chaos.kinds import BLOWS, MESSAGES
from hurray_rdma.testing.chaos.results import EpisodeResult
from hurray_rdma.testing.chaos.run import ChaosReport, Tally, run_chaos

_LOG_LINES = 60


def main(
    *,
    seed: Annotated[int | None, typer.Option(help="Seed of everything that is drawn (default: a new one).")] = None,
    faults: Annotated[int, typer.Option(min=1, help="How many faults to try.")] = 500,
    minutes: Annotated[float | None, typer.Option(help="No further fault begins after so many minutes.")] = None,
    scene: Annotated[int | None, typer.Option(min=0, help="Only this scene of the seed.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Move snapshots between real processes while faults strike, and check every byte, error and page."""
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that whoever ends it leaves no process behind
    columns = (
        TextColumn("faults"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[last]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=faults, last="")

        def heard(episode: EpisodeResult) -> None:
            progress.update(
                task, advance=1, last=episode.kind if episode.problem is None else f"FAILED: {episode.kind}"
            )

        report = asyncio.run(
            run_chaos(
                secrets.randbelow(2**31) if seed is None else seed,
                num_faults=faults,
                budget_s=None if minutes is None else 60 * minutes,
                scene=scene,
                on_episode=heard,
            )
        )
    _show(console, report)
    if json is not None:
        json.write_text(json_text.dumps(_facts(report), indent=2) + "\n")
    if report.failures:
        raise typer.Exit(1)


def _show(console: Console, report: ChaosReport) -> None:
    messages = Table(title="messages spoiled: survived/tried (never came by)", title_justify="left")
    messages.add_column("message", no_wrap=True)
    for action in Action:
        messages.add_column(action.value, justify="right")
    for direction, kind in MESSAGES:
        cells = [_cell(report.tallies[f"{action.value} {kind.name} {direction.value}"]) for action in Action]
        messages.add_row(f"{kind.name} {direction.value}", *cells)
    console.print(messages)
    others = Table(title="other faults", title_justify="left")
    others.add_column("fault")
    others.add_column("survived/tried", justify="right")
    for blow in BLOWS:
        others.add_row(blow, _cell(report.tallies[blow]))
    console.print(others)
    for failure in report.failures:
        console.rule(f"seed {report.seed}, scene {failure.plan.index}: {failure.plan.cast}")
        for line in failure.log[-_LOG_LINES:]:
            console.print(line, markup=False, highlight=False)
        console.print(f"seed {report.seed}, scene {failure.plan.index}: {failure.problem}", markup=False, style="red")
        console.print(f"repeat: scripts/chaos --seed {report.seed} --scene {failure.plan.index}", markup=False)
    console.print(
        f"seed {report.seed}: {report.num_survived} of {report.num_tried} faults survived, {report.num_scenes} scenes, "
        f"{len(report.failures)} of them failed; {report.num_delivered} transfers under fault delivered, "
        f"{report.num_failed} failed as they may; {report.seconds:.0f} s, "
        f"{report.num_tried / max(report.seconds, 1e-9):.1f} faults/s",
        highlight=False,
    )


def _cell(tally: Tally) -> str:
    counts = f"{tally.survived}/{tally.tried}" if tally.tried else "-"
    counts += f" ({tally.missed})" if tally.missed else ""
    return counts if tally.survived == tally.tried else f"[red]{counts}[/red]"


def _facts(report: ChaosReport) -> dict[str, object]:
    return {
        "seed": report.seed,
        "seconds": report.seconds,
        "num_tried": report.num_tried,
        "num_survived": report.num_survived,
        "num_scenes": report.num_scenes,
        "num_delivered": report.num_delivered,
        "num_failed": report.num_failed,
        "faults": {kind: asdict(tally) for kind, tally in report.tallies.items()},
        "failures": [
            {
                "scene": failure.plan.index,
                "cast": asdict(failure.plan.cast),
                "problem": failure.problem,
                "log": failure.log,
            }
            for failure in report.failures
        ],
    }


if __name__ == "__main__":
    typer.run(main)
