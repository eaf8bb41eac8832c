"""What senders and receivers say is held to the trace and to each other: each lie is told, a true story passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hurray_rdma.replay import load_config
from hurray_rdma.replay.checks import Heard, check_failures, check_worker
from hurray_rdma.replay.messages import Delivery, Failure, Service
from hurray_rdma.replay.trace import parse_trace
from hurray_rdma.replay.work import Work
from tests.replay.traces import line

BLOCK = 8 * 64 * 2 * 4  # 8 tokens of 64 bfloat16 in two roles of two layers
TOKEN = BLOCK // 8


def work() -> Work:
    """Requests 0 and 1 go to worker 0 and share a block, 2 goes to worker 1, 3 is larger than the pools."""
    lines = [line([0, 1]), line([0, 2, 3], tokens=1100), line([9]), line(list(range(20, 31)))]
    config = load_config(overrides={"workers": {"decode": 2, "decode_pages": 10}})
    return Work(config, parse_trace(lines, skip_malformed=False), np.array([0, 0, 1, 0]))


def delivery(request: int, blocks: int, resident: int) -> Delivery:
    return Delivery(request, 1.0, 2.0, blocks, resident, blocks * BLOCK, (blocks - resident) * BLOCK)


def service(request: int, resident: list[int], tokens: int) -> Service:
    return Service(request, 1, 2, 3, 4, 5, 5, np.array(resident, bool), tokens * TOKEN)


TRUE = Heard(
    worker=0,
    killed=False,
    services=[service(0, [0, 0], 16), service(1, [1, 0, 0], 17)],  # 76 of 512 tokens are one of 8
    deliveries=[delivery(0, 2, 0), delivery(1, 3, 1)],
    num_again=0,
    received_nbytes=4 * BLOCK,
)


def test_a_true_story_passes() -> None:
    assert check_worker(work(), TRUE) == []
    assert check_failures(work(), {3: Failure(3, "PoolExhaustedError", "")}) == []


LIES: dict[str, Callable[[], Heard]] = {
    "request 0: 8,192 bytes must be compared, 4,096 were": lambda: replace(
        TRUE, services=[service(0, [0, 0], 8), TRUE.services[1]]
    ),
    "request 2: was to go to decode worker 1": lambda: replace(TRUE, services=[*TRUE.services, service(2, [0], 8)]),
    "request 0: bytes sent: must be 8,192, 4,096 found": lambda: replace(
        TRUE, deliveries=[replace(TRUE.deliveries[0], sent_nbytes=BLOCK), TRUE.deliveries[1]]
    ),
    "request 0: blocks: must be 2, 3 found": lambda: replace(TRUE, deliveries=[delivery(0, 3, 0), TRUE.deliveries[1]]),
    "request 0: logical bytes: must be 8,192, 1 found": lambda: replace(
        TRUE, deliveries=[replace(TRUE.deliveries[0], logical_nbytes=1), TRUE.deliveries[1]]
    ),
    "request 1: 1 times through by the trace, 0 by its receiver": lambda: replace(TRUE, services=TRUE.services[:1]),
    "request 0: 1 times through by the trace, 2 by its sender": lambda: replace(
        TRUE, deliveries=[*TRUE.deliveries, TRUE.deliveries[0]]
    ),
    "request 1: 2 blocks were resident by its sender, 1 by its receiver": lambda: replace(
        TRUE, deliveries=[TRUE.deliveries[0], delivery(1, 3, 2)]
    ),
    "2 blocks were resident, of at most 1": lambda: replace(
        TRUE,
        services=[TRUE.services[0], service(1, [1, 1, 0], 17)],
        deliveries=[TRUE.deliveries[0], delivery(1, 3, 2)],
        received_nbytes=3 * BLOCK,
    ),
    "bytes received: must be 16,384 by the trace, 20,480 by its engine": lambda: replace(
        TRUE, received_nbytes=5 * BLOCK
    ),
    "1 requests were sent again, though it lived: its counts are not checked": lambda: replace(TRUE, num_again=1),
}


@pytest.mark.parametrize("told", LIES)
def test_each_lie_is_told(told: str) -> None:
    assert told in check_worker(work(), LIES[told]())


def test_of_a_killed_worker_requests_are_held_to_the_trace_and_their_number_is_not() -> None:
    killed = replace(TRUE, killed=True, num_again=1, services=TRUE.services[:1], received_nbytes=0)
    assert check_worker(work(), killed) == []
    lying = replace(killed, services=[service(0, [0, 0], 8)])
    assert check_worker(work(), lying) == ["request 0: 8,192 bytes must be compared, 4,096 were"]


@pytest.mark.parametrize(
    ("failures", "told"),
    [
        ({}, ["request 3: larger than the pool, and not refused"]),
        ({2: Failure(2, "PoolExhaustedError", "no")}, ["request 2: PoolExhaustedError: no"]),  # it fits
        ({3: Failure(3, "PeerLostError", "gone")}, ["request 3: PeerLostError: gone"]),
    ],
)
def test_who_fails_is_compared_and_not_how_many(failures: dict[int, Failure], told: list[str]) -> None:
    assert [each for each in check_failures(work(), failures) if each in told] == told
