"""The command ``hurray-rdma``: joins its sub-commands, turns failures into one line and an exit code.

Sub-commands import what they run when they run it, so that ``--help`` and `multiprocessing`'s fresh interpreters, which
import this module again, stay quick.

Exit codes: 0 all well; 1 the run failed; 2 the input is wrong; 130 Ctrl-C; 143 SIGTERM.
"""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hurray_rdma.cli.bench import bench
from hurray_rdma.cli.demo import demo
from hurray_rdma.cli.doctor import doctor
from hurray_rdma.cli.inspect import inspect
from hurray_rdma.cli.replay import replay
from hurray_rdma.cli.serve import serve
from hurray_rdma.errors import ConfigError, GeometryError, HurrayError

__all__ = ["app", "main"]

app = typer.Typer(
    name="hurray-rdma",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command(short_help="See it work: move a cache between two processes, compare it.")(demo)
app.command(short_help="Is this machine fast? Lanes, limits, what mends them.")(doctor)
app.command(short_help="Measure the engine beside memcpy and other engines.")(bench)
app.command(short_help="Run a production trace through it, checked.")(replay)
app.command(short_help="Receive for bench --connect on another machine.")(serve)
app.command(short_help="Explain descriptors and control messages byte by byte.")(inspect)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hurray-rdma {version('hurray-rdma')}")
        raise typer.Exit


@app.callback()
def options(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Zero-copy transfer of paged LLM KV caches over UCX.

    Begin with `hurray-rdma demo`.
    """


def main() -> None:
    """Runs the command line of this process."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    try:
        app()
    except HurrayError as error:
        _tell(error)
        sys.exit(2 if isinstance(error, ConfigError | GeometryError) else 1)
    except OSError as error:  # what is printed cannot be written: a full disk
        sys.stderr.write(f"error: {error}\n")
        sys.exit(1)


def _exit_on_sigterm(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


def _tell(error: HurrayError) -> None:
    console = Console(stderr=True)
    told = Text("error: ", style="bold red") + Text(str(error), style="default")
    for note in (*getattr(error, "__notes__", ()), getattr(error, "text", "")):
        if note:
            told.append(f"\n  {note}", style="dim")
    console.print(told, soft_wrap=True)
