"""The sections of a benchmark, each a function from settings and a rig to rows. All take turns, round by round."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np

from hurray_rdma.bench.case import Case, Pattern
from hurray_rdma.bench.config import (
    ContactConfig,
    FreshConfig,
    IdleConfig,
    LatencyConfig,
    OverheadConfig,
    OverlapConfig,
    RunConfig,
    SweepConfig,
)
from hurray_rdma.bench.layers import lost_seconds, ran_seconds, unit_seconds
from hurray_rdma.bench.machine import on_core, spare_core
from hurray_rdma.bench.measured import Measured, Stat, cpu_seconds
from hurray_rdma.bench.messages import Arrived, Party, RanLayers, RunLayers
from hurray_rdma.bench.results import (
    ContactRow,
    FreshRow,
    IdleRow,
    LatencyRow,
    LayerTimes,
    OverheadRow,
    OverlapRow,
    SweepRow,
    latency_row,
    sweep_rows,
)
from hurray_rdma.bench.rig import Rig

__all__ = [
    "Mover",
    "Step",
    "cases_of",
    "contact",
    "fresh",
    "idle",
    "latency",
    "latency_case",
    "overhead",
    "overlap",
    "sweep",
]

Step = Callable[[str], None]
"""Called with what happens next."""


class Mover(Protocol):
    """Who opens cases and moves their pages: a `Rig`, or the sender to another machine."""

    lane: str

    def open(self, case: Case, *, only: frozenset[Party] | None = None) -> tuple[Party, ...]: ...

    def measure(self, party: Party, count: int) -> Measured: ...

    @property
    def carried_by(self) -> dict[Party, str]: ...

    def close_case(self) -> None: ...


_MIB: Final = 2**20
_WARM_UP = 20
_ENOUGH_ROUNDS = 3
_SLOW_S = 2.0
"""Who takes longer for a transfer is measured in a few rounds only: some take a hundred times what others do."""
_QUICK_S, _QUICK_TIMES = 0.1, 3
"""Who takes less is measured so many times in a round, which says more of it than one time does."""
_LAYER_RUNS = 5
"""Of each in a round: together they take a second."""
_ENGINE = frozenset({Party.HURRAY})
_LATENCY_POOL_PAGES = 1024
_SMALL_PARTIES = frozenset(Party) - {Party.MEMCPY, Party.STREAM, Party.MAPPED, Party.CMA, Party.UCX_PERFTEST}
"""Those whose receiver is told, or whose sender is when it has it: the others are no transfers."""


def cases_of(config: SweepConfig, run: RunConfig) -> tuple[Case, ...]:
    """The cases of one sweep."""
    return tuple(
        Case(
            page_nbytes=page_nbytes,
            num_pages=max(1, mib * _MIB // page_nbytes),
            pattern=pattern,
            seed=run.seed,
            huge_pages=run.huge_pages,
        )
        for pattern in config.patterns
        for mib in config.transfer_mib
        for page_nbytes in config.page_nbytes
    )


def sweep(rig: Mover, case: Case, run: RunConfig, step: Step) -> tuple[SweepRow, ...]:
    """One case, everyone in turn, ``rounds`` times."""
    name = f"{case.num_pages:,} pages of {case.page_nbytes:,} bytes, {case.pattern}" + f" over {rig.lane}" * bool(
        rig.lane
    )
    step(f"{name}: set up, first transfers, compare")
    parties = rig.open(case)
    measured: dict[Party, list[Measured]] = {party: [] for party in parties}
    for number in range(run.rounds):
        step(f"{name}: round {number + 1} of {run.rounds}")
        for party in parties:
            first_s = measured[party][0].seconds[0] if measured[party] else _SLOW_S
            if number < _ENOUGH_ROUNDS or first_s < _SLOW_S:
                measured[party].append(rig.measure(party, _QUICK_TIMES if first_s < _QUICK_S else 1))
    carried_by = rig.carried_by
    rig.close_case()
    return sweep_rows(case, lane=rig.lane, carried_by=carried_by, measured=measured)


def latency_case(config: LatencyConfig, run: RunConfig, num_pages: int) -> Case:
    """That of small transfers of so many pages."""
    return Case(
        page_nbytes=config.page_nbytes,
        num_pages=num_pages,
        pattern=Pattern.RANDOM,
        seed=run.seed,
        pool_pages=max(_LATENCY_POOL_PAGES, 2 * num_pages) + config.ahead_pages,
        ahead_pages=config.ahead_pages,
        huge_pages=run.huge_pages,
    )


def latency(rig: Mover, config: LatencyConfig, run: RunConfig, step: Step) -> tuple[LatencyRow, ...]:
    """Small transfers of the same pages again and again."""
    rows: list[LatencyRow] = []
    for num_pages in config.num_pages:
        name = f"latency of {num_pages} pages"
        step(f"{name}: set up")
        case = latency_case(config, run, num_pages)
        parties = rig.open(case, only=_SMALL_PARTIES)
        for party in parties:
            rig.measure(party, _WARM_UP)
        measured: dict[Party, list[Measured]] = {party: [] for party in parties}
        for number in range(run.rounds):
            step(f"{name}: round {number + 1} of {run.rounds}")
            for party in parties:
                measured[party].append(rig.measure(party, config.repeats))
        rig.close_case()
        rows += [latency_row(case, party, each) for party, each in measured.items()]
    return tuple(rows)


def overhead(rig: Rig, config: OverheadConfig, run: RunConfig, step: Step) -> OverheadRow:
    """Tiny pages: a whole send less a memcpy of the same."""
    step(f"overhead of a page: {config.num_pages:,} of {config.page_nbytes} bytes")
    case = Case(
        page_nbytes=config.page_nbytes,
        num_pages=config.num_pages,
        pattern=Pattern.GATHER,
        seed=run.seed,
        huge_pages=run.huge_pages,
    )
    send, memcpy = _in_turns(rig, case, (Party.HURRAY, Party.MEMCPY), run.rounds)
    return OverheadRow(
        page_nbytes=config.page_nbytes,
        num_pages=config.num_pages,
        send_s=send,
        memcpy_s=memcpy,
        us_per_page=(send.median - memcpy.median) / config.num_pages * 1e6,
    )


def fresh(rig: Rig, config: FreshConfig, run: RunConfig, step: Step) -> FreshRow:
    """One contiguous snapshot, beside one contiguous copy."""
    step(f"fresh snapshot of {config.mib:,} MiB")
    num_pages = config.mib * _MIB // config.page_nbytes
    case = Case(
        page_nbytes=config.page_nbytes,
        num_pages=num_pages,
        pattern=Pattern.CONTIGUOUS,
        seed=run.seed,
        pool_pages=num_pages,
        huge_pages=run.huge_pages,
    )
    send, copy = _in_turns(rig, case, (Party.HURRAY, Party.STREAM), run.rounds)
    return FreshRow(nbytes=case.nbytes, send_s=send, copy_s=copy, ratio=copy.median / send.median)


def _in_turns(rig: Rig, case: Case, parties: tuple[Party, Party], rounds: int) -> tuple[Stat, Stat]:
    """Seconds of two parties of one case."""
    rig.open(case, only=frozenset(parties))
    measured = [[rig.measure(party, 1).seconds[0] for party in parties] for _ in range(rounds)]
    rig.close_case()
    first, second = zip(*measured, strict=True)
    return Stat.of(first), Stat.of(second)


def contact(rig: Rig, config: ContactConfig, run: RunConfig, step: Step) -> tuple[ContactRow, ...]:
    """A page to a peer that is met for the first time, by the size of its pool."""
    rows = []
    for pool_pages in config.pool_pages:
        step(f"first contact with a pool of {pool_pages:,} pages")
        case = Case(
            page_nbytes=config.page_nbytes,
            num_pages=1,
            pattern=Pattern.GATHER,
            seed=run.seed,
            pool_pages=pool_pages,
            huge_pages=run.huge_pages,
        )
        rig.open(case, only=_ENGINE)
        rows.append(ContactRow(Party.HURRAY, pool_pages, Stat.of(rig.pair.contact(run.rounds).usable_s)))
        rig.close_case()
        for party in (party for party in rig.externals if party is not Party.MOONCAKE):
            seconds = [
                rig.externals[party].contact(num_pages=pool_pages, page_nbytes=config.page_nbytes)
                for _ in range(run.rounds)
            ]
            rows.append(ContactRow(party, pool_pages, Stat.of(seconds)))
    return tuple(rows)


def idle(rig: Rig, config: IdleConfig, run: RunConfig, step: Step) -> IdleRow:
    """Two connected engines that have nothing to do."""
    step(f"two idle engines for {config.seconds:.0f} s")
    rig.open(Case(page_nbytes=32768, num_pages=8, pattern=Pattern.GATHER, seed=run.seed), only=_ENGINE)
    started, before = time.monotonic(), cpu_seconds(rig.pair.pids)
    time.sleep(config.seconds)
    seconds, cpu_s = time.monotonic() - started, cpu_seconds(rig.pair.pids) - before
    rig.close_case()
    return IdleRow(seconds=seconds, cpu_share=cpu_s / seconds)


@dataclass(slots=True)
class _LayerRuns:
    """Layers moved by one party, again and again."""

    by: Party
    moved: list[RanLayers] = field(default_factory=list)
    """Without computing."""
    together: list[tuple[RanLayers, Arrived | None]] = field(default_factory=list)
    alone: list[tuple[RanLayers, RanLayers]] = field(default_factory=list)
    """Computing alone, right before and right after each of ``together``."""

    @property
    def hidden(self) -> float:
        """Share of the moving's time that the computing hides."""
        lost_s = lost_seconds([ran for ran, _ in self.together], self.alone)
        return 1 - lost_s / statistics.median(map(ran_seconds, self.moved))


def overlap(rig: Rig, config: OverlapConfig, run: RunConfig, step: Step) -> OverlapRow:
    """Computing alone, sending alone, and both together, in turns, several times a round; and a copy like sending.

    Where there are two cores, one computes and both processes share the other.
    """
    step(f"{config.num_layers} layers of {config.layer_mib} MiB beside computing")
    core = spare_core()
    case = Case(
        page_nbytes=config.page_nbytes,
        num_pages=config.layer_mib * _MIB // config.page_nbytes,
        num_layers=config.num_layers,
        pattern=Pattern.GATHER,
        seed=run.seed,
        huge_pages=run.huge_pages,
    )
    rig.open(case, only=_ENGINE)
    with contextlib.ExitStack() as moved:
        if rig.cores is not None and core == rig.cores[1]:
            # Computing has its core to itself: nobody's receiver takes turns with the sender's kernels.
            moved.enter_context(on_core(rig.pair.pids[1], rig.cores[0]))
        send = RunLayers(work=0, by=Party.HURRAY, core=core)
        sent_s = statistics.median(ran_seconds(rig.pair.measure_layers(send)[0]) for _ in range(_LAYER_RUNS))
        work = max(1, round(config.compute_ratio * sent_s / config.num_layers / unit_seconds()))
        compute = RunLayers(work=work, by=None, core=core)
        sent, copied = _LayerRuns(Party.HURRAY), _LayerRuns(Party.STREAM)
        alone = rig.pair.measure_layers(compute)[0]
        for _ in range(run.rounds * _LAYER_RUNS):
            for runs in (sent, copied):
                runs.moved.append(rig.pair.measure_layers(replace(send, by=runs.by))[0])
                runs.together.append(rig.pair.measure_layers(replace(send, by=runs.by, work=work)))
                before, alone = alone, rig.pair.measure_layers(compute)[0]
                runs.alone.append((before, alone))
    rig.close_case()
    middle, arrived = sorted(sent.together, key=lambda each: ran_seconds(each[0]))[len(sent.together) // 2]
    assert arrived is not None, "it was sent"
    return OverlapRow(
        num_layers=config.num_layers,
        layer_nbytes=case.nbytes // config.num_layers,
        compute_s=Stat.of([ran_seconds(after) for runs in (sent, copied) for _, after in runs.alone]),
        transfer_s=Stat.of([ran_seconds(ran) for ran in sent.moved]),
        together_s=Stat.of([ran_seconds(ran) for ran, _ in sent.together]),
        hidden=sent.hidden,
        copy_hidden=copied.hidden,
        possible=1 - 1 / config.num_layers,
        timeline=_timeline(middle, arrived),
    )


def _timeline(ran: RanLayers, arrived: Arrived) -> tuple[LayerTimes, ...]:
    def since(times_ns: np.ndarray) -> list[float]:
        return ((times_ns - ran.started_ns) / 1e9).tolist()  # type: ignore[no-any-return]

    return tuple(
        LayerTimes(computed=(computed[0], computed[1]), sent=(sent[0], sent[1]), usable=usable)
        for computed, sent, usable in zip(
            map(since, ran.computed_ns), map(since, ran.sent_ns), since(arrived.layers_ns[0]), strict=True
        )
    )
