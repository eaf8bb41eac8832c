"""Workers and endpoints: who can be reached, over which lane, and when UCX has let go of the memory it was given.

All waits have a deadline, the native ones included.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from hurray_rdma.errors import TransportError
from hurray_rdma.transport.binding import BoundWorker, native
from hurray_rdma.transport.envelope import seal, unseal
from hurray_rdma.transport.lanes import LaneReport, parse_lanes
from hurray_rdma.transport.memory import RemoteRegion, hold
from hurray_rdma.transport.page_streams import PageStream
from hurray_rdma.transport.remote import Offsets, RemoteMemory, StopFlag
from hurray_rdma.transport.status import deadline_ns, raise_for
from hurray_rdma.transport.turns import take_turn

__all__ = ["Endpoint", "Worker"]

_WINDOW = 512
"""Operations in flight per plan: enough to fill any lane, few enough that a stop is heard soon."""
_CLOSE_TIMEOUT_S = 2.0

_stranded: list[Endpoint] = []
"""What UCX would not let go of: freeing it would let UCX read freed memory."""


class Worker:
    """One UCX worker with its progress thread. Made by `Context.open_worker`.

    Args:
        bound: the worker.
        current: entered wherever a thread of the caller's may progress it: UCX may ask CUDA then.
        owns: as of `Context`.
    """

    def __init__(
        self,
        bound: BoundWorker,
        current: Callable[[], AbstractContextManager[None]],
        owns: Callable[[RemoteRegion], bool],
    ) -> None:
        self._bound = bound
        self.current = current
        self.owns = owns
        self._unclosed: list[Endpoint] = []
        self.address: bytes = seal(bound.address)
        """What a peer needs to connect, in an envelope."""

    @property
    def handle(self) -> int:
        """``ucp_worker_h``."""
        return self._bound.handle

    def drain(self) -> None:
        """Puts what has reached this process, as messages of an emulated lane, where it belongs."""
        with self.current():
            native.drain(self.handle)

    def restart(self, on_start: Callable[[], None]) -> None:
        """As of `BoundWorker.restart`."""
        self._bound.restart(on_start)

    def connect(self, address: bytes, *, timeout_s: float, stop: StopFlag | None = None) -> Endpoint:
        """Connects to a peer's worker and picks the fastest lane that survives the peer's death.

        With error handling first; UCX has no one-sided lane for some transports then (tcp), and those are safe without
        it: a dead peer fails the flush. cma is not (the process would abort), so it is never used without.

        Args:
            address: the peer's `Worker.address`.
            timeout_s: budget for making the connection, both attempts together.
            stop: set it from another thread to give up early.

        Raises:
            TransferAbortedError: ``stop`` was set.
            ProtocolError: the address is damaged.
            TransportError: no transport reaches the peer.
            DeadlineExceededError: the peer's worker did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        raw = unseal(address, field="worker_address")
        stop = stop if stop is not None else StopFlag()
        endpoint = self._open(raw, error_handling=True, deadline=deadline, stop=stop)
        if not endpoint.lanes.emulated:
            return endpoint
        try:
            other = self._open(raw, error_handling=False, deadline=deadline, stop=stop)
        except BaseException:
            endpoint.close()
            raise
        if other.lanes.emulated or any(lane.transport == "cma" for lane in other.lanes.rma):
            other.close()
            return endpoint
        endpoint.close()
        return other

    def _open(self, raw: bytes, *, error_handling: bool, deadline: float, stop: StopFlag) -> Endpoint:
        try:
            with self.current():
                bound = native.Endpoint(self.handle, raw, error_handling, self._bound.owner)
        except native.UcxError as error:
            raise TransportError(
                f"no UCX transport reaches the peer's worker: {error}",
                status=error.status,
                fix="Both processes need a common transport: compare UCX_TLS and UCX_NET_DEVICES on the two sides",
            ) from error
        endpoint = Endpoint(self, bound, error_handling)
        try:
            # Lanes are known only after the wire-up, which a first flush completes.
            endpoint.flush(timeout_s=deadline - time.monotonic(), stop=stop)
            endpoint.read_lanes()
        except BaseException:
            endpoint.close()
            raise
        return endpoint

    def close(self) -> None:
        """Stops the progress thread. Idempotent; close its endpoints first.

        Endpoints that did not close, since a stopped peer takes no bytes, get one more chance. Those that still do not
        are kept, with all memory that UCX may touch for them, until the process ends.
        """
        _stranded.extend(endpoint for endpoint in self._unclosed if not endpoint.close())
        with self.current():
            self._bound.close()

    def adopt(self, endpoint: Endpoint) -> None:
        """Called by an endpoint that could not close: it must outlive its user."""
        if endpoint not in self._unclosed:
            self._unclosed.append(endpoint)


class Endpoint:
    """A connection to one peer's worker. Made by `Worker.connect`."""

    lanes: LaneReport

    def __init__(self, worker: Worker, bound: native.Endpoint, error_handling: bool) -> None:
        self._worker = worker
        self._bound = bound
        self._error_handling = error_handling
        self._remote_memories: list[RemoteMemory] = []
        self._in_use = threading.RLock()
        self._running: StopFlag | None = None
        self._held: list[tuple[native.Memory, native.RemoteKey]] = []  # in use by operations in flight
        self._late_keys: list[native.RemoteKey] = []

    @property
    def handle(self) -> int:
        """``ucp_ep_h``.

        Raises:
            TransportError: the endpoint is closed.
        """
        handle = self._bound.handle
        if handle == 0:
            raise TransportError("the endpoint is closed")
        return handle

    @property
    def closed(self) -> bool:
        """Whether nothing can be posted any more: closed here, or given up with a plan that did not end."""
        return self._bound.handle == 0

    @property
    def bound(self) -> native.Endpoint:
        """The native endpoint, for unpacking rkeys."""
        return self._bound

    def current(self) -> AbstractContextManager[None]:
        """As of `Worker`."""
        return self._worker.current()

    def owns(self, remote: RemoteRegion) -> bool:
        """As of `Worker`."""
        return self._worker.owns(remote)

    def read_lanes(self) -> None:
        """Asks UCX for the lanes (``ucp_ep_print_info``) and keeps them as ``lanes``."""
        self.lanes = parse_lanes(self._bound.info(), error_handling=self._error_handling)

    def flush(self, *, timeout_s: float, stop: StopFlag | None = None) -> None:
        """Waits until everything posted before has reached the peer (``ucp_ep_flush_nbx``).

        Raises:
            DeadlineExceededError, TransferAbortedError, PeerLostError, TransportError
        """
        with self.current():
            status = native.flush(
                self._worker.handle, self.handle, stop if stop is not None else StopFlag(), deadline_ns(timeout_s)
            )
        raise_for(status, "flush", timeout_s=timeout_s)

    def open_region(self, remote: RemoteRegion, *, stream: PageStream | None = None, index: int = 0) -> RemoteMemory:
        """Unpacks a peer's rkey for this endpoint (``ucp_ep_rkey_unpack``).

        Args:
            remote, stream, index: as of `RemoteMemory`.

        Raises:
            ProtocolError: the rkey is damaged.
            TransportError: UCX cannot use it, or the region is not in the memory that it is of.
        """
        memory = RemoteMemory(self, remote, stream=stream, index=index)
        self._remote_memories.append(memory)
        return memory

    def forget(self, memory: RemoteMemory) -> None:
        """Called by a `RemoteMemory` that closes."""
        if memory in self._remote_memories:
            self._remote_memories.remove(memory)

    def post(
        self,
        local: native.Memory,
        *,
        local_address: int,
        remote_address: int,
        rkey: native.RemoteKey,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        lengths: Offsets,
        get: bool,
        stop: StopFlag,
        timeout_s: float,
        describe: bool = False,
    ) -> tuple[int, int, int, int, bool, str]:
        """Posts a plan with ``ucp_put_nbx`` or ``ucp_get_nbx`` and flushes; returns what `native.post` does. For
        `RemoteMemory`.

        One plan at a time: an endpoint that must be closed, because what is in flight does not end, has no other user.
        The last of what it returns is empty unless ``describe``.

        Raises:
            DeadlineExceededError: another plan kept the endpoint busy for ``timeout_s``.
            RegistrationError: the region of ``local`` was closed meanwhile.
        """
        left_s = take_turn(self._in_use, "endpoint", stop=stop, timeout_s=timeout_s)
        try:
            handle = self.handle
            self._running = stop
            hold(local)
            self._held.append((local, rkey))
            outcome = native.post(
                self._worker.handle,
                handle,
                get,
                local_address,
                local,
                remote_address,
                rkey,
                local_offsets,
                remote_offsets,
                lengths,
                _WINDOW,
                stop,
                deadline_ns(left_s),
                describe,
            )
            posted, completed, *_ = outcome
            if completed == posted:
                self._held.pop()
                local.release()
            else:
                self.close()
            return outcome
        finally:
            self._running = None
            self._in_use.release()

    @property
    def holds_memory(self) -> bool:
        """True while a plan runs, or operations of a failed one are in flight and may still read their source.

        It stays so only for a peer that takes no more bytes over tcp, where UCX cannot cancel; `close` asks again.
        """
        return bool(self._held)

    def keep(self, rkey: native.RemoteKey) -> None:
        """Takes over a key that operations in flight may use, to close it after them."""
        self._late_keys.append(rkey)

    def close(self) -> bool:
        """Ends a running plan, closes the remote keys, then the endpoint; True once UCX has let go of all memory.

        Idempotent; after False (see `holds_memory`) the worker keeps the endpoint alive and tries again when it closes.
        """
        running = self._running
        if running is not None:
            running.set()
        with self._in_use, self.current():
            for memory in tuple(self._remote_memories):
                memory.close()
            if not self._bound.close(deadline_ns(_CLOSE_TIMEOUT_S)):
                self._worker.adopt(self)
                return False
            while self._held:
                memory_held, _ = self._held.pop()
                memory_held.release()
            while self._late_keys:
                self._late_keys.pop().close()
            return True
