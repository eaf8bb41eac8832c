"""Pages that the kernel is lent by a push over a page stream: of all kinds of memory, and when they may change."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import resource
import signal
import socket
import struct
import termios
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from hurray_rdma.errors import PeerLostError, ProtocolError, TransferAbortedError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import PageStream, PageStreamListener, StopFlag
from hurray_rdma.transport import _page_streams as native
from tests.transport.test_page_streams import LARGE, NUM_LARGE, OK, WHOLE, both_ends, exactly, move, permit

MEMFD_SECRET = 447
NBYTES = 4 << 20


def open_files() -> int:
    gc.collect()  # what other tests have left would be closed while it is counted
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def tcp_pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Ours as of a page stream; theirs, whose kernel takes little that is not read."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 128 << 10)
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    with ours, theirs:
        theirs.settimeout(10)
        ours.setblocking(False)
        yield ours, theirs


def secret_memory(nbytes: int) -> mmap.mmap:
    """Of which the kernel gives no reference away, as of a driver's."""
    fd = ctypes.CDLL(None, use_errno=True).syscall(MEMFD_SECRET, 0)
    if fd < 0:
        pytest.skip("this kernel has no memfd_secret")
    try:
        os.ftruncate(fd, nbytes)
        return mmap.mmap(fd, nbytes)
    finally:
        os.close(fd)


@pytest.mark.parametrize("offset", [0, 1, 4095])
@pytest.mark.parametrize("page", [4096, 5000, 40_000, 3 << 19])
@pytest.mark.parametrize("kind", ["private", "shared", "secret", "half secret"])
def test_pages_of_any_memory_arrive_from_any_place(kind: str, page: int, offset: int) -> None:
    random = np.random.default_rng(page + offset)
    if kind == "private":
        here = random.integers(0, 256, NBYTES, np.uint8)
    else:
        secret = kind == "secret"
        here = np.frombuffer(secret_memory(NBYTES) if secret else mmap.mmap(-1, NBYTES), np.uint8)
        here[:] = random.integers(0, 256, NBYTES, np.uint8)
    num_pages = (NBYTES - offset) // page
    ours, theirs = random.permutation(num_pages), random.permutation(num_pages)
    plan = offset + ours * page, theirs * page, np.full(num_pages, page)
    there = np.zeros(num_pages * page, np.uint8)
    before = open_files()
    with both_ends() as (stream, guest, _), contextlib.ExitStack() as stack:
        if kind == "half secret":
            # What begins as memory that can be lent goes on as memory that cannot, within one piece.
            fd = ctypes.CDLL(None).syscall(MEMFD_SECRET, 0)
            if fd < 0:
                pytest.skip("this kernel has no memfd_secret")
            stack.callback(os.close, fd)
            os.ftruncate(fd, NBYTES // 2)
            content = here[NBYTES // 2 :].copy()
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            at = here.ctypes.data + NBYTES // 2
            flags = mmap.MAP_SHARED | 0x10  # MAP_FIXED
            arguments = ctypes.c_void_p(at), ctypes.c_size_t(NBYTES // 2), 3, flags, fd, ctypes.c_long(0)
            assert libc.mmap(*arguments) == at
            here[NBYTES // 2 :] = content
        permit(guest.permits, there, list(range(num_pages)), page=page)
        assert move(stream, here, plan) == num_pages * page
        assert not stream.closed
    expected = here[offset : offset + num_pages * page].reshape(num_pages, page)
    assert np.array_equal(there.reshape(num_pages, page)[theirs], expected[ours])
    assert open_files() <= before


def test_what_has_not_left_when_a_push_is_stopped_never_leaves() -> None:
    """What the receiver's kernel has by then may still change: so it is seen that pages are lent at all."""
    here, stop = np.ones(NUM_LARGE * LARGE, np.uint8), StopFlag()
    with tcp_pair() as (ours, theirs):
        before = open_files()
        stream, timer = PageStream(ours), threading.Timer(0.1, stop.set)
        timer.start()
        with pytest.raises(TransferAbortedError):
            move(stream, here, WHOLE, stop=stop)
        assert stream.closed
        assert open_files() <= before
        here[:] = 2
        came = bytearray()
        with pytest.raises(ConnectionResetError):
            while part := theirs.recv(1 << 20):
                came += part
        pages = came[32 + 2 * 16 :]
        assert set(pages) == {2}
        assert len(pages) < 2 << 20, "less than one parcel"


def two_transfers(connection: Connection) -> None:
    """Permits all of its pages to one transfer, and when it is told so to another instead."""
    memory = np.zeros(NUM_LARGE * LARGE, np.uint8)
    listener = PageStreamListener(["127.0.0.1"], on_end=lambda *_: None)
    first = listener.expect()
    permit(first.permits, memory, list(range(NUM_LARGE)), page=LARGE)
    connection.send((listener.port, first.ticket))
    connection.recv()
    first.permits.remove(1)
    memory[:] = 0
    second = listener.expect()
    permit(second.permits, memory, list(range(NUM_LARGE)), page=LARGE)
    connection.send(second.ticket)
    connection.recv()
    connection.send(np.unique(memory).tolist())
    listener.close()


def test_pages_that_change_after_an_aborted_push_are_not_seen_in_a_later_transfer() -> None:
    here, stop = np.ones(NUM_LARGE * LARGE, np.uint8), StopFlag()
    with Child(two_transfers) as child:
        port, ticket = child.receive()
        stream = PageStream.open("127.0.0.1", port, ticket, timeout_s=10)
        child.signal(signal.SIGSTOP)
        timer = threading.Timer(0.1, stop.set)
        timer.start()
        with pytest.raises(TransferAbortedError) as caught:
            move(stream, here, WHOLE, stop=stop)
        assert not caught.value.in_doubt
        here[:] = 9
        child.signal(signal.SIGCONT)  # it reads on what it has
        child.send("next")
        other = PageStream.open("127.0.0.1", port, child.receive(), timeout_s=10)
        every_other = tuple(each[::2] for each in WHOLE)
        assert move(other, np.full_like(here, 4), every_other) == NUM_LARGE // 2 * LARGE
        child.send("read")
        assert child.receive() == [0, 4]
        other.close()
        stream.close()


def test_a_peer_that_answers_for_what_it_has_not_taken_is_not_believed() -> None:
    here = np.ones(LARGE, np.uint8)
    with tcp_pair() as (ours, theirs):
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)

        def lie() -> None:
            exactly(theirs, 32 + 16)
            untaken = 0
            while untaken < LARGE // 2:  # until much waits to be sent
                untaken = struct.unpack("i", fcntl.ioctl(ours.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
            theirs.sendall(struct.pack("<2I", 0, OK))

        thread = threading.Thread(target=lie)
        thread.start()
        stream = PageStream(ours)
        with pytest.raises(ProtocolError, match="makes no sense"):
            move(stream, here, ([0], [0], [LARGE]), timeout_s=10)
        thread.join(10)
        assert stream.closed
        with pytest.raises(ConnectionResetError):
            while theirs.recv(1 << 20):
                pass


def lends_until_it_is_cut(connection: Connection) -> None:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    here = np.ones(NUM_LARGE * LARGE, np.uint8)
    for _ in range(3):
        with tcp_pair() as (ours, theirs):

            def cut(ours: socket.socket = ours, theirs: socket.socket = theirs) -> None:
                exactly(theirs, 1 << 20)
                ours.shutdown(socket.SHUT_RDWR)  # as of a stream that is closed meanwhile

            thread = threading.Thread(target=cut)
            thread.start()
            with pytest.raises(PeerLostError):
                move(PageStream(ours), here, WHOLE)
            thread.join(10)
            assert signal.SIGPIPE not in signal.sigpending() | signal.pthread_sigmask(signal.SIG_BLOCK, ())
    connection.send("alive")


def test_a_connection_that_is_cut_raises_no_signal() -> None:
    with Child(lends_until_it_is_cut) as child:
        assert child.receive() == "alive"


def test_without_a_file_to_spare_pages_are_copied() -> None:
    here, there = np.ones(NUM_LARGE * LARGE, np.uint8), np.zeros(NUM_LARGE * LARGE, np.uint8)
    with both_ends() as (stream, guest, _):
        permit(guest.permits, there, list(range(NUM_LARGE)), page=LARGE)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            assert move(stream, here, WHOLE) == NUM_LARGE * LARGE
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert there.all()


def test_a_parcel_is_lent_from_a_quarter_of_a_mebibyte_on_and_a_page_at_a_time() -> None:
    """Neighbouring sizes, of which some are lent and some copied, in one plan."""
    sizes = np.array([1, 3000, 5000, (256 << 10) - 1, 256 << 10, native.MAX_NBYTES, 100, native.MAX_NBYTES + 1])
    starts = np.concatenate(([0], np.cumsum(sizes + 7)[:-1]))
    here = np.random.default_rng(2).integers(0, 256, int(starts[-1] + sizes[-1]), np.uint8)
    there = np.zeros_like(here)
    with both_ends() as (stream, guest, _):
        permit(guest.permits, there, [0], page=there.nbytes)
        for first in range(len(sizes)):
            there[:] = 0
            assert move(stream, here, (starts[first:], starts[first:], sizes[first:])) == sizes[first:].sum()
            for start, size in zip(starts[first:], sizes[first:], strict=True):
                assert np.array_equal(there[start : start + size], here[start : start + size])
