"""Many senders on one receiver: what each costs must not depend on how many others there are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import hurray_rdma
from hurray_rdma import Engine
from hurray_rdma.testing.chaos.words import Lane
from hurray_rdma.testing.many import Footprint, crowd
from tests.hazards.scenes import SPEC, make_pool, settled, snapshot_of

NUM_SENDS = 5
NUM_PAGES = 4
NUM_PROCESSES = 4
MANY = (1, 4, 16, 64)
STILL_S = 600.0
"""Nobody pings, and nothing is said twice, while lines are counted, however long that takes."""
PACKAGE = str(Path(hurray_rdma.__file__).parent)

CONNECT = {
    "CLIENT_HELLO to receiver": 1,
    "SERVER_HELLO to sender": 1,
    "SESSION to receiver": 1,
    "SESSION to sender": 1,
    "POOL to sender": 1,
}
SEND = {
    "OFFER to receiver": 1,
    "GRANT to sender": 1,
    "ENDED to receiver": 1,  # every role of each of three layers is in it: so few pages are written in one call
    "TENSOR_PUT_ACK to sender": 1,
}
SAID_AGAIN = ("ENDED to receiver", "TENSOR_PUT_ACK to sender")
"""More of these pass where answers take half a second, the fewer the longer they take."""
IN_TIME = ("PING", "PONG")
"""How many of these pass depends on time."""


@pytest.mark.parametrize(("lane", "many"), [("mapped", MANY), ("tcp", (1, 16))])
def test_each_of_many_senders_costs_as_much_as_one(lane: Lane, many: tuple[int, ...]) -> None:
    async def look(num_senders: int) -> tuple[Footprint, Footprint]:
        starting = crowd(num_senders, num_processes=NUM_PROCESSES, lane=lane, count_messages=True)
        async with starting as (everybody, alone):
            told = await everybody.send(NUM_SENDS, num_pages=NUM_PAGES)
            assert len(told.seconds) == num_senders
            held = await everybody.footprint()
            assert (held.num_sessions, held.num_transfers) == (num_senders, num_senders * NUM_SENDS)
            messages = {name: n for name, n in everybody.messages.items() if not name.startswith(IN_TIME)}
            # Each asks once for pages ahead, is refused, and asks again only if all this takes longer than ten seconds.
            asked = messages.pop("RESERVE to receiver")
            assert messages.pop("ERROR to sender") == asked >= num_senders
            expected = {
                name: num_senders * (CONNECT.get(name, 0) + NUM_SENDS * SEND.get(name, 0)) for name in CONNECT | SEND
            }
            for name in SAID_AGAIN:
                assert expected[name] <= messages.pop(name) <= 3 * expected.pop(name), name
            assert messages == expected
        return alone, held

    costs, totals = {}, {}
    for num_senders in many:
        alone, held = asyncio.run(look(num_senders))
        costs[num_senders] = {
            "bytes": (held.anonymous_nbytes - alone.anonymous_nbytes) / num_senders,
            "files": (held.num_files - alone.num_files) / num_senders,
        }
        totals[num_senders] = held.anonymous_nbytes - alone.anonymous_nbytes
        # Over the network each has a UCX worker and a page stream, with a thread each; here all share the engine's.
        assert held.num_threads == alone.num_threads + (2 * num_senders if lane == "tcp" else 0)
    for num_senders in many[1:]:
        assert costs[num_senders]["bytes"] <= 1.25 * costs[1]["bytes"] + (64 << 10), costs
        assert costs[num_senders]["files"] <= costs[1]["files"] + 1, costs
    if len(many) == 4:  # the last ones cost no more than the ones before: a mean would hide what grows
        _, few, more, most = many
        before = (totals[more] - totals[few]) / (more - few)
        assert (totals[most] - totals[more]) / (most - more) <= 1.25 * before + (64 << 10), totals


@contextmanager
def counted_lines() -> Iterator[list[int]]:
    """The number is how many lines of the package this thread has run so far: work, however long it takes."""
    count = [0]
    ours: dict[CodeType, bool] = {}

    def local(frame: FrameType, event: str, _: object) -> Any:
        count[0] += event == "line"
        return local

    def trace(frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code not in ours:
            ours[code] = code.co_filename.startswith(PACKAGE)
        return local if ours[code] else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


def test_the_work_for_a_transfer_does_not_grow_with_the_number_of_senders() -> None:
    async def lines_of_a_send(num_senders: int) -> float:
        with make_pool(SPEC, 256) as pool, make_pool(SPEC, 256) as source:
            async with (
                Engine(pool, listen="127.0.0.1:0", peer_timeout_s=STILL_S) as engine,
                Engine(source, peer_timeout_s=STILL_S) as sender,
                AsyncExitStack() as stack,
            ):
                address = engine.address
                peers = [await stack.enter_async_context(sender.connect(address)) for _ in range(num_senders)]

                async def take() -> None:
                    async for arrival in engine.arrivals():
                        await arrival.snapshot()
                        arrival.release()

                taking = asyncio.create_task(take())
                sent = snapshot_of(source, [0, 1, 2, 3])
                await asyncio.gather(*(peer.send(sent) for peer in peers))
                with counted_lines() as count:
                    for _ in range(NUM_SENDS):
                        await asyncio.gather(*(peer.send(sent) for peer in peers))
                    lines = count[0] / (NUM_SENDS * num_senders)
                await settled(pool, 256, 0, 0)
            await taking
        return lines

    lines = {num_senders: asyncio.run(lines_of_a_send(num_senders)) for num_senders in MANY}
    assert lines[1] > 500, "they are counted"
    assert max(lines.values()) <= 1.2 * lines[1], lines
