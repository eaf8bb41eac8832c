"""The way of pages on GPUs through whole engines, on memory of the host that is said to be theirs."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Arrival, DeviceUnavailableError, Engine, PagePool, Snapshot
from hurray_rdma.cache import snapshot_keys
from hurray_rdma.transport import Context, Endpoint, Region, RemoteMemory
from tests.engine.pretended import bits, gpu_pool, pretended
from tests.hazards.scenes import SPEC, eventually, make_pool, run
from tests.transport.recorded import RecordedDriver

TABLE, NUM_TOKENS = [5, 1, 6], 10
"""The last page holds two tokens of four."""


@pytest.fixture
def driver() -> RecordedDriver:
    return RecordedDriver()


@pytest.fixture
def context(driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch) -> Context:
    return pretended(driver, monkeypatch)


@pytest.fixture
def source(context: Context) -> Iterator[PagePool]:
    with gpu_pool(SPEC, 8, 0, context) as pool:
        fill(pool, 1)
        yield pool


@pytest.fixture
def dest(context: Context) -> Iterator[PagePool]:
    with gpu_pool(SPEC, 8, 1, context) as pool:
        yield pool


def fill(pool: PagePool, seed: int) -> None:
    random = np.random.default_rng(seed)
    for tensor in pool.spec.tensors:
        pages = bits(pool, *tensor)
        pages[...] = random.integers(0, 2**16, pages.shape, np.uint16)


def snapshot_of(pool: PagePool) -> Snapshot:
    return Snapshot.from_block_tables(pool, [TABLE], seq_lens=[NUM_TOKENS])


def same_tokens(sent: Snapshot, got: Snapshot) -> bool:
    """Whether all tokens are equal, and slots behind them zero."""
    equal = []
    for tensor in SPEC.tensors:
        ours, theirs = (bits(each.pool, *tensor)[each.block_table] for each in (sent, got))
        ours, theirs = (each.reshape(-1, *each.shape[2:]) for each in (ours, theirs))
        equal += [(ours[:NUM_TOKENS] == theirs[:NUM_TOKENS]).all(), (theirs[NUM_TOKENS:] == 0).all()]
    return all(equal)


async def first(engine: Engine) -> Arrival:
    async with asyncio.timeout(10):
        return await anext(engine.arrivals())


def test_pages_and_zeros_go_from_gpu_to_gpu_by_puts(driver: RecordedDriver, source: PagePool, dest: PagePool) -> None:
    for tensor in SPEC.tensors:
        bits(dest, *tensor)[...] = 0xEEEE

    async def job() -> None:
        async with (
            Engine(dest, listen="127.0.0.1:0") as receiver,
            Engine(source) as sender,
            sender.connect(receiver.address) as peer,
        ):
            snapshot = snapshot_of(source)
            for _ in range(2):
                stats = await peer.send(snapshot, zero_tails=True)
                arrival = await first(receiver)
                assert same_tokens(snapshot, await arrival.snapshot())
                assert (stats.path, arrival.path) == ("put", "put"), "never the host's loads and stores"
                assert stats.lane == "cma", "which is what UCX says of it"
                lane = arrival.lane
                arrival.release()
            assert lane == "cma", "known by the second offer"
            assert not sender._peers.pop()._connection._zeros  # type: ignore[union-attr]
        zeros = [call for call in driver.calls if call[0] == "zeros"]
        assert zeros == [("zeros", 1 << 20, 0), ("zeros", 1 << 20, 1)], "once on each GPU, with its first pool"
        assert not any(map(any, driver.zeros))
        assert driver.context == []

    run(job())


@pytest.mark.parametrize(("here", "there"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_pages_go_between_a_gpu_and_the_host_where_that_is_asked_for(context: Context, here: str, there: str) -> None:
    def pool_on(kind: str) -> PagePool:
        return gpu_pool(SPEC, 8, 1, context) if kind == "cuda" else make_pool(SPEC, 8, "caller's", context)

    async def job() -> None:
        with pool_on(here) as source, pool_on(there) as dest:
            fill(source, 2)
            async with (
                Engine(dest, listen="127.0.0.1:0") as receiver,
                Engine(source) as sender,
                sender.connect(receiver.address) as peer,
            ):
                snapshot = snapshot_of(source)
                with pytest.raises(DeviceUnavailableError):
                    await peer.send(snapshot)
                stats = await peer.send(snapshot, pool="default", zero_tails=True)
                arrival = await first(receiver)
                assert same_tokens(snapshot, await arrival.snapshot())
                assert stats.path == "put"
                arrival.release()

    run(job())


def test_pages_of_the_host_are_moved_in_a_context_once_a_gpu_is_in_use(
    driver: RecordedDriver, context: Context, source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moves them takes what UCX has done on GPUs further, too."""
    current: list[list[int]] = []
    post = Endpoint.post
    monkeypatch.setattr(Endpoint, "post", lambda *a, **k: current.append(list(driver.context)) or post(*a, **k))  # type: ignore[func-returns-value]

    async def job() -> None:
        with make_pool(SPEC, 8, "caller's", context) as host:
            async with (
                Engine(dest, listen="127.0.0.1:0") as receiver,
                Engine(host) as sender,
                sender.connect(receiver.address) as peer,
            ):
                await peer.send(snapshot_of(host), pool="default")
                (await first(receiver)).release()

    run(job())
    assert current
    assert all(each[-1] == 0 for each in current), "the first in use"


def test_pages_are_fetched_into_a_gpu(source: PagePool, dest: PagePool) -> None:
    async def job() -> None:
        async with (
            Engine(source, listen="127.0.0.1:0") as publisher,
            Engine(dest) as reader,
            reader.connect(publisher.address) as peer,
        ):
            snapshot = snapshot_of(source)
            publisher.publish("there", snapshot)
            with await peer.fetch("there") as fetched:
                for tensor in SPEC.tensors:
                    ours, theirs = bits(source, *tensor)[TABLE], bits(dest, *tensor)[fetched.block_table]
                    assert (ours[:2] == theirs[:2]).all()
                    assert (ours[2, :2] == theirs[2, :2]).all()

    run(job())


def test_nothing_that_cuda_may_be_slow_to_do_is_done_on_the_loop(
    source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[int]] = {"key packed": set(), "region opened": set(), "pages moved": set(), "zeros made": set()}

    def watched(owner: type, name: str, what: str) -> None:
        call = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            seen[what].add(threading.get_ident())
            return call(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    watched(Region, "_packed_key", "key packed")
    watched(Endpoint, "open_region", "region opened")
    watched(RemoteMemory, "write", "pages moved")
    watched(Context, "zeros_on", "zeros made")

    async def job() -> None:
        async with (
            Engine(dest, listen="127.0.0.1:0") as receiver,
            Engine(source) as sender,
            sender.connect(receiver.address) as peer,
        ):
            await peer.send(snapshot_of(source), zero_tails=True)
            (await first(receiver)).release()
            await receiver.reregister()  # its pools are announced anew
            await peer.send(snapshot_of(source), zero_tails=True)
            (await first(receiver)).release()

            @contextlib.asynccontextmanager
            async def anew() -> AsyncIterator[None]:
                await receiver.reregister()
                await eventually(lambda: peer._connection._pools.on_devices)  # type: ignore[union-attr]
                opened = seen["region opened"]
                opened.clear()
                assert peer.path == "put"
                assert peer.lane.endswith("(staged)"), "as far as the connection tells"
                assert not opened, "to be asked opens nothing"
                yield
                assert opened
                assert threading.get_ident() not in opened

            snapshot = snapshot_of(source)
            async with anew(), peer.begin(snapshot) as transfer:
                await transfer.send_rest()
            (await first(receiver)).release()
            async with anew():
                await peer.send(snapshot, page_keys=snapshot_keys(snapshot, [range(NUM_TOKENS)]))
            (await first(receiver)).release()
            receiver.publish("there", snapshot_of(dest))
            async with anew():
                (await peer.fetch("there")).release()
        loop = threading.get_ident()
        assert {what for what, threads in seen.items() if loop in threads} == set()
        assert all(seen.values())

    run(job())


def test_pools_on_several_gpus_are_used_each_in_its_own_context(
    driver: RecordedDriver, context: Context, source: PagePool, dest: PagePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call that hands memory over, on whatever thread."""
    current: list[tuple[str, int]] = []
    post = Endpoint.post

    def noted(endpoint: Endpoint, local: Any, **more: Any) -> Any:
        here = "zeros" if local.address == more["local_address"] and local.nbytes == 1 << 20 else "pages"
        current.append((here, driver.context[-1]))
        return post(endpoint, local, **more)

    monkeypatch.setattr(Endpoint, "post", noted)

    async def job() -> None:
        with gpu_pool(SPEC, 8, 3, context) as other:
            fill(other, 3)
            async with (
                Engine(dest, listen="127.0.0.1:0") as receiver,
                Engine(source) as sender,
                sender.connect(receiver.address) as peer,
            ):
                for pool in (source, other, source):
                    snapshot = snapshot_of(pool)
                    await peer.send(snapshot, zero_tails=True)
                    arrival = await first(receiver)
                    assert same_tokens(snapshot, await arrival.snapshot())
                    arrival.release()

    run(job())
    assert set(current) == {("pages", 0), ("zeros", 0), ("pages", 3), ("zeros", 3)}
    assert [call for call in driver.calls if call[0] == "zeros"] == [("zeros", 1 << 20, gpu) for gpu in (0, 1, 3)]
