"""CUDA streams: when the work on one has run, and streams that wait for pages without the host.

An event is recorded where the caller stands, and asked again and again by one thread of this module, which sleeps in
between and ends when nothing is waited for: no stream is held up by a callback into Python, no call blocks on the
device, and who waits may give up at any time. Knows nothing of pages or transfers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hurray_rdma.errors import ConfigError, HurrayError, TransportError
from hurray_rdma.transport.cuda import Driver, Words
from hurray_rdma.transport.devices import flushed_by_streams

__all__ = ["Gate", "Gates", "StreamWatch", "stream_device", "stream_handle"]

_FIRST_LOOK_S = 20e-6
_LONGEST_LOOK_S = 500e-6
_WORDS_AT_A_TIME = 16384
_WRAP = 2**32
_PER_THREAD = 2
"""CU_STREAM_PER_THREAD."""

Passed = Callable[[HurrayError | None], None]
"""Told, on the thread of the watch, that the work has run, or why that is not known."""


def stream_handle(stream: Any) -> int:
    """The ``CUstream`` of a stream: a number, or an object of CuPy, torch or cuda.core.

    Raises:
        ConfigError: it is none, or the per-thread default stream.
    """
    if hasattr(stream, "__cuda_stream__"):
        handle = int(stream.__cuda_stream__()[1])
    elif hasattr(stream, "ptr"):  # cupy.cuda.Stream
        handle = int(stream.ptr)
    elif hasattr(stream, "cuda_stream"):  # torch.cuda.Stream
        handle = int(stream.cuda_stream)
    elif isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        handle = stream
    else:
        rule = "must be a CUDA stream: of CuPy, torch or cuda.core, or its handle"
        raise ConfigError(rule, field="stream", value=stream)
    if handle == _PER_THREAD:
        raise ConfigError(
            "must not be the per-thread default stream, which is another one in each thread",
            field="stream",
            value=stream,
            fix="Make a stream of its own for the work on pages",
        )
    return handle


def stream_device(stream: Any, *, expected: int | None = None) -> int:
    """The number of the GPU that a stream is on, if it tells: those of CuPy and torch do.

    Args:
        stream: as of `stream_handle`.
        expected: it must be this one, and is where it does not tell.

    Raises:
        ConfigError: it does not tell, or is on another GPU.
    """
    for name in ("device_id", "device_index"):
        if isinstance(index := getattr(stream, name, None), int) and index >= 0:
            if expected not in (None, index):
                raise ConfigError(f"is on cuda:{index}, its pool on cuda:{expected}", field="stream", value=stream)
            return index
    if expected is not None:
        return expected
    raise ConfigError(
        "must tell its GPU (device_id, device_index), since the pool is in host memory",
        field="stream",
        value=stream,
        fix="Pass the stream object of CuPy or torch",
    )


def _check_runs(driver: Driver, stream: int, index: int) -> None:
    if (found := driver.device_of(stream)) not in (None, index):  # a bare handle does not tell
        raise ConfigError(f"is on cuda:{found}, its pool on cuda:{index}", field="stream", value=stream)
    if driver.captures(stream):
        rule = "captures a graph, which would do each time it is launched what is meant once"
        raise ConfigError(rule, field="stream", value=stream, fix="Queue it before the capture, or after it")


@dataclass(slots=True, eq=False)
class _Watched:
    """An event that has not passed yet."""

    event: int
    device_index: int
    told: Passed


class StreamWatch:
    """Tells when the work that is on a stream has run. Thread-safe.

    Args:
        driver: asked about events.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._changed = threading.Condition()
        self._watched: dict[_Watched, None] = {}
        self._thread: threading.Thread | None = None

    def mark(self, stream: Any, *, index: int, told: Passed) -> None:
        """Tells once what is on the stream now has run.

        Args:
            stream: as of `stream_handle`.
            index: of the device that the stream is of.
            told: called once, on another thread; it must not block.

        Raises:
            ConfigError: it is no stream, or captures a graph.
            TransportError: CUDA refuses.
        """
        handle = stream_handle(stream)
        with self._driver.current(index):
            _check_runs(self._driver, handle, index)
            event = self._driver.record(handle)
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="hurray-streams", daemon=True)
                thread.start()
                self._thread = thread
            self._watched[_Watched(event, index, told)] = None
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            with self._changed:
                lost, self._watched, self._thread = self._watched, {}, None
            for each in lost:
                each.told(TransportError(f"streams are watched no more: {error}"))
            if not isinstance(error, HurrayError):
                raise

    def _watch(self) -> None:
        pause_s = _FIRST_LOOK_S
        while True:
            with self._changed:
                if not self._watched:
                    self._thread = None
                    return
                watched = list(self._watched)
            num_ended = sum([self._look(each) for each in watched])
            with self._changed:
                pause_s = _FIRST_LOOK_S if num_ended else min(2 * pause_s, _LONGEST_LOOK_S)
                if self._watched:
                    self._changed.wait(pause_s)

    def _look(self, watched: _Watched) -> bool:
        """Whether it is over; then it has been told."""
        error: HurrayError | None = None
        try:
            with self._driver.current(watched.device_index):
                if not self._driver.passed(watched.event):
                    return False
                self._driver.destroy(watched.event)
        except HurrayError as failed:  # the kernels did; the event goes with the context
            error = failed
        with self._changed:
            del self._watched[watched]  # first: whatever is raised, nobody is told twice
        watched.told(error)
        return True


@dataclass(slots=True, eq=False)
class Gate:
    """Closed until `open`: work queued after a `wait` runs then. Made by `Gates.make`; open it in any case."""

    _gates: Gates
    _place: int
    _value: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _opened: bool = False

    def wait(self, stream: Any, *, index: int) -> None:
        """Lets what is queued on the stream from now on wait for the gate; blocks where the stream's queue is full.

        Args:
            stream: as of `stream_handle`.
            index: of the device that it is of.

        Raises:
            ConfigError: it is no stream, or captures a graph.
            TransportError: CUDA refuses.
        """
        # CUDA may block here, until the stream's queue has room. A word that is opened meanwhile lets it pass as well.
        if not self._opened:
            self._gates.wait(stream_handle(stream), index, self._place, self._value)

    def open(self) -> None:
        """Idempotent; on any thread; calls nothing of CUDA's, and waits for nobody who does."""
        with self._lock:
            if self._opened:
                return
            self._opened = True
            self._gates.open(self._place, self._value)


class Gates:
    """Gates of one process, in words of page-locked memory that are used again, with the next value each time.

    No lock is held during a call of CUDA's: whoever opens a gate must never wait for one that a closed gate blocks.

    Args:
        driver: makes the words, and lets streams wait for them.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._words: list[Words] = []
        self._free: list[tuple[int, int]] = []
        self._flushed: dict[int, bool] = {}

    def make(self) -> Gate | None:
        """A closed gate; None if that takes new words (`reserve`)."""
        with self._lock:
            if not self._free:
                return None
            place, value = self._free.pop()
        return Gate(self, place, (value + 1) % _WRAP)

    def reserve(self, *, index: int) -> None:
        """Words for more gates; CUDA may be slow to make them.

        Args:
            index: of a device, for its context.

        Raises:
            TransportError: no memory.
        """
        with self._driver.current(index):
            words = self._driver.make_words(_WORDS_AT_A_TIME)
        with self._lock:
            first = len(self._words) * _WORDS_AT_A_TIME
            self._words.append(words)
            self._free += [(place, 0) for place in range(first, first + _WORDS_AT_A_TIME)]

    def wait(self, stream: int, index: int, place: int, value: int) -> None:
        """For `Gate`."""
        words = self._words[place // _WORDS_AT_A_TIME]
        with self._driver.current(index):
            _check_runs(self._driver, stream, index)
            address, flush = words.device_address + 4 * (place % _WORDS_AT_A_TIME), self._flushes(index)
            self._driver.wait_word(stream, address, value, flush=flush)

    def _flushes(self, index: int) -> bool:
        """As `devices.flushed_by_streams`, asked once for each device."""
        if index not in self._flushed:
            self._flushed[index] = flushed_by_streams(self._driver, index)
        return self._flushed[index]

    def open(self, place: int, value: int) -> None:
        """For `Gate`. Who waits for an earlier value of the word has passed, or passes now (``GEQ``, cyclic)."""
        self._words[place // _WORDS_AT_A_TIME].host[place % _WORDS_AT_A_TIME] = value
        with self._lock:
            self._free.append((place, value))
