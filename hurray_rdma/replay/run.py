"""A replay from the outside: starts the workers, kills one if told to, gathers what they say. Moves no bytes."""

from __future__ import annotations

import time
from collections.abc import Callable

from hurray_rdma.bench.machine import MachineFacts, machine_facts
from hurray_rdma.demo import Supervisor
from hurray_rdma.demo.messages import Listening, Ready
from hurray_rdma.demo.supervisor import Process
from hurray_rdma.errors import ConfigError, ProtocolError
from hurray_rdma.replay.config import ReplayConfig
from hurray_rdma.replay.decode import decode
from hurray_rdma.replay.gathered import Gathered
from hurray_rdma.replay.messages import Begin, DecodeNews, Ended, Finish, Killed, PrefillNews, Restarted
from hurray_rdma.replay.prefill import prefill
from hurray_rdma.replay.results import ReplayReport
from hurray_rdma.replay.trace import Trace
from hurray_rdma.replay.work import Work, choose_workers

__all__ = ["NUM_STEPS", "Step", "run_replay"]

Step = Callable[[str], None]
"""Called with what happens next, `NUM_STEPS` times in all."""

NUM_STEPS = 51
"""How often `run_replay` reports a step: at the start, and with each part of the requests."""

_KILLED = 0
"""The decode worker that is killed."""


def run_replay(
    config: ReplayConfig, trace: Trace, *, name: str, kill_decode_at: int | None = None, on_step: Step
) -> ReplayReport:
    """Replays a trace; what is not as it must be is in the report's problems.

    Args:
        config: what to do.
        trace: the requests.
        name: of the trace, for the report.
        kill_decode_at: kill a decode worker by SIGKILL once so many requests are through, and start it again.
        on_step: progress.

    Raises:
        ConfigError: a request is larger than a prefill worker's pool, so many requests will not come, or the last one
            comes after the deadline.
        HurrayError: a worker failed or died unasked, time is up, or bytes differ (MismatchError).
    """
    _check(config, trace, kill_decode_at)
    facts = machine_facts()
    work = Work(config, trace, choose_workers(trace, config.workers.decode))
    with Supervisor(deadline_s=config.run.deadline_s) as supervisor:
        on_step("starting the workers")
        return _Replay(supervisor, work, kill_decode_at, on_step).run(name, facts)


def _check(config: ReplayConfig, trace: Trace, kill_decode_at: int | None) -> None:
    largest = int(trace.lengths.argmax())
    if trace.lengths[largest] > config.workers.prefill_pages:
        raise ConfigError(
            f"must be at least the {trace.lengths[largest]} blocks of the request in line {trace.lines[largest]}",
            field="workers.prefill_pages",
            value=config.workers.prefill_pages,
            fix="Give prefill workers more pages (--prefill-pages), or take fewer requests (--requests)",
        )
    if kill_decode_at is not None and not 0 <= kill_decode_at < len(trace):
        raise ConfigError(
            f"must be from 0 to below the {len(trace)} requests", field="--kill-decode-at", value=kill_decode_at
        )
    last_s = float(trace.arrival_s[-1]) / config.run.speed
    if last_s >= config.run.deadline_s:
        raise ConfigError(
            f"must be above the {last_s:,.1f} s after which the last request comes, at speed {config.run.speed:g}",
            field="run.deadline_s",
            value=config.run.deadline_s,
            fix="Give it more time (--deadline), or run faster (--speed)",
        )


class _Replay:
    def __init__(self, supervisor: Supervisor, work: Work, kill_decode_at: int | None, step: Step) -> None:
        self._supervisor = supervisor
        self._work = work
        self._kill_at = kill_decode_at
        self._step = step
        self._num_steps = 1
        self._restarting = False
        workers = work.config.workers
        self._decode = [self._start_decode(number, "127.0.0.1:0") for number in range(workers.decode)]
        self._addresses = [supervisor.receive(each, Listening).address for each in self._decode]
        self._prefill = [
            supervisor.start(f"prefill {number}", prefill, work, number, self._addresses)
            for number in range(workers.prefill)
        ]
        for process in self._prefill:
            supervisor.receive(process, Ready)
        self._begin = Begin(time.monotonic())
        self._gathered = Gathered(work, self._begin.start_s)

    def _start_decode(self, number: int, listen: str) -> Process:
        return self._supervisor.start(f"decode {number}", decode, self._work, listen)

    def run(self, name: str, facts: MachineFacts) -> ReplayReport:
        for process in (*self._decode, *self._prefill):
            process.send(self._begin)
        while not self._gathered.done or self._restarting:
            self._take(*self._supervisor.receive_any([*self._decode, *self._prefill], object))
            self._show()
            if self._kill_at is not None and self._gathered.num_through >= self._kill_at:
                self._kill_at = None
                self._kill()
        for processes in (self._prefill, self._decode):  # senders first
            for process in processes:
                process.send(Finish())
            for process in processes:
                self._finish(process)
        return self._gathered.report(name, facts)

    def _take(self, process: Process, message: object) -> None:
        match message:
            case PrefillNews():
                self._gathered.sent(message)
            case DecodeNews():
                self._gathered.served(self._decode.index(process), message)
            case Listening():  # a decode worker is back
                worker = self._decode.index(process)
                self._gathered.began(worker)
                self._restarting = False
                process.send(self._begin)
                for sender in self._prefill:
                    sender.send(Restarted(worker, frozenset(self._gathered.finished)))
            case _:
                raise ProtocolError("was not to come now", field="message", value=type(message).__name__)

    def _show(self) -> None:
        num_through, total = self._gathered.num_through, len(self._work.trace)
        while self._num_steps < NUM_STEPS and num_through * (NUM_STEPS - 1) >= total * self._num_steps:
            self._num_steps += 1
            self._step(f"{num_through:,} of {total:,} requests")

    def _kill(self) -> None:
        self._supervisor.kill(self._decode[_KILLED])
        self._gathered.killed(_KILLED)
        self._restarting = True
        for sender in self._prefill:
            sender.send(Killed(_KILLED))
        self._decode[_KILLED] = self._start_decode(_KILLED, self._addresses[_KILLED])

    def _finish(self, process: Process) -> None:
        while not isinstance(message := self._supervisor.receive(process, object), Ended):
            self._take(process, message)
        if process in self._decode:
            self._gathered.decode_ended(self._decode.index(process), message)
        else:
            self._gathered.prefill_ended(message)
        self._supervisor.finish(process)
