"""Snapshots whose pages lie alike on both sides: copied as soon as their grant is there, or in their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from hurray_rdma import CacheSpec, Engine, GeometryError, PagePool, Peer
from hurray_rdma.control import Grant, ServerSession
from hurray_rdma.engine.exchange import INLINE_NBYTES, Exchange
from hurray_rdma.engine.transfer import Transfer
from hurray_rdma.engine.whole_push import WholePush
from tests.hazards.scenes import SPEC, counts, digest, eventually, fill, make_pool, run, settled, snapshot_of

pytestmark = pytest.mark.both_loops

LARGE = CacheSpec(
    num_layers=4, num_heads=8, head_dim=128, page_size=32, dtype="bfloat16"
)  # 512 KiB of a page's tensors


@contextlib.asynccontextmanager
async def pair(spec: CacheSpec = SPEC, num_pages: int = 16) -> AsyncIterator[tuple[PagePool, Engine, PagePool, Peer]]:
    """A receiver and a sender."""
    with make_pool(spec, num_pages) as mine, make_pool(spec, num_pages) as theirs:
        fill(theirs, 4)
        async with (
            Engine(mine, listen="127.0.0.1:0", timeout_s=20) as engine,
            Engine(theirs, timeout_s=20) as sender,
            sender.connect(engine.address) as peer,
        ):
            yield mine, engine, theirs, peer


@pytest.mark.parametrize(("num_pages", "at_once"), [(1, True), (3, True), (6, False)])
def test_what_takes_long_to_copy_is_left_to_a_thread(
    num_pages: int, monkeypatch: pytest.MonkeyPatch, *, at_once: bool
) -> None:
    handed_over: list[int] = []
    move = Exchange._move

    async def counted(self: WholePush, pool: PagePool, work: object, nbytes: int) -> None:
        handed_over.append(nbytes)
        await move(self, pool, work, nbytes)  # type: ignore[arg-type]

    async def job() -> None:
        monkeypatch.setattr(WholePush, "_move", counted)
        async with pair(LARGE) as (mine, engine, theirs, peer):
            sent = snapshot_of(theirs, [7, 3, 11, 2, 9, 5][:num_pages])
            stats = await peer.send(sent, key="a")
            arrival = await anext(engine.arrivals())
            assert digest(await arrival.snapshot()) == digest(sent)
            nbytes = num_pages << 19
            assert (stats.path, stats.num_pages, stats.num_resident) == ("mapped", num_pages, 0)
            assert (stats.sent_nbytes, stats.logical_nbytes) == (nbytes, nbytes)
            assert handed_over == ([] if at_once else [nbytes])
            assert (nbytes <= INLINE_NBYTES) is at_once
            arrival.release()
            await settled(mine, 16, 0, 0)
            assert engine.stats().receive.nbytes == nbytes

    run(job())


@pytest.mark.parametrize(("num_layers", "steps"), [(1, [1]), (2, [1, 1])])
def test_many_pages_go_at_once_where_no_layer_could_be_used_before_the_others(
    num_layers: int, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    say_ended, ended = WholePush._say_ended, Transfer._ended

    def at_once(self: WholePush) -> None:
        told.append(num_layers)
        say_ended(self)

    def by_layers(self: Transfer, indices: list[int]) -> None:
        told.append(len(indices))
        ended(self, indices)

    async def job() -> None:
        monkeypatch.setattr(WholePush, "_say_ended", at_once)
        monkeypatch.setattr(Transfer, "_ended", by_layers)
        spec = replace(LARGE, num_layers=num_layers, roles=("fused",), page_size=512)  # 1 MiB of each layer
        async with pair(spec, 40) as (mine, engine, theirs, peer):
            sent = snapshot_of(theirs, range(39, 5, -1))
            stats = await peer.send(sent, key="a")
            arrival = await anext(engine.arrivals())
            assert digest(await arrival.snapshot()) == digest(sent)
            assert (stats.path, stats.num_pages, stats.sent_nbytes) == ("mapped", 34, 34 * num_layers << 20)
            assert stats.num_operations < 34 * num_layers, "a fresh pool grants neighbours"
            assert told == steps
            arrival.release()
            await settled(mine, 40, 0, 0)

    run(job())


def test_pages_that_two_sequences_share_are_copied_once() -> None:
    async def job() -> None:
        async with pair() as (_, engine, theirs, peer):
            sent = snapshot_of(theirs, [5, 1], [5, 8], [1])
            stats = await peer.send(sent, key="a")
            assert (stats.num_pages, stats.num_table_entries, stats.num_sequences) == (3, 5, 3)
            arrival = await anext(engine.arrivals())
            assert digest(await arrival.snapshot()) == digest(sent)
            table = arrival.block_table.tolist()
            assert (table[0], table[1]) == (table[2], table[4])
            assert len(set(table)) == 3

    run(job())


def test_a_grant_that_comes_while_the_pool_is_registered_anew_is_used_after_that() -> None:
    async def job() -> None:
        async with pair() as (_, engine, theirs, peer):
            sent = snapshot_of(theirs, [3, 1, 7])
            with theirs.gate.renewal(timeout_s=5):
                sending = asyncio.create_task(peer.send(sent, key="a"))
                arrival = await anext(engine.arrivals())
                assert peer._connection is not None
                (push,) = [each for each in peer._connection._exchanges.values() if isinstance(each, WholePush)]
                await eventually(push._answer.done)
                assert not sending.done()
            await sending
            assert digest(await arrival.snapshot()) == digest(sent)

    run(job())


@pytest.mark.parametrize("count", [2, 4])
def test_a_grant_of_another_number_of_pages_is_none(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    grant_of = ServerSession.grant

    def wrong(session: ServerSession, transfer_id: int, grant: Grant, *, now: float) -> bool:
        page_ids = [*grant.page_ids.tolist(), 15][:count]
        return grant_of(session, transfer_id, replace(grant, page_ids=page_ids), now=now)  # type: ignore[arg-type]

    async def job() -> None:
        monkeypatch.setattr(ServerSession, "grant", wrong)
        async with pair() as (mine, engine, theirs, peer):
            with pytest.raises(GeometryError, match="must be the 3 pages of the offer"):
                await peer.send(snapshot_of(theirs, [3, 1, 7]), key="a")
            await settled(mine, 16, 0, 0)
            assert counts(theirs) == (16, 0, 0)
            assert not any(page.any() for page in (mine.pages(*tensor).view("uint8") for tensor in SPEC.tensors))
            assert engine.stats().receive.num_transfers == 0

    run(job())


def test_a_sender_that_is_cancelled_leaves_no_page_behind() -> None:
    async def job() -> None:
        async with pair(num_pages=4) as (mine, engine, theirs, peer):
            kept = mine.allocator.lease(3)
            sending = asyncio.create_task(peer.send(snapshot_of(theirs, [3, 1]), key="a"))
            await eventually(lambda: engine.stats().num_waiting == 1)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await eventually(lambda: engine.stats().num_waiting == 0)
            kept.release()
            await peer.send(snapshot_of(theirs, [0, 1, 2, 3]), key="b")
            assert counts(mine) == (0, 4, 0)

    run(job())


def test_a_pool_that_is_registered_anew_while_an_offer_waits_takes_it_after_that() -> None:
    async def job() -> None:
        async with pair(num_pages=4) as (mine, engine, theirs, peer):
            sent, kept = snapshot_of(theirs, [3, 1]), mine.allocator.lease(3)
            sending = asyncio.create_task(peer.send(sent, key="a"))
            await eventually(lambda: engine.stats().num_waiting == 1)
            await engine.reregister()
            kept.release()
            assert (await sending).num_pages == 2
            arrival = await anext(engine.arrivals())
            assert digest(await arrival.snapshot()) == digest(sent)
            assert engine.stats().receive.failures == {}

    run(job())
