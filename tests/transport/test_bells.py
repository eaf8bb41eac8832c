"""Bells: heard by another thread or process once all before them was copied, and by nobody else's token."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import numpy as np
import pytest

from hurray_rdma.errors import GeometryError, TransferAbortedError
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Bell, Bells, Context, Path, Region, RemoteMemory, RemoteRegion, StopFlag

NBYTES = 1 << 20
AT = NBYTES - 4096
LONG_S = 30.0


@pytest.fixture
def region() -> Iterator[Region]:
    region = Context().allocate(NBYTES)
    yield region
    region.close()


def word(region: Region, bell: Bell) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return region.array()[bell.offset_nbytes : bell.offset_nbytes + 8].view(np.uint64)


def test_each_has_a_place_and_a_token_of_its_own_and_all_come_back(region: Region) -> None:
    bells = Bells(region, offset_nbytes=AT, nbytes=4096)
    taken = [bells.take() for _ in range(64)]
    assert bells.take() is None
    assert len({bell.offset_nbytes // 64 for bell in taken if bell}) == 64
    assert all(bell and bell.offset_nbytes % 64 == 0 and AT <= bell.offset_nbytes < NBYTES for bell in taken)
    for bell in taken:
        assert bell is not None
        bells.give_back(bell)
    again = [bells.take() for _ in range(64)]
    assert len({bell.token for bell in [*taken, *again] if bell}) == 128


def test_it_rings_with_its_own_token_alone(region: Region) -> None:
    bells = Bells(region, offset_nbytes=AT, nbytes=4096)
    first = bells.take()
    assert first is not None
    assert not bells.listen(first, timeout_s=0)
    word(region, first)[0] = first.token
    assert bells.listen(first, timeout_s=0)
    bells.give_back(first)
    further = [bell for bell in iter(bells.take, None) if bell is not None]
    assert [bell.offset_nbytes for bell in further].index(first.offset_nbytes) == 63, "given back last, taken last"
    second = further[-1]
    assert not bells.listen(second, timeout_s=0.001)
    word(region, second)[0] = second.token
    assert bells.listen(second, timeout_s=0)


def test_what_rang_in_a_region_before_rings_no_bell_of_its_next_user(region: Region) -> None:
    for _ in range(2):  # as two engines do, one after the other, of the same pool
        bells = Bells(region, offset_nbytes=AT, nbytes=4096)
        bell = bells.take()
        assert bell is not None
        assert not bells.listen(bell, timeout_s=0)
        word(region, bell)[0] = bell.token
        assert bells.listen(bell, timeout_s=0)


def test_other_threads_run_while_it_is_listened_to(region: Region) -> None:
    bells = Bells(region, offset_nbytes=AT, nbytes=4096)
    bell = bells.take()
    assert bell is not None
    heard: list[bool] = []
    listening = threading.Thread(target=lambda: heard.append(bells.listen(bell, timeout_s=LONG_S)))
    listening.start()
    word(region, bell)[0] = bell.token  # this thread would not come here if the other kept the GIL
    listening.join(LONG_S)
    assert heard == [True]


@contextlib.contextmanager
def reached(context: Context, address: bytes, remote: RemoteRegion) -> Iterator[RemoteMemory]:
    worker = context.open_worker()
    endpoint = worker.connect(address, timeout_s=LONG_S)
    memory = endpoint.open_region(remote)
    assert memory.path is Path.MAPPED
    yield memory
    endpoint.close()
    worker.close()


def copy_pages(memory: RemoteMemory, source: Region, bell: Bell, *, stop: bool = False) -> None:
    """All before the bells, in reversed order, and rings."""
    rows, flag = np.arange(AT // 4096, dtype=np.uint32), StopFlag()
    if stop:
        flag.set()
    memory.write_rows(
        source,
        places=np.array([[0, 4096, 0, 4096, 4096]], np.uint64),
        src_rows=rows,
        dst_rows=rows[::-1].copy(),
        stop=flag,
        timeout_s=LONG_S,
        bell=bell,
    )


def ringer(connection: Connection, address: bytes, remote: RemoteRegion) -> None:
    context = Context()
    source = context.allocate(NBYTES)
    with reached(context, address, remote) as memory:
        while isinstance(order := connection.recv(), tuple):
            fill, bell = order
            source.array()[:] = fill
            copy_pages(memory, source, bell)
    source.close()


def test_everything_that_was_copied_before_is_there_when_it_rings(region: Region) -> None:
    bells, worker = Bells(region, offset_nbytes=AT, nbytes=4096), region.context.open_worker()
    with Child(ringer, worker.address, region.remote()) as child:
        for fill in range(1, 100):
            bell = bells.take()
            assert bell is not None
            child.send((fill, bell))
            assert bells.listen(bell, timeout_s=LONG_S)
            assert (region.array()[:AT] == fill).all()
            bells.give_back(bell)
        child.send("end")
    worker.close()


def test_a_bell_outside_the_region_is_refused_and_nothing_is_written(region: Region) -> None:
    context, worker = region.context, region.context.open_worker()
    source = context.allocate(NBYTES)
    source.array()[:] = 7
    with reached(context, worker.address, region.remote()) as memory:
        for offset_nbytes in (region.nbytes, region.nbytes - 4, 12, 2**64 - 8):
            with pytest.raises(GeometryError, match="bell"):
                copy_pages(memory, source, Bell(offset_nbytes, 1))
    assert not region.array().any()
    source.close()
    worker.close()


def test_a_copy_that_was_stopped_rings_nothing(region: Region) -> None:
    context, worker = region.context, region.context.open_worker()
    bells, source = Bells(region, offset_nbytes=AT, nbytes=4096), context.allocate(NBYTES)
    bell = bells.take()
    assert bell is not None
    with reached(context, worker.address, region.remote()) as memory:
        with pytest.raises(TransferAbortedError):
            copy_pages(memory, source, bell, stop=True)
        assert not bells.listen(bell, timeout_s=0)
        copy_pages(memory, source, bell)
        assert bells.listen(bell, timeout_s=0)
    source.close()
    worker.close()
