"""The counts that a replay is held to, on traces small enough to count by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hurray_rdma.replay import load_config
from hurray_rdma.replay.expected import bounds_of, check_services
from hurray_rdma.replay.messages import Service
from hurray_rdma.replay.trace import parse_trace
from hurray_rdma.replay.work import Work
from tests.replay.traces import line


def work_of(*lines: bytes, decode_pages: int = 10) -> Work:
    config = load_config(overrides={"workers": {"decode": 1, "decode_pages": decode_pages}})
    trace = parse_trace(lines, skip_malformed=False)
    return Work(config, trace, np.zeros(len(trace), np.int64))


def service(
    request: int, times: tuple[float, float, float, float], resident: list[int], free: tuple[int, int]
) -> Service:
    granted, seen, completed, released = times
    return Service(
        request=request,
        granted_s=granted,
        seen_s=seen,
        completed_s=completed,
        released_s=released,
        free_when_seen=free[0],
        free_when_released=free[1],
        resident=np.array(resident, bool),
        compared_nbytes=0,
    )


def test_bounds_are_counted_from_the_trace() -> None:
    work = work_of(
        line([0, 1, 2]),
        line([0, 1, 3], tokens=1100),  # its last block is not full: it is never resident
        line([0, 1, 3], tokens=1100),
        line(list(range(100, 111))),  # larger than the pool
    )
    bounds = bounds_of(work, 0)
    assert (bounds.num_unique, bounds.num_resident_most) == (4, 4)


def one_after_the_other() -> tuple[Work, list[Service]]:
    """Headroom 4 of 6 pages: at most 2 are kept, of the last request its beginning."""
    work = work_of(line([0, 1, 2, 3]), line([0, 1, 4]), line([5]), line([0]), decode_pages=6)
    work.trace.blocks[work.trace.block_ptr[2]] = 4  # no trace has 4 without 0 and 1; the cache does not care
    services = [
        service(0, (1, 2, 3, 4), [0, 0, 0, 0], (2, 4)),  # keeps 0 and 1
        service(1, (5, 6, 7, 8), [1, 1, 0], (3, 4)),  # finds them, leaves its end: keeps 0 and 1
        service(2, (9, 10, 11, 12), [0], (4, 4)),  # seen: 1 goes; then 0 is older than 4, and room for both
        service(3, (13, 14, 15, 16), [1], (4, 4)),
    ]
    return work, services


def test_a_history_by_hand_is_found_right() -> None:
    work, services = one_after_the_other()
    assert check_services(work, services) == (3, [])
    assert check_services(work, services[::-1]) == (3, [])  # times order them, not their places


def test_an_older_copy_stands_in_once_the_newest_is_gone() -> None:
    """Two requests bring block 0 at a time; the newer copy is given up while the request with the older one lasts."""
    # The largest request, which is not served here, makes the headroom 4.
    work = work_of(line([0]), line([0]), line([7]), line([0]), line([10, 11, 12, 13]), decode_pages=6)
    services = [
        service(0, (1, 2, 5, 20), [0], (5, 4)),
        service(1, (3, 4, 6, 7), [0], (4, 4)),
        service(2, (8, 9, 10, 11), [0], (4, 4)),  # seen: the copy of request 1 goes,
        service(3, (12, 13, 14, 15), [1], (4, 4)),  # finds that of request 0
    ]
    assert check_services(work, services) == (1, [])


@pytest.mark.parametrize(
    ("at", "change", "told"),
    [
        (1, {"resident": np.array([True, False, False])}, "request 1: 2 blocks must be resident, 1 were"),
        (2, {"resident": np.array([True])}, "request 2: 0 blocks must be resident, 1 were"),
        (0, {"free_when_released": 3}, "request 0: 4 pages must be free, 3 were"),
        (3, {"free_when_seen": 5}, "request 3: 4 pages must be free, 5 were"),
        (1, {"granted_s": 2.5}, "request 1: 0 blocks must be resident, 2 were"),  # before the first was complete
    ],
)
def test_anything_else_is_found_wrong(at: int, change: dict[str, object], told: str) -> None:
    work, services = one_after_the_other()
    services[at] = replace(services[at], **change)  # type: ignore[arg-type]
    assert told in check_services(work, services)[1]


def test_two_copies_of_a_block_the_later_one_counts_while_it_lives() -> None:
    work = work_of(line([0]), line([0]), line([0]), decode_pages=8)
    services = [
        service(0, (1, 2, 5, 9), [0], (7, 6)),
        service(1, (3, 4, 6, 7), [0], (6, 6)),  # granted before the first was complete
        service(2, (10, 11, 12, 13), [1], (6, 6)),
    ]
    assert check_services(work, services) == (1, [])
