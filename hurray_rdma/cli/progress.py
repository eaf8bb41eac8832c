"""A progress bar on standard error, so that standard output is the report alone."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["Bar"]


class Bar:
    """A context manager; shown on a terminal only.

    Args:
        num_steps: how often `step` will be called.
        first: what happens before the first step.
    """

    def __init__(self, num_steps: int, *, first: str = "starting two processes") -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._progress.add_task(first, total=num_steps)
        self._begun = False

    def step(self, what: str) -> None:
        """The step before is done; now comes ``what``."""
        self._progress.update(self._task, description=what, advance=int(self._begun))
        self._begun = True

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
