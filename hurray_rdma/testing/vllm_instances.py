"""A vLLM instance in a process of its own, driven by hand: requests, aborts, looks at its block accounts.

Everything that needs vLLM happens in the child; this side only talks to it. For tests, and for `scripts/vllm-demo`.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from hurray_rdma.testing.processes import Child

__all__ = ["HURRAY", "NIXL", "Instance", "run_instance"]

HURRAY, NIXL = "HurrayConnector", "NixlConnector"
_SLEEP_S = 0.02
_WAIT_S = 0.001
"""After a step in which nothing could be computed, as `vllm serve` does (`EngineCoreProc._process_engine_step`)."""
_NIXL_PORT = 5600
"""Of its side channel; each process has one of its own from here on."""


class Instance:
    """One vLLM instance. A context manager: it is gone afterwards, whatever happens.

    Args:
        model: the folder of a model, as `scripts/setup-vllm` makes it.
        core: the CPU that it computes on.
        connector: None for none.
        role: ``kv_producer``, ``kv_consumer`` or ``kv_both``.
        extra: `kv_connector_extra_config`.
        policy: `kv_load_failure_policy`.
        engine: further arguments of vLLM's engine.
    """

    def __init__(
        self,
        model: str,
        *,
        core: int = 0,
        connector: str | None = HURRAY,
        role: str = "kv_both",
        extra: dict[str, Any] | None = None,
        policy: str = "fail",
        deadline_s: float = 900,
        **engine: Any,
    ) -> None:
        transfer = None
        if connector is not None:
            transfer = {
                "kv_connector": connector,
                "kv_role": role,
                "kv_connector_extra_config": extra or {},
                "kv_load_failure_policy": policy,
            }
            if connector == HURRAY:
                transfer["kv_connector_module_path"] = "hurray_rdma.connectors.vllm"
            else:
                transfer["kv_buffer_device"] = "cpu"
        self._child = Child(run_instance, model, core, transfer, engine, deadline_s=deadline_s)
        self._ready = False
        self._count = 0
        self._done: dict[str, dict[str, Any]] = {}

    @property
    def pid(self) -> int:
        return self._child.pid

    def signal(self, number: Any) -> None:
        self._child.signal(number)

    def ready(self) -> Instance:
        """Waits until it takes requests."""
        if not self._ready:
            assert self._child.receive(timeout_s=600) == "ready"
            self._ready = True
        return self

    def submit(self, prompt: str, params: dict[str, Any] | None = None, *, max_tokens: int = 16) -> str:
        """Begins a request; its name."""
        self.ready()
        self._count += 1
        name = f"request-{self._count}"
        self._child.send(("submit", name, prompt, params, max_tokens))
        return name

    def result(self, name: str, *, timeout_s: float = 240) -> dict[str, Any]:
        """Waits for a request: text, reason, kv_transfer_params, seconds to the first token, cached tokens."""
        until = time.monotonic() + timeout_s
        while name not in self._done:
            kind, *rest = self._child.receive(timeout_s=max(0.1, until - time.monotonic()))
            assert kind == "done", kind
            self._done[rest[0]] = rest[1]
        return self._done.pop(name)

    def ask(self, prompt: str, params: dict[str, Any] | None = None, *, max_tokens: int = 16) -> dict[str, Any]:
        """One request, to its end."""
        return self.result(self.submit(prompt, params, max_tokens=max_tokens))

    def prefill(self, prompt: str) -> dict[str, Any]:
        """What the decode side is to be given for a prompt that this instance computes."""
        answer = self.ask(prompt, {"do_remote_decode": True}, max_tokens=16)
        assert answer["params"], answer
        return dict(answer["params"])

    def abort(self, name: str) -> None:
        self._child.send(("abort", name))

    def tell(self, what: str) -> Any:
        """``facts``: free blocks, requests that vLLM still holds, metrics of the connector; ``cpu``: seconds used."""
        self.ready()
        self._child.send((what,))
        while True:
            kind, *rest = self._child.receive(timeout_s=60)
            if kind == what:
                return rest[0]
            self._done[rest[0]] = rest[1]

    def settled(self, *, within_s: float = 30) -> dict[str, Any]:
        """The facts once vLLM holds no request any more."""
        until = time.monotonic() + within_s
        while (facts := self.tell("facts"))["requests"]:
            assert time.monotonic() < until, facts
            time.sleep(0.1)
        return dict(facts)

    def __enter__(self) -> Instance:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None and self._ready and self._child._killed_by is None:
            self._child.send(("end",))
            while self._child.receive(timeout_s=60) != "ended":
                pass
        self._child.__exit__(kind, error, tb)


def run_instance(
    connection: Connection, model: str, core: int, transfer: dict[str, Any] | None, arguments: dict[str, Any]
) -> None:
    """In the child: takes commands between vLLM's steps."""
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
    from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: PLC0415 - it reads the environment
    from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

    if transfer is not None:
        arguments = arguments | {"kv_transfer_config": transfer}
    settings = {"block_size": 32, "max_model_len": 1024, "max_num_seqs": 4, "dtype": "bfloat16"} | arguments
    engine = LLMEngine.from_engine_args(EngineArgs(model=model, enforce_eager=True, **settings))
    core_engine = engine.engine_core.engine_core
    scheduler = core_engine.scheduler
    connection.send("ready")
    seen: list[dict[str, Any]] = []
    if transfer is not None:
        _watch_stats(get_kv_transfer_group(), seen)
    begun: dict[str, float] = {}
    first: dict[str, float] = {}
    names: dict[str, str] = {}

    def facts() -> dict[str, Any]:
        pool = scheduler.kv_cache_manager.block_pool
        told = {"free": pool.get_num_free_blocks(), "blocks": pool.num_gpu_blocks, "requests": len(scheduler.requests)}
        if transfer is not None:
            told["stats"] = list(seen)
        if transfer is not None and transfer["kv_connector"] == HURRAY:
            told["engine"] = get_kv_transfer_group()._working()._engine.stats()
            told["failures"] = dict(sum((Counter(each["failures"]) for each in seen), Counter()))
        return told

    while True:
        busy = engine.has_unfinished_requests() or scheduler.has_requests()
        while connection.poll(0 if busy else _SLEEP_S):
            command, *rest = connection.recv()
            if command == "submit":
                name, prompt, params, max_tokens = rest
                extra = {"kv_transfer_params": params} if params else None
                sampling = SamplingParams(temperature=0, max_tokens=max_tokens, extra_args=extra)
                begun[name] = time.monotonic()
                names[engine.add_request(name, prompt, sampling) or name] = name
                busy = True
            elif command == "abort":
                engine.abort_request(rest)
                connection.send(("done", rest[0], {"text": "", "reason": "abort", "params": None}))
            elif command == "facts":
                connection.send((command, facts()))
            elif command == "cpu":
                times = os.times()
                connection.send((command, times.user + times.system))
            elif command == "end":
                core_engine.shutdown()
                connection.send("ended")
                return
        for output in engine.step() if busy else ():
            name = output.request_id if output.request_id in begun else names.get(output.request_id, output.request_id)
            if name in begun and output.outputs and output.outputs[0].token_ids:
                first.setdefault(name, time.monotonic())
            if output.finished:
                result = {
                    "text": output.outputs[0].text,
                    "reason": output.outputs[0].finish_reason,
                    "params": output.kv_transfer_params,
                    "seconds": first.pop(name, time.monotonic()) - begun.pop(name),
                    "cached": output.num_cached_tokens,
                    "tokens": len(output.prompt_token_ids or ()),
                }
                connection.send(("done", name, result))
        if busy and not scheduler.running and scheduler.has_requests():
            time.sleep(_WAIT_S)


def _watch_stats(connector: Any, seen: list[dict[str, Any]]) -> None:
    """Keeps what the connector tells vLLM of its transfers."""
    tell = connector.get_kv_connector_stats

    def watched() -> Any:
        stats = tell()
        if stats is not None and not stats.is_empty():
            seen.append(dict(stats.data))
        return stats

    connector.get_kv_connector_stats = watched
