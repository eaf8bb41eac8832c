"""Pages that CUDA streams fill or wait for: real engines and moves, and a driver that says when events have passed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hurray_rdma import Arrival, Engine, PagePool, Peer, sync
from hurray_rdma.engine.marks import mark_of
from hurray_rdma.errors import ConfigError, DeadlineExceededError, HurrayError, TransferAbortedError, TransportError
from hurray_rdma.transport import Context
from hurray_rdma.transport.cuda import Trait
from tests.hazards.scenes import SPEC, connected, digest, fill, make_pool, run, settled, snapshot_of
from tests.transport.recorded import DEVICE_ADDRESS, RecordedDriver

NEVER = 1 << 60


class Stream:
    """Of a library; on the second GPU."""

    ptr = 7
    device_id = 1


@pytest.fixture
def driver() -> RecordedDriver:
    return RecordedDriver(passed_after=NEVER)


@pytest.fixture
def context(driver: RecordedDriver) -> Context:
    context = Context()
    context.__dict__["driver"] = driver  # in the place of the machine's
    return context


@pytest.fixture
def source(context: Context) -> Iterator[PagePool]:
    with make_pool(SPEC, 8, context=context) as pool:
        yield pool


@pytest.fixture
def dest(context: Context) -> Iterator[PagePool]:
    with make_pool(SPEC, 8, context=context) as pool:
        yield pool


@asynccontextmanager
async def joined(listening: PagePool, connecting: PagePool, **settings: Any) -> AsyncIterator[tuple[Engine, Peer]]:
    """An engine that listens, and a peer of another one that has connected to it."""
    async with (
        Engine(listening, listen="127.0.0.1:0", **settings) as engine,
        connected(connecting, engine.address) as peer,
    ):
        yield engine, peer


async def first(engine: Engine) -> Arrival:
    async with asyncio.timeout(10):
        return await anext(engine.arrivals())


async def recorded(driver: RecordedDriver, count: int = 1) -> None:
    """Returns once so many events were recorded and asked."""
    await until(lambda: sum(call[0] == "record" for call in driver.calls) >= count and driver.asked >= 3)


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


def test_pages_are_moved_only_after_the_work_that_fills_them(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            snapshot = snapshot_of(source, [3, 1])
            sending = asyncio.create_task(peer.send(snapshot, stream=Stream()))
            arrival = await first(receiver)
            await recorded(driver)
            assert driver.calls == [("record", 7, 1)]
            assert arrival.state.name == "ARRIVING"
            fill(source, 5)  # the kernels do
            driver.passed_after = 0
            await sending
            assert digest(await arrival.snapshot()) == digest(snapshot)
            arrival.release()

    run(job())


def test_each_layer_waits_for_its_own_work(driver: RecordedDriver, source: PagePool, dest: PagePool) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            snapshot = snapshot_of(source, [3, 1])
            async with peer.begin(snapshot, stream=Stream()) as transfer:
                arrival = await first(receiver)
                layers = [asyncio.create_task(transfer.send_layer(layer)) for layer in range(2)]
                await recorded(driver, count=2)
                with pytest.raises(DeadlineExceededError):
                    await arrival.wait_layer(0, timeout_s=0.05)
                fill(source, 6)
                driver.passed_after = 0
                await asyncio.gather(*layers)
            assert digest(await arrival.snapshot()) == digest(snapshot)
            assert [call[:2] for call in driver.calls if call[0] == "record"] == [("record", 7)] * 2
            arrival.release()

    run(job())


def test_failed_kernels_end_the_transfer_on_both_sides(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            sending = asyncio.create_task(peer.send(snapshot_of(source, [3, 1]), stream=Stream()))
            arrival = await first(receiver)
            driver.fails = True
            with pytest.raises(TransportError, match="illegal memory access"):
                await sending
            with pytest.raises(HurrayError):
                await arrival.snapshot(timeout_s=10)
            await settled(dest, 8, 0, 0)

    run(job())


def test_kernels_that_have_failed_already_send_nothing(
    driver: RecordedDriver, context: Context, source: PagePool
) -> None:
    """Also not into pages that were granted ahead."""

    async def job() -> None:
        with make_pool(SPEC, 32, context=context) as dest:
            async with (
                Engine(dest, listen="127.0.0.1:0", ahead_pages=8) as receiver,
                Engine(source) as sender,
                sender.connect(receiver.address) as peer,
            ):
                snapshot = snapshot_of(source, [3, 1])
                await peer.send(snapshot)
                (await first(receiver)).release()
                await settled(dest, 24, 8, 0)  # which are granted
                driver.fails = True
                mark = mark_of(source, Stream())
                assert mark is not None
                with pytest.raises(TransportError, match="illegal memory access"):
                    await mark.passed()
                with pytest.raises(TransportError, match="illegal memory access"):
                    await peer.send(snapshot, stream=mark)
                assert receiver.stats().receive.num_transfers == 1
                assert dict(sender.stats().send.failures) == {"TransportError": 1}

    run(job())


def test_kernels_that_never_end_cost_no_more_than_the_deadline(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    async def job() -> None:
        async with joined(dest, source) as (_, peer):
            with pytest.raises(DeadlineExceededError):
                await peer.send(snapshot_of(source, [3, 1]), stream=Stream(), timeout_s=0.3)
            await settled(dest, 8, 0, 0)
            driver.passed_after = 0
            await peer.send(snapshot_of(source, [3, 1]), stream=Stream())

    run(job())


def test_a_receiver_that_aborts_ends_the_wait_for_kernels(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            sending = asyncio.create_task(peer.send(snapshot_of(source, [3, 1]), stream=Stream()))
            (await first(receiver)).abort("not wanted")
            with pytest.raises(TransferAbortedError):
                await sending
            await settled(dest, 8, 0, 0)
            driver.passed_after = 0

    run(job())


def test_readers_wait_until_what_is_published_holds_its_content(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    async def job() -> None:
        async with joined(source, dest) as (publisher, peer):
            snapshot = snapshot_of(source, [3, 1])
            publisher.publish("ready soon", snapshot, stream=Stream())
            with pytest.raises(DeadlineExceededError):
                await peer.fetch("ready soon", timeout_s=0.2)
            fetching = asyncio.create_task(peer.fetch("ready soon"))
            await recorded(driver)
            fill(source, 7)
            driver.passed_after = 0
            with await fetching as fetched:
                assert digest(fetched) == digest(snapshot)
            assert publisher.unpublish("ready soon")

    run(job())


def test_readers_hear_of_failed_kernels(driver: RecordedDriver, source: PagePool, dest: PagePool) -> None:
    async def job() -> None:
        driver.fails = True
        async with joined(source, dest) as (publisher, peer):
            publisher.publish("broken", snapshot_of(source, [3, 1]), stream=Stream())
            with pytest.raises(TransportError, match="illegal memory access"):
                await peer.fetch("broken")

    run(job())


def words(driver: RecordedDriver) -> list[tuple[int, int]]:
    """What streams wait for: (the word as it is now, the value that lets them go on)."""
    return [
        (driver.words[0].host[(address - DEVICE_ADDRESS) // 4], value)
        for kind, *rest in driver.calls
        if kind == "wait"
        for _, address, value, _ in [rest]
    ]


def wait(arrival: Arrival, layer: int, **more: Any) -> Any:
    return arrival.wait_layer(layer, stream=Stream(), **more)


def test_a_stream_waits_for_a_layer_without_the_host(driver: RecordedDriver, source: PagePool, dest: PagePool) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            async with peer.begin(snapshot_of(source, [3, 1])) as transfer:
                arrival = await first(receiver)
                for layer in (0, 1, 1):
                    await wait(arrival, layer)
                assert words(driver) == [(0, 1)] * 3
                await transfer.send_layer(1)
                await arrival.wait_layer(1)
                assert words(driver) == [(0, 1), (1, 1), (1, 1)]
                await transfer.send_layer(0)
            await arrival.snapshot()
            assert words(driver) == [(1, 1)] * 3
            await wait(arrival, 0)
            assert len(words(driver)) == 3, "nothing to wait for"
            arrival.release()

    run(job())


def test_a_layer_comes_while_cuda_blocks_on_a_full_stream(
    driver: RecordedDriver, source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's queue is full behind a gate, and the loop opens that gate."""
    held: list[bool] = []

    def full(stream: int, address: int, value: int, *, flush: bool) -> None:
        held.append(False)
        deadline = time.monotonic() + 10
        word = (address - DEVICE_ADDRESS) // 4
        while driver.words[0].host[word] != value and time.monotonic() < deadline:
            time.sleep(0.002)
        held[:] = [time.monotonic() < deadline]

    async def job() -> None:
        async with joined(dest, source) as (receiver, peer), peer.begin(snapshot_of(source, [3, 1])) as transfer:
            arrival = await first(receiver)
            waiting = asyncio.create_task(wait(arrival, 0))
            await until(lambda: held == [False])
            await transfer.send_rest()
            await waiting
            assert held == [True]
            await arrival.snapshot()
            arrival.release()

    monkeypatch.setattr(driver, "wait_word", full)
    run(job())


def test_a_gpu_that_does_not_order_remote_writes_lets_no_stream_wait(
    driver: RecordedDriver, source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer), peer.begin(snapshot_of(source, [3, 1])) as transfer:
            arrival = await first(receiver)
            with monkeypatch.context() as on_a_gpu:
                on_a_gpu.setattr(PagePool, "device_index", property(lambda _: 1))
                with pytest.raises(ConfigError, match="queued on cuda:1 already may miss"):
                    await wait(arrival, 0)
                driver.traits = {Trait.WRITES_ORDERING: 100}
                await wait(arrival, 0)
            assert words(driver) == [(0, 1)]
            await transfer.send_rest()
            await arrival.snapshot()
            arrival.release()

    run(job())


def test_nothing_is_left_of_waits_that_are_over(driver: RecordedDriver, source: PagePool, dest: PagePool) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            async with peer.begin(snapshot_of(source, [3, 1])) as transfer:
                arrival = await first(receiver)
                await wait(arrival, 0, timeout_s=1000)
                await wait(arrival, 1, timeout_s=0.5)
                (timer,) = arrival._gates[0].values()
                await until(lambda: words(driver)[1] == (1, 1))
                assert not arrival._gates[1], "its time is up"
                await transfer.send_rest()
            await arrival.snapshot()
            assert timer.cancelled(), "its layer has come"
            assert not arrival._gates[0]
            arrival.release()

    run(job())


def test_a_stream_goes_on_when_the_arrival_fails_or_takes_too_long(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            transfer = peer.begin(snapshot_of(source, [3, 1]))
            await transfer.__aenter__()
            arrival = await first(receiver)
            await wait(arrival, 0, timeout_s=0.5)
            await wait(arrival, 0)
            await until(lambda: words(driver)[0] == (1, 1))
            assert words(driver)[1] == (0, 1)
            await transfer.abort()
            with pytest.raises(HurrayError):
                await arrival.wait_layer(0)
            assert words(driver) == [(1, 1)] * 2
            with pytest.raises(HurrayError):
                await wait(arrival, 0)

    run(job())


@pytest.mark.parametrize("way", ["push", "pull"])
def test_pages_go_back_when_what_was_queued_on_the_stream_has_run(
    driver: RecordedDriver, source: PagePool, dest: PagePool, way: str
) -> None:
    async def job() -> None:
        async with (
            Engine(dest, listen="127.0.0.1:0") as receiver,
            Engine(source, listen="127.0.0.1:0") as sender,
            sender.connect(receiver.address) as peer,
            receiver.connect(sender.address) as publisher,
        ):
            snapshot = snapshot_of(source, [3, 1])
            sender.publish("there", snapshot)

            async def come() -> Any:
                if way == "pull":
                    return await publisher.fetch("there")
                await peer.send(snapshot)
                return await first(receiver)

            held = await come()
            num_free = dest.allocator.accounts().free
            with pytest.raises(ConfigError, match="must be a CUDA stream"):
                held.release(stream="stream")
            held.release(stream=Stream())
            held.release()  # harmless
            await recorded(driver)
            assert dest.allocator.accounts().free == num_free
            driver.passed_after = 0
            await settled(dest, 8, 0, 0)
            held = await come()
            driver.fails = True
            held.release(stream=Stream())
            await settled(dest, num_free, 0, 8 - num_free)
            (lease,) = dest.allocator.quarantined()
            assert "kernels may still use them" in str(lease.reason)

    run(job())


def test_pages_that_a_thread_gives_back_wait_for_its_stream(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    with (
        sync.Engine(dest, listen="127.0.0.1:0") as receiver,
        sync.Engine(source) as sender,
        sender.connect(receiver.address) as peer,
    ):
        sending = peer.send_async(snapshot_of(source, [3, 1]))
        arrival = next(receiver.arrivals())
        sending.result(timeout=10)
        num_free = dest.allocator.accounts().free
        with pytest.raises(ConfigError, match="must be a CUDA stream"):
            arrival.release(stream="stream")
        arrival.release(stream=Stream())
        assert dest.allocator.accounts().free == num_free < 8
    driver.passed_after = 0  # when the engines are closed
    run(settled(dest, 8, 0, 0))


def test_pages_of_an_arrival_that_is_given_up_wait_for_the_stream_as_well(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            transfer = await peer.begin(snapshot_of(source, [3, 1])).__aenter__()
            arrival = await first(receiver)
            num_free = dest.allocator.accounts().free
            arrival.release(stream=Stream())
            await transfer.abort()
            await until(lambda: arrival.state.name == "RELEASED")
            assert dest.allocator.accounts().free == num_free
            driver.passed_after = 0
            await settled(dest, 8, 0, 0)

    run(job())


class FullQueue:
    """Takes nothing until there is room, as CUDA does it: the caller blocks."""

    def __init__(self, driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch) -> None:
        self.blocks, self.room = threading.Event(), threading.Event()
        record = driver.record

        def full(stream: int) -> int:
            self.blocks.set()
            assert self.room.wait(10)
            return record(stream)

        monkeypatch.setattr(driver, "record", full)


def test_a_snapshot_is_published_while_cuda_blocks_on_a_full_stream(
    driver: RecordedDriver, source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver.passed_after = 0
    queue = FullQueue(driver, monkeypatch)

    async def job() -> None:
        async with joined(source, dest) as (publisher, peer):
            snapshot = snapshot_of(source, [3, 1])
            publisher.publish("queued soon", snapshot, stream=Stream())
            await until(queue.blocks.is_set)
            with pytest.raises(DeadlineExceededError):
                await peer.fetch("queued soon", timeout_s=0.2)
            queue.room.set()
            with await peer.fetch("queued soon") as fetched:
                assert digest(fetched) == digest(snapshot)
            with pytest.raises(ConfigError, match="must be a CUDA stream"):
                publisher.publish("never", snapshot, stream="stream")
            driver.capturing.add(7)
            publisher.publish("captured", snapshot, stream=Stream())
            with pytest.raises(ConfigError, match="captures a graph"):
                await peer.fetch("captured")

    run(job())


def test_a_full_stream_costs_a_send_no_more_than_its_time(
    driver: RecordedDriver, source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = FullQueue(driver, monkeypatch)

    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            with pytest.raises(DeadlineExceededError, match="queue was full"):
                await peer.send(snapshot_of(source, [3, 1]), stream=Stream(), timeout_s=0.1)
            async with peer.begin(snapshot_of(source, [3, 1])) as transfer:
                sending = asyncio.create_task(transfer.send_layer(0, stream=Stream()))
                await asyncio.sleep(0)
                await transfer.send_layer(1)  # not behind the other
                driver.passed_after = 0
                queue.room.set()
                await sending
            (await first(receiver)).release()

    run(job())


class Unordered:
    """The receiving pool is of a GPU that does not order remote writes, and each flush takes until it is let."""

    def __init__(self, dest: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun: list[threading.Event] = []
        self.error: HurrayError | None = None

        def flush(pool: PagePool) -> None:
            if pool is dest:
                done = threading.Event()
                self.begun.append(done)
                assert done.wait(10)
                if self.error is not None:
                    raise self.error

        monkeypatch.setattr(PagePool, "needs_flush", property(lambda pool: pool is dest))
        monkeypatch.setattr(PagePool, "make_visible", flush)


def test_layers_are_there_when_they_have_been_flushed_and_the_loop_goes_on_meanwhile(
    source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Unordered(dest, monkeypatch)

    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            snapshot = snapshot_of(source, [3, 1])
            transfer = await peer.begin(snapshot).__aenter__()
            arrival = await first(receiver)
            await transfer.send_layer(0)
            await until(lambda: len(gpu.begun) == 1)
            with pytest.raises(DeadlineExceededError):
                await arrival.wait_layer(0, timeout_s=0.05)
            await transfer.send_layer(1)
            ending = asyncio.create_task(transfer.__aexit__(None, None, None))
            (of_pool,) = receiver._reception._receivers.values()  # type: ignore[union-attr]
            await until(lambda: len(of_pool.granted.visibility._steps) == 2)  # the layer, and the end
            gpu.begun[0].set()
            await arrival.wait_layer(0)
            await until(lambda: len(gpu.begun) == 2)
            with pytest.raises(DeadlineExceededError):
                await arrival.wait_layer(1, timeout_s=0.05)
            assert not ending.done()
            assert arrival.state.name == "ARRIVING"
            gpu.begun[1].set()
            await ending
            assert digest(await arrival.snapshot()) == digest(snapshot)
            assert len(gpu.begun) == 2, "one for all that came during the first"
            arrival.release()

    run(job())


def test_an_arrival_that_cannot_be_flushed_fails_on_both_sides(
    source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Unordered(dest, monkeypatch)
    gpu.error = TransportError("cuFlushGPUDirectRDMAWrites: an illegal memory access was encountered", status=700)

    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            sending = asyncio.create_task(peer.send(snapshot_of(source, [3, 1])))
            arrival = await first(receiver)
            await until(lambda: len(gpu.begun) == 1)
            gpu.begun[0].set()
            with pytest.raises(TransportError, match="illegal memory access"):
                await arrival.snapshot(timeout_s=10)
            while not sending.done():
                for each in gpu.begun:
                    each.set()
                await asyncio.sleep(0.002)
            with pytest.raises(HurrayError, match="illegal memory access"):
                await sending
            await settled(dest, 8, 0, 0)

    run(job())


def test_an_arrival_that_is_aborted_while_it_is_flushed_stays_so(
    source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Unordered(dest, monkeypatch)

    async def job() -> None:
        async with joined(dest, source) as (receiver, peer):
            sending = asyncio.create_task(peer.send(snapshot_of(source, [3, 1])))
            arrival = await first(receiver)
            await until(lambda: len(gpu.begun) == 1)
            arrival.abort("not wanted")
            gpu.begun[0].set()
            with pytest.raises(TransferAbortedError):
                await sending
            await settled(dest, 8, 0, 0)
            with pytest.raises(TransferAbortedError):
                await arrival.wait_layer(0)

    run(job())


def test_what_comes_into_pages_granted_ahead_is_flushed_before_it_is_handed_over(
    context: Context, source: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job() -> None:
        with make_pool(SPEC, 32, context=context) as dest:
            async with joined(dest, source, ahead_pages=8) as (receiver, peer):
                snapshot = snapshot_of(source, [3, 1])
                await peer.send(snapshot)
                (await first(receiver)).release()
                await settled(dest, 24, 8, 0)  # which are granted
                gpu = Unordered(dest, monkeypatch)
                sending = asyncio.create_task(peer.send(snapshot))
                await until(lambda: len(gpu.begun) == 1)
                assert receiver.stats().receive.num_transfers == 1
                assert not sending.done()
                gpu.begun[0].set()
                await sending
                arrival = await first(receiver)
                assert digest(await arrival.snapshot()) == digest(snapshot)
                arrival.release()
                gpu.error = TransportError("cuFlushGPUDirectRDMAWrites: unknown error", status=999)
                sending = asyncio.create_task(peer.send(snapshot))
                await until(lambda: len(gpu.begun) == 2)
                gpu.begun[1].set()
                with pytest.raises(HurrayError, match="unknown error"):
                    await sending
                assert receiver.stats().receive.num_transfers == 2

    run(job())


def test_groups_wait_for_what_was_queued_when_they_were_sent(
    driver: RecordedDriver, source: PagePool, dest: PagePool
) -> None:
    """Not for what is queued while they wait for pages."""

    async def job() -> None:
        held = dest.allocator.lease(8)
        async with joined(dest, source) as (receiver, peer):
            groups: Any = {"all": snapshot_of(source, [3, 1])}
            sending = asyncio.create_task(peer.send_groups(groups, stream=Stream()))
            await until(lambda: receiver.stats().num_waiting == 1)
            assert driver.calls == [("record", 7, 1)]
            driver.passed_after = 0
            held.release()
            await sending
            assert [call[0] for call in driver.calls] == ["record", "destroy"]
            (await first(receiver)).release()

    run(job())


def test_what_is_no_stream_is_refused_before_anything_moves(source: PagePool, dest: PagePool) -> None:
    async def job() -> None:
        async with joined(dest, source) as (_, peer):
            for wrong in ("stream", object(), 7):  # a bare handle does not tell its GPU, nor does a pool on the host
                with pytest.raises(ConfigError, match="stream"):
                    await peer.send(snapshot_of(source, [3, 1]), stream=wrong)
            await settled(dest, 8, 0, 0)

    run(job())
