"""A benchmark between two machines: one sending process here, `hurray-rdma serve` there.

The clocks differ, so all times are the sender's; the receiver's pools are fresh, so its pages are neighbours.
"""

from __future__ import annotations

import numpy as np

from hurray_rdma.bench import sections
from hurray_rdma.bench.case import Case, Pattern
from hurray_rdma.bench.config import BenchConfig
from hurray_rdma.bench.machine import choose_cores, machine_facts
from hurray_rdma.bench.measured import Measured, cpu_seconds
from hurray_rdma.bench.messages import (
    CloseCase,
    Closed,
    Finish,
    JoinCase,
    Joined,
    Opened,
    Party,
    Ran,
    Run,
    Used,
    UsePages,
)
from hurray_rdma.bench.results import BenchReport, SweepRow
from hurray_rdma.bench.sections import Step, cases_of
from hurray_rdma.bench.sending import sending
from hurray_rdma.demo import Supervisor
from hurray_rdma.engine import Tls
from hurray_rdma.errors import ConfigError

__all__ = ["num_remote_steps", "run_remote"]

_PARTIES = frozenset({Party.HURRAY, Party.MEMCPY, Party.STREAM})
_PATTERNS = (Pattern.GATHER, Pattern.CONTIGUOUS)


def num_remote_steps(config: BenchConfig) -> int:
    """How often `run_remote` reports a step."""
    each = 1 + config.run.rounds
    steps = sum(each * len(cases_of(some, config.run)) for some in config.sweep)
    return steps + (each * len(config.latency.num_pages) if config.latency is not None else 0)


def run_remote(
    config: BenchConfig, *, name: str, address: str, token: str | None, tls: Tls | None, on_step: Step
) -> BenchReport:
    """Runs the sweep and the latency of ``config`` against the receiver at ``address``.

    Args:
        config: sections that need both processes on this machine must be left out.
        name: of the settings, for the report.
        address: ``host:port`` of a `serve` with pools of the same page sizes.
        token: its token.
        tls: certificates of the control channel; None is plain TCP.
        on_step: progress.

    Raises:
        ConfigError: a setting means nothing between two machines.
        HurrayError: the receiver cannot be reached, or a transfer failed.
    """
    _check(config)
    facts = machine_facts()
    rows: list[SweepRow] = []
    lanes = list(dict.fromkeys(some.lane for some in config.sweep)) or [""]
    told: dict[str, object] = {}
    with Supervisor(deadline_s=config.run.deadline_s) as supervisor:
        for lane in lanes:
            sender = _Sender(supervisor, lane=lane, address=address, token=token, tls=tls)
            for case in (case for some in config.sweep if some.lane == lane for case in cases_of(some, config.run)):
                rows += sections.sweep(sender, case, config.run, on_step)
            if lane == lanes[0] and config.latency is not None:
                told["latency"] = sections.latency(sender, config.latency, config.run, on_step)
            sender.finish()
    return BenchReport(
        facts=facts,
        config=name,
        rounds=config.run.rounds,
        peer=address,
        compared_nbytes=0,
        sweep=tuple(rows),
        **told,  # type: ignore[arg-type]
    )


def _check(config: BenchConfig) -> None:
    for section in ("overlap", "overhead", "contact", "idle", "fresh"):
        if getattr(config, section) is not None:
            raise ConfigError(
                "needs both processes on this machine", field=section, value="[...]", fix="Use --config two-machines"
            )
    for pattern in (pattern for some in config.sweep for pattern in some.patterns):
        if pattern not in _PATTERNS:
            raise ConfigError(
                f"must be one of {', '.join(_PATTERNS)} with --connect: the receiver's pool is fresh",
                field="sweep.patterns",
                value=str(pattern),
            )


class _Sender:
    """The sending process; what moves pages within it is measured beside it."""

    def __init__(self, supervisor: Supervisor, *, lane: str, address: str, token: str | None, tls: Tls | None) -> None:
        self.lane = lane
        self.carried_by: dict[Party, str] = {}
        self._supervisor = supervisor
        self._address, self._token, self._tls = address, token, tls
        cores = choose_cores()
        self._process = supervisor.start("sending", sending, lane, cores[0] if cores is not None else None)

    def open(self, case: Case, *, only: frozenset[Party] | None = None) -> tuple[Party, ...]:
        parties = _PARTIES if only is None else _PARTIES & only
        opened = Opened(
            pid=0,
            address=self._address,
            caller_address="",
            worker_address=b"",
            region=None,
            caller_region=None,
            socket_port=0,
        )
        self._process.send(JoinCase(case, parties, opened, self._token, self._tls))
        self.carried_by = self._supervisor.receive(self._process, Joined).lanes
        self._process.send(UsePages(np.arange(case.num_pages, dtype=np.uint32)))
        self._supervisor.receive(self._process, Used)
        return tuple(party for party in Party if party in parties)

    def measure(self, party: Party, count: int) -> Measured:
        before = cpu_seconds([self._process.pid])
        self._process.send(Run(party, count))
        ran = self._supervisor.receive(self._process, Ran)
        seconds = (ran.ended_ns - ran.started_ns) / 1e9
        return Measured(seconds, seconds, cpu_seconds([self._process.pid]) - before)

    def close_case(self) -> None:
        self._process.send(CloseCase())
        self._supervisor.receive(self._process, Closed)

    def finish(self) -> None:
        self._process.send(Finish())
        self._supervisor.finish(self._process)
