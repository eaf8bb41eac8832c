"""Which event loop `asyncio.run` makes: asyncio's own, or uvloop's, in this process and in those that it starts.

Knows how to choose it for programs that do not choose one themselves; knows nothing of what runs on it.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["LOOPS", "event_loops", "take_event_loop"]

LOOPS = ("asyncio", "uvloop")
_VARIABLE = "HURRAY_RDMA_TEST_LOOP"


@contextmanager
def event_loops(name: str) -> Iterator[None]:
    """Loops are made of this kind meanwhile.

    Args:
        name: of `LOOPS`.
    """
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = name
    take_event_loop()
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
        take_event_loop()


def take_event_loop() -> None:
    """Makes loops as the environment says: for processes that were started meanwhile."""
    policy: asyncio.AbstractEventLoopPolicy | None = None
    if os.environ.get(_VARIABLE) == "uvloop":
        import uvloop  # noqa: PLC0415

        policy = uvloop.EventLoopPolicy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.14; it has nothing else for a whole process
        asyncio.set_event_loop_policy(policy)
