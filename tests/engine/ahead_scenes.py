"""What tests of pages granted ahead share: traffic that is counted, a sender in a process of its own, who takes all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from hurray_rdma import CacheSpec, Engine, HurrayError, PagePool, Peer, Snapshot
from hurray_rdma.control import MessageType
from hurray_rdma.testing.chaos import Action, ChaosProxy, Direction, Rule
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context, default_context
from tests.hazards.scenes import LANES, SPEC, counts, digest, eventually, fill, make_pool, snapshot_of

NUM_PAGES = 128
"""Of receiving pools."""
AHEAD_PAGES = 16
"""Of these may be granted ahead: twice the least that a sender asks for."""

NEVER = 10**9


class Traffic(ChaosProxy):
    """Counts the messages of transfers that pass."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        super().__init__(host, int(port))
        self._counting = [
            self.arm(Rule(action=Action.DROP, kind=kind, direction=direction, nth=NEVER))
            for direction, kinds in {
                Direction.TO_SERVER: (
                    "OFFER",
                    "TENSOR_DATA_END",
                    "ENDED",
                    "RESERVE",
                    "PREPARE",
                    "COMMIT",
                    "ABORT",
                    "QUIET",
                ),
                Direction.TO_CLIENT: ("GRANT", "TENSOR_PUT_ACK", "ABORT", "ERROR"),
            }.items()
            for kind in map(MessageType.__getitem__, kinds)
        ]

    def __getitem__(self, name: str) -> int:
        """How many there were of a kind."""
        return sum(rule.num_seen for rule in self._counting if rule.kind.name == name)

    @property
    def ahead(self) -> int:
        """Messages that told of snapshots in pages granted ahead: PREPARE of what is copied through a mapping, COMMIT
        of all else, and of the first where its bell was not heard at once."""
        return self["PREPARE"] + self["COMMIT"]

    def counts(self) -> Counter[str]:
        """How many there were of each kind."""
        return Counter({rule.kind.name: self[rule.kind.name] for rule in self._counting})


@contextlib.asynccontextmanager
async def sending(address: str, pool: PagePool, **settings: Any) -> AsyncIterator[tuple[Engine, Peer, Traffic]]:
    """An engine, connected through a proxy."""
    async with (
        Traffic(address) as traffic,
        Engine(pool, **({"timeout_s": 10} | settings)) as engine,
        engine.connect(traffic.address) as peer,
    ):
        yield engine, peer, traffic


async def hear(child: Child) -> Any:
    return await asyncio.to_thread(child.receive)


async def ask(child: Child, *order: object) -> Any:
    child.send(order if len(order) > 1 else order[0])
    return await hear(child)


async def until_granted_ahead(peer: Peer, sent: Snapshot, traffic: Traffic, child: Child | None = None) -> None:
    """Sends until pages granted ahead are used."""

    async def used() -> bool:
        before = traffic.ahead
        await peer.send(sent, key="ahead")
        if child is not None:
            assert await hear(child) == ("ahead", digest(sent))
        return traffic.ahead > before

    await eventually(used)


async def until_answered(traffic: Traffic, child: Child) -> None:
    """Until a sending child, all of whose snapshots go one way, has pages ahead for the next one."""

    def answered() -> bool:
        used = max(traffic["PREPARE"], traffic["COMMIT"])
        return traffic["GRANT"] == traffic["RESERVE"] + traffic["OFFER"] and traffic["RESERVE"] > used

    await eventually(answered)
    await ask(child, "stats")  # its loop has heard what came before


def sender(connection: Connection, address: str, settings: dict[str, Any]) -> None:
    """Does as it is told, one after the other: ("send", key, page IDs), "stats", "close", "end".

    Answers with (key, digest of what it sent or name of the error, seconds), its stats, "closed".
    """

    async def job() -> None:
        default_context(LANES[settings.pop("lane", "mapped")][1])
        with make_pool(SPEC, 64) as pool:
            fill(pool, settings.pop("seed", 1))
            engine = Engine(pool, **({"timeout_s": 15} | settings))
            async with engine, engine.connect(address) as peer:
                connection.send("connected")
                while (order := await asyncio.to_thread(connection.recv)) != "end":
                    match order:
                        case ("send", key, page_ids):
                            sent, started = snapshot_of(pool, page_ids), time.monotonic()
                            try:
                                await peer.send(sent, key=key)
                                outcome = digest(sent)
                            except HurrayError as error:
                                outcome = type(error).__name__
                            connection.send((key, outcome, time.monotonic() - started))
                        case "stats":
                            connection.send(engine.stats())
                        case "close":
                            await engine.close()
                            connection.send("closed")

    asyncio.run(job())


class Taking:
    """Takes every arrival of an engine: digests or errors by key, in order; then lets go of it, unless told to hold."""

    def __init__(self, engine: Engine) -> None:
        self.hold = False
        self.taken: list[tuple[str, str]] = []
        self.held: list[Any] = []
        self._engine = engine
        self._task = asyncio.create_task(self._take())

    async def _take(self) -> None:
        async for arrival in self._engine.arrivals():
            try:
                outcome = digest(await arrival.snapshot())
            except HurrayError as error:
                outcome = type(error).__name__
            self.taken.append((arrival.key, outcome))
            if self.hold:
                self.held.append(arrival)
            else:
                arrival.release()

    def check(self) -> None:
        if self._task.done():
            self._task.result()

    async def end(self) -> None:
        await self._task


@contextlib.asynccontextmanager
async def receiving(
    num_pages: int = NUM_PAGES, *, lane: str = "mapped", spec: CacheSpec = SPEC, **settings: Any
) -> AsyncIterator[tuple[Engine, PagePool, Taking]]:
    """An engine that takes what comes, and grants one page in eight ahead; in the end every page must be free."""
    kind, options = LANES[lane]
    with make_pool(spec, num_pages, kind, Context(options) if options else None) as pool:
        async with Engine(
            pool, **({"listen": "127.0.0.1:0", "timeout_s": 10, "ahead_pages": num_pages // 8} | settings)
        ) as engine:
            taking = Taking(engine)
            yield engine, pool, taking
            taking.check()
        await taking.end()
        assert counts(pool) == (num_pages, 0, 0)


async def send(child: Child, key: str, page_ids: Sequence[int], taking: Taking) -> float:
    """Has a child send, and compares what came; the seconds that it took."""
    said, outcome, seconds = await ask(child, "send", key, list(page_ids))
    assert said == key
    await eventually(lambda: bool(taking.taken) and taking.taken[-1] == (key, outcome))
    return seconds
