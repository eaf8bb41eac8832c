"""Waiting for what one plan at a time may use, no longer than the plan is wanted."""

from __future__ import annotations

import threading
import time

from hurray_rdma.errors import DeadlineExceededError, TransferAbortedError
from hurray_rdma.transport.binding import native

__all__ = ["take_turn"]

_LOOK_S = 0.02
"""How often it looks whether the plan is still wanted."""


def take_turn(lock: threading.Lock | threading.RLock, what: str, *, stop: native.StopFlag, timeout_s: float) -> float:
    """Acquires the lock of ``what`` for a plan; returns what is left of its time, seconds.

    Raises:
        DeadlineExceededError: another plan kept it busy for ``timeout_s``.
        TransferAbortedError: ``stop`` was set.
    """
    deadline = time.monotonic() + timeout_s
    while not lock.acquire(timeout=max(0.0, min(_LOOK_S, deadline - time.monotonic()))):
        if stop.is_set():
            raise TransferAbortedError(f"it was stopped while it waited for the {what}")
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(f"the {what} was busy all the time", field="timeout_s", value=timeout_s)
    return deadline - time.monotonic()
