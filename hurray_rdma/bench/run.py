"""A benchmark from the outside: lane after lane, section after section, into one report. Moves no bytes itself."""

from __future__ import annotations

from hurray_rdma.bench import sections
from hurray_rdma.bench.config import BenchConfig
from hurray_rdma.bench.external import KINDS, find_python
from hurray_rdma.bench.machine import choose_cores, machine_facts
from hurray_rdma.bench.messages import Party
from hurray_rdma.bench.planning import planning
from hurray_rdma.bench.results import BenchReport, Skipped, SweepRow
from hurray_rdma.bench.rig import Rig
from hurray_rdma.bench.sections import Step, cases_of
from hurray_rdma.demo import Supervisor

__all__ = ["needed_nbytes", "num_steps", "run_bench"]


def num_steps(config: BenchConfig) -> int:
    """How often `run_bench` reports a step."""
    each = 1 + config.run.rounds
    steps = sum(each * len(cases_of(some, config.run)) for some in config.sweep)
    steps += each * len(config.latency.num_pages) if config.latency is not None else 0
    steps += len(config.contact.pool_pages) if config.contact is not None else 0
    steps += len(config.planning.num_pages) if config.planning is not None else 0
    return steps + sum(each is not None for each in (config.overhead, config.fresh, config.overlap, config.idle))


def run_bench(config: BenchConfig, *, name: str, pythons: dict[str, str], on_step: Step) -> BenchReport:
    """Runs everything that ``config`` has.

    Args:
        config: what to do.
        name: of the settings, for the report.
        pythons: interpreters of other engines by their kind, that outrank what is found.
        on_step: progress.

    Raises:
        HurrayError: a setting is wrong, a process failed or died, time is up, or bytes differ (MismatchError).
    """
    facts = machine_facts()
    cores = choose_cores()
    wanted = set(config.run.peers) & set(KINDS.values())
    found = {kind: find_python(kind, given=pythons.get(kind)) if kind in wanted else None for kind in KINDS.values()}
    told: dict[str, object] = {}
    sweep_rows: list[SweepRow] = []
    skipped: dict[tuple[Party, str], Skipped] = {}
    compared_nbytes = 0
    lanes = list(dict.fromkeys(some.lane for some in config.sweep)) or [""]
    with Supervisor(deadline_s=config.run.deadline_s) as supervisor:
        for lane in lanes:
            cases = [case for some in config.sweep if some.lane == lane for case in cases_of(some, config.run)]
            rig = Rig(
                supervisor,
                config=config,
                lane=lane,
                cores=cores,
                pythons=found,
                pool_nbytes=max([needed_nbytes(config), *(case.pool_nbytes for case in cases)]),
            )
            with rig:
                for case in cases:
                    sweep_rows += sections.sweep(rig, case, config.run, on_step)
                if lane == lanes[0]:
                    told = _sections(rig, config, on_step)
            skipped |= {(each.party, each.lane): each for each in rig.skipped}
            compared_nbytes += rig.pair.compared_nbytes
    if config.planning is not None:
        told["planning"] = planning(config.planning, config.run, on_step)
    return BenchReport(
        facts=facts,
        config=name,
        rounds=config.run.rounds,
        peer="",
        compared_nbytes=compared_nbytes,
        sweep=tuple(sweep_rows),
        skipped=tuple(skipped.values()),
        **told,  # type: ignore[arg-type]
    )


def _sections(rig: Rig, config: BenchConfig, step: Step) -> dict[str, object]:
    """The sections that run on the first lane only, by their field of `BenchReport`."""
    told: dict[str, object] = {}
    run = config.run
    if config.latency is not None:
        told["latency"] = sections.latency(rig, config.latency, run, step)
    if config.overlap is not None:
        told["overlap"] = sections.overlap(rig, config.overlap, run, step)
    if config.overhead is not None:
        told["overhead"] = sections.overhead(rig, config.overhead, run, step)
    if config.contact is not None:
        told["contact"] = sections.contact(rig, config.contact, run, step)
    if config.fresh is not None:
        told["fresh"] = sections.fresh(rig, config.fresh, run, step)
    if config.idle is not None:
        told["idle"] = sections.idle(rig, config.idle, run, step)
    return told


def needed_nbytes(config: BenchConfig) -> int:
    """Memory that other engines need for the sections besides the sweep."""
    sizes = [1]
    if config.latency is not None:
        cases = (sections.latency_case(config.latency, config.run, count) for count in config.latency.num_pages)
        sizes += [case.pool_nbytes for case in cases]
    if config.contact is not None:
        sizes += [config.contact.page_nbytes * max(config.contact.pool_pages)]
    return max(sizes)
