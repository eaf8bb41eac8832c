"""Who waits for pages, and who need not: senders of further heads, offers whose pages have come, what a queue holds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import pytest

from hurray_rdma import CacheSpec, Engine, PagePool, Snapshot
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.control import Granted as GrantHeard
from hurray_rdma.control import PeerBusyError, Refused
from hurray_rdma.engine import untaken
from hurray_rdma.testing.processes import Child
from tests.engine.hands import shaken
from tests.hazards.scenes import connected, counts, digest, eventually, fill, make_pool, run, settled, snapshot_of

SPEC = CacheSpec(num_layers=2, num_heads=4, head_dim=8, page_size=4, dtype="bfloat16", total_heads=4)
LOW, HIGH = (replace(SPEC, num_heads=2, head_offset=offset) for offset in (0, 2))
SENDERS = {"low": (LOW, [1, 2, 3]), "stranger": (SPEC, [0, 1, 2, 3, 4, 5]), "high": (HIGH, [4, 5, 6])}


def contents(snapshot: Snapshot, heads: slice = slice(None)) -> list[bytes]:
    """Of every token, in the order of roles and layers, some heads of it."""
    tokens = (snapshot.tokens(role, layer=layer, seq=0) for role, layer in snapshot.pool.spec.tensors)
    return [np.ascontiguousarray(each[:, heads]).tobytes() for each in tokens]


def three_senders(connection: Connection, address: str) -> None:
    """Told a name of `SENDERS` it begins to send that, "low" and "high" with one key; answers with what it sends. Told
    "end" it waits for all, and says whose pages are there."""

    async def job() -> None:
        there: set[str] = set()

        async def send(name: str, pool: PagePool) -> None:
            sent = snapshot_of(pool, SENDERS[name][1])
            connection.send(contents(sent))
            async with connected(pool, address, timeout_s=20) as peer:
                await peer.send(sent, key="stranger" if name == "stranger" else "slices")
            there.add(name)

        with make_pool(SPEC, 8) as stranger, make_pool(LOW, 8) as low, make_pool(HIGH, 8) as high:
            pools = {"low": low, "stranger": stranger, "high": high}
            async with asyncio.TaskGroup() as group:
                while (name := await asyncio.to_thread(connection.recv)) != "end":
                    fill(pools[name], len(name))
                    group.create_task(send(name, pools[name]))
            connection.send(there)

    asyncio.run(job())


def test_senders_of_one_snapshot_are_granted_together_past_who_waits_between_them() -> None:
    """The second half stood behind a stranger that needed more pages than there were, the first waited for it with
    pages that nobody else could have: all three waited for each other."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                three, five = pool.allocator.lease(3), pool.allocator.lease(5)
                with Child(three_senders, engine.address) as child:
                    sent = {}
                    for count, name in enumerate(SENDERS, start=1):
                        child.send(name)
                        sent[name] = await asyncio.to_thread(child.receive)
                        await eventually(lambda count=count: engine.stats().num_waiting == count)
                    three.release()
                    arrivals = engine.arrivals()
                    slices = await anext(arrivals)
                    assert slices.key == "slices"
                    whole = await slices.snapshot()
                    assert contents(whole, slice(0, 2)) == sent["low"]
                    assert contents(whole, slice(2, 4)) == sent["high"]
                    assert engine.stats().num_waiting == 1
                    assert counts(pool) == (0, 8, 0)
                    five.release()  # one page too few for the stranger
                    slices.release()
                    stranger = await anext(arrivals)
                    assert stranger.key == "stranger"
                    assert contents(await stranger.snapshot()) == sent["stranger"]
                    stranger.release()
                    child.send("end")
                    assert await asyncio.to_thread(child.receive) == set(SENDERS)
                await settled(pool, 8, 0, 0)

    run(job())


def keyed_sender(connection: Connection, address: str) -> None:
    """Begins a transfer of three pages; told to, offers another of the same three and one more; told to, ends the
    first. Reports what each is, then how many pages of each were written and spared."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            fill(pool, 1)
            tokens = np.arange(4 * SPEC.page_size)
            less, more = snapshot_of(pool, [1, 2, 3]), snapshot_of(pool, [1, 2, 3, 4])
            keys = snapshot_keys(less, [tokens[: 3 * SPEC.page_size]])
            async with connected(pool, address, timeout_s=20) as peer:
                async with peer.begin(less, key="less", page_keys=keys) as transfer:
                    await transfer.send_layer(0)
                    connection.send(digest(less))
                    await asyncio.to_thread(connection.recv)
                    sending = asyncio.create_task(peer.send(more, key="more", page_keys=snapshot_keys(more, [tokens])))
                    connection.send(digest(more))
                    await asyncio.to_thread(connection.recv)
                    await transfer.send_layer(1)
                stats = transfer.stats, await sending
                connection.send([(each.num_pages, each.num_resident) for each in stats])

    asyncio.run(job())


def test_pages_that_came_with_keys_let_an_offer_in_that_shares_them() -> None:
    """It waited until pages became free, though it needed but the one that was: the rest had come meanwhile."""

    async def job() -> None:
        with make_pool(SPEC, 4) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                with Child(keyed_sender, engine.address) as child:
                    arrivals = engine.arrivals()
                    less = await asyncio.to_thread(child.receive)
                    first = await anext(arrivals)
                    child.send("offer the other")
                    more = await asyncio.to_thread(child.receive)
                    await eventually(lambda: engine.stats().num_waiting == 1)
                    assert counts(pool) == (1, 3, 0)
                    child.send("end the first")
                    second = await anext(arrivals)
                    assert (first.key, second.key) == ("less", "more")
                    assert digest(await second.snapshot()) == more
                    assert digest(await first.snapshot()) == less  # kept all the while
                    assert await asyncio.to_thread(child.receive) == [(3, 0), (1, 3)]
                    assert counts(pool) == (0, 4, 0)
                    first.release()
                    second.release()

    run(job())


def test_an_offer_that_waits_is_counted_with_what_was_made_of_it() -> None:
    """4096 entries of its table are a million of ours."""
    ours = CacheSpec(num_layers=1, num_heads=1, head_dim=8, page_size=1, dtype="bfloat16", total_heads=1)
    theirs = replace(ours, page_size=256)

    async def job() -> None:
        with make_pool(ours, 256) as pool, make_pool(theirs, 1) as source:
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                held = pool.allocator.lease(256)
                sent = Snapshot.from_block_tables(source, [[0] * 4096], seq_lens=[4096 * 256])
                hand.offer(sent)
                await eventually(lambda: engine.stats().num_waiting == 1)
                assert engine._reception is not None
                (receiver,) = engine._reception._receivers.values()
                assert receiver._queue._waiting.nbytes > 4096 * 256 * 4
                held.release()
                assert len((await hand.expect(GrantHeard)).grant.page_ids) == 256
                assert receiver._queue._waiting.nbytes == 0
            await settled(pool, 256, 0, 0)

    run(job())


def test_no_more_is_granted_from_the_queue_than_the_application_may_leave_untaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def job() -> None:
        monkeypatch.setattr(untaken, "_MAX_ARRIVALS", 1)
        with make_pool(SPEC, 4) as pool, make_pool(SPEC, 4) as source:
            async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
                held = pool.allocator.lease(4)
                one, other = (hand.offer(snapshot_of(source, [n]), key=str(n)) for n in range(2))
                await eventually(lambda: engine.stats().num_waiting == 2)
                held.release()
                assert (await hand.expect(GrantHeard)).transfer_id == one
                refused = await hand.expect(Refused)
                assert refused.transfer_id == other
                assert isinstance(refused.error, PeerBusyError)
                assert counts(pool) == (3, 1, 0)

    run(job())
