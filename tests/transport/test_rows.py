"""Rows through a mapping: against plain Python, and refused as a whole where one lies outside."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.errors import DeadlineExceededError, GeometryError, RegistrationError, TransportError
from hurray_rdma.transport import Context, Path, Region, RemoteMemory, StopFlag

NBYTES = 1 << 16
LONG_S = 30.0


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Region, Region, RemoteMemory]]:
    with opened() as sides:
        yield sides


@contextlib.contextmanager
def opened() -> Iterator[tuple[Region, Region, RemoteMemory]]:
    context = Context()
    worker, source, dest = context.open_worker(), context.allocate(NBYTES), context.allocate(NBYTES)
    source.array()[:] = np.random.default_rng(1).integers(0, 256, NBYTES, np.uint8)
    endpoint = worker.connect(worker.address, timeout_s=LONG_S)
    memory = endpoint.open_region(dest.remote())
    assert memory.path is Path.MAPPED
    yield source, dest, memory
    endpoint.close()
    worker.close()
    source.close()
    dest.close()


def write(
    sides: tuple[Region, Region, RemoteMemory],
    places: list[list[int]],
    rows: list[list[int]],
    *,
    timeout_s: float = LONG_S,
) -> tuple[int, int]:
    source, _, memory = sides
    table = np.array(places, np.uint64).reshape(-1, 5)
    src_rows, dst_rows = np.array(rows, np.uint32).reshape(-1, 2).T.copy()
    moved = memory.write_rows(
        source, places=table, src_rows=src_rows, dst_rows=dst_rows, stop=StopFlag(), timeout_s=timeout_s
    )
    return moved.num_operations, moved.nbytes


STARTS, STRIDES, LENGTHS = st.integers(0, 999), st.integers(0, 600), st.integers(1, 600)
APART = st.tuples(STARTS, STRIDES, STARTS, STRIDES, LENGTHS)
DENSE = st.builds(lambda src, dst, nbytes: (src, nbytes, dst, nbytes, nbytes), STARTS, STARTS, LENGTHS)
PLACES = st.lists(APART | DENSE, max_size=4)
RUNS = st.builds(
    lambda src, dst, length: [(src + at, dst + at) for at in range(length)],
    st.integers(0, 90),
    st.integers(0, 90),
    st.integers(1, 4),
)
ROWS = st.lists(RUNS, max_size=6).map(lambda runs: [row for run in runs for row in run])


def pieces_of(place: list[int], rows: list[list[int]]) -> int:
    """Rows, but neighbours on both sides only once."""
    dense = place[1] == place[3] == place[4]
    joined = sum(src == before + 1 and dst == there + 1 for (before, there), (src, dst) in pairwise(rows))
    return len(rows) - joined * dense


@settings(max_examples=200)
@given(PLACES, ROWS)
def test_each_row_goes_where_its_place_says(
    sides: tuple[Region, Region, RemoteMemory], places: list[list[int]], rows: list[list[int]]
) -> None:
    source, dest, _ = sides
    dest.array()[:] = 0
    expected = dest.array().copy()
    for src, src_stride, dst, dst_stride, nbytes in places:
        for src_row, dst_row in rows:
            start = dst + dst_row * dst_stride
            row = source.array()[src + src_row * src_stride :][:nbytes]
            expected[start : start + nbytes] = row
    num_pieces = sum(pieces_of(place, rows) for place in places)
    assert write(sides, places, rows) == (num_pieces, sum(place[4] for place in places) * len(rows))
    assert np.array_equal(dest.array(), expected)


@settings(max_examples=50)
@given(PLACES, ROWS)
def test_each_row_that_is_read_comes_from_where_its_place_says(
    sides: tuple[Region, Region, RemoteMemory], places: list[list[int]], rows: list[list[int]]
) -> None:
    mine, theirs, memory = sides
    kept = mine.array().copy()
    theirs.array()[:] = np.random.default_rng(2).integers(0, 256, NBYTES, np.uint8)
    expected = kept.copy()
    for src, src_stride, dst, dst_stride, nbytes in places:
        for src_row, dst_row in rows:
            row = theirs.array()[src + src_row * src_stride :][:nbytes]
            expected[dst + dst_row * dst_stride :][:nbytes] = row
    src_rows, dst_rows = np.array(rows, np.uint32).reshape(-1, 2).T.copy()
    table = np.array(places, np.uint64).reshape(-1, 5)
    moved = memory.read_rows(
        mine, places=table, src_rows=src_rows, dst_rows=dst_rows, stop=StopFlag(), timeout_s=LONG_S
    )
    assert moved.num_operations == sum(pieces_of(place, rows) for place in places)
    assert moved.nbytes == sum(place[4] for place in places) * len(rows)
    assert np.array_equal(mine.array(), expected)
    mine.array()[:] = kept


@pytest.mark.parametrize(("row", "side"), [([16, 0], "src"), ([0, 16], "dst")])
def test_a_row_outside_is_not_read(sides: tuple[Region, Region, RemoteMemory], row: list[int], side: str) -> None:
    mine, _, memory = sides
    kept = mine.array().copy()
    with pytest.raises(GeometryError, match=f"ends at byte {17 * 4096} of a region of {NBYTES}") as caught:
        memory.read_rows(
            mine,
            places=np.array([[0, 4096, 0, 4096, 4096]], np.uint64),
            src_rows=np.array([0, row[0]], np.uint32),
            dst_rows=np.array([0, row[1]], np.uint32),
            stop=StopFlag(),
            timeout_s=LONG_S,
        )
    assert (caught.value.field, caught.value.value) == (f"{side}_rows[1]", 16)
    assert np.array_equal(mine.array(), kept)


@pytest.mark.parametrize(
    ("place", "row", "side", "end"),
    [
        ([0, 4096, 0, 4096, 4096], [16, 0], "src", 17 * 4096),
        ([0, 4096, 0, 4096, 4096], [0, 16], "dst", 17 * 4096),
        ([1, 4096, 0, 4096, 4096], [15, 0], "src", NBYTES + 1),
        ([0, 4096, 1, 4096, 4096], [0, 15], "dst", NBYTES + 1),
        ([0, 4096, NBYTES, 4096, 1], [0, 0], "dst", NBYTES + 1),
        ([0, 2**62, 0, 0, 8], [4, 0], "src", 2**64 + 8),  # 8 in 64 bits
        ([2**64 - 8, 8, 0, 0, 8], [1, 0], "src", 2**64 + 8),
        ([0, 0, 2**64 - 4, 0, 8], [0, 0], "dst", 2**64 + 4),
        ([0, 0, 0, 2**40, 1], [0, 2**32 - 1], "dst", 2**72 - 2**40 + 1),
        ([0, 0, 0, 0, NBYTES + 1], [0, 0], "src", NBYTES + 1),
    ],
)
def test_a_row_outside_is_refused_by_name_and_nothing_is_written(
    sides: tuple[Region, Region, RemoteMemory], place: list[int], row: list[int], side: str, end: int
) -> None:
    _, dest, _ = sides
    dest.array()[:] = 3
    good = [0, 4096, 0, 4096, 4096]
    with pytest.raises(GeometryError, match=f"ends at byte {end} of a region of {NBYTES}") as caught:
        write(sides, [good, place], [[0, 0], row])
    number = row[side == "dst"]
    assert (caught.value.field, caught.value.value) == (f"{side}_rows[{int(number > 0)}]", number)
    assert (dest.array() == 3).all()


def test_rows_that_have_no_place_are_not_looked_at(sides: tuple[Region, Region, RemoteMemory]) -> None:
    source, _, memory = sides
    rows = np.zeros(1 << 28, np.uint32)  # which nobody has touched, and takes no memory
    places = np.empty((0, 5), np.uint64)
    moved = memory.write_rows(source, places=places, src_rows=rows, dst_rows=rows, stop=StopFlag(), timeout_s=LONG_S)
    assert (moved.num_operations, moved.nbytes) == (0, 0)


def test_lists_of_unlike_length_are_refused(sides: tuple[Region, Region, RemoteMemory]) -> None:
    source, _, memory = sides
    rows = np.zeros(2, np.uint32)
    with pytest.raises(ValueError, match="same length"):
        memory.write_rows(
            source,
            places=np.zeros((1, 5), np.uint64),
            src_rows=rows,
            dst_rows=rows[:1],
            stop=StopFlag(),
            timeout_s=LONG_S,
        )


def test_the_last_byte_can_be_reached(sides: tuple[Region, Region, RemoteMemory]) -> None:
    source, dest, _ = sides
    dest.array()[:] = 0
    assert write(sides, [[0, 4096, 0, 4096, 4096]], [[15, 15]]) == (1, 4096)
    assert np.array_equal(dest.array()[-4096:], source.array()[-4096:])
    assert not dest.array()[:-4096].any()


def test_nothing_is_written_without_time_nor_through_what_is_closed() -> None:
    place, row = [[0, 4096, 0, 4096, 4096]], [[0, 1]]
    with opened() as (source, dest, memory):
        sides = source, dest, memory
        with pytest.raises(DeadlineExceededError):
            write(sides, place, row, timeout_s=0)
        source.close()
        with pytest.raises(RegistrationError, match="closed"):
            write(sides, place, row)
        memory.close()
        other = dest.context.allocate(NBYTES)
        with pytest.raises(TransportError, match="closed"):
            write((other, dest, memory), place, row)
        assert not dest.array().any()
        other.close()


def test_rows_go_nowhere_but_through_a_mapping() -> None:
    context = Context()
    worker, source = context.open_worker(), context.allocate(NBYTES)
    pages = np.zeros(NBYTES, np.uint8)
    dest = context.register(pages.ctypes.data, NBYTES, owner=pages)
    endpoint = worker.connect(worker.address, timeout_s=LONG_S)
    memory = endpoint.open_region(dest.remote())
    assert memory.path is Path.PUT
    with pytest.raises(TransportError, match="not mapped"):
        write((source, dest, memory), [[0, 4096, 0, 4096, 4096]], [[0, 0]])
    endpoint.close()
    worker.close()
    source.close()
    dest.close()
