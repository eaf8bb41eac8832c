"""What the workers of a replay have said, put together: who is through, what it came to, and what is wrong with it.

Knows messages and the trace; knows no processes.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from hurray_rdma.bench.machine import MachineFacts
from hurray_rdma.cache import PageAccounts
from hurray_rdma.engine import EngineStats
from hurray_rdma.replay.checks import Heard, check_failures, check_worker
from hurray_rdma.replay.expected import bounds_of, check_services
from hurray_rdma.replay.messages import DecodeNews, Delivery, Ended, Failure, PrefillNews, Sample, Service
from hurray_rdma.replay.results import Life, Percentiles, ReplayReport
from hurray_rdma.replay.work import Work

__all__ = ["Gathered"]

_WAITED_S = 1e-3
"""A grant that took longer has waited."""


@dataclass(slots=True)
class _Life:
    worker: int
    began_s: float
    killed_s: float | None = None
    services: list[Service] = field(default_factory=list)
    num_failed: int = 0
    samples: list[Sample] = field(default_factory=list)
    ended: Ended | None = None


class Gathered:
    """Takes messages as they come.

    Args:
        work: the replay.
        start_s: when the trace began.
    """

    def __init__(self, work: Work, start_s: float) -> None:
        self._work = work
        self._start_s = start_s
        self._lives = [_Life(worker, 0.0) for worker in range(work.config.workers.decode)]
        self._current = list(self._lives)
        self._deliveries: list[Delivery] = []
        self._failures: dict[int, Failure] = {}
        self._again: set[int] = set()
        self._lane = ""
        self._problems: list[str] = []
        self.finished: set[int] = set()
        """Requests whose output was given."""

    def sent(self, news: PrefillNews) -> None:
        """A prefill worker has done this."""
        self._deliveries += news.deliveries
        self._failures.update((each.request, each) for each in news.failures)
        self._again.update(news.again)

    def served(self, worker: int, news: DecodeNews) -> None:
        """A decode worker has done this."""
        life = self._current[worker]
        life.services += news.services
        life.num_failed = news.num_failed
        life.samples.append(replace(news.sample, at_s=news.sample.at_s - self._start_s))
        self.finished.update(each.request for each in news.services)

    def killed(self, worker: int) -> None:
        """A decode worker is dead."""
        self._current[worker].killed_s = time.monotonic() - self._start_s

    def began(self, worker: int) -> None:
        """It lives again."""
        self._current[worker] = _Life(worker, time.monotonic() - self._start_s)
        self._lives.append(self._current[worker])

    def prefill_ended(self, ended: Ended) -> None:
        """A prefill worker's last word."""
        self._lane = ended.lane
        self._look_for_leaks("a prefill worker", ended.stats)

    def decode_ended(self, worker: int, ended: Ended) -> None:
        """A decode worker's last word."""
        self._current[worker].ended = ended
        self._look_for_leaks(f"decode worker {worker}", ended.stats)

    @property
    def num_through(self) -> int:
        """Requests that are served, or cannot be."""
        return len(self.finished) + len(self._failures.keys() - self.finished)

    @property
    def done(self) -> bool:
        """Whether nothing is left to wait for."""
        return self.num_through == len(self._work.trace)

    def report(self, name: str, facts: MachineFacts) -> ReplayReport:
        """What it came to, after everybody has ended."""
        work = self._work
        bounds = [bounds_of(work, worker) for worker in range(work.config.workers.decode)]
        lives = tuple(self._life(each) for each in self._lives)
        num_unique = sum(self._num_unique(worker) for worker in range(work.config.workers.decode))
        expected_unique = sum(each.num_unique for each in bounds)
        refused = {each.request for each in self._failures.values() if each.kind == "PoolExhaustedError"}
        num_failed = len(self._failures.keys() - refused - self.finished)
        block_nbytes = work.spec.page_nbytes * len(work.spec.tensors)
        num_entries = sum(each.num_entries for each in self._deliveries)
        num_resident = sum(each.num_resident for each in self._deliveries)
        sent_nbytes = sum(each.sent_nbytes for each in self._deliveries)
        resident_most = sum(each.num_resident_most for each in bounds)
        if expected_unique != num_unique:
            self._problems.append(f"distinct blocks sent: must be {expected_unique:,}, {num_unique:,} found")
        self._problems += check_failures(work, self._failures)
        for worker in range(work.config.workers.decode):
            told = check_worker(work, self._heard(worker))
            self._problems += [f"decode worker {worker}, {each}" for each in told]
        if not self.finished:
            self._problems.append("no request was delivered")
        started = np.array([each.started_s for each in self._deliveries])
        acknowledged = np.array([each.acknowledged_s for each in self._deliveries])
        due = np.array([self._start_s + work.due_s(each.request) for each in self._deliveries])
        released = [each.released_s for life in self._lives for each in life.services]
        seconds = max(released, default=self._start_s) - self._start_s
        stats = [life.ended.stats for life in self._lives if life.ended is not None]
        return ReplayReport(
            facts=facts,
            trace=name,
            config=work.config,
            malformed=work.trace.malformed,
            num_requests=len(work.trace),
            num_delivered=len(self.finished),
            num_refused=len(refused),
            num_failed=num_failed,
            num_again=len(self._again),
            seconds=seconds,
            transfers_per_s=len(self._deliveries) / seconds if seconds else 0.0,
            block_nbytes=block_nbytes,
            num_entries=num_entries,
            num_unique=num_unique,
            expected_unique=expected_unique,
            num_resident=num_resident,
            resident_most=resident_most,
            logical_nbytes=sum(each.logical_nbytes for each in self._deliveries),
            unique_nbytes=num_unique * block_nbytes,
            sent_nbytes=sent_nbytes,
            compared_nbytes=sum(each.compared_nbytes for life in self._lives for each in life.services),
            lane=self._lane,
            send_s=Percentiles.of(acknowledged - started),
            late_s=Percentiles.of(acknowledged - due),
            num_leases=sum(each.grant_wait.count for each in stats),
            num_leases_expired=sum(each.num_leases_expired for each in stats),
            num_waits=sum(map(_num_waits, stats)),
            wait_s=sum(each.grant_wait.sum_s for each in stats),
            refusals=dict(sum((Counter(each.receive.failures) for each in stats), Counter())),
            lives=lives,
            problems=tuple(self._problems),
        )

    def _heard(self, worker: int) -> Heard:
        lives = [each for each in self._lives if each.worker == worker]
        return Heard(
            worker=worker,
            killed=any(each.killed_s is not None for each in lives),
            services=[each for life in lives for each in life.services],
            deliveries=[each for each in self._deliveries if self._work.decode_of[each.request] == worker],
            num_again=sum(int(self._work.decode_of[each] == worker) for each in self._again),
            received_nbytes=sum(each.ended.stats.receive.nbytes for each in lives if each.ended is not None),
        )

    def _life(self, life: _Life) -> Life:
        expected = None
        if life.num_failed and life.killed_s is None:
            self._problems.append(
                f"decode worker {life.worker}, {life.num_failed} arrivals came to nothing: its cache is not checked"
            )
        elif life.ended is not None:
            expected, wrong = check_services(self._work, life.services)
            self._problems += [f"decode worker {life.worker}, {each}" for each in wrong]
        return Life(
            worker=life.worker,
            began_s=life.began_s,
            killed_s=life.killed_s,
            num_requests=len(life.services),
            num_entries=sum(len(each.resident) for each in life.services),
            num_resident=sum(int(each.resident.sum()) for each in life.services),
            expected_resident=expected,
            num_evicted=life.ended.num_evicted if life.ended is not None else None,
            samples=tuple(life.samples),
        )

    def _num_unique(self, worker: int) -> int:
        """Distinct blocks that travelled to a worker, in all its lives."""
        sent: set[int] = set()
        for service in (each for life in self._lives if life.worker == worker for each in life.services):
            sent.update(self._work.trace.blocks_of(service.request)[~service.resident].tolist())
        return len(sent)

    def _look_for_leaks(self, who: str, stats: EngineStats) -> None:
        accounts: PageAccounts = stats.pools["default"]
        if accounts.free != accounts.num_pages or accounts.num_leases:
            self._problems.append(f"{who} ended with pages that are not free: {accounts}")


def _num_waits(stats: EngineStats) -> int:
    bounds = (*stats.grant_wait.bounds_s, float("inf"))
    return sum(count for bound, count in zip(bounds, stats.grant_wait.counts, strict=True) if bound > _WAITED_S)
