"""``ucs_status_t`` and time, turned into what the rest of the room speaks."""

from __future__ import annotations

import time

from hurray_rdma.errors import DeadlineExceededError, PeerLostError, TransferAbortedError, TransportError
from hurray_rdma.transport.binding import native

__all__ = ["deadline_ns", "raise_for"]

_TIMED_OUT, _CANCELED = -20, -16  # ucs/type/status.h
_PEER_GONE = frozenset({-25, -24, -6, -80})  # CONNECTION_RESET, NOT_CONNECTED, UNREACHABLE, ENDPOINT_TIMEOUT


def deadline_ns(timeout_s: float) -> int:
    """CLOCK_MONOTONIC in ``timeout_s`` seconds, in nanoseconds, as the native loops take it."""
    return time.monotonic_ns() + max(0, round(timeout_s * 1e9))


def raise_for(status: int, what: str, *, timeout_s: float) -> None:
    """The one place where ``ucs_status_t`` becomes an exception.

    Raises:
        DeadlineExceededError, TransferAbortedError, PeerLostError, TransportError
    """
    if status == 0:
        return
    text = native.status_text(status)
    if status == _TIMED_OUT:
        raise DeadlineExceededError(
            f"{what} did not complete within {timeout_s:.3g} s", field="timeout_s", value=timeout_s
        )
    if status == _CANCELED:
        raise TransferAbortedError(f"{what} was stopped")
    if status in _PEER_GONE:
        raise PeerLostError(f"{what} failed: {text}", fix="Check that the peer process is alive")
    raise TransportError(f"{what} failed: {text}", status=status)
