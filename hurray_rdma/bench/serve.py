"""An engine that takes whatever is sent to it and gives the pages back: the other end of a benchmark, or of a trial."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address

from hurray_rdma.bench.case import cache_spec
from hurray_rdma.bench.child import context_of
from hurray_rdma.bench.config import ServeConfig
from hurray_rdma.bench.machine import own_addresses
from hurray_rdma.cache import PoolGroups
from hurray_rdma.control import Address, check_listen, parse_address
from hurray_rdma.engine import Arrival, Engine, Tls
from hurray_rdma.errors import HurrayError

__all__ = ["Served", "Serving", "serve"]

_MIB = 2**20
_REPORT_S = 1.0


@dataclass(frozen=True, slots=True)
class Serving:
    """The engine is up."""

    address: str
    """``host:port`` as it listens, the port filled in."""
    reachable: tuple[str, ...]
    """``host:port`` for senders: as it listens, or every address of this machine where it listens on all."""
    page_nbytes: tuple[int, ...]
    """Page sizes that it has a pool for."""
    pool_nbytes: int
    """Of each pool."""


@dataclass(frozen=True, slots=True)
class Served:
    """What has arrived since it was told last, or in all."""

    num_arrivals: int
    num_failed: int
    """Of which the sender gave up, or was lost."""
    nbytes: int
    """Of the arrivals that were complete."""
    seconds: float
    """Since then."""
    lanes: tuple[str, ...]
    """What has carried pages so far: ``"sysv, mapped"``."""


async def serve(
    config: ServeConfig,
    *,
    listen: str,
    lane: str,
    token: str | None,
    tls: Tls | None,
    tell: Callable[[Serving | Served], None],
) -> Served:
    """Listens until SIGTERM or SIGINT; what arrived in all.

    Args:
        config: the pools.
        listen: ``host:port``; beyond this host a token is needed, or `Tls.authority`.
        lane: UCX transports; empty leaves the choice to UCX.
        token: what senders must show.
        tls: certificates of the control channel; None is plain TCP.
        tell: called once it listens, then at most once a second when something has arrived.

    Raises:
        ExposedError: the address would be open to everyone.
        HurrayError: the address cannot be listened on, or the pools cannot be made.
    """
    host, port = parse_address(listen)
    await check_listen(host, port, token=token, ssl_context=tls.server_context() if tls is not None else None)
    nbytes = config.pool_mib * _MIB
    groups = {
        f"pages of {size}": (cache_spec(size), max(1, nbytes // size)) for size in dict.fromkeys(config.page_nbytes)
    }
    context = context_of(lane)
    with PoolGroups.allocate(groups, context=context) as pools:
        for pool in pools.values():
            for role, layer in pool.spec.tensors:
                pool.pages(role, layer).fill(0)  # touched before anybody measures
            await asyncio.sleep(0)  # who is tired of waiting may say so here
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        async with Engine(pools, listen=listen, token=token, tls=tls) as engine:
            sizes = tuple(spec.page_nbytes for spec, _ in groups.values())
            tell(Serving(engine.address, _reachable(engine.address), sizes, nbytes))
            taking = _Taking(engine, tell)
            try:
                await taking.run(stop)
            finally:
                total = taking.total()
    return total


def _reachable(address: str) -> tuple[str, ...]:
    host, port = parse_address(address)
    bound = ip_address(host)
    if not bound.is_unspecified:
        return (address,)
    return tuple(str(Address(own, port)) for own in own_addresses(ipv6=bound.version == 6)) or (address,)


class _Taking:
    """Takes arrivals, several at once, and counts them."""

    def __init__(self, engine: Engine, tell: Callable[[Serving | Served], None]) -> None:
        self._engine = engine
        self._tell = tell
        self._begun = self._told_at = time.monotonic()
        self._counts = [0, 0, 0]
        self._told = [0, 0, 0]

    async def run(self, stop: asyncio.Event) -> None:
        """Until ``stop`` is set."""
        async with asyncio.TaskGroup() as tasks:
            stopping = tasks.create_task(stop.wait())
            accepting = tasks.create_task(self._accept(tasks))
            reporting = tasks.create_task(self._report())
            await stopping
            for task in (accepting, reporting):
                task.cancel()
            await self._engine.close()  # what is still arriving fails, and its tasks end

    async def _accept(self, tasks: asyncio.TaskGroup) -> None:
        async for arrival in self._engine.arrivals():
            tasks.create_task(self._take(arrival))

    async def _take(self, arrival: Arrival) -> None:
        try:
            snapshot = await arrival.snapshot()
            self._counts[0] += 1
            self._counts[2] += len(snapshot.block_table) * snapshot.pool.spec.page_nbytes
        except HurrayError:
            self._counts[1] += 1
        finally:
            arrival.release()

    async def _report(self) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            if self._counts != self._told:
                self._tell(self._since(self._told, self._told_at))
            self._told, self._told_at = list(self._counts), time.monotonic()

    def total(self) -> Served:
        return self._since([0, 0, 0], self._begun)

    def _since(self, before: list[int], at: float) -> Served:
        done, failed, nbytes = (now - then for now, then in zip(self._counts, before, strict=True))
        lanes = tuple(f"{each.lane}, {each.path}" for each in self._engine.stats().receive.lanes if each.nbytes)
        return Served(num_arrivals=done, num_failed=failed, nbytes=nbytes, seconds=time.monotonic() - at, lanes=lanes)
