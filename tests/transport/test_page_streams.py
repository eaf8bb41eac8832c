"""Page streams between two threads and two processes: every byte compared, and nothing moved that is not permitted."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.errors import (
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
    ProtocolError,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Guest, PageStream, PageStreamListener, Permits, StopFlag, page_streams
from hurray_rdma.transport import _page_streams as native

PAGE = 4096
NUM_PAGES = 64
MAGIC, WRITE, READ = 0x31465248, 1, 2
OK, ENDED, FORBIDDEN, BROKEN = 0, 1, 2, 3


def u64(*rows: tuple[int, ...]) -> np.ndarray:
    return np.array(rows, np.uint64)


def permit(
    permits: Permits,
    memory: np.ndarray,
    pages: list[int],
    *,
    transfer_id: int = 1,
    writes: bool = True,
    page: int = PAGE,
) -> None:
    """Dense pages of one region."""
    permits.add(
        transfer_id,
        writes,
        u64((memory.ctypes.data, memory.nbytes, 0, 1)),
        u64((0, page, page)),
        np.array(pages, np.uint32),
    )


def parcel(
    kind: int,
    pieces: list[tuple[int, int]],
    *,
    transfer_id: int = 1,
    region: int = 0,
    seq: int = 0,
    nbytes: int | None = None,
    magic: int = MAGIC,
    count: int | None = None,
) -> bytes:
    total = sum(length for _, length in pieces) if nbytes is None else nbytes
    header = struct.pack("<6IQ", magic, kind, transfer_id, region, len(pieces) if count is None else count, seq, total)
    return header + b"".join(struct.pack("<QQ", *piece) for piece in pieces)


def exactly(connection: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        part = connection.recv(nbytes - len(data))
        if not part:
            break
        data += part
    return data


def hello(ticket: bytes, nonce: bytes) -> bytes:
    return b"hurray/2" + hashlib.sha256(ticket).digest()[:16] + nonce


def proof(ticket: bytes, what: bytes) -> bytes:
    return hmac.new(ticket, what, hashlib.sha256).digest()


def shake(connection: socket.socket, ticket: bytes) -> None:
    """As `PageStream.open` does it."""
    nonce = os.urandom(16)
    connection.sendall(hello(ticket, nonce))
    answer = exactly(connection, 48)
    assert answer[16:] == proof(ticket, b"server" + nonce + answer[:16])
    connection.sendall(proof(ticket, b"client" + nonce + answer[:16]))
    assert exactly(connection, 8) == b"hurray/2"


@contextlib.contextmanager
def served(permits: Permits) -> Iterator[tuple[socket.socket, list[tuple[int, ...]]]]:
    """A connection whose other end is served, and how that ended."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    ours.settimeout(10)
    ends: list[tuple[int, ...]] = []

    def serve() -> None:
        ends.append(permits.serve(theirs.fileno()))
        theirs.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield ours, ends
    finally:
        ours.close()
        thread.join(10)
        assert not thread.is_alive()


def test_a_parcel_writes_its_bytes_into_its_pieces_and_one_answer_says_so() -> None:
    memory, permits = np.zeros(NUM_PAGES * PAGE, np.uint8), Permits()
    permit(permits, memory, [3, 4, 9])
    with served(permits) as (connection, ends):
        connection.sendall(parcel(WRITE, [(9 * PAGE + 5, 2), (3 * PAGE, 2 * PAGE)], seq=7) + b"ab" + b"c" * 2 * PAGE)
        assert exactly(connection, 8) == struct.pack("<2I", 7, OK)
        connection.shutdown(socket.SHUT_WR)
        assert exactly(connection, 1) == b""
    expected = np.zeros_like(memory)
    expected[9 * PAGE + 5 : 9 * PAGE + 7] = [ord("a"), ord("b")]
    expected[3 * PAGE : 5 * PAGE] = ord("c")
    assert np.array_equal(memory, expected)
    assert ends[0][0] == OK


def test_a_read_is_answered_with_its_bytes_between_two_answers() -> None:
    memory, permits = np.arange(NUM_PAGES * PAGE, dtype=np.uint64).astype(np.uint8), Permits()
    permit(permits, memory, [2, 5], writes=False)
    with served(permits) as (connection, _):
        connection.sendall(parcel(READ, [(5 * PAGE + 1, 3), (2 * PAGE, PAGE)], seq=1))
        answer = exactly(connection, 8 + 3 + PAGE + 8)
        word = struct.pack("<2I", 1, OK)
        expected = memory[5 * PAGE + 1 : 5 * PAGE + 4].tobytes() + memory[2 * PAGE : 3 * PAGE].tobytes()
        assert answer == word + expected + word


@pytest.mark.parametrize(
    ("what", "status"),
    [
        (parcel(WRITE, [(2 * PAGE, PAGE)]), FORBIDDEN),
        (parcel(WRITE, [(3 * PAGE, PAGE + 1)]), FORBIDDEN),
        (parcel(WRITE, [(3 * PAGE - 1, 2)]), FORBIDDEN),
        (parcel(WRITE, [(3 * PAGE, 10), (NUM_PAGES * PAGE - 1, 2)]), FORBIDDEN),
        (parcel(WRITE, [(2**64 - 1, 2)]), FORBIDDEN),
        (parcel(WRITE, [(3 * PAGE, PAGE)], region=1), FORBIDDEN),
        (parcel(WRITE, [(3 * PAGE, PAGE)], region=2**32 - 1), FORBIDDEN),
        (parcel(READ, [(3 * PAGE, PAGE)]), FORBIDDEN),
        (parcel(WRITE, [(3 * PAGE, 0), (3 * PAGE, 5)]), FORBIDDEN),
        (parcel(WRITE, [(3 * PAGE, PAGE)], magic=MAGIC + 1), BROKEN),
        (parcel(3, [(3 * PAGE, PAGE)]), BROKEN),
        (parcel(WRITE, [(3 * PAGE, PAGE)], nbytes=PAGE - 1), BROKEN),
        (parcel(WRITE, [(3 * PAGE, PAGE)], nbytes=PAGE + 1), BROKEN),
        (parcel(WRITE, [(3 * PAGE, 2**63), (3 * PAGE, 2**63 + PAGE)], nbytes=PAGE), BROKEN),
        (parcel(WRITE, [], nbytes=PAGE), BROKEN),
        (parcel(WRITE, [], count=native.MAX_PIECES + 1, nbytes=PAGE), BROKEN),
        (parcel(WRITE, [(3 * PAGE, PAGE)], nbytes=native.MAX_NBYTES + 1), BROKEN),
    ],
)
def test_what_is_not_permitted_or_no_parcel_ends_the_connection_before_a_byte_lands(what: bytes, status: int) -> None:
    memory, permits = np.zeros(NUM_PAGES * PAGE, np.uint8), Permits()
    permit(permits, memory, [3])
    with served(permits) as (connection, ends):
        connection.sendall(what + b"x" * 3 * PAGE)
        assert exactly(connection, 8) == struct.pack("<2I", 0, status)
        assert exactly(connection, 1) == b""
        connection.close()
    assert ends[0][0] == status
    assert not memory.any()


def test_bytes_of_a_transfer_that_is_not_permitted_any_more_are_thrown_away_and_others_go_on() -> None:
    memory, permits = np.zeros(NUM_PAGES * PAGE, np.uint8), Permits()
    permit(permits, memory, [3])
    permit(permits, memory, [4], transfer_id=2)
    with served(permits) as (connection, _):
        connection.sendall(parcel(WRITE, [(3 * PAGE, PAGE)]) + b"x" * 100)
        while not memory[3 * PAGE + 99]:
            time.sleep(0.001)
        assert permits.remove(1)
        assert not permits.remove(1)
        memory[:] = 0
        permit(permits, memory, [3])  # another transfer, though of the same number: nothing of the parcel is for it
        connection.sendall(b"x" * (PAGE - 100))
        assert exactly(connection, 8) == struct.pack("<2I", 0, ENDED)
        assert not memory.any()
        connection.sendall(parcel(READ, [(5 * PAGE, 1)], transfer_id=77, seq=1))
        assert exactly(connection, 8) == struct.pack("<2I", 1, ENDED)
        connection.sendall(parcel(WRITE, [(4 * PAGE, 1)], transfer_id=2, seq=2) + b"y")
        assert exactly(connection, 8) == struct.pack("<2I", 2, OK)
    assert memory.nonzero()[0].tolist() == [4 * PAGE]


@pytest.mark.parametrize("lent", [False, True])
def test_a_read_that_is_permitted_no_more_half_way_goes_on_with_zeros(lent: bool) -> None:
    num_pages = 512
    # An array does not begin where a page of the kernel's does: short pieces are copied, a long one is lent.
    pieces = [(0, num_pages * PAGE)] if lent else [(page * PAGE, PAGE) for page in range(num_pages)]
    memory, permits = np.full(num_pages * PAGE, 7, np.uint8), Permits()
    permit(permits, memory, list(range(num_pages)), writes=False)
    with served(permits) as (connection, _):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(parcel(READ, pieces))
        head = exactly(connection, 8 + 100)
        permits.remove(1)
        memory[:] = 9
        rest = exactly(connection, num_pages * PAGE - 100 + 8)
        assert head[:8] == struct.pack("<2I", 0, OK)
        assert rest[-8:] == struct.pack("<2I", 0, ENDED)
        # What is lent is read as it is when it is taken; that it came too late is what the transfer says.
        assert set(rest[:-8]) - {7} == ({9, 0} if lent else {0})


segments = st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 8))
"""Where pages begin, how long they are, what lies between two of them."""


@settings(max_examples=200, deadline=None)
@given(
    regions=st.lists(st.lists(segments, min_size=1, max_size=4), min_size=1, max_size=3),
    pages=st.sets(st.integers(0, 9), min_size=1),
    pieces=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 250), st.integers(1, 60)), max_size=12),
)
def test_a_piece_is_permitted_if_all_of_it_is_in_permitted_pages_of_any_segments(
    regions: list[list[tuple[int, int, int]]], pages: set[int], pieces: list[tuple[int, int, int]]
) -> None:
    nbytes, places, rows = 240, [], []
    memory = np.random.default_rng(0).integers(0, 256, (len(regions), nbytes), np.uint8)
    allowed: list[set[int]] = []
    for region, segments_of in enumerate(regions):
        places.append((memory[region].ctypes.data, nbytes, len(rows), len(segments_of)))
        allowed.append(set())
        for start, extent, gap in segments_of:
            rows.append((start, extent + gap, extent))
            for page in pages:
                first = start + page * (extent + gap)
                allowed[-1].update(range(first, first + extent))
    permits = Permits()
    permits.add(5, False, u64(*places), u64(*rows), np.array(sorted(pages), np.uint32))
    left = list(pieces)
    while left:  # one that is forbidden ends the connection
        with served(permits) as (connection, _):
            while left:
                region, offset, length = left.pop()
                connection.sendall(parcel(READ, [(offset, length)], transfer_id=5, region=region))
                status = struct.unpack("<2I", exactly(connection, 8))[1]
                wanted = set(range(offset, offset + length))
                fits = region < len(regions) and offset + length <= nbytes and wanted <= allowed[region]
                assert status == (OK if fits else FORBIDDEN)
                if not fits:
                    break
                assert exactly(connection, length) == memory[region, offset : offset + length].tobytes()
                assert exactly(connection, 8) == struct.pack("<2I", 0, OK)


# Both ends.


@contextlib.contextmanager
def both_ends() -> Iterator[tuple[PageStream, Guest, list[HurrayError | None]]]:
    ends: list[HurrayError | None] = []
    ended = threading.Event()

    def end(_: Guest, error: HurrayError | None) -> None:
        ends.append(error)
        ended.set()

    listener = PageStreamListener(["127.0.0.1"], on_end=end)
    try:
        guest = listener.expect()
        stream = PageStream.open("127.0.0.1", listener.port, guest.ticket, timeout_s=10)
        try:
            yield stream, guest, ends
        finally:
            stream.close()
            assert ended.wait(10)
    finally:
        listener.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hurray-pages")]


def move(
    stream: PageStream,
    local: np.ndarray,
    plan: tuple[np.ndarray, np.ndarray, np.ndarray],
    *,
    get: bool = False,
    stop: StopFlag | None = None,
    timeout_s: float = 20,
) -> int:
    local_offsets, remote_offsets, lengths = (np.asarray(each, np.uint64) for each in plan)
    return stream.move(
        local.ctypes.data,
        transfer_id=1,
        region_index=0,
        local_offsets=local_offsets,
        remote_offsets=remote_offsets,
        lengths=lengths,
        get=get,
        stop=stop if stop is not None else StopFlag(),
        timeout_s=timeout_s,
    )


@pytest.mark.parametrize("get", [False, True], ids=["write", "read"])
@pytest.mark.parametrize("page", [64, 4096, 3 << 20], ids=["small pages", "pages", "pages of several parcels"])
def test_scattered_pages_arrive_and_nothing_else_is_touched(get: bool, page: int) -> None:
    num_pages = 4096 if page == 64 else (1024 if page == 4096 else 12)
    random = np.random.default_rng(page)
    here = random.integers(0, 256, (num_pages, page), np.uint8)
    there = random.integers(0, 256, (num_pages, page), np.uint8)
    ours, theirs = random.permutation(num_pages)[: num_pages // 2], random.permutation(num_pages)[: num_pages // 2]
    expected_here, expected_there = here.copy(), there.copy()
    if get:
        expected_here[ours] = there[theirs]
    else:
        expected_there[theirs] = here[ours]
    with both_ends() as (stream, guest, ends):
        permit(guest.permits, there, sorted(theirs.tolist()), writes=not get, page=page)
        plan = ours * page, theirs * page, np.full(len(ours), page)
        assert move(stream, here, plan, get=get) == len(ours) * page
        assert np.array_equal(there, expected_there)
        assert np.array_equal(here, expected_here)
        assert not stream.closed
    assert ends == [None] or isinstance(ends[0], PeerLostError)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=1500),
    seed=st.integers(0, 2**32 - 1),
    get=st.booleans(),
    ordered=st.booleans(),
)
def test_any_plan_arrives(lengths: list[int], seed: int, get: bool, ordered: bool) -> None:
    """In order on one side, so that neighbours are put together there, or on neither."""
    random = np.random.default_rng(seed)
    sizes = np.array(lengths)
    here_order = np.arange(len(sizes)) if ordered else random.permutation(len(sizes))
    there_order = random.permutation(len(sizes))
    here_at, there_at = np.empty(len(sizes), np.int64), np.empty(len(sizes), np.int64)
    here_at[here_order] = np.concatenate(([0], np.cumsum(sizes[here_order])[:-1]))
    there_at[there_order] = np.concatenate(([0], np.cumsum(sizes[there_order])[:-1]))
    total = int(sizes.sum())
    here, there = random.integers(0, 256, total, np.uint8), random.integers(0, 256, total, np.uint8)
    with both_ends() as (stream, guest, _):
        permit(guest.permits, there, [0], writes=not get, page=total)
        assert move(stream, here, (here_at, there_at, sizes), get=get) == total
    for mine, theirs, length in zip(here_at, there_at, lengths, strict=True):
        assert np.array_equal(here[mine : mine + length], there[theirs : theirs + length])


def test_on_one_machine_no_timers_pace_the_pages() -> None:
    with open("/proc/sys/net/ipv4/tcp_allowed_congestion_control") as allowed:
        if "reno" not in allowed.read().split():
            pytest.skip("reno is not for everybody here")
    with both_ends() as (stream, _, _):
        name = stream._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert name.rstrip(b"\0") == b"reno"


def test_a_ticket_is_good_once_and_no_other_is_good() -> None:
    listener = PageStreamListener(["127.0.0.1"], on_end=lambda *_: None)
    try:
        guest = listener.expect()
        with pytest.raises(TransportError, match="ticket"):
            PageStream.open("127.0.0.1", listener.port, bytes(32), timeout_s=10)
        first = PageStream.open("127.0.0.1", listener.port, guest.ticket, timeout_s=10)
        with pytest.raises(TransportError, match="ticket"):
            PageStream.open("127.0.0.1", listener.port, guest.ticket, timeout_s=10)
        gone = listener.expect()
        listener.dismiss(gone)
        with pytest.raises(TransportError, match="ticket"):
            PageStream.open("127.0.0.1", listener.port, gone.ticket, timeout_s=10)
        assert not first.closed
        listener.dismiss(guest)
        until = time.monotonic() + 10
        while not first.closed:  # it is cut
            assert time.monotonic() < until
            time.sleep(0.001)
        first.close()
    finally:
        listener.close()
    with pytest.raises(TransportError, match="reached"):
        PageStream.open("127.0.0.1", listener.port, guest.ticket, timeout_s=10)


def test_who_only_listens_at_the_port_learns_no_ticket_and_is_not_believed() -> None:
    ticket, heard = os.urandom(32), []
    with socket.create_server(("127.0.0.1", 0)) as squatter:

        def squat(answer: bytes) -> None:
            with squatter.accept()[0] as connection:
                connection.settimeout(10)
                heard.append(exactly(connection, 40))
                nonce = heard[-1][24:]
                # Neither what it makes up nor what a client would say passes for a server's proof.
                said = answer or bytes(16) + proof(ticket, b"client" + nonce + bytes(16))
                connection.sendall(said)
                heard[-1] += exactly(connection, 1)

        for answer in (b"hurray/2", os.urandom(48), b""):
            thread = threading.Thread(target=squat, args=(answer,))
            thread.start()
            with pytest.raises(TransportError, match="ticket"):
                PageStream.open("127.0.0.1", squatter.getsockname()[1], ticket, timeout_s=1)
            thread.join(10)
            assert not thread.is_alive()
    assert len({said[24:] for said in heard}) == 3, "a nonce each"
    for said in heard:
        assert said == hello(ticket, said[24:])


def test_what_a_client_has_said_does_not_open_another_stream_nor_use_its_ticket_up() -> None:
    listener = PageStreamListener(["127.0.0.1"], on_end=lambda *_: None)
    try:
        guest, nonce = listener.expect(), os.urandom(16)

        def knock(proof_for: bytes | None) -> bytes:
            with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as connection:
                connection.sendall(hello(guest.ticket, nonce))
                answer = exactly(connection, 48)
                nonces = nonce + (answer[:16] if proof_for is None else proof_for)
                with contextlib.suppress(OSError):
                    connection.sendall(proof(guest.ticket, b"client" + nonces))
                    connection.sendall(parcel(READ, [(0, 1)]))
                    return exactly(connection, 16)
            return b""

        assert knock(bytes(16)) == b"", "a proof for another connection"
        assert knock(bytes(16)) == b""
        assert knock(None) == b"hurray/2" + struct.pack("<2I", 0, ENDED)
        with socket.create_connection(("127.0.0.1", listener.port), timeout=10) as connection:
            connection.sendall(hello(guest.ticket, nonce))
            assert exactly(connection, 1) == b"", "it has been used"
    finally:
        listener.close()


def test_a_ticket_that_nobody_uses_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_streams, "_TICKET_S", 0.0)
    listener = PageStreamListener(["127.0.0.1"], on_end=lambda *_: None)
    try:
        guests = [listener.expect() for _ in range(3)]
        with pytest.raises(TransportError, match="ticket"):
            PageStream.open("127.0.0.1", listener.port, guests[-1].ticket, timeout_s=10)
        assert len(listener._guests) == 1, "none is kept"
        assert str(guests[0].ticket) not in repr(guests[0])
    finally:
        listener.close()


def test_all_hosts_have_one_port_that_nobody_else_has(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[socket.socket] = []
    create = socket.create_server

    def other_is_quicker(address: tuple[str, int], **more: int) -> socket.socket:
        if address[0] == "127.0.0.2" and len(taken) < num_taken:
            taken.append(create(address))
        return create(address, **more)

    monkeypatch.setattr(socket, "create_server", other_is_quicker)
    num_taken = 2
    listener = PageStreamListener(["127.0.0.1", "127.0.0.2"], on_end=lambda *_: None)
    try:
        assert len(taken) == 2
        assert listener.port not in [each.getsockname()[1] for each in taken]
        for host in ("127.0.0.1", "127.0.0.2"):
            PageStream.open(host, listener.port, listener.expect().ticket, timeout_s=10).close()
    finally:
        listener.close()
    num_taken = 1000
    with pytest.raises(TransportError, match="in use"):
        PageStreamListener(["127.0.0.1", "127.0.0.2"], on_end=lambda *_: None)
    for each in taken:
        with socket.socket() as free:  # nothing listens there on the first one any more
            assert free.connect_ex(("127.0.0.1", each.getsockname()[1])) != 0
        each.close()


def test_without_a_thread_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, left = threading.Thread.start, 1

    def start(thread: threading.Thread) -> None:
        nonlocal left
        if thread.name.startswith("hurray-pages"):
            left -= 1
            if left < 0:
                raise RuntimeError("can't start new thread")
        plain(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(TransportError, match="can't start new thread"):
        PageStreamListener(["127.0.0.1", "127.0.0.2"], on_end=lambda *_: None)
    left = 1
    listener = PageStreamListener(["127.0.0.1"], on_end=lambda *_: None)
    with pytest.raises(TransportError, match="ticket"):
        PageStream.open("127.0.0.1", listener.port, listener.expect().ticket, timeout_s=10)
    listener.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hurray-pages")]


def test_a_parcel_that_is_answered_before_it_was_sent_breaks_the_connection_and_costs_no_cpu() -> None:
    ours, theirs = socket.socketpair()
    here = np.ones(2 * LARGE, np.uint8)
    with theirs:
        ours.setblocking(False)
        theirs.sendall(struct.pack("<4I", 0, OK, 1, OK))
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_utime
        with pytest.raises(ProtocolError, match="makes no sense"):
            move(PageStream(ours), here, ([0], [0], [2 * LARGE]), timeout_s=3)
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_utime - before < 1
    ours.close()


def test_a_stop_lets_a_slow_peer_finish_what_is_under_way() -> None:
    """It takes longer than the second that one gets who takes nothing at all."""
    ours, theirs = socket.socketpair()
    here, stop = np.ones(2 * LARGE, np.uint8), StopFlag()
    ours.setblocking(False)
    nbytes = 32 + 16 + 2 * LARGE

    def take_slowly() -> None:
        exactly(theirs, 1)
        stop.set()
        left = nbytes - 1
        for _ in range(16):
            left -= len(exactly(theirs, nbytes // 17))
            time.sleep(0.1)
        exactly(theirs, left)
        theirs.sendall(struct.pack("<2I", 0, OK))

    thread = threading.Thread(target=take_slowly)
    thread.start()
    stream = PageStream(ours)
    try:
        with theirs:
            with pytest.raises(TransferAbortedError):
                move(stream, here, ([0], [0], [2 * LARGE]), stop=stop)
            thread.join(10)
            assert not stream.closed
    finally:
        stream.close()


def test_those_that_say_nothing_keep_nobody_out_and_no_thread_alive() -> None:
    listener = PageStreamListener(["127.0.0.1"], on_end=lambda *_: None)
    silent = [socket.create_connection(("127.0.0.1", listener.port)) for _ in range(70)]
    try:
        for cut in silent[:6]:  # the oldest
            cut.settimeout(4)
            assert cut.recv(1) == b""
        with listener._lock:
            assert len(listener._unknown) == 64
        stream = PageStream.open("127.0.0.1", listener.port, listener.expect().ticket, timeout_s=10)
        stream.close()
    finally:
        listener.close()
        for connection in silent:
            connection.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hurray-pages")]


def test_a_plan_that_is_not_permitted_is_a_protocol_error_on_both_sides() -> None:
    here, there = np.ones(2 * PAGE, np.uint8), np.zeros(NUM_PAGES * PAGE, np.uint8)
    with both_ends() as (stream, guest, ends):
        permit(guest.permits, there, [1])
        with pytest.raises(ProtocolError, match="has not permitted"):
            move(stream, here, ([0, PAGE], [PAGE, 5 * PAGE], [PAGE, PAGE]))
        assert stream.closed
        with pytest.raises(PeerLostError):
            move(stream, here, ([0], [PAGE], [PAGE]))
    assert isinstance(ends[0], ProtocolError)
    assert "4096 bytes from byte 20480 of region 0" in str(ends[0])
    assert not there.any()


def test_a_transfer_that_has_ended_is_told_so_and_the_connection_lives_on() -> None:
    here, there = np.ones(NUM_PAGES * PAGE, np.uint8), np.zeros(NUM_PAGES * PAGE, np.uint8)
    with both_ends() as (stream, guest, _):
        for get in (False, True):
            with pytest.raises(TransferAbortedError, match="permits no more"):
                move(stream, here, ([0], [0], [NUM_PAGES * PAGE]), get=get)
        assert not there.any()
        permit(guest.permits, there, [1])
        assert move(stream, here, ([0], [PAGE], [PAGE])) == PAGE
    assert there.nonzero()[0].tolist() == list(range(PAGE, 2 * PAGE))


NUM_LARGE, LARGE = 64, 1 << 20
"""More than the sockets of both sides hold."""


def target(connection: Connection, writes: bool) -> None:
    """Permits all of its pages; reports its bytes when asked."""
    memory = np.zeros(NUM_LARGE * LARGE, np.uint8)
    listener = PageStreamListener(["127.0.0.1"], on_end=lambda *_: None)
    guest = listener.expect()
    permit(guest.permits, memory, list(range(NUM_LARGE)), writes=writes, page=LARGE)
    connection.send((listener.port, guest.ticket))
    while connection.recv() == "read":
        connection.send(np.unique(memory).tolist())
    listener.close()


WHOLE = np.arange(NUM_LARGE) * LARGE, np.arange(NUM_LARGE) * LARGE, np.full(NUM_LARGE, LARGE)


@pytest.mark.parametrize("get", [False, True], ids=["write", "read"])
@pytest.mark.parametrize("how", ["killed", "stopped, late", "stopped, not wanted"])
def test_a_peer_that_is_killed_or_stopped_is_an_error_in_time(get: bool, how: str) -> None:
    memory = np.ones(NUM_LARGE * LARGE, np.uint8)
    with Child(target, not get) as child:
        port, ticket = child.receive()
        stream = PageStream.open("127.0.0.1", port, ticket, timeout_s=10)
        stop, timeout_s = StopFlag(), 0.3 if how == "stopped, late" else 20.0
        child.signal(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        if how == "killed":
            child.join()
        timer = threading.Timer(0.1, stop.set)
        if how == "stopped, not wanted":
            timer.start()
        expected = {"killed": PeerLostError, "stopped, late": DeadlineExceededError}.get(how, TransferAbortedError)
        with pytest.raises(expected) as caught:
            move(stream, memory, WHOLE, get=get, stop=stop, timeout_s=timeout_s)
        assert not caught.value.in_doubt
        assert stream.closed, "what is in the midst of a parcel cannot be used on"
        stream.close()
        timer.cancel()
        if how != "killed":
            child.signal(signal.SIGCONT)
            child.send("read")
            assert set(child.receive()) <= {0, 1}
            child.send("end")


def test_a_stop_between_parcels_leaves_the_connection_as_it_was() -> None:
    here, there = np.ones(NUM_LARGE * LARGE, np.uint8), np.zeros(NUM_LARGE * LARGE, np.uint8)
    with both_ends() as (stream, guest, _):
        permit(guest.permits, there, list(range(NUM_LARGE)), page=LARGE)
        stop = StopFlag()
        stop.set()
        with pytest.raises(TransferAbortedError):
            move(stream, here, WHOLE, stop=stop)
        assert not there.any()
        stop, timer = StopFlag(), threading.Timer(0.002, stop.set)
        timer.start()
        with contextlib.suppress(TransferAbortedError):  # wherever that finds it
            move(stream, here, WHOLE, stop=stop)
        timer.join()
        assert not stream.closed
        assert move(stream, here, WHOLE) == NUM_LARGE * LARGE
        assert there.all()


def test_two_threads_take_turns() -> None:
    here, there = np.ones(NUM_LARGE * LARGE, np.uint8), np.zeros(NUM_LARGE * LARGE, np.uint8)
    with both_ends() as (stream, guest, _):
        permit(guest.permits, there, list(range(NUM_LARGE)), page=LARGE)
        moved: list[int] = []
        half = NUM_LARGE // 2
        threads = [
            threading.Thread(target=lambda part=part: moved.append(move(stream, here, tuple(a[part] for a in WHOLE))))
            for part in (slice(half), slice(half, None))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert moved == [half * LARGE] * 2
        assert there.all()


def test_permits_end_at_once_while_bytes_come_all_the_time() -> None:
    """The loop that moves takes its mutex again and again: who ends a permit goes first."""
    here, there = np.ones(NUM_LARGE * LARGE, np.uint8), np.zeros(NUM_LARGE * LARGE, np.uint8)
    with both_ends() as (stream, guest, _):
        permit(guest.permits, there, list(range(NUM_LARGE)), page=LARGE)
        stop = StopFlag()
        ended: list[HurrayError] = []

        def write() -> None:
            try:
                while True:
                    move(stream, here, WHOLE, stop=stop)
            except HurrayError as error:
                ended.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            while not there[-1]:
                time.sleep(0.001)
            guest.permits.remove(1)
            there[:] = 0
            thread.join(20)
            assert not thread.is_alive()
            assert not there.any(), "a byte landed after its permit had ended"
            assert "permits no more" in str(ended[0])
        finally:
            stop.set()
            thread.join(20)
