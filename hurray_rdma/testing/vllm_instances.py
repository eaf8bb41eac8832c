"""A vLLM instance in a process of its own, driven by hand: requests, aborts, looks at its block accounts.

Everything that needs vLLM happens in the child (`vllm_child`); this side only talks to it. For tests, and for
`scripts/vllm-demo`.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from hurray_rdma.testing.processes import Child
from hurray_rdma.testing.vllm_child import HURRAY, NIXL, run_instance

__all__ = ["HURRAY", "NIXL", "Instance"]


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
        self._held = False

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

    def gone(self) -> Instance:
        """Waits for the end that a signal has caused."""
        assert self._child.join() is not None
        return self

    def submit(self, prompt: str | list[int], params: dict[str, Any] | None = None, *, max_tokens: int = 16) -> str:
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
            self._hear(until - time.monotonic())
        return self._done.pop(name)

    def ask(
        self, prompt: str | list[int], params: dict[str, Any] | None = None, *, max_tokens: int = 16
    ) -> dict[str, Any]:
        """One request, to its end."""
        return self.result(self.submit(prompt, params, max_tokens=max_tokens))

    def prefill(self, prompt: str | list[int]) -> dict[str, Any]:
        """What the decode side is to be given for a prompt that this instance computes."""
        answer = self.ask(prompt, {"do_remote_decode": True}, max_tokens=16)
        assert answer["params"], answer
        return dict(answer["params"])

    def abort(self, name: str) -> None:
        """The client does not want it any more."""
        self._child.send(("abort", name))

    def abort_at(self, name: str, place: str, *, call: int = 1) -> None:
        """The same, in the middle of a step: when a method is called by vLLM's thread for that time from now on."""
        self._child.send(("abort_at", name, place, call))

    def preempt(self) -> None:
        """Has vLLM put all running requests back, as when it needs their blocks."""
        self._child.send(("preempt",))

    def steps(self, count: int) -> None:
        """Has it take so many steps, and then none until `go`; 0 is to stop at once."""
        self._held = False
        self._child.send(("steps", count))
        self.wait_held()

    def go(self) -> None:
        """Has it step as ever."""
        self._child.send(("steps", None))

    def hold(self, place: str, *, call: int = 1) -> None:
        """Has another thread than vLLM's stop before a method, ``module:Class.method``; see `Hold`."""
        self._held = False
        self._child.send(("hold", place, call))

    def tune(self, place: str, value: object) -> None:
        """Sets a constant of a module, ``module:NAME``."""
        self._child.send(("tune", place, value))

    def wait_held(self, *, timeout_s: float = 180) -> None:
        """Until it has stopped there."""
        until = time.monotonic() + timeout_s
        while not self._held:
            self._hear(until - time.monotonic())

    def release(self) -> None:
        """Lets it go on."""
        self._child.send(("release",))

    def tell(self, what: str) -> Any:
        """``facts``: free blocks, requests that vLLM still holds, metrics of the connector; ``cpu``: seconds used."""
        self.ready()
        self._child.send((what,))
        while (answer := self._hear(60, what)) is None:
            pass
        return answer[0]

    def _hear(self, timeout_s: float, wanted: str = "") -> list[Any] | None:
        """The next message, if it is of the kind that is wanted; others are kept."""
        kind, *rest = self._child.receive(timeout_s=max(0.1, timeout_s))
        if kind == wanted:
            return list(rest)
        assert kind in ("done", "held"), kind
        if kind == "held":
            self._held = True
        else:
            self._done[rest[0]] = rest[1]
        return None

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
