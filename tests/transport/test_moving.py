"""Two real processes over real UCX: every byte compared, the lane asserted."""

from __future__ import annotations

import io
import logging
import mmap
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma.errors import (
    DeadlineExceededError,
    GeometryError,
    HurrayError,
    PeerLostError,
    ProtocolError,
    RegistrationError,
    TransferAbortedError,
    TransportError,
)
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, Endpoint, Path, RemoteMemory, StopFlag, mappings
from hurray_rdma.transport.lanes import LaneReport
from hurray_rdma.transport.mappings import mapping_kind, shared_memory_kind
from hurray_rdma.transport.turns import take_turn

PAGE = 8192
NUM_PAGES = 512
NBYTES = PAGE * NUM_PAGES


def target(connection: Connection, options: dict[str, str], allocate: bool) -> None:
    """Owns a region filled with 0xEE; hands out its address, reports its bytes when asked."""
    context = Context(options)
    worker = context.open_worker()
    if allocate:
        region = context.allocate(NBYTES)
        array = region.array()
    else:
        array = np.empty(NBYTES, np.uint8)
        region = context.register(array.ctypes.data, NBYTES, owner=array)
    array[:] = 0xEE
    connection.send((worker.address, region.remote()))
    while connection.recv() == "read":
        connection.send(array.copy())
    region.close()
    worker.close()


def offsets(pages: np.ndarray) -> np.ndarray:
    return (pages * PAGE).astype(np.uint64)


def scattered(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.permutation(NUM_PAGES)[: NUM_PAGES // 2], random.permutation(NUM_PAGES)[: NUM_PAGES // 2]


@pytest.mark.parametrize(
    ("options", "allocate", "path", "lanes"),
    [
        ({}, True, Path.MAPPED, {"sysv", "posix"}),
        ({}, False, Path.PUT, {"cma"}),
        ({"TLS": "tcp"}, True, Path.PUT, {"tcp"}),
        ({"TLS": "tcp"}, False, Path.PUT, {"tcp"}),
    ],
    ids=["shared memory", "cma", "tcp, UCX memory", "tcp, caller's memory"],
)
def test_scattered_pages_arrive_over_the_lane_that_is_named(
    options: dict[str, str], allocate: bool, path: Path, lanes: set[str]
) -> None:
    with Child(target, options, allocate) as child:
        address, remote = child.receive()
        context = Context(options)
        worker = context.open_worker()
        src = context.allocate(NBYTES)
        src.array()[:] = np.random.default_rng(1).integers(0, 256, NBYTES, dtype=np.uint8)
        endpoint = worker.connect(address, timeout_s=10)
        memory = endpoint.open_region(remote)
        assert memory.path is path
        assert memory.lane in lanes
        assert not endpoint.lanes.emulated

        src_pages, dst_pages = scattered(2)
        moved = memory.write(
            src,
            src_offsets=offsets(src_pages),
            dst_offsets=offsets(dst_pages),
            lengths=np.full(len(src_pages), PAGE, np.uint64),
            stop=StopFlag(),
            timeout_s=20,
        )
        child.send("read")
        got = child.receive().reshape(NUM_PAGES, PAGE)
        expected = np.full((NUM_PAGES, PAGE), 0xEE, np.uint8)
        expected[dst_pages] = src.array().reshape(NUM_PAGES, PAGE)[src_pages]
        assert np.array_equal(got, expected)
        assert (moved.num_operations, moved.nbytes) == (len(src_pages), len(src_pages) * PAGE)
        child.send("end")
        assert endpoint.close()
        worker.close()


@pytest.mark.parametrize("options", [{}, {"TLS": "tcp"}], ids=["cma", "tcp"])
def test_killed_target_is_an_error_and_not_the_end_of_this_process(options: dict[str, str]) -> None:
    with Child(target, options, False) as child:
        address, remote = child.receive()
        context = Context(options)
        worker = context.open_worker()
        src = context.allocate(NBYTES)
        endpoint = worker.connect(address, timeout_s=10)
        memory = endpoint.open_region(remote)
        child.signal(signal.SIGKILL)
        child.join()
        everything = offsets(np.arange(NUM_PAGES))
        with pytest.raises((PeerLostError, TransportError)) as caught:
            memory.write(
                src,
                src_offsets=everything,
                dst_offsets=everything,
                lengths=np.full(NUM_PAGES, PAGE, np.uint64),
                stop=StopFlag(),
                timeout_s=10,
            )
        assert isinstance(caught.value, HurrayError)
        assert endpoint.close()
        worker.close()


def test_stopped_target_over_tcp_ends_at_the_deadline() -> None:
    with Child(target, {"TLS": "tcp"}, False) as child:
        address, remote = child.receive()
        context = Context({"TLS": "tcp"})
        worker = context.open_worker()
        src = context.allocate(NBYTES)
        endpoint = worker.connect(address, timeout_s=10)
        memory = endpoint.open_region(remote)
        child.signal(signal.SIGSTOP)
        everything = np.tile(offsets(np.arange(NUM_PAGES)), 8)  # more than socket buffers hold
        started = time.monotonic()
        with pytest.raises(DeadlineExceededError) as caught:
            memory.write(
                src,
                src_offsets=everything,
                dst_offsets=everything,
                lengths=np.full(len(everything), PAGE, np.uint64),
                stop=StopFlag(),
                timeout_s=0.5,
            )
        assert time.monotonic() - started < 10
        assert caught.value.in_doubt
        # UCX cannot cancel a tcp operation: it says so, and the source stays registered whatever its owner does.
        assert endpoint.holds_memory
        view = src.array()
        src.close()
        view[:] = 1
        with pytest.raises(TransportError, match="closed"):
            endpoint.flush(timeout_s=1)
        child.signal(signal.SIGKILL)
        child.join()
        assert endpoint.close()
        assert not endpoint.holds_memory
        worker.close()


def test_pieces_outside_either_region_are_refused_before_anything_moves() -> None:
    with Child(target, {}, True) as child:
        address, remote = child.receive()
        context = Context()
        worker = context.open_worker()
        src = context.allocate(NBYTES)
        endpoint = worker.connect(address, timeout_s=10)
        memory = endpoint.open_region(remote)
        good, length = np.array([0], np.uint64), np.array([PAGE], np.uint64)
        for bad in (NBYTES - PAGE + 1, 2**64 - 1):
            beyond = np.array([bad], np.uint64)
            for field, src_at, dst_at in (("src_offsets", beyond, good), ("dst_offsets", good, beyond)):
                with pytest.raises(GeometryError) as caught:
                    memory.write(
                        src,
                        src_offsets=src_at,
                        dst_offsets=dst_at,
                        lengths=length,
                        stop=StopFlag(),
                        timeout_s=1,
                    )
                assert caught.value.field == f"{field}[0]"
                assert caught.value.value == bad
        stop = StopFlag()
        stop.set()
        with pytest.raises(TransferAbortedError):
            memory.write(
                src,
                src_offsets=good,
                dst_offsets=good,
                lengths=length,
                stop=stop,
                timeout_s=1,
            )
        child.send("read")
        assert (child.receive() == 0xEE).all()
        child.send("end")
        endpoint.close()
        worker.close()


@pytest.mark.parametrize(
    ("allocate", "what", "when"),
    [
        (True, "write", "before it is held"),
        (True, "read", "before it is held"),
        (True, "write_rows", "before it is held"),
        (True, "read_rows", "before it is held"),
        (False, "write", "before it is held"),
        (False, "read", "before it is held"),
        (False, "write", "before it is posted"),
        (False, "read", "before it is posted"),
    ],
)
def test_a_region_that_another_thread_closes_just_then_is_a_typed_error_and_nothing_moves(
    allocate: bool, what: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, none = np.array([PAGE], np.uint64), np.zeros(1, np.uint64)
    pieces = {"src_offsets": none, "dst_offsets": none, "lengths": one}
    rows = {
        "places": np.array([[0, PAGE, 0, PAGE, PAGE]], np.uint64),
        "src_rows": np.zeros(1, np.uint32),
        "dst_rows": np.zeros(1, np.uint32),
    }
    with Child(target, {}, allocate) as child:
        address, remote = child.receive()
        context = Context()
        worker, region = context.open_worker(), context.allocate(NBYTES)
        to_peer = worker.connect(address, timeout_s=10)
        memory, handle = to_peer.open_region(remote), region.memory
        assert memory.path is (Path.MAPPED if allocate else Path.PUT)

        def closing(call: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **options: Any) -> Any:
                elsewhere = threading.Thread(target=region.close)
                elsewhere.start()
                elsewhere.join()
                return call(*args, **options)

            return called

        with monkeypatch.context() as patches:
            if when == "before it is held":
                patches.setattr(RemoteMemory, "_enter", closing(RemoteMemory._enter))
            else:
                patches.setattr("hurray_rdma.transport.endpoint.take_turn", closing(take_turn))
            with pytest.raises(RegistrationError, match="the region is closed") as caught:
                getattr(memory, what)(
                    region, **(rows if what.endswith("rows") else pieces), stop=StopFlag(), timeout_s=10
                )
        assert not caught.value.in_doubt
        assert not handle.in_use
        assert not to_peer.holds_memory
        child.send("read")
        assert (child.receive() == 0xEE).all()
        child.send("end")
        assert to_peer.close()
        worker.close()


def test_damaged_address_and_rkey_never_reach_ucx() -> None:
    context = Context()
    worker = context.open_worker()
    region = context.allocate(4096)
    remote = region.remote()
    for broken in (b"", b"x" * 40, worker.address[:-1], worker.address[:-1] + b"\0\0", b"y" + worker.address[1:]):
        with pytest.raises(ProtocolError):
            worker.connect(broken, timeout_s=1)
    endpoint = worker.connect(worker.address, timeout_s=5)
    for broken in (b"", remote.rkey[:-1], remote.rkey + b"\0"):
        with pytest.raises(ProtocolError):
            endpoint.open_region(type(remote)(remote_addr=remote.remote_addr, nbytes=remote.nbytes, rkey=broken))
    endpoint.close()
    worker.close()


def test_memory_of_a_device_is_never_reached_by_this_process_s_own_loads_and_stores() -> None:
    with Child(target, {}, True) as child:
        address, remote = child.receive()
        worker = Context().open_worker()
        endpoint = worker.connect(address, timeout_s=10)
        mapped = endpoint.open_region(remote)
        assert mapped.path is Path.MAPPED
        assert mapped.path_from("cuda:0") is Path.PUT
        assert mapped.lane_from("cuda:0").endswith("(staged)"), "no transport of a device is there"
        on_device = endpoint.open_region(replace(remote, device="cuda:0"))
        assert on_device.path is Path.PUT
        assert on_device.lane.endswith("(staged)")
        endpoint.close()
        worker.close()
        child.send("end")


def test_a_key_of_memory_that_this_process_cannot_store_to_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with Child(target, {}, True) as child:
        address, remote = child.receive()
        worker = Context().open_worker()
        endpoint = worker.connect(address, timeout_s=10)
        asked: set[int] = set()
        monkeypatch.setattr("hurray_rdma.transport.keys.shared_memory_kind", lambda start, end: asked.add(end - start))
        with pytest.raises(TransportError, match="not in the memory that its rkey is of"):
            endpoint.open_region(remote)
        assert asked == {remote.nbytes}
        endpoint.close()
        worker.close()
        child.send("end")


def test_shared_memory_is_the_host_s_writable_of_one_file_and_has_no_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, 3 * mmap.PAGESIZE) as whole:
        start = np.frombuffer(whole, np.uint8).ctypes.data
        assert shared_memory_kind(start, start + len(whole)) == "shared"
        with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ) as read_only:
            start = np.frombuffer(read_only, np.uint8).ctypes.data
            assert not shared_memory_kind(start, start + 1)
    lines: list[str] = []
    monkeypatch.setattr(mappings, "open", lambda *_, **__: io.StringIO("".join(lines)), raising=False)
    lines[:] = ["1000-2000 rw-s 00000000 00:01 7 /dev/shm/ucx\n", "2000-3000 rwxs 00001000 00:01 7 /dev/shm/ucx\n"]
    assert shared_memory_kind(0x1800, 0x3000) == "posix"
    assert not shared_memory_kind(0x1800, 0x3001), "nothing is there"
    assert not shared_memory_kind(0x800, 0x1800)
    for line, whose in {
        "2000-3000 rw-s 00000000 00:06 528 /dev/nvidiactl\n": "a GPU's",
        "2000-3000 rw-s 00000000 00:01 8 /SYSV00000000 (deleted)\n": "another segment's",
        "2000-3000 rw-p 00000000 00:00 0\n": "this process's alone",
    }.items():
        lines[1] = line
        assert shared_memory_kind(0x1800, 0x2000)
        assert not shared_memory_kind(0x1800, 0x2001), whose
    assert not shared_memory_kind(0x2000, 0x3000)


def test_a_mapped_file_whose_name_looks_like_the_end_of_a_line_is_one_line(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "pages\rof a file"
    path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file, mmap.mmap(file.fileno(), mmap.PAGESIZE) as mapped:
        start = np.frombuffer(mapped, np.uint8).ctypes.data
        assert shared_memory_kind(start, start + 1)
        assert mapping_kind(start) == "shared"
        assert mapping_kind(2**64 - 1) == "private", "which is behind all lines"


@pytest.mark.parametrize(
    ("options", "lane_of_puts", "lane_of_gets"),
    [
        ({"TLS": "posix,cma"}, "cma", "cma"),
        ({"TLS": "tcp"}, "tcp", "tcp (staged)"),
        # No RMA at all: UCX packs a put into messages, and is done at once.
        ({"TLS": "posix,self"}, "posix (staged)", "posix (staged)"),
    ],
    ids=["cma", "tcp", "emulated"],
)
def test_the_lane_of_a_device_is_what_ucx_says_that_it_took(
    options: dict[str, str],
    lane_of_puts: str,
    lane_of_gets: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Host memory that is said to be a device's: what an endpoint has for devices, and UCX does not take."""
    monkeypatch.setattr(LaneReport, "name_between", lambda *_: "cuda_ipc")
    with Child(target, options, False) as child:
        address, remote = child.receive()
        context = Context(options)
        worker = context.open_worker()
        local = context.allocate(NBYTES)
        local.array()[:] = 7
        endpoint = worker.connect(address, timeout_s=10)

        def move(memory: RemoteMemory, way: str, nbytes: int) -> str:
            zero = np.zeros(4, np.uint64)
            places = zero + np.arange(4, dtype=np.uint64) * np.uint64(nbytes)
            done = getattr(memory, way)(
                local,
                src_offsets=places,
                dst_offsets=places,
                lengths=zero + np.uint64(nbytes),
                stop=StopFlag(),
                timeout_s=10,
            )
            assert (done.num_operations, done.nbytes) == (4, 4 * nbytes)
            return memory.lane_from("cpu")

        move(endpoint.open_region(remote), "write", PAGE)  # the first waits for UCX's own handshake
        put, got = (endpoint.open_region(replace(remote, device="cuda:0")) for _ in range(2))
        assert put.lane_from("cpu") == got.lane_from("cpu") == "cuda_ipc"
        with caplog.at_level(logging.WARNING, "hurray_rdma"):
            assert move(put, "write", PAGE) == lane_of_puts
            assert len(caplog.records) == lane_of_puts.endswith("(staged)")
            assert move(got, "read", PAGE) == lane_of_gets
            assert move(got, "read", 4 * PAGE) == lane_of_gets
        staged = [lane.endswith("(staged)") for lane in (lane_of_puts, lane_of_gets)]
        assert [each.levelname for each in caplog.records] == ["WARNING"] * sum(staged), "once of each memory"
        if any(staged):
            assert f"travel over {lane_of_gets}, not cuda_ipc" in caplog.text
            assert f"software emulation {lane_of_gets.split(maxsplit=1)[0]}/" in caplog.text
        pages = local.array().reshape(NUM_PAGES, PAGE)
        assert (pages[:4] == 7).all()
        assert (pages[4:16] == 0xEE).all()
        assert (pages[16:] == 7).all()
        assert endpoint.close()
        worker.close()
        child.send("read")
        assert (child.receive()[: 4 * PAGE] == 7).all()
        child.send("end")


def test_ucx_is_asked_of_the_longest_pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    post = Endpoint.post
    monkeypatch.setattr(Endpoint, "post", lambda *a, **k: asked.append(k["describe"]) or post(*a, **k))  # type: ignore[func-returns-value]
    with Child(target, {}, False) as child:
        address, remote = child.receive()
        context = Context()
        worker = context.open_worker()
        local = context.allocate(NBYTES)
        endpoint = worker.connect(address, timeout_s=10)
        on_device, on_host = endpoint.open_region(replace(remote, device="cuda:0")), endpoint.open_region(remote)
        one = np.zeros(1, np.uint64)
        for memory in (on_host, on_device):
            for nbytes in (64, 64, 32, PAGE, 64):
                memory.write(
                    local,
                    src_offsets=one,
                    dst_offsets=one,
                    lengths=one + np.uint64(nbytes),
                    stop=StopFlag(),
                    timeout_s=10,
                )
        assert asked == [False] * 5 + [True, False, False, True, False]
        endpoint.close()
        worker.close()
        child.send("end")
