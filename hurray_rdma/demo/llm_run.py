"""``--llm`` from the outside: is all there, start both processes, compare their tokens. Imports no torch."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from hurray_rdma.demo.config import DemoConfig
from hurray_rdma.demo.content import MismatchError
from hurray_rdma.demo.llm_workers import llm_decode, llm_prefill
from hurray_rdma.demo.messages import Command, Continued, Listening, Prefilled, Ready, Verdict
from hurray_rdma.demo.report import LlmReport
from hurray_rdma.demo.run import Step
from hurray_rdma.demo.supervisor import Supervisor
from hurray_rdma.errors import ConfigError

__all__ = ["LLM_STEPS", "default_model", "missing_extra", "run_llm"]

LLM_STEPS = 4
"""How often `run_llm` reports a step."""

_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_EXTRA = ("torch", "transformers", "accelerate", "gguf")


def default_model() -> Path:
    """Where ``scripts/get-model`` puts the model: ``$XDG_CACHE_HOME/hurray-rdma``, or ``~/.cache/hurray-rdma``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hurray-rdma" / _MODEL_FILE


def missing_extra() -> tuple[str, ...]:
    """The packages of the extra ``[llm]`` that cannot be imported here."""
    return tuple(name for name in _EXTRA if find_spec(name) is None)


def run_llm(config: DemoConfig, *, model: Path | None, on_step: Step) -> LlmReport:
    """Runs the demo with a language model; returns only if both processes generated the same tokens.

    Args:
        config: what to do.
        model: a GGUF file or a model folder; None is `default_model`.
        on_step: progress.

    Raises:
        ConfigError: the extra or the model is missing; the message has the command that gets it.
        HurrayError: a process failed or died, time is up, or a token differs (MismatchError).
    """
    path = _checked_model(model)
    with Supervisor(deadline_s=config.llm.deadline_s) as supervisor:
        on_step("loading the model in both processes")
        receiver = supervisor.start("decode", llm_decode, config, path)
        sender = supervisor.start("prefill", llm_prefill, config, path)
        supervisor.receive(sender, Ready)
        listening = supervisor.receive(receiver, Listening)
        on_step("reading the prompt, sending layer by layer")
        sender.send(listening)
        prefilled = supervisor.receive(sender, Prefilled)
        on_step("continuing the text from the received pages")
        receiver.send(prefilled.first_token)
        continued = supervisor.receive(receiver, Continued)
        on_step("generating the same in one process")
        sender.send(continued)
        verdict = supervisor.receive(sender, Verdict)
        supervisor.finish(sender)
        receiver.send(Command.FINISH)
        supervisor.finish(receiver)
    check_tokens(continued.tokens, verdict.tokens)
    stats, spec = prefilled.stats, prefilled.spec
    return LlmReport(
        model=path.name,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=spec.dtype,
        prompt_tokens=stats.num_tokens,
        num_pages=stats.num_pages,
        lane=stats.lane,
        path=stats.path,
        sent_nbytes=stats.sent_nbytes,
        num_operations=stats.num_operations,
        transfer_s=stats.seconds,
        tokens=continued.tokens,
        prompt=config.llm.prompt,
        text=verdict.text,
    )


def check_tokens(decoded: tuple[int, ...], alone: tuple[int, ...]) -> None:
    """Raises MismatchError unless the decode process generated what a single process does."""
    if decoded == alone:
        return
    both = zip(decoded, alone, strict=False)
    at = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), min(len(decoded), len(alone)))
    raise MismatchError(
        f"a single process generates {alone[at : at + 1]} there ({len(alone)} tokens in all): the decode process "
        "continued from other keys and values than the prompt's",
        field=f"tokens[{at}]",
        value=decoded[at : at + 1],
    )


def _checked_model(model: Path | None) -> Path:
    missing = missing_extra()
    if missing:
        raise ConfigError(
            "needs packages that are not installed",
            field="--llm",
            value=missing,
            fix='Run `pip install "hurray-rdma[llm]"`, in a checkout `pip install ".[llm]"` or ./scripts/demo --llm',
        )
    path = default_model() if model is None else model
    if not path.exists():
        raise ConfigError(
            "does not exist", field="--model", value=str(path), fix="Run ./scripts/get-model, or name a GGUF file"
        )
    return path.absolute()
