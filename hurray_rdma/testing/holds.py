"""A place in the code where a test process stops, says so, and goes on when it is told to: what happens "meanwhile" is
then certain, and needs no sleep."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Hold"]

_MAX_S = 120
"""A test that failed meanwhile lets go of nothing."""


class Hold:
    """Stops one call of a method, before it does anything, until `release`.

    Args:
        place: ``module:Class.method``.
        call: which of the calls from now on, the first is 1; those before and after it go on as ever.
        reached: called at it, on the thread that is stopped. What it returns decides whether that waits.
    """

    def __init__(self, place: str, *, call: int, reached: Callable[[], bool]) -> None:
        module, _, path = place.partition(":")
        owner, _, name = path.partition(".")
        self._owner, self._name = getattr(importlib.import_module(module), owner), name
        self._method = getattr(self._owner, name)
        self._left = call
        self._lock = threading.Lock()
        self._reached = reached
        self._go_on = threading.Event()

        def held(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._left -= 1
                mine = self._left == 0
            if mine and self._reached():
                self._go_on.wait(_MAX_S)
            return self._method(*args, **kwargs)

        setattr(self._owner, name, held)

    def release(self) -> None:
        """Lets it go on, and takes the hold away."""
        setattr(self._owner, self._name, self._method)
        self._go_on.set()
