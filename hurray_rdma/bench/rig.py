"""Everybody who can move the pages of one lane's cases: the engine's pair, its yardsticks, and the other engines."""

from __future__ import annotations

import contextlib

import numpy as np

from hurray_rdma.bench import perftest
from hurray_rdma.bench.case import Case, source_pages
from hurray_rdma.bench.config import BenchConfig
from hurray_rdma.bench.external import INSTALL, KINDS, External, PeerFailedError
from hurray_rdma.bench.measured import Measured
from hurray_rdma.bench.messages import Party
from hurray_rdma.bench.pair import Pair
from hurray_rdma.bench.results import Skipped
from hurray_rdma.demo import Supervisor
from hurray_rdma.errors import HurrayError

__all__ = ["Rig", "parties_of"]

_PARTIES = {
    "memcpy": (),
    "cma": (Party.CMA,),
    "ucx_put": (Party.UCX_PUT,),
    "ucx_perftest": (Party.UCX_PERFTEST,),
    "socket": (Party.SOCKET,),
    "nixl": (Party.NIXL, Party.NIXL_DEFAULT),
    "mooncake": (Party.MOONCAKE,),
}


_ALWAYS = (Party.HURRAY, Party.HURRAY_CALLER, Party.HURRAY_PULL, Party.MEMCPY, Party.STREAM, Party.MAPPED)


def parties_of(peers: tuple[str, ...]) -> frozenset[Party]:
    """The engine's own, the copies by one process alone, and those that the names stand for."""
    named = [party for name in peers for party in _PARTIES[name]]
    return frozenset([*_ALWAYS, *named])


class Rig:
    """The parties of one lane. A context manager, within the supervisor's.

    Args:
        supervisor: of the engine's two processes.
        config: which parties.
        lane: UCX transports; empty leaves the choice to UCX.
        cores: of the sending and the receiving side.
        pythons: interpreters of other engines by their kind, None where it is not installed.
        pool_nbytes: the largest pool of this lane's cases.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        *,
        config: BenchConfig,
        lane: str,
        cores: tuple[int, int] | None,
        pythons: dict[str, str | None],
        pool_nbytes: int,
    ) -> None:
        self.lane = lane
        self.cores = cores
        self._parties = parties_of(config.run.peers)
        self._huge_pages = config.run.huge_pages
        self._pythons = pythons
        self._pool_nbytes = pool_nbytes
        self._closing = contextlib.ExitStack()
        self._case: Case
        self.pair = Pair(supervisor, lane=lane, cores=cores)
        self.externals: dict[Party, External] = {}
        self._skipped: dict[Party, Skipped] = {}

    def __enter__(self) -> Rig:
        try:
            for party in (party for party in Party if party in self._parties and party in KINDS):
                self._start(party)
        except BaseException:
            self._closing.close()
            raise
        if Party.UCX_PERFTEST in self._parties and perftest.binary() is None:
            self._skip(Party.UCX_PERFTEST, "the libucx package has no ucx_perftest", "Install libucx-cu12 again")
        return self

    def _start(self, party: Party) -> None:
        kind, python = KINDS[party], self._pythons[KINDS[party]]
        if python is None:
            self._skip(party, f"{kind} is not installed", INSTALL[kind])
            return
        if party is Party.MOONCAKE and self.lane not in ("", "tcp"):
            self._skip(party, "it does not use UCX: compare with its tcp on the default lane", "")
            return
        try:
            external = External(
                party,
                python=python,
                lane=self.lane,
                cores=self.cores,
                nbytes=self._pool_nbytes,
                huge_pages=self._huge_pages,
            )
        except PeerFailedError as error:
            self._skip(party, str(error), "")
            return
        self.externals[party] = self._closing.enter_context(external)

    def _skip(self, party: Party, reason: str, fix: str) -> None:
        self._skipped[party] = Skipped(party, self.lane, reason, fix)

    def open(self, case: Case, *, only: frozenset[Party] | None = None) -> tuple[Party, ...]:
        """Prepares a case; those who can run it, in the order in which they take their turns.

        Args:
            case: what to move.
            only: leaves out everybody else.
        """
        self._case = case
        wanted = self._parties if only is None else self._parties & only
        page_ids = self.pair.open(case, wanted)
        for party, reason in self.pair.skipped.items():
            self._skip(party, reason, "See `hurray-rdma doctor`")
        ready = [party for party in Party if party in wanted and self.pair.runs(party)]
        for party, external in self.externals.items():
            if party in wanted:
                external.prepare(source_pages(case), page_ids, page_nbytes=case.page_nbytes)
                ready.append(party)
        if Party.UCX_PERFTEST in wanted and Party.UCX_PERFTEST not in self._skipped:
            ready.append(Party.UCX_PERFTEST)
        return tuple(ready)

    def measure(self, party: Party, count: int) -> Measured:
        """Moves the case's pages ``count`` times, one after the other."""
        if party in self.externals:
            return self.externals[party].measure(party, count)
        if party is not Party.UCX_PERFTEST:
            return self.pair.measure(party, count)
        path = perftest.binary()
        if path is None:
            raise HurrayError("ucx_perftest has vanished", field="party", value=party)
        case = self._case
        runs = [
            perftest.measure(
                path, page_nbytes=case.page_nbytes, num_pages=case.num_pages, lane=self.lane, cores=self.cores
            )
            for _ in range(count)
        ]
        return Measured(np.concatenate([run.seconds for run in runs]), np.concatenate([r.usable_s for r in runs]), None)

    @property
    def carried_by(self) -> dict[Party, str]:
        """Lane and path of the parties that UCX carries, in the open case."""
        return dict(self.pair.lanes)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """Those who did not run in some case."""
        return tuple(self._skipped.values())

    def close_case(self) -> None:
        """Ends a case."""
        self.pair.close_case()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._closing.close()
        if kind is None:
            self.pair.finish()
