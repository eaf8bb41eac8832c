"""The yardstick of a network: the same pages through a TCP connection, gathered and scattered by the kernel.

Knows addresses and lengths of pages. Lists of pieces are made before anything is measured.
"""

from __future__ import annotations

import queue
import socket
import threading
import time

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.transport import unpace

__all__ = ["SocketReceiver", "SocketSender"]

_IOV_MAX = 1024
_TIMEOUT_S = 60.0
_ACK = b"!"


def _pieces(memory: NDArray[np.uint8], page_ids: NDArray[np.uint32], page_nbytes: int) -> list[list[memoryview]]:
    """One list a call: at most 1024 pages each."""
    view = memory.data
    starts = (page_ids.astype(np.int64) * page_nbytes).tolist()
    pages = [view[start : start + page_nbytes] for start in starts]
    return [pages[start : start + _IOV_MAX] for start in range(0, len(pages), _IOV_MAX)]


def _prepare(connection: socket.socket) -> None:
    """As the engine's own connections for pages: what the kernel can do, and not what it does unless told."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    unpace(connection)


def _rest(pieces: list[memoryview], done: int) -> list[memoryview]:
    """What is left of some pieces after ``done`` bytes of them."""
    for at, piece in enumerate(pieces):
        if done < len(piece):
            return [piece[done:], *pieces[at + 1 :]]
        done -= len(piece)
    return []


class SocketReceiver:
    """Listens on this host; a thread takes transfer after transfer into the same pages, and acknowledges each."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(_TIMEOUT_S)
        self.port: int = self._listener.getsockname()[1]
        self._calls: list[list[memoryview]] = []
        self._usable_ns: queue.Queue[int] = queue.Queue()
        self._connection: socket.socket | None = None
        self._thread: threading.Thread | None = None

    def use(self, memory: NDArray[np.uint8], page_ids: NDArray[np.uint32], page_nbytes: int) -> None:
        """Waits for the sender, then begins to take transfers into these pages."""
        self._calls = _pieces(memory, page_ids, page_nbytes)
        self._connection, _ = self._listener.accept()
        _prepare(self._connection)
        self._thread = threading.Thread(target=self._take, args=(self._connection,), daemon=True)
        self._thread.start()

    def _take(self, connection: socket.socket) -> None:
        while True:
            for call in self._calls:
                left = call
                while left:
                    done = connection.recvmsg_into(left)[0]
                    if done == 0:  # the sender has closed
                        return
                    left = _rest(left, done)
            self._usable_ns.put(time.monotonic_ns())
            connection.sendall(_ACK)

    def collect(self, count: int) -> NDArray[np.int64]:
        """When the next ``count`` transfers were complete, nanoseconds, int64 ``[count]``."""
        return np.array([self._usable_ns.get(timeout=_TIMEOUT_S) for _ in range(count)], np.int64)

    def close(self) -> None:
        """Ends the connection and the thread."""
        if self._connection is not None and self._thread is not None:
            self._connection.shutdown(socket.SHUT_RDWR)
            self._thread.join(_TIMEOUT_S)
            self._connection.close()
        self._listener.close()


class SocketSender:
    """The other end."""

    def __init__(self, port: int, memory: NDArray[np.uint8], page_ids: NDArray[np.uint32], page_nbytes: int) -> None:
        self._calls = _pieces(memory, page_ids, page_nbytes)
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S)
        _prepare(self._connection)

    def run(self) -> None:
        """One transfer; returns when the receiver has acknowledged it."""
        for call in self._calls:
            left = call
            while left:
                left = _rest(left, self._connection.sendmsg(left))
        if self._connection.recv(1) != _ACK:
            raise ConnectionError("the receiver has hung up")

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()
