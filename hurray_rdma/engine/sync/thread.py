"""The thread of one engine: an event loop, calls of it from other threads, and an end that leaves none of them waiting.

Knows coroutines, threads, forks and the interpreter's exit; nothing of what engines do.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from hurray_rdma.engine.sync.call import Call
from hurray_rdma.errors import ConfigError, TransferAbortedError, TransportError

__all__ = ["EngineThread", "on_loop"]

_log = logging.getLogger(__name__)

T = TypeVar("T")


async def on_loop(function: Callable[..., T], *args: object) -> T:
    """Calls a plain function on the loop."""
    return function(*args)


class EngineThread:
    """An event loop in a thread of its own. Not daemonic: `stop` joins it, at the interpreter's exit at the latest.

    Args:
        name: of the engine.
        at_end: closes the engine; runs on the loop after every call has ended.
    """

    def __init__(self, name: str, *, at_end: Callable[[], Awaitable[None]]) -> None:
        self._name = name
        self._at_end = at_end
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name=f"hurray-engine-{name}")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._stopping = False
        self._calls: set[Call[Any]] = set()
        self._ended: Future[None] = Future()

    def start(self) -> None:
        """Makes the loop and runs it.

        Raises:
            ConfigError: it was started before.
            TransportError: this is a forked child of the process that made it.
        """
        self._check_process()
        if self._loop is not None:
            raise ConfigError("was started before", field="engine", value=self._name, fix="Make another one")
        loop = self._loop = asyncio.new_event_loop()
        try:
            self._thread.start()
        except BaseException:
            self._loop = None
            loop.close()
            raise
        _running.add(self)

    def submit(self, coroutine: Coroutine[Any, Any, T], *, ends: bool = False) -> Call[T]:
        """Runs a coroutine, waits for nothing. On any thread, the engine's own included.

        Args:
            coroutine: is closed where it cannot run.
            ends: as of `Call`.

        Raises:
            ConfigError: not started.
            TransportError: in a forked child.
        """
        call = self._prepare(coroutine, ends=ends)
        self._post(call)
        return call

    def run(self, coroutine: Coroutine[Any, Any, T], *, undo: Callable[[T], None] | None = None) -> T:
        """Runs a coroutine and waits for it; what a signal's handler raises meanwhile cancels it and waits on.

        Args:
            coroutine: has a deadline of its own.
            undo: gives back a result that nobody will get, since the caller was interrupted just then.

        Raises:
            ConfigError: not started, or on the engine's own thread, which would wait for itself.
            TransferAbortedError: the engine was closed.
            TransportError: in a forked child.
            BaseException: what the coroutine raises.
        """
        self._check_thread(coroutine)
        call = self._prepare(coroutine, ends=False)
        try:
            try:
                self._post(call)
                call.exception()  # waits, raises nothing of the call's
            except BaseException:
                call.cancel()
                wait([call])
                if undo is not None and not call.cancelled() and call.exception() is None:
                    undo(call.result())
                raise
            return call.result()
        finally:
            del call  # its error's traceback has this frame

    def end(self, coroutine: Coroutine[Any, Any, None]) -> bool:
        """Runs a coroutine that ends something, and waits for it; neither the engine's end nor a signal cancels it.

        False if the engine has ended instead, and so everything it had.

        Raises:
            ConfigError, TransportError, BaseException: as `run`.
        """
        self._check_thread(coroutine)
        call = self.submit(coroutine, ends=True)
        try:
            call.exception()
            if call.refused:
                self._thread.join()
                return False
            call.result()
            return True
        finally:
            del call

    def stop(self) -> None:
        """Ends calls under way, then the engine, the loop and the thread. Idempotent, on several threads at once, too.

        Goes on when the caller is interrupted. Does nothing in a forked child: the engine is its parent's.

        Raises:
            ConfigError: on the engine's own thread.
            BaseException: what ``at_end`` raises.
        """
        if self._loop is None or os.getpid() != self._pid:
            return
        self._check_thread(None)
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._ended.result()

    @property
    def name(self) -> str:
        """Of the engine."""
        return self._name

    @property
    def is_own(self) -> bool:
        """Whether it is of this process: after a fork the child has a copy that runs nowhere."""
        return os.getpid() == self._pid

    @property
    def is_current(self) -> bool:
        """Whether the caller is on it."""
        return threading.get_ident() == self._thread.ident

    # On the thread.

    def _run(self) -> None:
        try:
            loop = self._loop
            assert loop is not None
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                runner.run(self._main())
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)
        finally:
            self._refuse_calls()
            _running.discard(self)

    async def _main(self) -> None:
        await self._stop.wait()
        # From here on `_begin` refuses, so that no task joins these.
        begun = [(call, call.task) for call in list(self._calls) if call.task is not None]
        for call, task in begun:
            if not call.ends:
                task.cancel()
        tasks = {task for _, task in begun}
        if tasks:
            _, tasks = await asyncio.wait(tasks, timeout=_CANCELLED_S)
        await self._at_end()
        if tasks:  # whose pages may have been written until the engine's end
            await asyncio.wait(tasks)

    def _begin(self, call: Call[Any]) -> None:
        if self._stopping:
            self._calls.discard(call)
            call.refuse()
            return
        call.begin().add_done_callback(lambda _: self._calls.discard(call))

    # On any thread.

    def _prepare(self, coroutine: Coroutine[Any, Any, T], *, ends: bool) -> Call[T]:
        try:
            self._check_process()
            if self._loop is None:
                raise ConfigError("the engine is not running", field="engine", value=self._name, fix="Use `with`")
        except BaseException:
            coroutine.close()
            raise
        return Call(coroutine, self._loop, ends=ends, closed=self._closed)

    def _post(self, call: Call[Any]) -> None:
        self._calls.add(call)
        try:
            call.loop.call_soon_threadsafe(self._begin, call)
        except RuntimeError:  # the loop has been closed
            self._refuse_calls()

    def _refuse_calls(self) -> None:
        """Those that came too late for the loop; each is refused by whoever takes it out."""
        while self._calls:
            with contextlib.suppress(KeyError):
                self._calls.pop().refuse()

    def _closed(self) -> TransferAbortedError:
        return TransferAbortedError(f"engine {self._name!r} was closed")

    def _check_process(self) -> None:
        if not self.is_own:
            raise TransportError(
                f"engine {self._name!r} was made in process {self._pid} and does not run in its forked child "
                f"{os.getpid()}",
                fix="Start processes with multiprocessing's 'spawn' method, or make the engine after the fork",
            )

    def _check_thread(self, coroutine: Coroutine[Any, Any, Any] | None) -> None:
        if self.is_current:
            if coroutine is not None:
                coroutine.close()
            raise ConfigError(
                "is the engine's own thread, which would wait for itself",
                field="thread",
                value=self._thread.name,
                fix="In callbacks of its futures use send_async and fetch_async, or hand over to another thread",
            )


_CANCELLED_S = 5.0
"""What was cancelled takes a moment to end in order."""

_running: set[EngineThread] = set()
"""What the interpreter's exit has to stop."""


def _stop_all() -> None:
    for thread in list(_running):
        if not thread.is_own:
            continue
        try:
            thread.stop()
            warnings.warn(f"engine {thread.name!r} was not closed before the exit", ResourceWarning, stacklevel=2)
        except Exception:
            _log.exception("engine %r could not be closed at exit", thread.name)


# `atexit` is too late: its functions run after threads were joined, and after concurrent.futures, on which the engine's
# end relies, has shut its own threads down; by this same hook.
threading._register_atexit(_stop_all)  # type: ignore[attr-defined]
