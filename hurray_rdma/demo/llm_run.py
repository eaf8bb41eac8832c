"""``--llm`` from the outside: is all there, start both processes, lead them, compare their tokens. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from hurray_rdma.demo.config import DemoConfig
from hurray_rdma.demo.content import MismatchError
from hurray_rdma.demo.llm_messages import Arrived, Continued, FirstTokens, Generated, Loaded, Prefilled, Reread, Verdict
from hurray_rdma.demo.llm_plan import Move, Variant, check_variants, moves, variants
from hurray_rdma.demo.llm_report import LlmReport, Overlap, PromptReport, VariantReport
from hurray_rdma.demo.llm_workers import llm_decode, llm_prefill
from hurray_rdma.demo.messages import Command, Listening
from hurray_rdma.demo.run import Step
from hurray_rdma.demo.supervisor import Supervisor
from hurray_rdma.errors import ConfigError

__all__ = ["check_reread", "check_texts", "default_model", "missing_extra", "num_llm_steps", "run_llm"]

_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_ROUNDING = {"float32": 0.01, "float16": 0.1, "bfloat16": 0.5}
"""By how much logits of tens may differ between two ways of computing them, by the dtype of the model."""
_EXTRA = ("torch", "transformers", "accelerate", "gguf")


def default_model() -> Path:
    """Where ``scripts/get-model`` puts the model: ``$XDG_CACHE_HOME/hurray-rdma``, or ``~/.cache/hurray-rdma``."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "hurray-rdma" / _MODEL_FILE


def missing_extra() -> tuple[str, ...]:
    """The packages of the extra ``[llm]`` that cannot be imported here."""
    return tuple(name for name in _EXTRA if find_spec(name) is None)


def num_llm_steps(config: DemoConfig) -> int:
    """How often `run_llm` reports a step."""
    return 2 + len(moves(config))


@dataclass(frozen=True, slots=True)
class _Heard:
    """Everything that the two processes said."""

    loaded: Loaded
    moved: tuple[tuple[Prefilled, Arrived], ...]
    """Of each of `moves`."""
    continued: Continued
    verdict: Verdict


def run_llm(config: DemoConfig, *, model: Path | None, on_step: Step) -> LlmReport:
    """Runs the demo with a language model; returns only if both processes generated the same tokens.

    Args:
        config: what to do.
        model: a GGUF file or a model folder; None is `default_model`.
        on_step: progress.

    Raises:
        ConfigError: the extra or the model is missing; the message has the command that gets it.
        GeometryError: pages of such sizes cannot be exchanged.
        HurrayError: a process failed or died, time is up, or a token or a logit differs (MismatchError).
    """
    check_variants(config.llm)
    path = _checked_model(model)
    heard = _lead(config, path, on_step)
    for kind, decoded, alone in zip(
        variants(config.llm), heard.continued.generated, heard.verdict.generated, strict=True
    ):
        check_texts(decoded, alone, variant=kind)
    check_reread(heard.verdict.reread, dtype=heard.loaded.spec.dtype)
    return _report_of(config, path, heard)


def check_texts(decoded: Generated, alone: Generated, *, variant: Variant) -> None:
    """Raises MismatchError unless the decode process generated what a single process does, from the same logits."""
    for seq, (ours, theirs) in enumerate(zip(decoded.texts, alone.texts, strict=True)):
        if ours == theirs:
            continue
        both = zip(ours, theirs, strict=False)
        at = next((i for i, (one, other) in enumerate(both) if one != other), min(len(ours), len(theirs)))
        raise MismatchError(
            f"a single process generates {theirs[at : at + 1]} there ({len(theirs)} tokens in all): the decode process "
            f"continued sequence {seq} from other keys and values than the prompt's (pool {variant.pool})",
            field=f"texts[{seq}][{at}]",
            value=ours[at : at + 1],
        )
    if decoded.logits_digest != alone.logits_digest:
        raise MismatchError(
            f"a single process has logits of digest {alone.logits_digest[:16]}, if the same tokens: the decode process "
            f"continued from keys and values that are not the prompt's to the last bit (pool {variant.pool})",
            field="logits",
            value=decoded.logits_digest[:16],
        )


def check_reread(reread: Reread, *, dtype: str) -> None:
    """Raises MismatchError unless each text is the likeliest one also when it is read alone, but for rounding."""
    if not reread.max_shortfall <= _ROUNDING[dtype]:
        raise MismatchError(
            f"must be at most {_ROUNDING[dtype]}, what rounding explains in {dtype}: read alone, without batch, cache "
            "and pages, the model would have chosen another token",
            field="max_shortfall",
            value=reread.max_shortfall,
        )


def _lead(config: DemoConfig, path: Path, on_step: Step) -> _Heard:
    unread = msgspec.structs.replace(
        config, llm=msgspec.structs.replace(config.llm, system_prompt="", prompts=())
    )  # so that the decode process cannot know them
    moved = []
    with Supervisor(deadline_s=config.llm.deadline_s) as supervisor:
        on_step("loading the model in both processes")
        receiver = supervisor.start("decode", llm_decode, unread, path)
        sender = supervisor.start("prefill", llm_prefill, config, path)
        loaded = supervisor.receive(sender, Loaded)
        sender.send(supervisor.receive(receiver, Listening))
        for number, move in enumerate(moves(config), 1):
            how = "layer by layer" if move.layer_by_layer else "sending after the last layer"
            on_step(f"transfer {number} of {len(moves(config))}: reading the prompts, {how}")
            receiver.send(Command.TRANSFER)
            sender.send(Command.TRANSFER)
            receiver.send(supervisor.receive(sender, FirstTokens))
            moved.append((supervisor.receive(sender, Prefilled), supervisor.receive(receiver, Arrived)))
        on_step("continuing the texts, in the decode process and in one process alone")
        receiver.send(Command.CONTINUE)
        sender.send(Command.CONTINUE)
        continued = supervisor.receive(receiver, Continued)
        sender.send(continued)
        verdict = supervisor.receive(sender, Verdict)
        supervisor.finish(sender)
        receiver.send(Command.FINISH)
        supervisor.finish(receiver)
    return _Heard(loaded, tuple(moved), continued, verdict)


def _report_of(config: DemoConfig, path: Path, heard: _Heard) -> LlmReport:
    kinds, verdict, spec = variants(config.llm), heard.verdict, heard.loaded.spec
    of_kind = {move.variant: sent.stats for move, (sent, _) in zip(moves(config), heard.moved, strict=True)}
    stored = [kind.source(spec) for kind in kinds]
    timed = [
        [both for move, both in zip(moves(config), heard.moved, strict=True) if move == Move(0, layer_by_layer=overlap)]
        for overlap in (True, False)
    ]
    first_int8 = next(index for index, kind in enumerate(kinds) if kind.quantized)
    texts = heard.continued.generated
    return LlmReport(
        model=path.name,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        dtype=spec.dtype,
        prefix_tokens=heard.loaded.prefix_tokens,
        lane=of_kind[0].lane,
        path=of_kind[0].path,
        layer_by_layer=Overlap.of(timed[0]),
        after_the_last=Overlap.of(timed[1]),
        variants=tuple(
            VariantReport(
                dtype=stored[index].dtype,
                scale_dtype=stored[index].scale_dtype,
                src_page_size=kind.src_page_size,
                dst_page_size=kind.dst_page_size,
                num_pages=of_kind[index].num_pages,
                num_table_entries=of_kind[index].num_table_entries,
                sent_nbytes=of_kind[index].sent_nbytes,
                logical_nbytes=of_kind[index].logical_nbytes,
                num_operations=of_kind[index].num_operations,
                num_tokens=sum(map(len, texts[index].texts)),
                num_texts_as_computed=sum(
                    ours == exact for ours, exact in zip(texts[index].texts, texts[0].texts, strict=True)
                ),
                num_texts_equal=sum(
                    ours == alone
                    for ours, alone in zip(texts[index].texts, verdict.generated[index].texts, strict=True)
                ),
            )
            for index, kind in enumerate(kinds)
        ),
        drift=verdict.drift,
        reread=verdict.reread,
        system_prompt=config.llm.system_prompt,
        prompts=tuple(
            PromptReport(
                prompt=prompt,
                prompt_tokens=heard.loaded.seq_lens[seq],
                decode_text=verdict.decode_texts[0][seq],
                single_text=verdict.single_texts[seq],
                int8_text=verdict.decode_texts[first_int8][seq],
            )
            for seq, prompt in enumerate(config.llm.prompts)
        ),
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
