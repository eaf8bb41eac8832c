"""Workers and endpoints, and moving a plan over one: who can be reached, over which lane, and how bytes go there.

A plan here is three arrays of offsets and lengths; the room above decides what they mean. All waits have a deadline,
the native ones included, and a plan that did not end well says whether its memory is still in use.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import (
    DeadlineExceededError,
    GeometryError,
    HurrayError,
    PeerLostError,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.transport.binding import BoundWorker, native
from hurray_rdma.transport.envelope import seal, unseal
from hurray_rdma.transport.lanes import LaneReport, parse_lanes
from hurray_rdma.transport.mappings import mapping_kind
from hurray_rdma.transport.memory import Region, RemoteRegion

__all__ = ["Endpoint", "Moved", "Path", "RemoteMemory", "StopFlag", "Worker"]

Offsets = NDArray[np.uint64]
StopFlag = native.StopFlag

_WINDOW = 512
"""Operations in flight per plan: enough to fill any lane, few enough that a stop is heard soon."""
_CLOSE_TIMEOUT_S = 2.0
_TIMED_OUT, _CANCELED = -20, -16  # ucs_status_t
_PEER_GONE = frozenset({-25, -24, -6, -80})  # CONNECTION_RESET, NOT_CONNECTED, UNREACHABLE, ENDPOINT_TIMEOUT


_stranded: list[Endpoint] = []
"""What UCX would not let go of: freeing it would let UCX read freed memory."""


class Path(Enum):
    """How bytes reach a remote region."""

    MAPPED = "mapped"
    """This process maps the peer's memory (``ucp_rkey_ptr``) and stores into it."""
    PUT = "put"
    """``ucp_put_nbx`` and ``ucp_ep_flush_nbx``."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What moving a plan did; all of it has reached its destination."""

    num_operations: int
    """Puts posted, or pieces copied through a mapping."""
    nbytes: int
    seconds: float


class Worker:
    """One UCX worker with its progress thread. Made by `Context.open_worker`."""

    def __init__(self, bound: BoundWorker) -> None:
        self._bound = bound
        self._unclosed: list[Endpoint] = []
        self.address: bytes = seal(bound.address)
        """What a peer needs to connect, in an envelope."""

    @property
    def handle(self) -> int:
        """``ucp_worker_h``."""
        return self._bound.handle

    def connect(self, address: bytes, *, timeout_s: float) -> Endpoint:
        """Connects to a peer's worker and picks the fastest lane that survives the peer's death.

        With error handling first; UCX has no one-sided lane for some transports then (tcp), and those are safe without
        it: a dead peer fails the flush. cma is not (the process would abort), so it is never used without.

        Args:
            address: the peer's `Worker.address`.
            timeout_s: budget for making the connection, both attempts together.

        Raises:
            ProtocolError: the address is damaged.
            TransportError: no transport reaches the peer.
            DeadlineExceededError: the peer's worker did not answer in time.
        """
        deadline = time.monotonic() + timeout_s
        raw = unseal(address, field="worker_address")
        endpoint = self._open(raw, error_handling=True, deadline=deadline)
        if not endpoint.lanes.emulated:
            return endpoint
        try:
            other = self._open(raw, error_handling=False, deadline=deadline)
        except BaseException:
            endpoint.close()
            raise
        if other.lanes.emulated or any(lane.transport == "cma" for lane in other.lanes.rma):
            other.close()
            return endpoint
        endpoint.close()
        return other

    def _open(self, raw: bytes, *, error_handling: bool, deadline: float) -> Endpoint:
        try:
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
            endpoint.flush(timeout_s=deadline - time.monotonic())
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
    def bound(self) -> native.Endpoint:
        """The native endpoint, for unpacking rkeys."""
        return self._bound

    def read_lanes(self) -> None:
        """Asks UCX for the lanes (``ucp_ep_print_info``) and keeps them as ``lanes``."""
        self.lanes = parse_lanes(self._bound.info(), error_handling=self._error_handling)

    def flush(self, *, timeout_s: float) -> None:
        """Waits until everything posted before has reached the peer (``ucp_ep_flush_nbx``).

        Raises:
            DeadlineExceededError, PeerLostError, TransportError
        """
        deadline_ns = _deadline_ns(timeout_s)
        _raise_for(native.flush(self._worker.handle, self.handle, deadline_ns), "flush", timeout_s=timeout_s)

    def open_region(self, remote: RemoteRegion) -> RemoteMemory:
        """Unpacks a peer's rkey for this endpoint (``ucp_ep_rkey_unpack``).

        Raises:
            ProtocolError: the rkey is damaged.
            TransportError: UCX cannot use it.
        """
        memory = RemoteMemory(self, remote)
        self._remote_memories.append(memory)
        return memory

    def forget(self, memory: RemoteMemory) -> None:
        """Called by a `RemoteMemory` that closes."""
        if memory in self._remote_memories:
            self._remote_memories.remove(memory)

    def put(
        self,
        src: native.Memory,
        *,
        src_address: int,
        dst_address: int,
        rkey: native.RemoteKey,
        src_offsets: Offsets,
        dst_offsets: Offsets,
        lengths: Offsets,
        stop: StopFlag,
        timeout_s: float,
    ) -> tuple[int, int, int, int, bool]:
        """Posts a plan with ``ucp_put_nbx`` and flushes; returns what `native.post` does. For `RemoteMemory.write`.

        One plan at a time: an endpoint that must be closed, because what is in flight does not end, has no other user.

        Raises:
            DeadlineExceededError: another plan kept the endpoint busy for ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        if not self._in_use.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineExceededError("the endpoint was busy all the time", field="timeout_s", value=timeout_s)
        try:
            handle = self.handle
            self._running = stop
            src.hold()
            self._held.append((src, rkey))
            outcome = native.post(
                self._worker.handle,
                handle,
                False,
                src_address,
                src,
                dst_address,
                rkey,
                src_offsets,
                dst_offsets,
                lengths,
                _WINDOW,
                stop,
                _deadline_ns(deadline - time.monotonic()),
            )
            posted, completed, *_ = outcome
            if completed == posted:
                self._held.pop()
                src.release()
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
        with self._in_use:
            for memory in tuple(self._remote_memories):
                memory.close()
            if not self._bound.close(_deadline_ns(_CLOSE_TIMEOUT_S)):
                self._worker.adopt(self)
                return False
            while self._held:
                memory_held, _ = self._held.pop()
                memory_held.release()
            while self._late_keys:
                self._late_keys.pop().close()
            return True


class RemoteMemory:
    """A peer's region, reachable over one endpoint: the place that plans are written to."""

    def __init__(self, endpoint: Endpoint, remote: RemoteRegion) -> None:
        self._endpoint = endpoint
        self.remote = remote
        try:
            self._rkey = native.RemoteKey(endpoint.bound, unseal(remote.rkey, field="rkey"))
        except native.UcxError as error:
            raise TransportError(f"the peer's rkey cannot be used here: {error}", status=error.status) from error
        self._lock = threading.Lock()
        self._busy = 0
        self._closing = False
        self._pointer = self._rkey.pointer(remote.remote_addr)

    @property
    def path(self) -> Path:
        """How `write` will move bytes."""
        return Path.MAPPED if self._pointer else Path.PUT

    @property
    def lane(self) -> str:
        """The transport that carries the bytes: the kind of shared memory when mapped, else the endpoint's RMA lane."""
        return mapping_kind(self._pointer) if self._pointer else self._endpoint.lanes.name

    def write(
        self,
        src: Region,
        *,
        src_offsets: Offsets,
        dst_offsets: Offsets,
        lengths: Offsets,
        stop: StopFlag,
        timeout_s: float,
    ) -> Moved:
        """Writes a plan and waits until every byte is at the peer. Blocks; releases the GIL.

        Args:
            src: this process's region; must stay registered, its bytes unchanged, until the call returns.
            src_offsets: uint64 ``[num_operations]``, bytes from the start of ``src``.
            dst_offsets: uint64 ``[num_operations]``, bytes from the start of the remote region.
            lengths: uint64 ``[num_operations]``, bytes, each > 0.
            stop: set it from another thread to end the plan early.
            timeout_s: budget for the whole plan.

        Raises:
            GeometryError: a piece lies outside either region; nothing was written.
            DeadlineExceededError: out of time.
            TransferAbortedError: ``stop`` was set.
            PeerLostError, TransportError: the fabric failed.

        Whether bytes of a failed plan may still arrive is told by ``in_doubt`` of the error; whether UCX may still read
        the source by `Endpoint.holds_memory` (it is kept registered, whatever its owner does).
        """
        _check_inside("src", src_offsets, lengths, src.nbytes)
        _check_inside("dst", dst_offsets, lengths, self.remote.nbytes)
        memory = src.memory
        self._enter()
        started = time.monotonic()
        try:
            memory.hold()
            try:
                if self._pointer:
                    outcome = native.copy(
                        src.address,
                        self._pointer,
                        src_offsets,
                        dst_offsets,
                        lengths,
                        stop,
                        _deadline_ns(timeout_s),
                    )
                else:
                    outcome = self._endpoint.put(
                        memory,
                        src_address=src.address,
                        dst_address=self.remote.remote_addr,
                        rkey=self._rkey,
                        src_offsets=src_offsets,
                        dst_offsets=dst_offsets,
                        lengths=lengths,
                        stop=stop,
                        timeout_s=timeout_s,
                    )
            finally:
                memory.release()
        finally:
            self._leave()
        posted, _, nbytes, status, settled = outcome
        try:
            _raise_for(status, "put", timeout_s=timeout_s)
        except HurrayError as error:
            error.in_doubt = not settled
            raise
        return Moved(num_operations=posted, nbytes=nbytes, seconds=time.monotonic() - started)

    def _enter(self) -> None:
        with self._lock:
            if self._closing:
                raise TransportError("the remote memory is closed")
            self._busy += 1

    def _leave(self) -> None:
        with self._lock:
            self._busy -= 1
            close_now = self._closing and self._busy == 0
        if close_now:
            self._close_key()

    def _close_key(self) -> None:
        if self._endpoint.holds_memory:
            self._endpoint.keep(self._rkey)
        else:
            self._rkey.close()

    def close(self) -> None:
        """Destroys the key as soon as no `write` uses it. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            close_now = self._busy == 0
        self._endpoint.forget(self)
        if close_now:
            self._close_key()


def _deadline_ns(timeout_s: float) -> int:
    return time.monotonic_ns() + max(0, round(timeout_s * 1e9))


def _check_inside(side: str, offsets: Offsets, lengths: Offsets, nbytes: int) -> None:
    if len(lengths) == 0:
        return
    ends = offsets + lengths
    wrong = (ends < offsets) | (ends > np.uint64(nbytes))
    if wrong.any():
        at = int(wrong.argmax())
        raise GeometryError(
            f"piece {at} ends at byte {int(offsets[at]) + int(lengths[at])} of a region of {nbytes}",
            field=f"{side}_offsets[{at}]",
            value=int(offsets[at]),
        )


def _raise_for(status: int, what: str, *, timeout_s: float) -> None:
    """One place where ``ucs_status_t`` becomes an exception."""
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
        raise PeerLostError(f"{what} failed: {text}", fix="Check that the peer process is alive, then connect again")
    raise TransportError(f"{what} failed: {text}", status=status)
