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
        failed = [each for each in self._failures.values() if each.request not in refused | self.finished]
        block_nbytes = work.spec.page_nbytes * len(work.spec.tensors)
        num_entries = sum(each.num_entries for each in self._deliveries)
        num_resident = sum(each.num_resident for each in self._deliveries)
        sent_nbytes = sum(each.sent_nbytes for each in self._deliveries)
        resident_most = sum(each.num_resident_most for each in bounds)
        self._expect("requests refused", sum(each.num_refused for each in bounds), len(refused))
        self._expect("distinct blocks sent", expected_unique, num_unique)
        self._expect("bytes sent", (num_entries - num_resident) * block_nbytes, sent_nbytes)
        if not self._again:
            self._expect("resident blocks by the receivers", num_resident, sum(each.num_resident for each in lives))
            if num_resident > resident_most:
                self._problems.append(f"{num_resident} blocks were resident, of at most {resident_most}")
        self._problems += [f"request {each.request}: {each.kind}: {each.text}" for each in failed[:10]]
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
            num_failed=len(failed),
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

    def _life(self, life: _Life) -> Life:
        expected = None
        if life.ended is not None and not life.num_failed:
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

    def _expect(self, what: str, expected: int, found: int) -> None:
        if expected != found:
            self._problems.append(f"{what}: must be {expected:,}, {found:,} found")

    def _look_for_leaks(self, who: str, stats: EngineStats) -> None:
        accounts: PageAccounts = stats.pools["default"]
        if accounts.free != accounts.num_pages or accounts.num_leases:
            self._problems.append(f"{who} ended with pages that are not free: {accounts}")


def _num_waits(stats: EngineStats) -> int:
    bounds = (*stats.grant_wait.bounds_s, float("inf"))
    return sum(count for bound, count in zip(bounds, stats.grant_wait.counts, strict=True) if bound > _WAITED_S)
