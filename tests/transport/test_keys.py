"""Where a peer's memory is mapped is what its key has brought, whatever address the peer states; UCX checks none."""

from __future__ import annotations

import contextlib
import mmap
import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma.errors import TransportError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, Endpoint, Path, RemoteMemory, RemoteRegion, StopFlag, keys
from hurray_rdma.transport.binding import native
from hurray_rdma.transport.envelope import unseal

PAGE = mmap.PAGESIZE
NBYTES = 16 * PAGE
LANES: dict[str, dict[str, str]] = {
    "cma": {},
    "shared memory": {"TLS": "^cma"},  # UCX's own puts there are stores of this process
}


def target(connection: Connection, options: dict[str, str]) -> None:
    """Owns two pools, of 0xAA and 0xBB; tells their bytes, and renews the first."""
    worker = (context := Context(options)).open_worker()
    pools = [context.allocate(NBYTES) for _ in range(2)]
    for pool, byte in zip(pools, (0xAA, 0xBB), strict=True):
        pool.array()[:] = byte
    connection.send((worker.address, *(pool.remote() for pool in pools)))
    while (told := connection.recv()) != "end":
        if told == "renew":
            pools[0].renew()
            connection.send(pools[0].remote())
        else:
            connection.send([pool.array().copy() for pool in pools])
    for pool in pools:
        pool.close()
    worker.close()


class Reached:
    """A peer process, and an endpoint to it."""

    def __init__(self, child: Child, options: dict[str, str]) -> None:
        self.child = child
        self.options = options
        self.address, self.first, self.second = child.receive()
        self.context = Context(options)
        self.worker = self.context.open_worker()
        self.endpoint = self.worker.connect(self.address, timeout_s=10)

    def place(self, remote: RemoteRegion) -> int:
        """Where its memory comes to be mapped, each time that nothing else was mapped meanwhile."""
        memory = self.endpoint.open_region(remote)
        memory.close()
        return memory._pointer

    def refuses(self, lie: RemoteRegion) -> None:
        with pytest.raises(TransportError, match="not in the memory that its rkey is of") as caught:
            self.endpoint.open_region(lie)
        assert (caught.value.field, caught.value.value) == ("remote_addr", f"{lie.remote_addr:#x}")


@pytest.fixture(params=LANES.values(), ids=LANES)
def reached(request: pytest.FixtureRequest) -> Iterator[Reached]:
    options: dict[str, str] = request.param
    with Child(target, options) as child:
        reached = Reached(child, options)
        yield reached
        assert reached.endpoint.close()
        reached.worker.close()
        child.send("end")


def shifted(remote: RemoteRegion, nbytes: int) -> RemoteRegion:
    return replace(remote, remote_addr=(remote.remote_addr + nbytes) % 2**64)


def fill(context: Context, memory: RemoteMemory, byte: int) -> None:
    with_bytes = context.allocate(NBYTES)
    with_bytes.array()[:] = byte
    none, all_of_it = np.zeros(1, np.uint64), np.full(1, NBYTES, np.uint64)
    memory.write(with_bytes, src_offsets=none, dst_offsets=none, lengths=all_of_it, stop=StopFlag(), timeout_s=10)
    with_bytes.close()


@pytest.mark.parametrize("whose", ["this process's", "another pool of a peer"])
def test_an_address_in_other_shared_memory_of_this_process_is_refused_and_nothing_there_changes(
    reached: Reached, whose: str
) -> None:
    own = reached.context.allocate(NBYTES)
    own.array()[:] = 0xCC
    second = reached.endpoint.open_region(reached.second)
    elsewhere = own.address if whose == "this process's" else second._pointer
    lie = shifted(reached.first, elsewhere - reached.place(reached.first))
    key = native.RemoteKey(reached.endpoint.bound, unseal(lie.rkey, field="rkey"))
    assert key.pointer(lie.remote_addr) == elsewhere, "UCX believes it"
    key.close()
    reached.refuses(lie)

    honest = reached.endpoint.open_region(reached.first)
    assert honest.path is Path.MAPPED
    fill(reached.context, honest, 0xDD)
    reached.child.send("read")
    first, other = reached.child.receive()
    assert (first == 0xDD).all()
    assert (other == 0xBB).all()
    assert (own.array() == 0xCC).all()
    own.close()


def test_a_region_that_only_begins_or_ends_in_the_memory_of_its_key_is_refused(reached: Reached) -> None:
    reached.endpoint.open_region(reached.second)  # the kernel puts what comes next beside it
    reached.refuses(replace(reached.first, nbytes=NBYTES + 1))
    reached.refuses(shifted(reached.first, PAGE))
    reached.refuses(shifted(reached.first, -1))
    for nbytes in (1 << 40, 2**64 - 1):
        reached.refuses(replace(reached.first, nbytes=nbytes))
    assert reached.endpoint.open_region(replace(shifted(reached.first, PAGE), nbytes=PAGE)).path is Path.MAPPED


def test_private_memory_and_address_0_are_refused(reached: Reached) -> None:
    with mmap.mmap(-1, NBYTES, mmap.MAP_PRIVATE) as private:
        place = reached.place(reached.first)
        reached.refuses(shifted(reached.first, np.frombuffer(private, np.uint8).ctypes.data - place))
        reached.refuses(shifted(reached.first, -place))


def test_a_worker_reaches_through_itself_nothing_but_whole_regions_of_its_own(reached: Reached) -> None:
    own = reached.context.allocate(NBYTES)
    private = np.zeros(NBYTES, np.uint8)
    registered = reached.context.register(private.ctypes.data, NBYTES, owner=private)
    to_itself = reached.worker.connect(reached.worker.address, timeout_s=10)
    before = own.remote()
    assert to_itself.open_region(before).path is Path.MAPPED
    assert to_itself.open_region(registered.remote()).path is Path.PUT
    own.renew()
    renewed = own.remote()
    assert to_itself.open_region(renewed).path is Path.MAPPED
    for lie in (
        before,
        shifted(renewed, PAGE),
        replace(renewed, nbytes=NBYTES - 1),
        replace(registered.remote(), remote_addr=renewed.remote_addr),
        replace(reached.first, remote_addr=renewed.remote_addr),
    ):
        with pytest.raises(TransportError, match="not in the memory that its rkey is of"):
            to_itself.open_region(lie)
    to_itself.close()
    own.close()
    registered.close()


def test_who_opens_a_region_again_has_it_mapped_again(reached: Reached) -> None:
    other_worker = reached.context.open_worker()
    endpoints = [
        reached.endpoint,
        reached.endpoint,
        reached.worker.connect(reached.address, timeout_s=10),
        other_worker.connect(reached.address, timeout_s=10),
    ]
    memories = [endpoint.open_region(reached.first) for endpoint in endpoints]
    reached.child.send("renew")
    renewed = reached.child.receive()
    memories += [endpoint.open_region(renewed) for endpoint in endpoints]
    assert [memory.path for memory in memories] == [Path.MAPPED] * 8
    assert len({memory._pointer for memory in memories}) == 8, "each key brings a mapping"
    fill(reached.context, memories[-1], 0xDD)
    reached.child.send("read")
    assert (reached.child.receive()[0] == 0xDD).all()
    for endpoint in endpoints[2:]:
        endpoint.close()
    other_worker.close()


def test_threads_that_open_and_close_regions_at_once_all_have_them_mapped(reached: Reached) -> None:
    other_worker = reached.context.open_worker()
    endpoints = [reached.endpoint, other_worker.connect(reached.address, timeout_s=10)]

    def opens(endpoint: Endpoint) -> set[Path]:
        paths = set()
        for remote in (reached.first, reached.second) * 50:
            memory = endpoint.open_region(remote)
            paths.add(memory.path)
            memory.close()
        return paths

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(opens, endpoints)) == [{Path.MAPPED}] * 2
    endpoints[1].close()
    other_worker.close()


@pytest.mark.parametrize("when", ["before it is found empty", "after it is found empty"])
@pytest.mark.parametrize("times", [3, 100])
def test_a_place_that_another_thread_takes_is_given_up_for_another(
    reached: Reached, when: str, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []
    is_unmapped: Callable[[int, int], bool] = native.is_unmapped

    def take() -> None:
        if len(taken) < times:
            taken.append(native.RemoteKey(reached.endpoint.bound, unseal(reached.second.rkey, field="rkey")))

    def beside_another(start: int, nbytes: int) -> bool:
        if when.startswith("before"):
            take()
        unmapped = is_unmapped(start, nbytes)
        if when.startswith("after"):
            take()
        return unmapped

    monkeypatch.setattr(keys.native, "is_unmapped", beside_another)
    if times == 100:
        reached.refuses(reached.first)
    else:
        assert reached.endpoint.open_region(reached.first).path is Path.MAPPED
    assert len(taken) == min(times, keys._ATTEMPTS)
    for key in taken:
        key.close()


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_without_a_descriptor_to_look_where_it_is_mapped_nothing_stays_open(reached: Reached) -> None:
    place = reached.place(reached.first)
    with no_descriptor_left(), pytest.raises(TransportError, match="Too many open files") as caught:
        reached.endpoint.open_region(reached.first)
    assert (caught.value.field, caught.value.value) == ("remote_addr", f"{reached.first.remote_addr:#x}")
    assert native.is_unmapped(place, NBYTES), "its key is destroyed"
    assert reached.endpoint.open_region(reached.first).path is Path.MAPPED


def test_what_is_mapped_anywhere_in_a_span_of_memory_is_seen() -> None:
    with mmap.mmap(-1, 3 * PAGE) as whole:
        start = np.frombuffer(whole, np.uint8).ctypes.data
        assert not native.is_unmapped(start, 1)
        assert not native.is_unmapped(start + 3 * PAGE - 1, 1)
        assert not native.is_unmapped(start + PAGE + 1, 64 * PAGE)
    assert native.is_unmapped(start, 3 * PAGE)
    assert native.is_unmapped(start + 1, 3 * PAGE - 1), "and leaves it so"
    for impossible in ((start, 0), (start, 2**64 - 1), (start, 2**64 - start)):
        assert not native.is_unmapped(*impossible)
