"""The blocking face between two real processes: every byte, many threads, ends in the middle, forks, the exit."""

from __future__ import annotations

import inspect
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count as count_from
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import hurray_rdma
from hurray_rdma import sync
from hurray_rdma.sync import (
    Arrival,
    CacheSpec,
    ConfigError,
    DeadlineExceededError,
    Engine,
    GeometryError,
    HurrayError,
    NotPublishedError,
    PagePool,
    Peer,
    PoolExhaustedError,
    Snapshot,
    TransferAbortedError,
)
from hurray_rdma.testing.processes import Child

SPEC = CacheSpec(num_layers=3, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16")
LARGE = CacheSpec(num_layers=4, num_heads=8, head_dim=128, page_size=16, dtype="bfloat16")
"""Pages of 32 KiB: twenty and more of them are moved in mover threads."""


def fill(pool: PagePool, seed: int) -> None:
    random = np.random.default_rng(seed)
    for tensor in pool.spec.tensors:
        pages = pool.pages(*tensor).view(np.uint8)
        pages[...] = random.integers(0, 256, pages.shape, np.uint8)


def content(snapshot: Snapshot) -> dict[tuple[str, int, int], bytes]:
    """Every valid byte, by role, layer and sequence."""
    return {
        (role, layer, seq): snapshot.tokens(role, layer=layer, seq=seq).tobytes()
        for role, layer in snapshot.pool.spec.tensors
        for seq in range(snapshot.num_seqs)
    }


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def threads_left(before: set[threading.Thread]) -> list[str]:
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("hurray-mover"):
            thread.join(10)  # told to end, and not waited for, by the connection
    return [thread.name for thread in set(threading.enumerate()) - before]


def serve(arrivals: Iterator[Arrival]) -> int:
    """Takes whatever comes until the engine closes; how many were complete."""
    num_complete = 0
    for arrival in arrivals:
        try:
            arrival.snapshot()
            num_complete += 1
        except TransferAbortedError:
            pass
        finally:
            arrival.release()
    return num_complete


def other(connection: Connection, num_pages: int, spec: CacheSpec) -> None:
    """The other side, blocking as well: does what it is told, and at the end tells its accounts and its threads."""
    before = set(threading.enumerate())
    with PagePool.allocate(spec, num_pages) as pool, ThreadPoolExecutor(1) as threads:
        fill(pool, 9)
        with Engine(pool, listen="127.0.0.1:0", timeout_s=20) as engine:
            connection.send(engine.address)
            arrivals, held, serving = engine.arrivals(), [], None
            while (command := connection.recv()) != "end":
                match command:
                    case "take":
                        arrival = next(arrivals)
                        held.append(arrival)
                        connection.send((arrival.key, arrival.sender))
                    case "read":
                        for layer in range(SPEC.num_layers):
                            held[-1].wait_layer(layer)
                        connection.send(content(held[-1].snapshot()))
                    case "abort":
                        held[-1].abort()
                        connection.send("aborted")
                    case "serve":
                        serving = threads.submit(serve, arrivals)
                    case "release":
                        for arrival in held:
                            arrival.release()
                    case ("waiting", count):
                        until(lambda count=count: engine.stats().num_waiting == count)
                        connection.send("so many")
                    case ("publish", key, tables, seq_lens):
                        snapshot = Snapshot.from_block_tables(pool, tables, seq_lens=seq_lens)
                        engine.publish(key, snapshot)
                        connection.send(content(snapshot))
                    case ("unpublish", key):
                        connection.send(engine.unpublish(key))
        for arrival in held:
            arrival.release()  # what is complete is the application's beyond the engine's end
        connection.send(pool.allocator.accounts())
        connection.send(serving.result(20) if serving is not None else 0)
    connection.send(threads_left(before))


class Scene:
    """A pool here, the other side there."""

    pool: PagePool
    num_served: int
    """At its end: complete arrivals that the other side has served."""

    def __init__(self, child: Child, *, address: str) -> None:
        self.child, self.address = child, address

    def tell(self, command: object) -> Any:
        self.child.send(command)
        return self.child.receive()

    def snapshot(self, tables: list[list[int]], seq_lens: list[int]) -> Snapshot:
        return Snapshot.from_block_tables(self.pool, tables, seq_lens=seq_lens)


@contextmanager
def scene(num_pages: int, spec: CacheSpec = SPEC) -> Iterator[Scene]:
    """Both sides must end with all pages free and no thread left."""
    before = set(threading.enumerate())
    with Child(other, num_pages, spec) as child:
        there = Scene(child, address=child.receive())
        with PagePool.allocate(spec, 64) as pool:
            fill(pool, 1)
            there.pool = pool
            yield there
            accounts = pool.allocator.accounts()
            assert (accounts.free, accounts.leased, accounts.quarantined) == (64, 0, 0)
        assert threads_left(before) == []
        accounts = there.tell("end")
        assert (accounts.free, accounts.leased, accounts.quarantined) == (num_pages, 0, 0)
        there.num_served = child.receive()
        assert child.receive() == []


@contextmanager
def connected(there: Scene, **settings: Any) -> Iterator[tuple[Engine, Peer]]:
    with Engine(there.pool, timeout_s=20, **settings) as engine, engine.connect(there.address) as peer:
        yield engine, peer


@contextmanager
def full(there: Scene, peer: Peer) -> Iterator[None]:
    """The other side's pool of 4 pages has none left: what is offered meanwhile waits."""
    peer.send(there.snapshot([[1, 2, 3, 4]], [16]), key="all of it")
    there.tell("take")
    yield
    there.child.send("release")


# The same names.


def test_all_names_are_there() -> None:
    assert set(sync.__all__) == set(hurray_rdma.__all__)
    for name in sync.__all__:
        same = getattr(sync, name) is getattr(hurray_rdma, name)
        assert same == (name not in {"Engine", "Peer", "Transfer", "Arrival"}), name


@pytest.mark.parametrize("name", ["Engine", "Peer", "Transfer", "Arrival"])
def test_methods_have_the_same_arguments(name: str) -> None:
    blocking, awaited = getattr(sync, name), getattr(hurray_rdma, name)
    mine = {name: value for name, value in inspect.getmembers(blocking) if not name.startswith("_")}
    # What a receiver tells an arrival, and a route an exchange, is not for applications.
    inner = {"all_layers_ended", "layers_ended", "completed", "stopping", "ended", "recovered"}
    inner |= {"answered", "acknowledged", "ended_by_peer", "fail"}
    theirs = {name for name, _ in inspect.getmembers(awaited) if not name.startswith("_")} - inner
    without = {"send_async", "begin_async", "fetch_async", "refresh_async", "receive_async", "close_async"}
    without |= {"settled_async", "decline_async"}
    assert set(mine) - without - {"state", "completed_s"} == theirs
    for method, value in mine.items():
        assert value.__doc__, method
        if inspect.isfunction(value):
            there = getattr(awaited, method.removesuffix("_async"))
            same = [str(p) for p in inspect.signature(there).parameters.values()]
            assert [str(p) for p in inspect.signature(value).parameters.values()] == same, method
    if name == "Engine":
        assert inspect.signature(blocking).parameters == inspect.signature(awaited).parameters


# Transfers.


@pytest.mark.both_loops
def test_every_byte_arrives_by_every_call() -> None:
    with scene(16) as there, connected(there, name="prefill") as (engine, peer):
        assert (peer.connected, peer.path, peer.lanes is not None) == (True, "mapped", True)
        assert peer.lane in {"sysv", "posix"}
        snapshot = there.snapshot([[7, 3, 9], [7, 3, 2]], [12, 9])

        stats = peer.send(snapshot, key="whole")
        assert (stats.num_table_entries, stats.num_pages) == (6, 4)
        assert there.tell("take") == ("whole", "prefill")
        assert there.tell("read") == content(snapshot)
        there.child.send("release")

        with peer.begin(snapshot, key="by layers") as transfer:
            for layer in (2, 0):
                transfer.send_layer(layer)
            with pytest.raises(TransferAbortedError, match="is not complete"):
                _ = transfer.stats
            transfer.send_rest()
        assert transfer.stats.sent_nbytes == stats.sent_nbytes == 4 * 6 * 128
        there.tell("take")
        assert there.tell("read") == content(snapshot)
        there.child.send("release")

        future = peer.send_async(snapshot, key="later")
        assert there.tell("take")[0] == "later"
        assert future.result(20).key == "later"
        assert there.tell("read") == content(snapshot)
        there.child.send("release")
        assert engine.stats().send.num_transfers == 3


@pytest.mark.both_loops
def test_every_byte_is_fetched() -> None:
    with scene(16) as there, connected(there) as (_, peer):
        published = there.tell(("publish", "req-19", [[5, 6, 1], [5, 6, 2]], [12, 10]))
        with peer.fetch("req-19") as fetched:
            assert content(fetched) == published
            assert fetched.stats.num_pages == 4
        future = peer.fetch_async("req-19")
        with future.result(20) as fetched:
            assert content(fetched) == published
        assert there.tell(("unpublish", "req-19")) is True
        assert there.tell(("unpublish", "req-19")) is False
        with pytest.raises(NotPublishedError):
            peer.fetch("req-19")


@pytest.mark.both_loops
def test_eight_threads_send_through_one_peer() -> None:
    with scene(64) as there, connected(there) as (_, peer), ThreadPoolExecutor(8) as threads:
        snapshots = {f"{n}": there.snapshot([[n, n + 20, n + 40], [n]], [11, 3]) for n in range(8)}
        begin = threading.Barrier(8)

        def one(key: str) -> int:
            begin.wait(20)
            return sum(peer.send(snapshots[key], key=key).sent_nbytes for _ in range(4))

        sends = [threads.submit(one, key) for key in snapshots]
        seen = []
        for _ in range(8 * 4):
            key, _ = there.tell("take")
            assert there.tell("read") == content(snapshots[key])
            there.child.send("release")
            seen.append(key)
        assert sorted(seen) == sorted([*snapshots] * 4)
        assert [send.result(20) for send in sends] == [4 * 3 * 6 * 128] * 8


def test_pools_come_and_go_and_are_registered_anew() -> None:
    with PagePool.allocate(SPEC, 8) as pool, PagePool.allocate(SPEC, 4) as second:
        with Engine(pool, listen="127.0.0.1:0") as engine:
            engine.add_pool(second, name="second")
            assert set(engine.stats().pools) == {"default", "second"}
            with pytest.raises(ConfigError, match="name"):
                engine.add_pool(second, name="second")
            before = engine.stats().generations
            engine.reregister("second", timeout_s=5)
            assert engine.stats().generations["second"] == before["second"] + 1
            engine.remove_pool("second")
            assert set(engine.stats().pools) == {"default"}
        assert engine.stats().num_sessions == 0


# Errors.


def test_errors_are_those_of_the_other_side_with_its_traceback() -> None:
    with scene(4) as there, connected(there) as (_, peer):
        with pytest.raises(PoolExhaustedError, match="never fits") as caught:
            peer.send(there.snapshot([[1, 2, 3, 4, 5]], [20]))
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert any(frame.filename.endswith("engine/exchange.py") for frame in frames)
        with pytest.raises(GeometryError, match="layer"), peer.begin(there.snapshot([[1]], [4])) as transfer:
            transfer.send_layer(3)
        with full(there, peer):
            waiting = there.snapshot([[5]], [4])
            with pytest.raises(DeadlineExceededError):
                peer.send(waiting, timeout_s=0.1)


def test_before_the_start_and_after_the_end() -> None:
    with PagePool.allocate(SPEC, 4) as pool:
        engine = Engine(pool, listen="127.0.0.1:0")
        with pytest.raises(ConfigError, match="not running"):
            engine.unpublish("x")
        engine.close()
        with engine:
            peer = engine.connect(engine.address)
            transfer = peer.begin(Snapshot.from_block_tables(pool, [[1]], seq_lens=[1]))
            with pytest.raises(ConfigError, match="has not begun"):
                transfer.send_layer(0)
            with pytest.raises(ConfigError, match="started before"):
                engine.start()
        engine.close()
        for late in (lambda: engine.unpublish("x"), peer.open, transfer.__enter__):
            with pytest.raises(TransferAbortedError, match="was closed"):
                late()
        with pytest.raises(ConfigError, match="not running"):
            engine.connect(engine.address)
        assert list(engine.arrivals()) == []
        peer.close()
    before = set(threading.enumerate())
    with PagePool.allocate(SPEC, 4) as pool, pytest.raises(ConfigError, match="timeout_s"):
        Engine(pool, timeout_s=0)
    with (
        PagePool.allocate(SPEC, 4) as pool,
        pytest.raises(ConfigError),
        Engine(pool, listen="203.0.113.1:1", token="t"),
    ):
        pass
    assert threads_left(before) == []


def test_what_waits_is_refused_on_the_engines_own_thread() -> None:
    told: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    with scene(16) as there, connected(there) as (engine, peer):
        snapshot = there.snapshot([[1]], [4])

        def callback(_: Any) -> None:
            for call in (lambda: peer.send(snapshot), peer.close, engine.close):
                try:
                    call()
                    told.put(None)
                except BaseException as error:
                    told.put(error)

        peer.send_async(snapshot).add_done_callback(callback)
        for _ in range(3):
            error = told.get(timeout=20)
            assert isinstance(error, ConfigError), error
            assert error.value == f"hurray-engine-{engine.name}"
        assert peer.send(snapshot).num_pages == 1


# Ends in the middle.


@pytest.mark.both_loops
def test_closing_while_calls_run_ends_each_with_a_typed_error() -> None:
    with scene(4) as there, ThreadPoolExecutor(8) as threads:
        engine = Engine(there.pool, listen="127.0.0.1:0", timeout_s=20)
        with engine, engine.connect(there.address) as peer, full(there, peer):
            with there.pool.allocator.lease(2) as lease:  # the pages go back when nobody sends them any more
                held = Snapshot.from_block_tables(there.pool, [[int(n) for n in lease.page_ids]], seq_lens=[8])
                sends = [threads.submit(peer.send, held) for _ in range(4)]
                later = peer.send_async(held)
                entering = threads.submit(peer.begin(held).__enter__)
                arrivals = threads.submit(lambda: list(engine.arrivals()))
                there.tell(("waiting", 6))
            assert there.pool.allocator.accounts().leased == 2
            closings = [threads.submit(engine.close) for _ in range(2)]
            for call in (*sends, later, entering):
                with pytest.raises(TransferAbortedError, match="was closed"):
                    call.result(20)
            assert arrivals.result(20) == []
            assert [closing.result(20) for closing in closings] == [None, None]
            assert there.pool.allocator.accounts().leased == 0


def test_closing_while_pages_move_loses_none_of_them() -> None:
    with scene(128, LARGE) as there, ThreadPoolExecutor(8) as threads:
        there.child.send("serve")
        lease = there.pool.allocator.lease(48)
        snapshot = there.snapshot([[int(n) for n in lease.page_ids]], [48 * 16])
        with connected(there) as (engine, peer):

            def again_and_again() -> tuple[int, str]:
                """How many were acknowledged, and why no more."""
                for count in count_from(0):
                    try:
                        assert peer.send(snapshot).sent_nbytes == 48 * 8 * 32768
                    except TransferAbortedError as error:
                        return count, str(error)
                raise AssertionError

            sends = [threads.submit(again_and_again) for _ in range(8)]
            until(lambda: engine.stats().send.num_transfers >= 16)
            lease.release()
            engine.close()
            ends = [send.result(20) for send in sends]
            assert {why for _, why in ends} == {f"engine {engine.name!r} was closed"}
            num_acknowledged = sum(count for count, _ in ends)
            assert num_acknowledged == engine.stats().send.num_transfers
    # One that was complete there may have been acknowledged too late for its sender.
    assert num_acknowledged <= there.num_served <= num_acknowledged + 8


def test_closing_aborts_transfers_that_nobody_works_on() -> None:
    with scene(8) as there:
        lease = there.pool.allocator.lease(2)
        snapshot = Snapshot.from_block_tables(there.pool, [[int(n) for n in lease.page_ids]], seq_lens=[8])
        with connected(there) as (engine, peer):
            abandoned, refused = peer.begin(snapshot, key="abandoned"), peer.begin(snapshot, key="refused")
            abandoned.__enter__()
            refused.__enter__()
            lease.release()
            assert [there.tell("take")[0] for _ in range(2)] == ["abandoned", "refused"]
            there.tell("abort")
            peer.send(there.snapshot([[60]], [4]))  # by its end the abort has been heard
            with pytest.raises(TransferAbortedError, match="was closed"), peer.begin(snapshot) as transfer:
                transfer.send_layer(0)
                engine.close()
                assert there.pool.allocator.accounts().leased == 0
                transfer.send_layer(1)
            with pytest.raises(TransferAbortedError, match="was closed"):
                abandoned.send_rest()
            abandoned.abort()
            refused.abort()


def test_a_receiver_that_closes_ends_waits_and_keeps_what_is_complete() -> None:
    with PagePool.allocate(SPEC, 4) as pool, PagePool.allocate(SPEC, 4) as source, ThreadPoolExecutor(2) as threads:
        receiver, sender = Engine(pool, listen="127.0.0.1:0"), Engine(source)
        snapshot = Snapshot.from_block_tables(source, [[1]], seq_lens=[4])
        with receiver, sender, sender.connect(receiver.address) as peer:
            arrivals = receiver.arrivals()
            peer.send(snapshot, key="complete")
            complete = next(arrivals)
            with pytest.raises(HurrayError), peer.begin(snapshot) as transfer:
                arriving = next(arrivals)
                transfer.send_layer(0)
                arriving.wait_layer(0)
                with pytest.raises(DeadlineExceededError):
                    arriving.wait_layer(1, timeout_s=0.05)
                waiting = [threads.submit(arriving.wait_layer, 1), threads.submit(lambda: list(arrivals))]
                receiver.close()
                with pytest.raises(TransferAbortedError):
                    waiting[0].result(20)
                assert waiting[1].result(20) == []
                transfer.send_rest()
        arriving.release()
        assert pool.allocator.accounts().leased == 1
        complete.release()
        complete.release()
        assert (complete.state.name, pool.allocator.accounts().free) == ("RELEASED", 4)


def test_either_side_aborts() -> None:
    with PagePool.allocate(SPEC, 4) as pool, PagePool.allocate(SPEC, 4) as source:
        receiver, sender = Engine(pool, listen="127.0.0.1:0"), Engine(source)
        snapshot = Snapshot.from_block_tables(source, [[1]], seq_lens=[4])
        with receiver, sender, sender.connect(receiver.address) as peer:
            arrivals = receiver.arrivals()
            with pytest.raises(TransferAbortedError, match="changed my mind"), peer.begin(snapshot) as transfer:
                transfer.abort("changed my mind")
            with pytest.raises(TransferAbortedError):
                next(arrivals).snapshot()
            with pytest.raises(TransferAbortedError, match="too late"), peer.begin(snapshot) as transfer:
                arrival = next(arrivals)
                arrival.abort("too late")
                with pytest.raises(TransferAbortedError, match="too late"):
                    arrival.wait_layer(0)
                transfer.send_rest()
            until(lambda: pool.allocator.accounts().free == 4)
            peer.send(snapshot)
            next(arrivals).release()
        assert pool.allocator.accounts().free == 4


@pytest.mark.both_loops
def test_a_cancelled_future_is_done_when_the_transfer_has_ended() -> None:
    with scene(4) as there, connected(there) as (engine, peer):
        with full(there, peer):
            with there.pool.allocator.lease(1) as lease:
                future = peer.send_async(there.snapshot([[int(lease.page_ids[0])]], [4]))
                there.tell(("waiting", 1))
            assert (future.running(), future.done()) == (True, False)
            assert future.cancel()
            assert wait([future], 20).done == {future}
            assert future.cancelled()
            assert future.cancel()
            with pytest.raises(CancelledError):
                future.result()
            assert there.pool.allocator.accounts().leased == 0
            there.tell(("waiting", 0))
        done = peer.send_async(there.snapshot([[2]], [4]))
        assert done.result(20).num_pages == 1
        assert (done.cancel(), done.cancelled()) == (False, False)
        there.tell("take")
        there.child.send("release")
        assert engine.stats().send.failures == {"CancelledError": 1}


@pytest.mark.parametrize("call", ["send", "enter", "fetch", "arrivals"])
def test_an_interrupt_ends_the_call_and_nothing_else(call: str) -> None:
    main = threading.main_thread().ident
    assert main is not None
    with scene(4) as there, connected(there, listen="127.0.0.1:0") as (engine, peer), ThreadPoolExecutor(1) as threads:
        there.tell(("publish", "req", [[0]], [4]))
        own = there.pool.allocator
        with full(there, peer), own.lease(64 if call == "fetch" else 1) as lease:
            snapshot = there.snapshot([[int(lease.page_ids[0])]], [4])
            calls: dict[str, Callable[[], object]] = {
                "send": lambda: peer.send(snapshot),
                "enter": lambda: peer.begin(snapshot).__enter__(),
                "fetch": lambda: peer.fetch("req"),
                "arrivals": lambda: next(engine.arrivals()),
            }

            def interrupt() -> None:
                if call in {"send", "enter"}:
                    there.tell(("waiting", 1))
                else:
                    until(lambda: bool(engine._thread._calls))
                signal.pthread_kill(main, signal.SIGINT)

            interrupting = threads.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                calls[call]()
            interrupting.result(20)
            assert own.accounts().num_leases == 1  # its own
            there.tell(("waiting", 0))
        assert peer.send(there.snapshot([[2]], [4])).num_pages == 1
        there.tell("take")
        there.child.send("release")


# The process.


def script(text: str, *options: str) -> subprocess.CompletedProcess[str]:
    prologue = """
        import os, sys, threading
        from hurray_rdma.sync import *
        spec = CacheSpec(num_layers=1, num_heads=1, head_dim=8, page_size=4, dtype="float32")
        pool = PagePool.allocate(spec, 4)
        engine = Engine(pool, listen="127.0.0.1:0", name="prefill")
        snapshot = Snapshot.from_block_tables(pool, [[1]], seq_lens=[4])
        peer = engine.__enter__().connect(engine.address).__enter__()
    """
    source = textwrap.dedent(prologue) + textwrap.dedent(text)
    return subprocess.run(
        [sys.executable, *options, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_exit_closes_what_was_left_open() -> None:
    done = script(
        """
        peer.send(snapshot)
        threading.Thread(target=lambda: print([arrival.key for arrival in engine.arrivals()])).start()
        peer.begin(snapshot, key="never left").__enter__()
        future = PagePool.allocate(spec, 4) and peer.send_async(snapshot)
        """,
        "-Wdefault::ResourceWarning",
    )
    assert done.returncode == 0, done.stderr
    assert "engine 'prefill' was not closed before the exit" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout.startswith("[")


def test_the_exit_by_an_error_does_not_hang() -> None:
    done = script("raise SystemExit(3)")
    assert (done.returncode, done.stdout, done.stderr) == (3, "", "")


def test_a_forked_child_is_refused_and_harms_nobody() -> None:
    done = script(
        """
        child = os.fork()
        if child == 0:
            for call in (peer.send, peer.send_async, lambda _: next(engine.arrivals())):
                try:
                    call(snapshot)
                except TransportError as error:
                    assert "forked child" in str(error), error
                else:
                    os._exit(4)
            engine.close()
            sys.exit(5)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, peer.send(snapshot).num_pages, next(engine.arrivals()).snapshot().num_seqs)
        peer.close()
        engine.close()
        """,
        "-Wignore::DeprecationWarning",
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "5 1 1\n", "")
