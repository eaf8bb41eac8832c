"""Page streams: TCP connections for page bytes, where UCX has nothing better than TCP itself between two processes.

The connecting side opens one beside each session with a ticket, good for one connection, that it was given there. Both
sides prove that they have it, and neither shows it: who else listens at the port, or listens in, learns nothing of it.
Over it `PageStream.move` writes into the other side's regions, or reads from them, straight between pages and socket.
The listening side does that in a thread for each connection, without the GIL, and holds every piece to what the session
has been permitted (`Permits`): nothing else is touched, and when a permit has been removed, nothing lands any more.

Knows regions, pages as numbers, and sockets; neither UCX nor what a transfer is. Nothing here is encrypted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import (
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
    ProtocolError,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.transport import _page_streams as native
from hurray_rdma.transport.binding import native as ucx_native
from hurray_rdma.transport.status import deadline_ns
from hurray_rdma.transport.turns import take_turn

__all__ = ["Guest", "PageStream", "PageStreamListener", "Permits", "unpace"]

_log = logging.getLogger(__name__)

Permits = native.Permits
StopFlag = ucx_native.StopFlag
Offsets = NDArray[np.uint64]

_GREETING = b"hurray/2"
_TICKET_NBYTES = 32
_NAME_NBYTES = 16
_NONCE_NBYTES = 16
_PROOF_NBYTES = 32
_HANDSHAKE_S = 5.0
_TICKET_S = 10.0
"""How long a ticket that nobody uses is good."""
_MAX_PORTS = 8
"""Tried until one is free on all hosts."""
_KEEP_S = 20
_UNPACED = b"reno"
"""Congestion control that every Linux has and lets everybody use, unless it was told not to."""
_MAX_UNKNOWN = 64
"""Connections that may be about to show their ticket; the oldest is cut for a new one."""
_SHORT_S = 0.02
"""Until it is tried again to accept a connection, where there were too many files."""


class PageStream:
    """The connecting end. Made by `open`; thread-safe, one plan at a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._in_use = threading.Lock()
        self._closed = False

    @classmethod
    def open(cls, host: str, port: int, ticket: bytes, *, timeout_s: float) -> PageStream:
        """Connects; blocks.

        Args:
            host, port: of the `PageStreamListener`.
            ticket: what it expects.
            timeout_s: for all of it.

        Raises:
            TransportError: it cannot be reached in time, or does not know the ticket, or is not who gave it.
        """
        deadline = time.monotonic() + timeout_s
        try:
            connection = socket.create_connection((host, port), timeout=max(0.001, timeout_s))
        except OSError as error:
            raise TransportError(f"port {port} of {host} cannot be reached: {_why(error)}") from error
        try:
            _prepare(connection)
            nonce = os.urandom(_NONCE_NBYTES)
            connection.sendall(_GREETING + _name(ticket) + nonce)
            answer = _read(connection, _NONCE_NBYTES + _PROOF_NBYTES, deadline)
            if len(answer) < _NONCE_NBYTES + _PROOF_NBYTES:
                raise TransportError(f"port {port} of {host} does not take the ticket")
            nonces = nonce + answer[:_NONCE_NBYTES]
            if not hmac.compare_digest(answer[_NONCE_NBYTES:], _proof(ticket, b"server", nonces)):
                raise TransportError(f"port {port} of {host} is not who gave the ticket")
            connection.sendall(_proof(ticket, b"client", nonces))
            if _read(connection, len(_GREETING), deadline) != _GREETING:
                raise TransportError(f"port {port} of {host} does not take the ticket any more")
            connection.setblocking(False)
        except OSError as error:
            connection.close()
            if isinstance(error, HurrayError):
                raise
            raise TransportError(f"port {port} of {host} does not take the ticket: {_why(error)}") from error
        return cls(connection)

    @property
    def closed(self) -> bool:
        """Whether nothing can be moved any more: closed here, or cut."""
        if not self._closed and self._in_use.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._in_use.release()
        return self._closed

    def _look(self) -> None:
        """Between two plans nothing comes but the end."""
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return
        except OSError:
            pass
        self._cut()

    def move(
        self,
        local_address: int,
        *,
        transfer_id: int,
        region_index: int,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        lengths: Offsets,
        get: bool,
        stop: StopFlag,
        timeout_s: float,
    ) -> int:
        """Moves a plan to the other side, or (``get``) from there; returns the bytes moved when all are in place.
        Whether what came from there was still what it should be, says the acknowledgement of the transfer.

        The local memory is free when it returns or raises, and nothing is written into it any more. What the other side
        has not taken by then it takes only while it permits that, maybe as the memory is by then (page_lending.h).

        Args:
            local_address: first byte of this side's region.
            transfer_id: under whose permit.
            region_index: of the other side's region.
            local_offsets, remote_offsets, lengths: uint64 ``[num_operations]``, bytes.
            stop, timeout_s: as of `RemoteMemory.write`.

        Raises:
            DeadlineExceededError, TransferAbortedError: too late, or not wanted any more, on either side.
            PeerLostError: the connection was cut.
            ProtocolError: the other side says that the plan is not what it has permitted.
        """
        left_s = take_turn(self._in_use, "connection for pages", stop=stop, timeout_s=timeout_s)
        try:
            if self._closed:
                raise PeerLostError("the connection for pages is closed")
            nbytes, status, intact = native.move(
                self._socket.fileno(),
                get,
                transfer_id,
                region_index,
                local_address,
                local_offsets,
                remote_offsets,
                lengths,
                stop.address,
                deadline_ns(left_s),
            )
            if not intact:
                self._cut()
        finally:
            self._in_use.release()
        _raise_for(status, timeout_s=timeout_s)
        return nbytes

    def _cut(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cuts the connection; a plan under way fails. Idempotent; blocks until that has returned."""
        self._cut()
        with self._in_use:
            self._socket.close()


@dataclass(frozen=True, slots=True, eq=False)
class Guest:
    """Whom a ticket was made for."""

    ticket: bytes = field(repr=False)
    permits: Permits
    expires: float
    """Until when the ticket can be used, on the monotonic clock, seconds."""


class PageStreamListener:
    """Accepts page streams on some addresses, all with one port, and serves each in a thread of its own.

    Args:
        hosts: addresses of this machine.
        on_end: told, on some thread, of a guest whose connection has ended, and why; None is in order.

    Raises:
        TransportError: there is no port that can be listened on at all of them, or no thread.
    """

    def __init__(self, hosts: Iterable[str], *, on_end: Callable[[Guest, HurrayError | None], None]) -> None:
        self._on_end = on_end
        self._lock = threading.Lock()
        self._guests: dict[bytes, Guest] = {}
        """Whose connection has not come yet, by the names of their tickets; the oldest first."""
        self._unknown: dict[socket.socket, None] = {}
        self._serving: dict[Guest, socket.socket] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._listeners: list[socket.socket] = []
        self.port = 0
        """Of all addresses."""
        try:
            self._listen(tuple(hosts))
            for listener in self._listeners:
                self._start(self._accept, listener)
        except (OSError, RuntimeError) as error:  # no more threads
            self.close()
            why = _why(error) if isinstance(error, OSError) else str(error)
            raise TransportError(f"no port for pages can be listened on: {why}") from error

    def _listen(self, hosts: tuple[str, ...]) -> None:
        """On one port of all hosts: at another process's nobody must knock."""
        for left in reversed(range(_MAX_PORTS)):
            try:
                for host in hosts:
                    family = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
                    self._listeners.append(socket.create_server((host, self.port), family=family))
                    self.port = self._listeners[-1].getsockname()[1]
                return
            except OSError as error:
                if error.errno != errno.EADDRINUSE or not left:
                    raise
                while self._listeners:
                    self._listeners.pop().close()
                self.port = 0

    def expect(self) -> Guest:
        """Makes a ticket, good for one connection within 10 s, and permits that are empty yet. `dismiss` ends it."""
        now = time.monotonic()
        guest = Guest(os.urandom(_TICKET_NBYTES), Permits(), now + _TICKET_S)
        with self._lock:
            while self._guests and next(iter(self._guests.values())).expires <= now:
                del self._guests[next(iter(self._guests))]
            self._guests[_name(guest.ticket)] = guest
        return guest

    def dismiss(self, guest: Guest) -> None:
        """The guest's ticket is void, and its connection is cut. Idempotent."""
        with self._lock:
            self._guests.pop(_name(guest.ticket), None)
            connection = self._serving.pop(guest, None)
            if connection is not None:
                _shut(connection)

    def close(self) -> None:
        """Cuts all connections; returns when no thread is left. Idempotent."""
        with self._lock:
            self._closed = True
            self._guests.clear()
            for connection in (*self._listeners, *self._unknown, *self._serving.values()):
                _shut(connection)
            threads = tuple(self._threads)
        for thread in threads:
            thread.join()
        for listener in self._listeners:
            listener.close()

    def _start(self, work: Callable[[socket.socket], None], connection: socket.socket) -> None:
        def run() -> None:
            try:
                work(connection)
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name=f"hurray-pages-{self.port}", daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except BaseException:
            self._threads.discard(thread)
            raise

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    time.sleep(_SHORT_S)
                continue
            with self._lock:
                if self._closed:
                    connection.close()
                    return
                if len(self._unknown) >= _MAX_UNKNOWN:
                    oldest = next(iter(self._unknown))
                    del self._unknown[oldest]
                    _shut(oldest)
                self._unknown[connection] = None
                try:
                    self._start(self._receive, connection)
                except RuntimeError as error:  # no more threads
                    _log.warning("a connection for pages was turned away: %s", error)
                    del self._unknown[connection]
                    connection.close()

    def _receive(self, connection: socket.socket) -> None:
        with connection:
            guest = self._greet(connection)
            if guest is None:
                return
            try:
                error = _served(guest.permits.serve(connection.fileno()))
            finally:
                with self._lock:
                    self._serving.pop(guest, None)
        self._on_end(guest, error)

    def _greet(self, connection: socket.socket) -> Guest | None:
        """Whose connection it is; None is nobody's."""
        guest = None
        with contextlib.suppress(OSError):
            _prepare(connection)
            guest = self._recognize(connection, time.monotonic() + _HANDSHAKE_S)
            connection.setblocking(False)
        with self._lock:
            self._unknown.pop(connection, None)
            # Only now: who cannot prove that he has a ticket must not use it up.
            if guest is None or self._guests.pop(_name(guest.ticket), None) is None:
                _log.info("a connection for pages came without a ticket that is expected")
                return None
            self._serving[guest] = connection
        try:
            connection.sendall(_GREETING)
        except OSError:
            with self._lock:
                self._serving.pop(guest, None)
            return None
        return guest

    def _recognize(self, connection: socket.socket, deadline: float) -> Guest | None:
        """Who proves to have the ticket that he names.

        Raises:
            OSError: not in time, or cut.
        """
        hello = _read(connection, len(_GREETING) + _NAME_NBYTES + _NONCE_NBYTES, deadline)
        name, nonce = hello[len(_GREETING) : -_NONCE_NBYTES], hello[-_NONCE_NBYTES:]
        with self._lock:
            guest = self._guests.get(name)
        if guest is None or guest.expires <= time.monotonic() or not hello.startswith(_GREETING):
            return None
        ours = os.urandom(_NONCE_NBYTES)
        nonces = nonce + ours
        connection.sendall(ours + _proof(guest.ticket, b"server", nonces))
        proof = _read(connection, _PROOF_NBYTES, deadline)
        return guest if hmac.compare_digest(proof, _proof(guest.ticket, b"client", nonces)) else None


def _name(ticket: bytes) -> bytes:
    """Tells which ticket it is, and nothing else of it."""
    return hashlib.sha256(ticket).digest()[:_NAME_NBYTES]


def _proof(ticket: bytes, role: bytes, nonces: bytes) -> bytes:
    """What only who has the ticket can say: that side of the connection that both nonces belong to."""
    return hmac.digest(ticket, role + nonces, "sha256")


def _prepare(connection: socket.socket) -> None:
    """Nothing waits for more to send; and what lies idle is kept open by all that is between, or found to be cut."""
    for level, name, value in (
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEP_S),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    ):
        connection.setsockopt(level, name, value)
    unpace(connection)


def unpace(connection: socket.socket) -> None:
    """On one machine there is no path to probe: an algorithm that paces (bbr) is a timer for every few segments there.
    Other connections keep what the administrator has chosen."""
    if connection.getpeername()[0] == connection.getsockname()[0]:
        with contextlib.suppress(OSError):  # it may be forbidden, and another is as right
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _UNPACED)


def _read(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    """Exactly so many bytes; fewer where the other end closes before.

    Raises:
        OSError: not in time, or cut.
    """
    data = b""
    while len(data) < nbytes:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def _shut(connection: socket.socket) -> None:
    """Wakes whoever waits for it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _why(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _served(outcome: tuple[int, int, int, int, int]) -> HurrayError | None:
    """Why the other end is served no more."""
    status, transfer_id, region, offset, nbytes = outcome
    if status == native.OK:
        return None
    if status == native.FORBIDDEN:
        return ProtocolError(
            f"a parcel of transfer {transfer_id} names {nbytes} bytes from byte {offset} of region {region}, which are "
            "not inside pages that it may use"
        )
    if status == native.BROKEN:
        return ProtocolError("what came over the connection for pages is no parcel")
    return PeerLostError("the connection for pages was cut")


def _raise_for(status: int, *, timeout_s: float) -> None:
    if status == native.OK:
        return
    if status == native.TIMED_OUT:
        raise DeadlineExceededError(f"pages did not move within {timeout_s:.3g} s", field="timeout_s", value=timeout_s)
    if status == native.STOPPED:
        raise TransferAbortedError("moving pages was stopped")
    if status == native.ENDED:
        raise TransferAbortedError("the other side permits no more of this transfer")
    if status == native.FORBIDDEN:
        raise ProtocolError("the other side has not permitted what the plan names")
    if status == native.BROKEN:
        raise ProtocolError("what the other side answers over the connection for pages makes no sense")
    if status == native.NO_MEMORY:
        raise TransportError("there is no memory for a parcel")
    raise PeerLostError("the connection for pages was cut", fix="Check that the peer process is alive")
