"""Many senders at once: nobody is served at the cost of the others. Counted, not timed: all of them run on one loop."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from hurray_rdma import Arrival, CacheSpec, Engine, PagePool, Peer
from hurray_rdma.control import TensorData
from hurray_rdma.engine.granted import Granted
from hurray_rdma.engine.link import Link
from hurray_rdma.transport import Context
from tests.hazards.scenes import SPEC, eventually, make_pool, run, settled, snapshot_of

NUM_SENDERS = 16
NUM_SENDS = 8
NUM_PAGES = 4
LARGE = CacheSpec(num_layers=2, num_heads=8, head_dim=64, page_size=64, dtype="bfloat16")  # 64 KiB of each tensor


@asynccontextmanager
async def senders(
    spec: CacheSpec, num_pages: int, num_senders: int, context: Context | None = None
) -> AsyncIterator[tuple[PagePool, Engine, PagePool, list[Peer]]]:
    """A receiver, and so many connections of one process to it."""
    with make_pool(spec, num_pages, context=context) as pool, make_pool(spec, 64, context=context) as source:
        async with (
            Engine(pool, listen="127.0.0.1:0", timeout_s=20, peer_timeout_s=60) as engine,
            Engine(source, timeout_s=20, peer_timeout_s=60) as sender,
            AsyncExitStack() as stack,
        ):
            peers = [await stack.enter_async_context(sender.connect(engine.address)) for _ in range(num_senders)]
            yield pool, engine, source, peers
        await settled(pool, num_pages, 0, 0)


@pytest.mark.parametrize("num_transfers", [1, 3, NUM_SENDERS], ids=["one fits", "three fit", "all fit"])
def test_no_sender_gets_ahead_of_another_by_more_than_two_transfers(num_transfers: int) -> None:
    async def job() -> None:
        async with senders(SPEC, NUM_PAGES * num_transfers, NUM_SENDERS) as (_, engine, source, peers):
            granted: Counter[int] = Counter()
            ahead = []

            async def take() -> None:
                async for arrival in engine.arrivals():
                    granted[int(arrival.key)] += 1
                    served = [granted[number] for number in range(NUM_SENDERS)]
                    ahead.append(max(served) - min(served))
                    tasks.append(asyncio.create_task(let_go(arrival)))

            async def let_go(arrival: Arrival) -> None:
                await arrival.snapshot()
                arrival.release()

            async def send_all(number: int) -> None:
                for turn in range(NUM_SENDS):
                    table = [(number + turn + page) % 64 for page in range(NUM_PAGES)]
                    await peers[number].send(snapshot_of(source, table), key=str(number))

            tasks: list[asyncio.Task[None]] = []
            taking = asyncio.create_task(take())
            await asyncio.gather(*map(send_all, range(NUM_SENDERS)))
            await eventually(lambda: granted.total() == NUM_SENDERS * NUM_SENDS)
            await asyncio.gather(*tasks)
            taking.cancel()
            assert set(granted.values()) == {NUM_SENDS}
            assert max(ahead) <= 2

    run(job())


def test_pieces_of_large_transfers_are_taken_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the control channel, where each piece is work for the receiver: of any 32 in a row a sender has few."""
    num_senders, num_pages, window = 8, 32, 32
    pieces: list[Link] = []
    data = Granted.data

    def heard(granted: Granted, event: TensorData, link: Link) -> None:
        pieces.append(link)
        data(granted, event, link)

    async def job() -> None:
        monkeypatch.setattr(Granted, "data", heard)
        context = Context({"TLS": "self"})  # by itself no process reaches another
        async with senders(LARGE, num_pages * num_senders, num_senders, context) as (_, engine, source, peers):
            sent = snapshot_of(source, list(range(num_pages)))
            await asyncio.gather(*(peer.send(sent, key="large") for peer in peers))
            for _ in peers:
                arrival = await anext(engine.arrivals())
                assert arrival.path == "frames"
                arrival.release()
            assert len(pieces) >= 2 * window
            most = [max(Counter(pieces[at : at + window]).values()) for at in range(len(pieces) - window)]
            assert max(most) <= 2 * window / num_senders, "twice its share"

    run(job())
