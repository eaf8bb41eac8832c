"""The process of one vLLM instance: takes commands between vLLM's steps. The other end is `vllm_instances.Instance`.

It knows vLLM from within: its scheduler's accounts, and its loop, which it can stop between two steps.
"""

from __future__ import annotations

import importlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from hurray_rdma.testing.holds import Hold

__all__ = ["HURRAY", "NIXL", "run_instance"]

HURRAY, NIXL = "HurrayConnector", "NixlConnector"
_SLEEP_S = 0.02
_YIELD_S = 0.001
_NIXL_PORT = 5600
"""Of its side channel; each process has one of its own from here on."""


def run_instance(
    connection: Connection, model: str, core: int, transfer: dict[str, Any] | None, arguments: dict[str, Any]
) -> None:
    """Until it is told to end.

    Args:
        connection: to whoever drives it.
        model: the folder of a model.
        core: the CPU that it computes on.
        transfer: `kv_transfer_config`; None is none.
        arguments: of vLLM's engine.
    """
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND=str(core),
        VLLM_SLEEP_WHEN_IDLE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        VLLM_LOGGING_LEVEL="WARNING",
        HF_HUB_OFFLINE="1",
        VLLM_NIXL_SIDE_CHANNEL_PORT=str(_NIXL_PORT + os.getpid() % 1000),
    )
    from vllm import EngineArgs, LLMEngine  # noqa: PLC0415 - it reads the environment

    if transfer is not None:
        arguments = arguments | {"kv_transfer_config": transfer}
    settings = {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 4, "dtype": "bfloat16"} | arguments
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, enforce_eager=True, **settings))
    driver = _Driver(connection, engine, transfer["kv_connector"] if transfer is not None else None)
    connection.send("ready")
    driver.run()


class _Driver:
    """Joins vLLM's loop with the pipe. Its methods are the commands, by name."""

    def __init__(self, connection: Connection, engine: Any, connector: str | None) -> None:
        self._connection = connection
        self._engine = engine
        self._core = engine.engine_core.engine_core
        self._scheduler = self._core.scheduler
        self._connector = connector
        self._stats: list[dict[str, Any]] = []
        self._said: list[str] = []
        self._preempted = 0
        self._begun: dict[str, float] = {}
        self._first: dict[str, float] = {}
        self._names: dict[str, str] = {}
        self._holds: list[Hold] = []
        self._held = threading.Event()
        self._steps_left: int | None = None
        self._over = False
        self._computed = True
        """Whether the last step had anything to compute."""
        self._watch()

    def run(self) -> None:
        """Takes commands, and steps while there is something to do."""
        while not self._over:
            busy = self._is_busy()
            if self._held.is_set():
                self._held.clear()
                self._connection.send(("held",))
            while not self._over and self._connection.poll(self._pause_s(busy)):
                command, *rest = self._connection.recv()
                getattr(self, command)(*rest)
                busy = self._is_busy()
            if busy and not self._over:
                self._step()
        self._core.shutdown()
        self._connection.send("ended")

    def _pause_s(self, busy: bool) -> float:
        """As vLLM's own loop: other threads have their turn while no request can run (EngineCoreProc, vLLM 0.32)."""
        if not busy:
            return _SLEEP_S
        return 0 if self._computed else _YIELD_S

    def _is_busy(self) -> bool:
        wanted = self._engine.has_unfinished_requests() or self._scheduler.has_requests()
        return bool(wanted) and self._steps_left != 0

    def _step(self) -> None:
        outputs = self._engine.step()
        if self._steps_left is not None:
            self.steps(self._steps_left - 1)
        for output in outputs:
            name = self._names.get(output.request_id, output.request_id)
            if name in self._begun and output.outputs and output.outputs[0].token_ids:
                self._first.setdefault(name, time.monotonic())
            if output.finished:
                result = {
                    "text": output.outputs[0].text,
                    "reason": output.outputs[0].finish_reason,
                    "params": output.kv_transfer_params,
                    "seconds": self._first.pop(name, time.monotonic()) - self._begun.pop(name),
                    "cached": output.num_cached_tokens,
                    "tokens": len(output.prompt_token_ids or ()),
                }
                self._connection.send(("done", name, result))

    # Commands.

    def submit(self, name: str, prompt: str | list[int], params: dict[str, Any] | None, max_tokens: int) -> None:
        from vllm import SamplingParams  # noqa: PLC0415 - it reads the environment

        extra = {"kv_transfer_params": params} if params else None
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra)
        self._begun[name] = time.monotonic()
        given = prompt if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        self._names[self._engine.add_request(name, given, sampling) or name] = name
        self._computed = True

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])
        self._connection.send(("done", name, {"text": "", "reason": "abort", "params": None}))

    def abort_at(self, name: str, place: str, call: int) -> None:
        def reached() -> bool:
            self.abort(name)
            return False  # nobody waits

        self._holds.append(Hold(place, call=call, reached=reached))

    def hold(self, place: str, call: int) -> None:
        def reached() -> bool:
            self._held.set()
            return True

        self._holds.append(Hold(place, call=call, reached=reached))

    def release(self) -> None:
        while self._holds:
            self._holds.pop().release()

    def steps(self, count: int | None) -> None:
        self._steps_left = count
        if count == 0:
            self._held.set()

    def tune(self, place: str, value: Any) -> None:
        module, _, name = place.partition(":")
        setattr(importlib.import_module(module), name, value)

    def preempt(self) -> None:
        self._scheduler.reset_prefix_cache(reset_running_requests=True)

    def facts(self) -> None:
        pool = self._scheduler.kv_cache_manager.block_pool
        told: dict[str, Any] = {
            "free": pool.get_num_free_blocks(),
            "blocks": pool.num_gpu_blocks,
            "requests": len(self._scheduler.requests),
            "running": len(self._scheduler.running),
            "preempted": self._preempted,
            "stats": self._stats,
            "said": self._said,
        }
        if self._connector == HURRAY:
            worker = self._group()._working()
            told["engine"] = worker._engine.stats()
            told |= {"address": worker.address, "loading": len(worker._takeovers), "early": worker._pushes.num_early}
            told["failures"] = dict(sum((Counter(each["failures"]) for each in self._stats), Counter()))
        self._connection.send(("facts", told))

    def cpu(self) -> None:
        times = os.times()
        self._connection.send(("cpu", times.user + times.system))

    def end(self) -> None:
        self._over = True

    # What vLLM does not tell by itself.

    def _group(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415 - it reads the environment

        return get_kv_transfer_group()

    def _watch(self) -> None:
        def preempted(*_: Any) -> None:
            self._preempted += 1

        def told(stats: Any) -> None:
            if stats is not None and not stats.is_empty():
                self._stats.append(dict(stats.data))

        def stepped(result: Any) -> None:
            self._computed = result[1]

        _watch(self._core, "step_fn", stepped)
        _watch(self._scheduler, "_preempt_request", preempted)
        if self._connector is not None:
            _watch(self._group(), "get_kv_connector_stats", told)
        logging.getLogger("hurray_rdma.connectors").addHandler(_Errors(self._said))


def _watch(owner: Any, name: str, seen: Callable[[Any], None]) -> None:
    """Has somebody see what a method of an object returns."""
    method = getattr(owner, name)

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        seen(result)
        return result

    setattr(owner, name, watched)


class _Errors(logging.Handler):
    """Keeps what the connector says of failures."""

    def __init__(self, said: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record.getMessage())
