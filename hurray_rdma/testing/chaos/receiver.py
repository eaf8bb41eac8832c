"""The receiving process: takes every arrival, checks every byte of it and of the free pages, does as its key says.

Run as ``python -m hurray_rdma.testing.chaos.receiver SETTINGS``, by `handle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys

import msgspec
import numpy as np

from hurray_rdma.cache import Lease, PagePool, Snapshot
from hurray_rdma.demo.child import die_with
from hurray_rdma.engine import Arrival, Engine
from hurray_rdma.errors import HurrayError
from hurray_rdma.testing.chaos.child import HANG_AFTER_S, ChaosChild, make_pool, run_child
from hurray_rdma.testing.chaos.guard import Guard
from hurray_rdma.testing.chaos.recipe import Recipe, mismatch, paint, raw, shape_of
from hurray_rdma.testing.chaos.words import (
    DELIVERED,
    HANG,
    TYPED,
    UNTYPED,
    Command,
    Plant,
    Publish,
    Published,
    Ready,
    Received,
    ReceiverSettings,
    Reopen,
    Reregister,
    Reregistered,
    Violation,
)

__all__ = ["ReceiverChild"]

_PATROL_S = {"small": 0.1, "large": 0.5}


class ReceiverChild(ChaosChild):
    """See the module."""

    def __init__(self, pool: PagePool, settings: ReceiverSettings) -> None:
        super().__init__(pool)
        self._settings = settings
        self._listen = settings.listen
        self._guard = Guard(pool)
        self._engine: Engine | None = None
        self._num_busy = 0
        self._num_told = 0
        self._corrupt_next = False
        self._planted: list[Lease] = []

    @property
    def num_busy(self) -> int:
        self._look()
        return self._num_busy

    async def open(self) -> None:
        settings = self._settings
        engine = Engine(
            self.pool,
            listen=self._listen,
            lease_s=settings.lease_s,
            timeout_s=settings.timeout_s,
            peer_timeout_s=settings.peer_timeout_s,
            ahead_pages=settings.ahead_pages,
        )
        await engine.start()
        self._engine, self._listen = engine, engine.address
        self.start(self._take_all(engine))
        self.say(Ready(engine.address))

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def do(self, command: Command) -> None:
        match command:
            case Publish(recipe=recipe):
                self._publish(recipe)
                self.say(Published(recipe.name))
            case Reregister():
                await self._reregister()
            case Reopen():
                await self.close()
                await self.open()
            case Plant(what="free page"):
                raw(self.pool, "value", 1)[self._guard.watched[0], 3] ^= np.uint8(1)
            case Plant(what="delivered page"):
                self._corrupt_next = True
            case Plant(what="lease"):
                self._planted.append(self.pool.allocator.lease(1))
            case _:
                raise ValueError(f"no word for a receiver: {command!r}")

    def _publish(self, recipe: Recipe) -> None:
        if self._engine is None or self.pool.allocator.accounts().free < recipe.num_pages:
            return  # whoever fetches it is told so
        shape = shape_of(recipe, self.pool.spec)
        with self.pool.allocator.lease(recipe.num_pages) as lease:
            paint(recipe, self.pool, lease.page_ids)
            tables = [lease.page_ids[table] for table in shape.tables]
            snapshot = Snapshot.from_block_tables(self.pool, tables, seq_lens=shape.seq_lens)
            self._engine.publish(recipe.key, snapshot, lease_s=recipe.hold_s)

    async def _reregister(self) -> None:
        detail, self._guard.writing = "", False
        try:
            if self._engine is not None:
                await self._engine.reregister()
        except HurrayError as error:  # it may: then the pool is as it was
            detail = f"{type(error).__name__}: {error}"
        self._guard.writing = True
        self.say(Reregistered(detail))

    async def _take_all(self, engine: Engine) -> None:
        patrol = asyncio.create_task(self._patrol())
        async for arrival in engine.arrivals():
            self._num_busy += 1
            self._guard.follow(arrival)
            self.start(self._take(arrival))
        patrol.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await patrol

    async def _patrol(self) -> None:
        while True:
            self._look()
            await asyncio.sleep(_PATROL_S[self._settings.size])

    def _look(self) -> None:
        self._guard.check()
        for violation in self._guard.violations[self._num_told :]:
            self.say(Violation(violation))
        self._num_told = len(self._guard.violations)

    async def _take(self, arrival: Arrival) -> None:
        recipe = Recipe.of(arrival.key)
        snapshot = None
        try:
            async with asyncio.timeout(HANG_AFTER_S):
                snapshot = await self._receive(arrival, recipe)
            outcome, detail = DELIVERED, ""
            self._compare(recipe, snapshot, "when it was delivered")
        except HurrayError as error:
            outcome, detail = TYPED, f"{type(error).__name__}: {error}"
        except TimeoutError:
            outcome, detail = HANG, repr(arrival)
        except (Exception, asyncio.CancelledError) as error:  # nobody cancels this task
            outcome, detail = UNTYPED, repr(error)
        self.say(Received(recipe.name, outcome, detail))
        if snapshot is not None:
            await asyncio.sleep(recipe.hold_s)
            self._compare(recipe, snapshot, "before its release")
        arrival.release()
        self._num_busy -= 1

    async def _receive(self, arrival: Arrival, recipe: Recipe) -> Snapshot:
        if recipe.receipt == "abort at once":
            arrival.abort("not wanted")
        elif recipe.receipt == "abort after a layer":
            await arrival.wait_layer(0, timeout_s=2 * HANG_AFTER_S)
            arrival.abort("not wanted any more")
        snapshot = await arrival.snapshot(timeout_s=2 * HANG_AFTER_S)
        if self._corrupt_next:
            self._corrupt_next = False
            raw(self.pool, "key", 0)[arrival.block_table[0], 0] ^= np.uint8(1)
        return snapshot

    def _compare(self, recipe: Recipe, snapshot: Snapshot, when: str) -> None:
        wrong = mismatch(recipe, snapshot)
        if wrong is not None:
            self.say(Violation(f"{recipe.name} {when}: {wrong}"))


def main() -> None:
    """The process."""
    die_with(int(sys.argv[2]))
    settings = msgspec.json.decode(sys.argv[1], type=ReceiverSettings)
    pool = make_pool(settings.lane, settings.size, settings.num_pages)
    run_child(ReceiverChild, settings.deadline_s, pool, settings)


if __name__ == "__main__":
    main()
