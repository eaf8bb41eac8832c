"""All that touches ucxx, the Python binding of UCX: context, worker, progress thread.

Another binding could take its place: the rest of the room sees raw handles (``ucp_context_h`` and ``ucp_worker_h`` as
integers) and the native module ``_ucx``. Importing this module loads UCX, once, from the libucx wheel;
it leaves ``os.environ`` as it was: of what ucxx sets there, contexts see nothing. ``UCX_MEMTYPE_CACHE=n`` is among
that, so that UCX's cache of what kind of memory an address is, which registration asks, is on unless the user turns it
off.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping

from hurray_rdma.errors import TransportError


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


with _environment_kept():
    import libucx

    # First of all: the native module and ucxx resolve UCX by soname, and two copies in one process do not mix.
    libucx.load_library()
    from ucxx._lib import libucxx
    from ucxx.exceptions import UCXError

    from hurray_rdma.transport import _ucx

__all__ = ["BoundContext", "BoundWorker", "native"]

native = _ucx


class BoundContext:
    """A ``ucp_context_h`` with the RMA and WAKEUP features.

    Args:
        options: UCX configuration without the ``UCX_`` prefix; it outranks the environment.

    Raises:
        TransportError: UCX refuses the options.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        features = (libucxx.Feature.RMA, libucxx.Feature.WAKEUP)
        try:
            self._context = libucxx.UCXContext(dict(options), features)
        except UCXError as error:
            raise TransportError(
                f"UCX could not make a context: {error}",
                field="options",
                value=dict(options),
                fix="Check the names and values with `ucx_info -c -f`, which the libucx wheel has in libucx/bin",
            ) from error

    @property
    def owner(self) -> object:
        """Keeps the ``ucp_context_h`` alive; the ucxx object itself, which the garbage collector cannot empty."""
        return self._context

    @property
    def handle(self) -> int:
        """``ucp_context_h``."""
        return int(self._context.handle)

    def open_worker(self, on_start: Callable[[], None] | None = None) -> BoundWorker:
        """A worker of its own, with a progress thread that sleeps while nothing happens.

        Args:
            on_start: called on that thread before it does anything else.
        """
        return BoundWorker(self._context, on_start)


class BoundWorker:
    """A ``ucp_worker_h`` (multi-threaded) and the thread that progresses it when its peers need that.

    Emulated and tcp lanes want the target to progress; the thread sleeps in epoll until there is something to do.
    """

    def __init__(self, context: object, on_start: Callable[[], None] | None = None) -> None:
        try:
            self._worker = libucxx.UCXWorker(context)
            self._start(on_start)
            self.address: bytes = bytes(libucxx.UCXAddress.create_from_worker(self._worker).tobytes())
        except UCXError as error:
            raise TransportError(f"UCX could not make a worker: {error}") from error
        self._lock = threading.Lock()

    def _start(self, on_start: Callable[[], None] | None) -> None:
        if on_start is not None:
            self._worker.set_progress_thread_start_callback(on_start)
        self._worker.start_progress_thread(polling_mode=False, epoll_timeout=-1)

    def restart(self, on_start: Callable[[], None]) -> None:
        """Another progress thread in the place of the one that runs, with this ``on_start``; none if it is closed."""
        with self._lock:
            if self._worker is not None:
                self._worker.stop_progress_thread()
                self._start(on_start)

    @property
    def owner(self) -> object:
        """Keeps the ``ucp_worker_h`` alive, as `BoundContext.owner`."""
        return self._worker

    @property
    def handle(self) -> int:
        """``ucp_worker_h``.

        Raises:
            TransportError: the worker is closed.
        """
        if self._worker is None:
            raise TransportError("the UCX worker is closed")
        return int(self._worker.handle)

    def close(self) -> None:
        """Stops the progress thread and lets the worker go. Idempotent; close its endpoints first.

        An endpoint that could not be closed keeps the worker itself.
        """
        with self._lock:
            worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop_progress_thread()
