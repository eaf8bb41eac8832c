"""What the tests of this folder share: two processes, three lanes, content that says where it came from."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hurray_rdma import Arrival, CacheSpec, Engine, HurrayError, PagePool, Peer, Snapshot, TransportError
from hurray_rdma.engine import reception
from hurray_rdma.transport import Context, default_context

SPEC = CacheSpec(num_layers=2, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16")

LANES: dict[str, tuple[str, dict[str, str]]] = {
    "mapped": ("engine-owned", {}),
    "cma": ("caller's", {}),
    "tcp": ("engine-owned", {"TLS": "tcp"}),
}
"""How to make the receiver's pool, and the UCX options of both sides, for each way that pages can go on one host."""

PATHS = {"mapped": "mapped", "cma": "put", "tcp": "stream"}
"""How they are moved then."""


@contextlib.contextmanager
def no_page_streams() -> Iterator[None]:
    """Engines of this process that listen have none, as behind a firewall: over tcp senders write by UCX's puts."""

    def refuse(*_: object, **__: object) -> None:
        raise TransportError("a firewall")

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(reception, "PageStreamListener", refuse)
        yield


def make_pool(spec: CacheSpec, num_pages: int, kind: str = "engine-owned", context: Context | None = None) -> PagePool:
    if kind == "engine-owned":
        return PagePool.allocate(spec, num_pages, context=context)
    arrays = {
        role: [np.empty((num_pages, *spec.page_shape), spec.storage_dtype) for _ in range(spec.num_layers)]
        for role in spec.roles
    }
    return PagePool.from_arrays(spec, arrays, context=context)


def raw(pool: PagePool, role: str, layer: int) -> np.ndarray:
    """Bytes of each page of a pool in NHD order: ``[num_pages, page_nbytes]``."""
    pages = pool.pages(role, layer)
    return pages.view(np.uint8).reshape(pool.num_pages, -1)


def fill(pool: PagePool, seed: int) -> None:
    random = np.random.default_rng(seed)
    for tensor in pool.spec.tensors:
        pages = raw(pool, *tensor)
        pages[...] = random.integers(0, 256, pages.shape, np.uint8)


def snapshot_of(pool: PagePool, *tables: list[int]) -> Snapshot:
    """Full pages only."""
    return Snapshot.from_block_tables(pool, tables, seq_lens=[len(table) * pool.spec.page_size for table in tables])


def digest(snapshot: Snapshot) -> str:
    """Of every token, in the order of roles, layers, sequences: the same wherever the pages are."""
    whole = hashlib.sha256()
    for role, layer in snapshot.pool.spec.tensors:
        for seq in range(snapshot.num_seqs):
            whole.update(np.ascontiguousarray(snapshot.tokens(role, layer=layer, seq=seq)).tobytes())
    return whole.hexdigest()


def counts(pool: PagePool) -> tuple[int, int, int]:
    """Pages that are (free, leased, quarantined)."""
    accounts = pool.allocator.accounts()
    return accounts.free, accounts.leased, accounts.quarantined


async def settled(pool: PagePool, free: int, leased: int, quarantined: int) -> None:
    """Returns once the accounts say so; its deadline is the test's failure."""
    until = time.monotonic() + 10
    while counts(pool) != (free, leased, quarantined):
        assert time.monotonic() < until, f"{counts(pool)} instead of {(free, leased, quarantined)}"
        await asyncio.sleep(0.005)


async def eventually(holds: Callable[[], bool | Awaitable[bool]], *, within_s: float = 10) -> None:
    """Returns once something holds that tells nobody when it does; its deadline is the test's failure."""
    until = time.monotonic() + within_s
    while True:
        answer = holds()
        if answer if isinstance(answer, bool) else await answer:
            return
        assert time.monotonic() < until, f"not in {within_s} s"
        await asyncio.sleep(0.005)


def state_of(pid: int) -> str:
    """R, S, T, Z ... as of ``ps``."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def stopped(pid: int) -> None:
    """Returns once the process is stopped by a signal."""
    until = time.monotonic() + 10
    while state_of(pid) != "T":
        assert time.monotonic() < until, f"process {pid} does not stop"
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def connected(pool: PagePool, address: str, **settings: Any) -> AsyncIterator[Peer]:
    async with Engine(pool, **settings) as engine, engine.connect(address) as peer:
        yield peer


def receiver(connection: Connection, settings: dict[str, Any]) -> None:
    """Receives; told "counts" it says its pool's, told "end" it ends. Reports each arrival as (key, digest or error).

    Settings: lane, num_pages, spec, listen, hold (keep pages); others are the engine's.
    """

    async def run() -> None:
        kind, options = LANES[settings.pop("lane", "mapped")]
        default_context(options)
        spec, num_pages, hold = settings.pop("spec", SPEC), settings.pop("num_pages", 32), settings.pop("hold", False)
        with make_pool(spec, num_pages, kind) as pool:
            async with Engine(pool, **{"listen": "127.0.0.1:0", "timeout_s": 20, **settings}) as engine:
                connection.send(engine.address)

                async def one(arrival: Arrival) -> None:
                    try:
                        connection.send((arrival.key, digest(await arrival.snapshot())))
                    except HurrayError as error:
                        connection.send((arrival.key, type(error).__name__))
                    if not hold:
                        arrival.release()

                async def take() -> None:
                    async with asyncio.TaskGroup() as group:
                        async for arrival in engine.arrivals():
                            group.create_task(one(arrival))

                taking = asyncio.create_task(take())
                while await asyncio.to_thread(connection.recv) != "end":
                    connection.send(counts(pool))
            await taking

    asyncio.run(run())


def drop_ptrace() -> bool:
    """Takes CAP_SYS_PTRACE from this thread and those it starts, as a container does; False if it had none."""

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    class Sets(ctypes.Structure):
        _fields_ = (("effective", ctypes.c_uint32), ("permitted", ctypes.c_uint32), ("inheritable", ctypes.c_uint32))

    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = Header(0x20080522, 0), (Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    had = bool(sets[0].permitted & 1 << 19)
    sets[0].effective &= ~(1 << 19)
    sets[0].permitted &= ~(1 << 19)
    assert libc.capset(ctypes.byref(header), sets) == 0
    return had


def run(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` with a deadline: a child that failed must not leave the test waiting for it."""

    async def within() -> None:
        async with asyncio.timeout(25):
            await main

    asyncio.run(within())
