"""Whole transfers between two real processes: every byte compared, the lane asserted, the accounts balanced."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import (
    CacheSpec,
    ConfigError,
    DeadlineExceededError,
    Engine,
    GeometryError,
    LeaseExpiredError,
    PagePool,
    Peer,
    PeerLostError,
    PoolExhaustedError,
    Snapshot,
    TransferAbortedError,
)
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, default_context

pytestmark = pytest.mark.both_loops

SPEC = CacheSpec(num_layers=3, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16")
TABLES = [[7, 3, 9], [7, 3, 2], [11], [], [12, 13, 14, 15, 40]]
SEQ_LENS = [12, 9, 1, 0, 13]  # sequence 4 has a page allocated ahead: 40 never travels
SENT_PAGES = [2, 3, 7, 9, 11, 12, 13, 14, 15]


def make_pool(spec: CacheSpec, num_pages: int, kind: str) -> PagePool:
    if kind == "engine-owned":
        return PagePool.allocate(spec, num_pages)
    arrays = {
        role: [np.empty((num_pages, *spec.page_shape), spec.storage_dtype) for _ in range(spec.num_layers)]
        for role in spec.roles
    }
    return PagePool.from_arrays(spec, arrays)


def fill(pool: PagePool, seed: int) -> None:
    random = np.random.default_rng(seed)
    for role, layer in pool.spec.tensors:
        pages = pool.pages(role, layer)
        pages.view(np.uint8)[...] = random.integers(0, 256, pages.view(np.uint8).shape, np.uint8)


def guard(pool: PagePool, page_ids: np.ndarray) -> None:
    for role, layer in pool.spec.tensors:
        pool.pages(role, layer).view(np.uint8)[page_ids] = 0xEE


def receiver(
    connection: Connection, spec: CacheSpec, pool_facts: tuple[int, str], options: dict[str, str], count: int
) -> None:
    """With a pool of (num_pages, kind): receives ``count`` snapshots, reports each as raw arrays, then the accounts."""

    async def run() -> None:
        default_context(options)
        num_pages, kind = pool_facts
        with make_pool(spec, num_pages, kind) as pool:
            guard(pool, np.arange(num_pages))
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                connection.send(engine.address)
                received = 0
                async for arrival in engine.arrivals():
                    for layer in range(spec.num_layers):
                        await arrival.wait_layer(layer)
                    snapshot = await arrival.snapshot()
                    used = np.unique(snapshot.block_table)
                    unused = np.setdiff1d(np.arange(num_pages), used)
                    untouched = all(
                        bool((pool.pages(*tensor).view(np.uint8)[unused] == 0xEE).all()) for tensor in spec.tensors
                    )
                    tokens = {
                        (*tensor, seq): snapshot.tokens(tensor[0], layer=tensor[1], seq=seq).view(np.uint8)
                        for tensor in spec.tensors
                        for seq in range(snapshot.num_seqs)
                    }
                    connection.send(
                        (arrival.key, snapshot.block_table, snapshot.seq_ptr, snapshot.seq_lens, tokens, untouched)
                    )
                    guard(pool, used)
                    arrival.release()
                    arrival.release()
                    received += 1
                    if received == count:
                        break
                connection.send(pool.allocator.accounts())
                await asyncio.to_thread(connection.recv)

    asyncio.run(run())


def run_sender(address: str, pool: PagePool, job: Callable[[Peer], Awaitable[Any]], **settings: Any) -> Any:
    async def run() -> Any:
        async with Engine(pool, timeout_s=20, **settings) as engine, engine.connect(address) as peer:
            return await job(peer)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "options", "path", "lanes"),
    [
        ("engine-owned", {}, "mapped", {"sysv", "posix"}),
        ("caller's", {}, "put", {"cma"}),
        ("engine-owned", {"TLS": "tcp"}, "stream", {"tcp"}),
    ],
    ids=["shared memory", "cma", "tcp"],
)
def test_snapshot_arrives_whole_with_its_aliases(
    kind: str, options: dict[str, str], path: str, lanes: set[str]
) -> None:
    with Child(receiver, SPEC, (32, kind), options, 1) as child:
        address = child.receive()
        context = Context(options)
        arrays = {role: [np.empty((64, 4, 2, 8), SPEC.storage_dtype) for _ in range(3)] for role in SPEC.roles}
        with PagePool.from_arrays(SPEC, arrays, context=context) as pool:
            fill(pool, 1)
            sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)

            async def job(peer: Peer) -> Any:
                return await peer.send(sent, key="req-17"), peer.lane, peer.lanes.emulated

            stats, lane, emulated = run_sender(address, pool, job, context=context)
            key, block_table, seq_ptr, seq_lens, tokens, untouched = child.receive()
            assert key == "req-17"
            assert seq_lens.tolist() == SEQ_LENS
            assert seq_ptr.tolist() == [0, 3, 6, 7, 7, 11]
            assert block_table[0] == block_table[3]
            assert block_table[1] == block_table[4]
            assert len(np.unique(block_table)) == len(SENT_PAGES)
            for (role, layer, seq), got in tokens.items():
                assert np.array_equal(got, sent.tokens(role, layer=layer, seq=seq).view(np.uint8)), (role, layer, seq)
            assert untouched, "a page outside the grant was written"

            assert (stats.path, emulated) == (path, False)
            assert stats.lane == lane
            assert lane in lanes
            page_nbytes = 4 * 2 * 8 * 2
            assert (stats.num_table_entries, stats.num_pages) == (11, 9)
            assert stats.logical_nbytes == 11 * page_nbytes * 6
            assert stats.sent_nbytes == 9 * page_nbytes * 6
            # 2-3, 7, 9, 11-15 are runs of the source; the empty pool grants pages 0 to 8, so no run is cut.
            assert stats.num_operations == 4 * 6
        accounts = child.receive()
        assert (accounts.free, accounts.leased, accounts.quarantined) == (32, 0, 0)
        child.send("end")


def test_layer_by_layer_in_any_order_and_several_transfers_at_once() -> None:
    with Child(receiver, SPEC, (16, "engine-owned"), {}, 6) as child:
        address = child.receive()
        with PagePool.allocate(SPEC, 64) as pool:
            fill(pool, 2)
            snapshots = [Snapshot.from_block_tables(pool, [[n, n + 20], [n, n + 1]], seq_lens=[8, 6]) for n in range(6)]

            async def one(peer: Peer, index: int) -> int:
                if index % 2:
                    return (await peer.send(snapshots[index], key=str(index))).sent_nbytes
                async with peer.begin(snapshots[index], key=str(index)) as transfer:
                    for layer in (2, 0, 1):
                        await transfer.send_layer(layer)
                return transfer.stats.sent_nbytes

            async def job(peer: Peer) -> list[int]:
                return await asyncio.gather(*(one(peer, index) for index in range(6)))

            assert run_sender(address, pool, job) == [3 * 6 * 128] * 6
            for _ in range(6):
                key, _, _, _, tokens, _ = child.receive()
                sent = snapshots[int(key)]
                for (role, layer, seq), got in tokens.items():
                    assert np.array_equal(got, sent.tokens(role, layer=layer, seq=seq).view(np.uint8))
        assert child.receive().free == 16
        child.send("end")


def test_empty_batch_completes() -> None:
    with Child(receiver, SPEC, (4, "engine-owned"), {}, 1) as child:
        address = child.receive()
        with PagePool.allocate(SPEC, 4) as pool:
            empty = Snapshot.from_block_tables(pool, [], seq_lens=[])
            stats = run_sender(address, pool, lambda peer: peer.send(empty))
            assert (stats.num_sequences, stats.sent_nbytes, stats.num_operations) == (0, 0, 0)
            _, block_table, seq_ptr, _, _, untouched = child.receive()
            assert (block_table.tolist(), seq_ptr.tolist(), untouched) == ([], [0], True)
        assert child.receive().free == 4
        child.send("end")


def test_misfits_are_refused_by_name_and_the_connection_lives_on() -> None:
    with Child(receiver, SPEC, (8, "engine-owned"), {}, 1) as child:
        address = child.receive()
        other = CacheSpec(num_layers=3, num_heads=2, head_dim=16, page_size=4, dtype="bfloat16")
        with PagePool.allocate(SPEC, 64) as pool, PagePool.allocate(other, 4) as unlike:
            fill(pool, 3)

            async def job(peer: Peer) -> None:
                with pytest.raises(GeometryError, match="head_dim") as geometry:
                    await peer.send(Snapshot.from_block_tables(unlike, [[0]], seq_lens=[4]))
                assert (geometry.value.field, geometry.value.value) == ("head_dim", 16)
                with pytest.raises(PoolExhaustedError, match="never fits"):
                    await peer.send(Snapshot.from_block_tables(pool, [list(range(9))], seq_lens=[36]))
                with pytest.raises(GeometryError, match="layers"):
                    async with peer.begin(Snapshot.from_block_tables(pool, [[1]], seq_lens=[4])) as transfer:
                        await transfer.send_layer(1)
                with pytest.raises(GeometryError, match="sent before"):
                    async with peer.begin(Snapshot.from_block_tables(pool, [[1]], seq_lens=[4])) as transfer:
                        await transfer.send_layer(1)
                        await transfer.send_layer(1)
                with pytest.raises(TransferAbortedError, match="changed my mind"):
                    async with peer.begin(Snapshot.from_block_tables(pool, [[1]], seq_lens=[4])) as transfer:
                        await transfer.abort("changed my mind")
                        await transfer.send_layer(0)
                await peer.send(Snapshot.from_block_tables(pool, [list(range(8))], seq_lens=[32]))

            with Child(aborted_receiver, SPEC) as second:
                run_sender(second.receive(), pool, job)
                second.send("end")
                assert second.receive() == (8, 0, 0)
            run_sender(address, pool, lambda p: p.send(Snapshot.from_block_tables(pool, [[5]], seq_lens=[2])))
            child.receive()
        assert child.receive().free == 8
        child.send("end")


def aborted_receiver(connection: Connection, spec: CacheSpec) -> None:
    """Takes whatever comes; arrivals may fail. Reports (free, leased, quarantined) when told to end."""

    async def run() -> None:
        with PagePool.allocate(spec, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                connection.send(engine.address)

                async def take() -> None:
                    async for arrival in engine.arrivals():
                        try:
                            await arrival.snapshot()
                        except TransferAbortedError:
                            continue
                        arrival.release()

                task = asyncio.create_task(take())
                await asyncio.to_thread(connection.recv)
                task.cancel()
                accounts = pool.allocator.accounts()
                connection.send((accounts.free, accounts.leased, accounts.quarantined))

    asyncio.run(run())


def greedy_receiver(connection: Connection, spec: CacheSpec, num_pages: int) -> None:
    """Keeps the first arrival until it is told to let go; aborts the second; takes the third."""

    async def run() -> None:
        with PagePool.allocate(spec, num_pages) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
                connection.send(engine.address)
                arrivals = engine.arrivals()
                first = await anext(arrivals)
                await first.snapshot()
                connection.send("holding")
                await asyncio.to_thread(connection.recv)
                first.release()
                second = await anext(arrivals)
                second.abort("not today")
                connection.send("aborted")
                with pytest.raises(TransferAbortedError):
                    await second.snapshot()
                third = await anext(arrivals)
                await third.snapshot()
                third.release()
                connection.send(pool.allocator.accounts())
                await asyncio.to_thread(connection.recv)

    asyncio.run(run())


def test_full_pool_makes_an_offer_wait_until_its_deadline_or_a_release() -> None:
    with Child(greedy_receiver, SPEC, 4) as child, PagePool.allocate(SPEC, 8) as pool:
        fill(pool, 4)
        four = Snapshot.from_block_tables(pool, [[1, 2, 3, 4]], seq_lens=[16])

        async def job(peer: Peer) -> None:
            await peer.send(four)
            assert await asyncio.to_thread(child.receive) == "holding"
            with pytest.raises(DeadlineExceededError):
                await peer.send(four, timeout_s=0.3)

            async def second() -> None:
                async with peer.begin(four, key="second") as transfer:
                    assert await asyncio.to_thread(child.receive) == "aborted"  # else it may be complete before that
                    await transfer.send_rest()

            waiting = asyncio.create_task(second())
            third = asyncio.create_task(peer.send(four, key="third"))
            await asyncio.sleep(0.05)  # both are offered; neither can be granted before the release below
            assert not waiting.done()
            child.send("let go")
            with pytest.raises(TransferAbortedError, match="not today"):
                await waiting
            await third

        run_sender(child.receive(), pool, job)
        accounts = child.receive()
        assert (accounts.free, accounts.leased, accounts.quarantined) == (4, 0, 0)
        child.send("end")


def test_nobody_there_port_in_use_and_bad_addresses_are_typed() -> None:
    async def run() -> None:
        with PagePool.allocate(SPEC, 4) as pool, PagePool.allocate(SPEC, 4) as other:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                with pytest.raises(ConfigError, match="in use") as in_use:
                    async with Engine(other, listen=engine.address):
                        pass
                assert in_use.value.fix
                port = engine.address
            async with Engine(pool) as engine:
                with pytest.raises(PeerLostError) as refused:
                    async with engine.connect(port, timeout_s=5):
                        pass
                assert port in str(refused.value)
                for address in ("", "host:", "host:70000", "[::1", "host:port"):
                    with pytest.raises(ConfigError):
                        engine.connect(address)
                with pytest.raises(ConfigError, match="listen"):
                    _ = engine.address

    asyncio.run(run())


def test_token_is_needed_where_one_is_set() -> None:
    from hurray_rdma import AuthenticationError

    async def run() -> None:
        with PagePool.allocate(SPEC, 4) as pool:
            async with Engine(pool, listen="127.0.0.1:0", token="right") as engine:
                for token in (None, "wrong"):
                    async with Engine(pool, token=token) as other:
                        with pytest.raises(AuthenticationError):
                            async with other.connect(engine.address, timeout_s=5):
                                pass
                async with Engine(pool, token="right") as other, other.connect(engine.address, timeout_s=5) as peer:
                    await peer.send(Snapshot.from_block_tables(pool, [[1]], seq_lens=[4]))

    asyncio.run(run())


def test_garbage_on_the_port_harms_nobody() -> None:
    async def run() -> None:
        with PagePool.allocate(SPEC, 4) as pool:
            async with Engine(pool, listen="127.0.0.1:0") as engine:
                host, port = engine.address.rsplit(":", 1)
                for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(garbage)
                    writer.write_eof()
                    await asyncio.wait_for(reader.read(), 10)
                    writer.close()
                async with Engine(pool) as other, other.connect(engine.address, timeout_s=5) as peer:
                    await peer.send(Snapshot.from_block_tables(pool, [[1]], seq_lens=[4]))
            assert pool.allocator.accounts().free == 4

    asyncio.run(run())


def test_every_way_to_leave_a_transfer_gives_the_pages_back() -> None:
    """Cancelled in each phase, closed under it, aborted late: the receiver's accounts balance in the end."""

    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as pool, PagePool.allocate(SPEC, 8) as source:
            snapshot = Snapshot.from_block_tables(source, [[1, 2, 3]], seq_lens=[12])
            async with Engine(pool, listen="127.0.0.1:0", lease_s=0.4) as engine, Engine(source) as sender:
                states = []

                async def take() -> None:
                    async for arrival in engine.arrivals():
                        states.append(arrival)  # noqa: PERF401 - the loop ends with the engine only

                taking = asyncio.create_task(take())
                peer = sender.connect(engine.address)
                await peer.open()

                async def hold(until: asyncio.Event) -> None:
                    async with peer.begin(snapshot) as transfer:
                        await transfer.send_layer(0)
                        until.set()
                        await asyncio.Event().wait()

                began = asyncio.Event()
                holding = asyncio.create_task(hold(began))
                await began.wait()
                holding.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await holding
                await settled(pool, free=8)

                # The receiver aborts when the lease is nearly over: the sender still has time to say QUIET.
                transfer = peer.begin(snapshot)
                await transfer.__aenter__()
                await asyncio.sleep(0.35)
                states[-1].abort("late")
                await asyncio.sleep(0.1)
                assert pool.allocator.accounts().quarantined == 0
                await transfer.abort()
                await transfer.abort()
                await settled(pool, free=8)

                # Its time, and then the lease, runs out while the application computes: the engine says QUIET for it.
                transfer = peer.begin(snapshot, timeout_s=0.2)
                await transfer.__aenter__()
                await settled(pool, free=5)
                await settled(pool, free=8)
                with pytest.raises(DeadlineExceededError):
                    await states[-1].snapshot()
                with pytest.raises(LeaseExpiredError):
                    await transfer.send_layer(0)
                await transfer.abort()

                # The sender's connection is closed with a transfer open.
                transfer = peer.begin(snapshot)
                await transfer.__aenter__()
                await peer.close()
                await peer.close()
                await settled(pool, free=8)
                with pytest.raises(TransferAbortedError):
                    await transfer.send_layer(0)
                taking.cancel()

    asyncio.run(run())


def test_a_layer_may_be_computed_for_longer_than_the_lease() -> None:
    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as pool, PagePool.allocate(SPEC, 8) as source:
            snapshot = Snapshot.from_block_tables(source, [[1, 2, 3]], seq_lens=[12])
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=0.2) as engine,
                Engine(source) as sender,
                sender.connect(engine.address) as peer,
                peer.begin(snapshot, timeout_s=20) as transfer,
            ):
                arrival = await anext(engine.arrivals())
                for layer in range(3):
                    await asyncio.sleep(0.7)  # what computing takes
                    await transfer.send_layer(layer)
                await arrival.snapshot()
                assert engine.stats().num_leases_expired == 0
                arrival.release()

    asyncio.run(run())


async def settled(pool: PagePool, *, free: int, quarantined: int = 0) -> None:
    """Returns once the accounts say so; the deadline is the test's failure."""
    async with asyncio.timeout(10):
        while (now := pool.allocator.accounts()).free != free or now.quarantined != quarantined:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # accounts tell nobody when they change


def test_a_send_cancelled_before_its_grant_leaves_nothing() -> None:
    """OFFER, ABORT and QUIET arrive in one read: the grant comes too late, and the pages go back."""

    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as pool, PagePool.allocate(SPEC, 8) as source:
            snapshot = Snapshot.from_block_tables(source, [[1, 2, 3]], seq_lens=[12])
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(source) as sender,
                sender.connect(engine.address) as peer,
            ):
                for _ in range(3):
                    sending = asyncio.create_task(peer.send(snapshot))
                    await asyncio.sleep(0)
                    sending.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await sending
                await peer.send(snapshot)  # the connection has survived
                assert pool.allocator.accounts().leased == 3
            assert pool.allocator.accounts().free == 8  # the arrival nobody took went back when the engine closed

    asyncio.run(run())


def test_pages_given_back_by_anyone_wake_a_waiting_offer() -> None:
    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as pool, PagePool.allocate(SPEC, 8) as source:
            snapshot = Snapshot.from_block_tables(source, [[1, 2, 3]], seq_lens=[12])
            lease = pool.allocator.lease(8)
            async with (
                Engine(pool, listen="127.0.0.1:0") as engine,
                Engine(source) as sender,
                sender.connect(engine.address) as peer,
            ):
                sending = asyncio.create_task(peer.send(snapshot, timeout_s=10))
                done, _ = await asyncio.wait({sending}, timeout=0.2)
                assert not done
                await asyncio.to_thread(lease.release)
                assert (await sending).num_pages == 3

    asyncio.run(run())


def test_settings_out_of_range_and_foreign_contexts_are_refused() -> None:
    with PagePool.allocate(SPEC, 4) as pool:
        for settings in ({"timeout_s": 0}, {"lease_s": float("inf")}, {"lease_s": float("nan")}):
            with pytest.raises(ConfigError):
                Engine(pool, **settings)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="context"):
            Engine(pool, context=Context())


def test_an_idle_transfer_ends_quietly_while_another_is_busy() -> None:
    """QUIET is said of the one transfer, not of the whole endpoint."""

    async def run() -> None:
        arrays = {role: [np.zeros((512, 4, 2, 8), SPEC.storage_dtype) for _ in range(3)] for role in SPEC.roles}
        with PagePool.from_arrays(SPEC, arrays) as pool, PagePool.allocate(SPEC, 512) as source:
            small = Snapshot.from_block_tables(source, [[1, 2, 3]], seq_lens=[12])
            large = Snapshot.from_block_tables(source, [np.random.default_rng(1).permutation(400)], seq_lens=[1600])
            async with (
                Engine(pool, listen="127.0.0.1:0", lease_s=0.5) as engine,
                Engine(source) as sender,
                sender.connect(engine.address) as peer,
            ):
                assert peer.path == "put"
                for _ in range(5):
                    idle = peer.begin(small)
                    await idle.__aenter__()
                    busy = asyncio.create_task(peer.send(large))
                    await asyncio.sleep(0)
                    await idle.abort()
                    await busy
                    arrival = await anext(aiter(engine.arrivals()))
                    other = await anext(aiter(engine.arrivals()))
                    arrival.release()
                    other.release()
                await settled(pool, free=512)

    asyncio.run(run())


def stopped_sender(connection: Connection, address: str) -> None:
    """Begins a transfer and waits."""

    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as source:
            async with Engine(source) as sender, sender.connect(address) as peer:
                transfer = peer.begin(Snapshot.from_block_tables(source, [[1, 2, 3]], seq_lens=[12]))
                await transfer.__aenter__()
                connection.send("granted")
                await asyncio.to_thread(connection.recv)
                await transfer.abort()

    asyncio.run(run())


def test_pages_of_a_stopped_sender_are_quarantined_and_come_back_with_its_late_quiet() -> None:
    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", lease_s=0.4) as engine:
                with Child(stopped_sender, engine.address) as child:
                    assert await asyncio.to_thread(child.receive) == "granted"
                    child.signal(signal.SIGSTOP)
                    await settled(pool, free=5, quarantined=3)
                    child.signal(signal.SIGCONT)
                    await settled(pool, free=8)
                    child.send("end")
                    await asyncio.to_thread(child.join)

    asyncio.run(run())


def test_a_receiver_that_closes_at_once_does_not_undo_a_complete_transfer() -> None:
    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as pool, PagePool.allocate(SPEC, 8) as source:
            snapshot = Snapshot.from_block_tables(source, [[1, 2, 3]], seq_lens=[12])

            async def receive(engine: Engine) -> None:
                async for arrival in engine.arrivals():
                    await arrival.snapshot()
                    arrival.release()
                    break
                await engine.close()

            for _ in range(10):
                async with Engine(pool, listen="127.0.0.1:0") as engine, Engine(source) as sender:
                    async with sender.connect(engine.address) as peer:
                        _, stats = await asyncio.gather(receive(engine), peer.send(snapshot))
                    assert (stats.num_pages, stats.path) == (3, "mapped")
            assert pool.allocator.accounts().free == 8

    asyncio.run(run())
