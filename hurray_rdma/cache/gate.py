"""Keeps moves of bytes and the renewal of a pool's memory apart: many moves at once, or one renewal."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from hurray_rdma.errors import DeadlineExceededError

__all__ = ["MemoryGate"]


class _Inside(threading.local):
    count = 0


class MemoryGate:
    """Thread-safe; a renewal that waits lets no further move begin, but inside one of the same thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # which is Python code to enter: moves take the lock itself
        self._num_moves = 0
        self._inside = _Inside()
        """Moves of a thread: where it has one, a renewal waits for it anyhow."""
        self._renewing = False

    @property
    def renewing(self) -> bool:
        """Whether a move would have to wait."""
        return self._renewing

    def moving(self, *, timeout_s: float) -> _Moving:
        """While bytes go out of the memory, or into it.

        Raises:
            DeadlineExceededError: on entering: it was being renewed all the time.
        """
        return _Moving(self, timeout_s)

    def try_moving(self) -> AbstractContextManager[None] | None:
        """As `moving`, for who must not wait: it has begun, and ends with the context; None during a renewal."""
        with self._lock:
            if self._renewing and not self._inside.count:
                return None
            self._num_moves += 1
        self._inside.count += 1
        return _Begun(self)

    def _begin_move(self, timeout_s: float) -> None:
        with self._lock:
            if (
                self._renewing
                and not self._inside.count
                and not self._changed.wait_for(lambda: not self._renewing, timeout_s)
            ):
                raise DeadlineExceededError(
                    "the pool is being registered anew", field="timeout_s", value=round(timeout_s, 3)
                )
            self._num_moves += 1
        self._inside.count += 1

    def _end_move(self) -> None:
        self._inside.count -= 1
        with self._lock:
            self._num_moves -= 1
            if self._renewing:
                self._changed.notify_all()

    @contextmanager
    def renewal(self, *, timeout_s: float) -> Iterator[None]:
        """While the memory is replaced: waits for the moves under way.

        Raises:
            DeadlineExceededError: they, or another renewal, did not end in time.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            if not self._changed.wait_for(lambda: not self._renewing, timeout_s):
                raise DeadlineExceededError("it is being renewed already", field="timeout_s", value=timeout_s)
            self._renewing = True
            try:
                if not self._changed.wait_for(lambda: self._num_moves == 0, deadline - time.monotonic()):
                    raise DeadlineExceededError(
                        f"{self._num_moves} moves out of the pool or into it are under way",
                        field="timeout_s",
                        value=timeout_s,
                    )
            except BaseException:
                self._end_renewal()
                raise
        try:
            yield
        finally:
            with self._lock:
                self._end_renewal()

    def _end_renewal(self) -> None:
        self._renewing = False
        self._changed.notify_all()


class _Moving:
    """A move, from entering to leaving: a generator would cost a small one several times as much."""

    __slots__ = ("_gate", "_timeout_s")

    def __init__(self, gate: MemoryGate, timeout_s: float) -> None:
        self._gate = gate
        self._timeout_s = timeout_s

    def __enter__(self) -> None:
        self._gate._begin_move(self._timeout_s)

    def __exit__(self, *_: object) -> None:
        self._gate._end_move()


class _Begun:
    """The same, which has entered already."""

    __slots__ = ("_gate",)

    def __init__(self, gate: MemoryGate) -> None:
        self._gate = gate

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._gate._end_move()
