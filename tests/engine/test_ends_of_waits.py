"""What ends while another task of the same transfer waits: each hears why, and the peer hears of the end at once."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from hurray_rdma import Engine, PagePool
from hurray_rdma.engine import exchange
from hurray_rdma.engine.mover import Mover
from hurray_rdma.engine.transfer import Transfer
from hurray_rdma.errors import DeadlineExceededError, TransferAbortedError, TransportError
from hurray_rdma.transport import Context, RemoteMemory
from tests.engine.test_stream_order import NEVER, Stream, first, recorded
from tests.hazards.scenes import SPEC, counts, make_pool, run, settled, snapshot_of
from tests.transport.recorded import RecordedDriver


class BrokenLane:
    """Every move fails as a lane does of which nobody knows yet whether the peer is gone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._looking = asyncio.Event()
        look = Transfer._look_whether_alive

        def move(_: Mover, layers: list[int], ended: Callable[[list[int]], None]) -> None:
            raise TransportError("UCX: the lane failed")

        async def told(transfer: Transfer) -> None:
            self._looking.set()
            await look(transfer)

        monkeypatch.setattr(Mover, "move", move)
        monkeypatch.setattr(Transfer, "_look_whether_alive", told)
        monkeypatch.setattr(exchange, "INLINE_NBYTES", -1)  # in a thread, as of large pages

    async def looked_at(self, transfer: Transfer) -> None:
        """Returns once the move has failed, and its task looks whether the peer is alive."""
        await asyncio.wait_for(self._looking.wait(), 10)
        assert [job.done() for job in transfer._jobs] == [True]


def test_a_broken_lane_is_told_of_although_the_block_was_left_for_another_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def job() -> None:
        lane = BrokenLane(monkeypatch)
        with make_pool(SPEC, 8) as source, make_pool(SPEC, 8) as dest:
            async with (
                Engine(dest, listen="127.0.0.1:0") as receiver,
                Engine(source, peer_timeout_s=20) as sender,  # a heartbeat is a second
                sender.connect(receiver.address) as peer,
            ):
                with pytest.raises(ZeroDivisionError):
                    async with peer.begin(snapshot_of(source, [1, 2]), key="k") as transfer:
                        sending = asyncio.create_task(transfer.send_layer(0))
                        await lane.looked_at(transfer)
                        raise ZeroDivisionError
                assert not sending.done()
                with pytest.raises(TransportError, match="the lane failed"):
                    await sending
                await settled(dest, 8, 0, 0)

    run(job())


def test_a_session_that_has_ended_tells_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks whether the peer is alive waited for the transfer's own deadline, since a closed session is silent."""

    async def job() -> None:
        lane = BrokenLane(monkeypatch)
        with make_pool(SPEC, 8) as source, make_pool(SPEC, 8) as dest:
            async with Engine(dest, listen="127.0.0.1:0") as receiver, Engine(source, peer_timeout_s=20) as sender:
                async with sender.connect(receiver.address) as peer:
                    with pytest.raises(ZeroDivisionError):
                        async with peer.begin(snapshot_of(source, [1, 2]), key="k", timeout_s=600) as transfer:
                            sending = asyncio.create_task(transfer.send_layer(0))
                            await lane.looked_at(transfer)
                            raise ZeroDivisionError
                    session = transfer._route.session
                assert session.is_closed
                with pytest.raises(TransportError, match="the lane failed"):
                    await sending  # within the test's time

    run(job())


def test_quiet_is_said_at_once_although_the_application_has_not_heard_of_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages of an aborted arrival stayed leased until the sending application left its block."""

    async def job() -> None:
        lane = BrokenLane(monkeypatch)
        with make_pool(SPEC, 8) as source, make_pool(SPEC, 8) as dest:
            async with (
                Engine(dest, listen="127.0.0.1:0", lease_s=600) as receiver,
                Engine(source, peer_timeout_s=200) as sender,
                sender.connect(receiver.address) as peer,
            ):
                with pytest.raises(TransferAbortedError, match="not wanted"):
                    async with peer.begin(snapshot_of(source, [1, 2]), key="k") as transfer:
                        sending = asyncio.create_task(transfer.send_layer(0))
                        arrival = await first(receiver)
                        await lane.looked_at(transfer)
                        arrival.abort("not wanted")
                        await settled(dest, 8, 0, 0)
                        await sending

    run(job())


@contextlib.asynccontextmanager
async def one_layer_left(
    timeout_s: float,
) -> AsyncIterator[tuple[PagePool, Transfer, asyncio.Task[None], asyncio.Task[None]]]:
    """The receiving pool, a transfer, a task that waits for a layer's work, which never ends, and one that has left the
    block."""
    driver, context = RecordedDriver(passed_after=NEVER), Context()
    context.__dict__["driver"] = driver
    with make_pool(SPEC, 8, context=context) as source, make_pool(SPEC, 8, context=context) as dest:
        async with (
            Engine(dest, listen="127.0.0.1:0") as receiver,
            Engine(source) as sender,
            sender.connect(receiver.address) as peer,
        ):
            transfer = peer.begin(snapshot_of(source, [1, 2]), key="k", timeout_s=timeout_s)
            await transfer.__aenter__()
            await transfer.send_layer(0)
            sending = asyncio.create_task(transfer.send_layer(1, stream=Stream()))
            await recorded(driver)
            leaving = asyncio.create_task(transfer.__aexit__(None, None, None))
            await asyncio.sleep(0)
            yield dest, transfer, sending, leaving


def test_who_waits_for_a_layer_hears_that_the_wait_for_the_end_was_cancelled() -> None:
    async def job() -> None:
        async with one_layer_left(600) as (dest, _, sending, leaving):
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            with pytest.raises(TransferAbortedError, match="the acknowledgement of 'k' was cancelled"):
                await sending
            await settled(dest, 8, 0, 0)

    run(job())


def test_a_wait_that_takes_too_long_is_the_end_of_the_whole_transfer() -> None:
    async def job() -> None:
        async with one_layer_left(3) as (dest, transfer, sending, leaving):
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            with pytest.raises(DeadlineExceededError, match="the acknowledgement for 'k' did not come in time"):
                await leaving
            with pytest.raises(DeadlineExceededError, match="the acknowledgement for 'k' did not come in time"):
                await transfer.send_rest()
            await settled(dest, 8, 0, 0)

    run(job())


def test_a_fetch_that_is_cancelled_again_while_it_ends_gives_its_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def job() -> None:
        begun, may_end = threading.Event(), threading.Event()
        read_rows = RemoteMemory.read_rows

        def slowly(self: RemoteMemory, *args: Any, **options: Any) -> object:
            begun.set()
            assert may_end.wait(10)
            return read_rows(self, *args, **options)

        monkeypatch.setattr(RemoteMemory, "read_rows", slowly)
        monkeypatch.setattr(exchange, "INLINE_NBYTES", -1)  # in a thread, as of large pages
        with make_pool(SPEC, 8) as source, make_pool(SPEC, 8) as mine:
            async with (
                Engine(source, listen="127.0.0.1:0") as engine,
                Engine(mine) as reader,
                reader.connect(engine.address) as peer,
            ):
                engine.publish("key", snapshot_of(source, [1, 2]))
                fetching = asyncio.create_task(peer.fetch("key"))
                assert await asyncio.to_thread(begun.wait, 10)
                for _ in range(2):  # the second while it waits for the thread, which it does not leave behind
                    fetching.cancel()
                    for _ in range(3):
                        await asyncio.sleep(0)
                assert not fetching.done()
                assert counts(mine)[0] == 6
                may_end.set()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
                assert counts(mine) == (8, 0, 0)
                await settled(source, 8, 0, 0)

    run(job())
