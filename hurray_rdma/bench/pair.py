"""The two processes of the benchmark as their supervisor sees them: open a case, move its pages, read the clocks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.bench.case import Case
from hurray_rdma.bench.measured import Measured, cpu_seconds
from hurray_rdma.bench.messages import (
    Arrived,
    CloseCase,
    Closed,
    Collect,
    Contact,
    Finish,
    JoinCase,
    Joined,
    Leave,
    OpenCase,
    Opened,
    Party,
    Ran,
    RanLayers,
    Run,
    RunLayers,
    Settle,
    Settled,
    Used,
    UsePages,
)
from hurray_rdma.bench.receiving import receiving
from hurray_rdma.bench.sending import YARDSTICKS, sending
from hurray_rdma.demo import Supervisor

__all__ = ["Pair"]

_SEEN_BY_RECEIVER = (Party.HURRAY, Party.HURRAY_CALLER, Party.SOCKET)


class Pair:
    """A sending and a receiving process, both restricted to one choice of UCX transports.

    Args:
        supervisor: starts and ends the processes.
        lane: UCX transports; empty leaves the choice to UCX.
        cores: of the sender and the receiver; None leaves them where they are.
    """

    def __init__(self, supervisor: Supervisor, *, lane: str, cores: tuple[int, int] | None) -> None:
        self._supervisor = supervisor
        src_core, dst_core = cores or (None, None)
        self._receiver = supervisor.start("receiving", receiving, lane, dst_core)
        self._sender = supervisor.start("sending", sending, lane, src_core)
        self.lanes: dict[Party, str] = {}
        self.skipped: dict[Party, str] = {}
        self.compared_nbytes = 0

    def open(self, case: Case, parties: frozenset[Party]) -> NDArray[np.uint32]:
        """Makes the pools, connects, sends once and compares; the receiver's page IDs, uint32 ``[num_pages]``.

        Afterwards ``lanes`` and ``skipped`` tell of this case's parties.

        Raises:
            HurrayError: a process failed, or what arrived differs.
        """
        ask = self._supervisor.receive
        self._receiver.send(OpenCase(case, parties))
        opened = ask(self._receiver, Opened)
        self._sender.send(JoinCase(case, parties, opened))
        joined = ask(self._sender, Joined)
        self._receiver.send(Settle())
        settled = ask(self._receiver, Settled)
        self.compared_nbytes += settled.compared_nbytes
        used = []
        for process in (self._sender, self._receiver):  # in turn: yardsticks write into pages that a pull may be given
            process.send(UsePages(settled.page_ids, joined.address))
            used.append(ask(process, Used))
        self.skipped = used[0].skipped | used[1].skipped
        self.lanes = joined.lanes | used[1].lanes
        self.compared_nbytes += used[1].compared_nbytes
        return settled.page_ids

    def runs(self, party: Party) -> bool:
        """True if it is one of the engine's or of the yardsticks, and can run in this case."""
        return party in self.lanes or (party in YARDSTICKS and party not in self.skipped)

    def measure(self, party: Party, count: int) -> Measured:
        pids = (self._sender.pid, self._receiver.pid)
        before = cpu_seconds(pids)
        mover = self._receiver if party is Party.HURRAY_PULL else self._sender
        mover.send(Run(party, count))
        ran = self._supervisor.receive(mover, Ran)
        cpu_s = cpu_seconds(pids) - before
        usable_ns = ran.ended_ns
        if party in _SEEN_BY_RECEIVER:
            self._receiver.send(Collect(party, count))
            usable_ns = self._supervisor.receive(self._receiver, Arrived).usable_ns
        return Measured((ran.ended_ns - ran.started_ns) / 1e9, (usable_ns - ran.started_ns) / 1e9, cpu_s)

    def measure_layers(self, request: RunLayers) -> tuple[RanLayers, Arrived | None]:
        """Computes and moves layer by layer; the second is None if nothing was sent to the receiver."""
        self._sender.send(request)
        ran = self._supervisor.receive(self._sender, RanLayers)
        if request.by is not Party.HURRAY:
            return ran, None
        self._receiver.send(Collect(Party.HURRAY, 1))
        return ran, self._supervisor.receive(self._receiver, Arrived)

    @property
    def pids(self) -> tuple[int, int]:
        """Process IDs of the sender and the receiver."""
        return self._sender.pid, self._receiver.pid

    def contact(self, count: int) -> Measured:
        """Connects to the receiver anew, ``count`` times, and sends the case's pages each time.

        ``seconds`` of each runs from the address alone to the acknowledgement.
        """
        self._sender.send(Contact(count))
        ran = self._supervisor.receive(self._sender, Ran)
        self._receiver.send(Collect(Party.HURRAY, count))
        usable_ns = self._supervisor.receive(self._receiver, Arrived).usable_ns
        return Measured((ran.ended_ns - ran.started_ns) / 1e9, (usable_ns - ran.started_ns) / 1e9, 0.0)

    def close_case(self) -> None:
        """Closes the pools and connections of the open case."""
        for process, request in (
            (self._receiver, Leave()),
            (self._sender, CloseCase()),
            (self._receiver, CloseCase()),
        ):
            process.send(request)
            self._supervisor.receive(process, Closed)

    def finish(self) -> None:
        """Ends both processes."""
        for process in (self._sender, self._receiver):
            process.send(Finish())
            self._supervisor.finish(process)
