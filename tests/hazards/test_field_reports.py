"""What users of other systems reported, where no other test of this folder has it yet; each names what it guards."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Engine, PeerLostError, TransferAbortedError, TransportError
from hurray_rdma.control import Acknowledged, Granted, Message, encode
from hurray_rdma.control.exchange import Abort, Ended, Quiet
from hurray_rdma.control.messages import TensorDataEndMessage
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, RemoteMemory, default_context
from tests.engine.hands import Hand, shaken
from tests.hazards.scenes import (
    LANES,
    SPEC,
    connected,
    counts,
    digest,
    eventually,
    fill,
    make_pool,
    receiver,
    run,
    settled,
    snapshot_of,
    stopped,
)
from tests.hazards.test_quarantine import WAYS, half_written, whole_pool_is_usable


def test_a_session_from_before_there_was_any_pool_uses_it_once_there_is() -> None:
    """Half-published metadata was a permanent failure elsewhere."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool, make_pool(SPEC, 8) as source:
            fill(source, 1)
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                engine.remove_pool("")
                async with connected(source, engine.address, timeout_s=5) as peer:
                    for _ in range(2):
                        with pytest.raises(PeerLostError, match="no pool"):
                            await peer.send(snapshot_of(source, [1]))
                    engine.add_pool(pool, name="late")

                    async def sent() -> bool:
                        try:
                            await peer.send(snapshot_of(source, [1, 2]), key="late")
                        except PeerLostError:
                            return False
                        return True

                    await eventually(sent)
                    arrival = await anext(engine.arrivals())
                    assert (arrival.group, arrival.key) == ("late", "late")
                    assert digest(await arrival.snapshot()) == digest(snapshot_of(source, [1, 2]))
                    arrival.release()
                    await settled(pool, 8, 0, 0)

    run(job())


@pytest.mark.parametrize("way", WAYS)
def test_pages_of_an_aborted_arrival_come_back_when_its_sender_never_says_quiet(way: str) -> None:
    """An aborted receive held its pages for ever when the sender never reported."""

    async def job() -> None:
        async with half_written(way, lease_s=60) as (pool, engine, child, arrival):
            arrival.abort("the request was cancelled")
            with pytest.raises(TransferAbortedError, match="cancelled"):
                await arrival.snapshot()
            arrival.release()
            assert counts(pool) == (4, 4, 0), "they are not free before it is sure"
            child.signal(signal.SIGKILL)
            await settled(pool, 8, 0, 0)
            await asyncio.to_thread(child.join)
            await whole_pool_is_usable(pool, engine)

    run(job())


def say(hand: Hand, stream_id: int, message: Message) -> None:
    """Past the session, which would not say it."""
    assert hand.channel is not None
    hand.channel._transport.write(encode(message, stream_id))


def test_completions_that_are_late_repeated_or_of_nothing_are_harmless() -> None:
    """A late completion of a cancelled request crashed the engine."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            snapshot = snapshot_of(pool, [1, 2])
            data = bytes(2 * SPEC.page_nbytes)
            num = len(SPEC.tensors)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine, shaken(engine.address) as hand:
                complete = hand.offer(snapshot, key="complete")
                await hand.expect(Granted)
                for index in range(num):
                    hand.do("tensor_data", complete, index, 0, memoryview(data))
                    hand.do("data_end", complete, index)
                await hand.expect(Acknowledged)
                arrival = await anext(engine.arrivals())
                await arrival.snapshot()

                cancelled = hand.offer(snapshot, key="cancelled")
                await hand.expect(Granted)
                other = await anext(engine.arrivals())
                other.abort("cancelled")
                await settled(pool, 6, 2, 0)  # it has answered that it is quiet

                for transfer_id in (complete, cancelled):
                    for _ in range(2):
                        for index in range(num):
                            say(hand, transfer_id + 1 + index, TensorDataEndMessage())
                        say(hand, transfer_id, Ended(tuple(range(num))))
                        say(hand, transfer_id, Quiet())
                        say(hand, transfer_id, Abort(0xF0, "too late"))
                for stream_id in (7777, 2**32 - 1):
                    for message in (TensorDataEndMessage(), Ended((0, 1)), Quiet(), Abort(0xF0, "of nothing")):
                        say(hand, stream_id, message)

                again = hand.offer(snapshot, key="again")  # the session lives, and has heard all of that before
                assert (await hand.expect(Granted)).transfer_id == again
                assert arrival.state.name == "COMPLETE"
                assert await arrival.snapshot()
                with pytest.raises(TransferAbortedError, match="cancelled"):
                    await other.snapshot()
                assert counts(pool) == (4, 4, 0)
                arrival.release()
                (await anext(engine.arrivals())).abort()
                await settled(pool, 8, 0, 0)
                assert engine.stats().receive.num_transfers == 1

    run(job())


def failing_sender(connection: Connection, address: str, lane: str, at: int) -> None:
    """One of its writes fails; the transfer after it does not. Reports both."""

    async def job() -> None:
        kind, options = LANES[lane]
        default_context(options)
        with make_pool(SPEC, 16, kind) as pool:
            fill(pool, 1)
            async with connected(pool, address, timeout_s=10) as peer:
                write, count = RemoteMemory.write, 0

                def fails(self: RemoteMemory, *args: Any, **plan: Any) -> Any:
                    nonlocal count
                    count += 1
                    if count == at:
                        raise TransportError("put: the device is gone", status=-3)
                    return write(self, *args, **plan)

                RemoteMemory.write = fails  # type: ignore[method-assign]
                sent = snapshot_of(pool, [1, 3])
                try:
                    async with peer.begin(sent, key="fails") as transfer:
                        await transfer.send_layer(0)
                        await transfer.send_layer(1)
                except TransportError as error:
                    connection.send(str(error))
                RemoteMemory.write = write  # type: ignore[method-assign]
                await peer.send(sent, key="works")
                connection.send(digest(sent))

    asyncio.run(job())


@pytest.mark.parametrize("way", ["send", "fetch"])
def test_a_peer_whose_death_ucx_notices_first_is_lost_all_the_same(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over tcp a killed peer was a `TransportError` or a `PeerLostError`, as it happened."""
    failed, name = threading.Event(), "write" if way == "send" else "read"
    works = getattr(RemoteMemory, name)

    def fails_once(self: RemoteMemory, *args: Any, **plan: Any) -> Any:
        if failed.is_set():
            return works(self, *args, **plan)
        failed.set()
        raise TransportError("put failed: Input/output error", status=-3)

    async def job() -> None:
        context = Context({"TLS": "tcp"})
        with make_pool(SPEC, 8, context=context) as pool, make_pool(SPEC, 8, context=context) as source:
            fill(source, 1)
            async with (
                Engine(pool, listen="127.0.0.1:0", peer_timeout_s=60) as engine,  # a heartbeat every 3 s
                Engine(source, peer_timeout_s=60) as sender,
                sender.connect(engine.address) as peer,
            ):
                engine.publish("it", snapshot_of(pool, [1, 3]))
                monkeypatch.setattr(RemoteMemory, name, fails_once)
                work: Coroutine[Any, Any, Any] = (
                    peer.send(snapshot_of(source, [1, 3])) if way == "send" else peer.fetch("it")
                )
                moving = asyncio.create_task(work)
                await eventually(failed.is_set)
                await asyncio.wait({moving}, timeout=0.2)  # had it not waited for the session's word, it would be over
                assert engine._reception is not None
                for channel in list(engine._reception._links.values()):
                    channel.abort()
                if way == "send":
                    with pytest.raises(PeerLostError):
                        await moving
                else:  # it is asked for again, over a new session: nothing had come of it
                    with await moving as snapshot:
                        assert snapshot.total_tokens == 2 * SPEC.page_size

    run(job())


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("at", [1, 2])
def test_one_write_that_fails_is_told_to_both_sides(lane: str, at: int) -> None:
    """A sender could not post one write and said nothing."""

    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 8, kind, Context(options)) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                with Child(failing_sender, engine.address, lane, at) as child:
                    arrival = await anext(engine.arrivals())
                    with pytest.raises(TransferAbortedError, match="the sender failed: TransportError"):
                        await arrival.snapshot()
                    assert "the device is gone" in await asyncio.to_thread(child.receive)
                    arrival = await anext(engine.arrivals())
                    assert digest(await arrival.snapshot()) == await asyncio.to_thread(child.receive)
                    arrival.release()
                await settled(pool, 8, 0, 0)
                assert engine.stats().num_quarantined == 0

    run(job())


@pytest.mark.parametrize("lane", LANES)
def test_a_receiver_that_is_alive_but_stuck_is_noticed_within_the_time_that_was_set(lane: str) -> None:
    async def job() -> None:
        kind, options = LANES[lane]
        with make_pool(SPEC, 8, kind, Context(options)) as pool, Child(receiver, {"lane": lane}) as child:
            fill(pool, 1)
            sent = snapshot_of(pool, [1, 2])
            address = await asyncio.to_thread(child.receive)
            async with connected(pool, address, timeout_s=20, peer_timeout_s=0.5) as peer:
                with pytest.raises(PeerLostError, match=r"nothing was heard from the peer|was lost"):
                    async with peer.begin(sent, key="stuck") as transfer:
                        child.signal(signal.SIGSTOP)
                        await stopped(child.pid)
                        await transfer._acknowledged
                child.signal(signal.SIGCONT)
                await peer.send(sent, key="after", timeout_s=10)
                received = dict([await asyncio.to_thread(child.receive) for _ in range(2)])
                assert received == {"stuck": received["stuck"], "after": digest(sent)}
                assert received["stuck"] in {"PeerLostError", "TransferAbortedError"}

                async def whole() -> bool:
                    child.send("counts")
                    return bool(await asyncio.to_thread(child.receive) == (32, 0, 0))

                await eventually(whole)
            child.send("end")

    run(job())


def chunked_senders(connection: Connection, address: str, num_senders: int) -> None:
    """All begin at once, and each sends a layer whenever it is its turn."""

    async def job() -> None:
        with make_pool(SPEC, 16) as pool:
            fill(pool, 1)
            sent = {str(n): snapshot_of(pool, [n, n + 1, (n + 5) % 16]) for n in range(num_senders)}
            connection.send({key: digest(snapshot) for key, snapshot in sent.items()})
            async with connected(pool, address, timeout_s=20) as peer:

                async def one(key: str) -> None:
                    async with peer.begin(sent[key], key=key) as transfer:
                        for layer in np.random.default_rng(int(key)).permutation(2).tolist():
                            await transfer.send_layer(layer)
                            await asyncio.sleep(0.01)

                await asyncio.gather(*map(one, sent))
            connection.send("all acknowledged")

    asyncio.run(job())


def test_a_pool_that_fills_in_the_midst_of_chunked_sends_locks_nobody_out() -> None:
    """Each held some pages and waited for more: here an offer has all its pages, or none."""
    with Child(receiver, {"num_pages": 4}) as target, Child(chunked_senders, target.receive(), 8) as senders:
        expected = senders.receive()
        assert dict(target.receive() for _ in expected) == expected
        assert senders.receive() == "all acknowledged"
        target.send("counts")
        assert target.receive() == (4, 0, 0)
        target.send("end")
