"""Where a command's report goes: a text on standard output, and JSON in a file, or in the text's place.

It knows paths and consoles; nothing of what is reported.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from hurray_rdma.errors import ConfigError

__all__ = ["JsonFile", "Output"]

_PIPED_WIDTH = 132

JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE|-", help="Write the facts to this file as JSON; -: to stdout, without the text."
    ),
]


class Output:
    """Takes one report, as a text (`console`) and as facts (`write`).

    Args:
        json: the file of the facts; ``-`` is standard output, which then has nothing else; None: nobody wants them.
        wide: use the width of a page rather than 80 columns where standard output is no terminal.

    Raises:
        ConfigError: the file cannot be written there: better known before the run.
    """

    def __init__(self, json: Path | None, *, wide: bool = True) -> None:
        self._json = json
        self._instead = json == Path("-")
        if json is not None and not self._instead and (json.is_dir() or not json.absolute().parent.is_dir()):
            raise ConfigError("must be a file in a folder that exists", field="--json", value=str(json))
        width = None if not wide or sys.stdout.isatty() else _PIPED_WIDTH
        self.console = Console(quiet=self._instead, width=width)

    def write(self, facts: object) -> None:
        """Writes plain values and dataclasses as JSON, if that is wanted.

        Raises:
            ConfigError: the file cannot be written.
        """
        if self._json is None:
            return
        text = msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n"
        if self._instead:
            sys.stdout.buffer.write(text)
            sys.stdout.flush()
            return
        try:
            self._json.write_bytes(text)
        except OSError as error:
            raise ConfigError(f"cannot be written: {error.strerror}", field="--json", value=str(self._json)) from error
