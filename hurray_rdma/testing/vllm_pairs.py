"""`scripts/vllm-demo`: the same prompts through pairs of vLLM instances, ours and NixlConnector's, in turn.

Prefill and decode are processes of their own. Each round asks every pair in turn; figures are medians over the rounds.
The prefill side has the prompt in its prefix cache after the first round, so that what is timed is the hand-over; the
decode side keeps no prefix. "Transfer" is what each connector tells vLLM of itself: ours from asking for pages to the
confirmation, NixlConnector's from posting its reads to their end; "moving" is the part of ours that is comparable, the
reads themselves. Time to first token is the decode side's, vLLM's own steps included. Where prefill pushes, decode asks
first, and its time to first token and the transfer include prefill's step. All texts are compared with those of one
instance alone.

NixlConnector's threads keep cores busy while nothing is asked of them: its pair is stopped while others are measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hurray_rdma.testing.vllm_instances import HURRAY, NIXL, Instance
from hurray_rdma.testing.vllm_servers import free_port

PUSH = f"{HURRAY}, push"
_WORDS = ["river", "stone", "window", "garden", "letter", "winter", "market", "engine", "silver", "forest"]


@dataclass
class Figures:
    """Of one connector and one length of prompt."""

    connector: str
    num_tokens: int
    text: str
    same_text: bool
    first_token_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    moving_s: list[float] = field(default_factory=list)
    nbytes: int = 0
    lane: str = ""
    cpu_s: float = 0.0
    """Of both processes, over all rounds, since their first answer."""


def main() -> None:
    """Parses the arguments, runs, prints."""
    parser = argparse.ArgumentParser(prog="scripts/vllm-demo", description="vLLM pairs side by side.")
    parser.add_argument("--model", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[200, 1000], help="lengths of the prompts, about")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--push", action="store_true", help="also a pair whose prefill side pushes")
    parser.add_argument("--without-nixl", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    connectors = [HURRAY, *([PUSH] if options.push else []), *([] if options.without_nixl else [NIXL])]
    figures = compare(options.model, connectors, options.tokens, rounds=options.rounds)
    Console().print(_table(figures))
    for each in figures:
        print(f"{each.connector}, {each.num_tokens} tokens: {'same text as alone' if each.same_text else 'OTHER TEXT'}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(each) for each in figures], indent=1))


def compare(model: str, connectors: list[str], lengths: list[int], *, rounds: int) -> list[Figures]:
    """Starts a pair for each connector, and asks them in turn."""
    engine: dict[str, Any] = {"max_model_len": max(lengths) + 96, "max_num_seqs": 2, "deadline_s": 3000}
    with contextlib.ExitStack() as running:
        pairs = {}
        for name in connectors:
            settings: tuple[dict[str, Any], dict[str, Any]] = {}, {}
            if name == PUSH:
                port = free_port()
                settings = {"mode": "push", "push_to": [f"127.0.0.1:{port}"]}, {"mode": "push", "port": port}
            more = engine | {"connector": HURRAY if name == PUSH else name}
            prefill = Instance(model, core=0, role="kv_producer", extra=settings[0], **more)
            decode = Instance(model, core=1, role="kv_consumer", extra=settings[1], enable_prefix_caching=False, **more)
            pairs[name] = running.enter_context(prefill), running.enter_context(decode)
        for pair in pairs.values():
            for instance in pair:
                instance.ready()
        running.callback(_signal, pairs.get(NIXL, ()), signal.SIGCONT)  # each of a pair is told to end after that
        _signal(pairs.get(NIXL, ()), signal.SIGSTOP)
        figures: list[Figures] = []
        for length in lengths:
            prompt = _prompt(length)
            alone = pairs[connectors[0]][0].ask(prompt, max_tokens=4)
            now = {name: Figures(name, alone["tokens"], alone["text"], True) for name in connectors}
            for at in range(rounds + 1):  # the first connects, and computes the prompt
                for name, (prefill, decode) in pairs.items():
                    with _awake(pairs[name] if name == NIXL else ()):
                        _round(prefill, decode, prompt, now[name], counts=at > 0)
            figures += now.values()
        return figures


@contextlib.contextmanager
def _awake(pair: Sequence[Instance]) -> Iterator[None]:
    """Runs a pair that is stopped, meanwhile."""
    _signal(pair, signal.SIGCONT)
    try:
        yield
    finally:
        _signal(pair, signal.SIGSTOP)


def _signal(pair: Sequence[Instance], number: signal.Signals) -> None:
    for instance in pair:
        instance.signal(number)


def _round(prefill: Instance, decode: Instance, prompt: str, figures: Figures, *, counts: bool) -> None:
    before = prefill.tell("cpu") + decode.tell("cpu")
    mover = prefill if figures.connector == PUSH else decode
    known = len(mover.tell("facts")["stats"])
    if mover is prefill:
        answer = _pushed(prefill, decode, prompt)
    else:
        answer = decode.ask(prompt, prefill.prefill(prompt), max_tokens=4)
    figures.same_text &= answer["text"] == figures.text
    prefill.settled()
    stats = mover.tell("facts")["stats"][known:]
    if not counts:
        return
    figures.first_token_s.append(answer["seconds"])
    figures.cpu_s += prefill.tell("cpu") + decode.tell("cpu") - before
    if figures.connector in (HURRAY, PUSH):
        figures.moving_s.append(sum(sum(each["moving_seconds"]) for each in stats))
        figures.transfer_s.append(sum(sum(each["seconds"]) for each in stats))
        figures.nbytes = sum(sum(each["nbytes"]) for each in stats)
        figures.lane = "+".join(sorted({lane for each in stats for lane in each["lanes"]}))
    else:
        figures.transfer_s.append(sum(sum(each["transfer_duration"]) for each in stats))
        figures.moving_s.append(figures.transfer_s[-1])
        figures.nbytes = int(sum(sum(each["bytes_transferred"]) for each in stats))
        figures.lane = "NIXL's UCX"


def _pushed(prefill: Instance, decode: Instance, prompt: str) -> dict[str, Any]:
    key = uuid.uuid4().hex
    address = decode.tell("facts")["address"]
    asked = {"do_remote_prefill": True, "remote_request_id": key}
    name = decode.submit(prompt, asked, max_tokens=4)
    prefill.ask(prompt, {"do_remote_decode": True, "remote_request_id": key, "remote_addresses": [address]})
    return decode.result(name)


def _prompt(num_tokens: int) -> str:
    return " ".join(_WORDS[at % len(_WORDS)] + str(at % 7) for at in range(num_tokens // 2))


def _table(figures: list[Figures]) -> Table:
    table = Table(title="vLLM, prefill process to decode process; medians (least-most)")
    for column in (
        "connector",
        "tokens",
        "MiB",
        "lane",
        "first token ms",
        "transfer ms",
        "moving ms",
        "CPU s a request",
    ):
        table.add_column(column, justify="left" if column in ("connector", "lane") else "right")
    for each in figures:
        table.add_row(
            each.connector,
            str(each.num_tokens),
            f"{each.nbytes / 2**20:.1f}",
            each.lane,
            *(_spread(times) for times in (each.first_token_s, each.transfer_s, each.moving_s)),
            f"{each.cpu_s / len(each.first_token_s):.2f}",
        )
    return table


def _spread(seconds: list[float]) -> str:
    middle, least, most = (value * 1e3 for value in (statistics.median(seconds), min(seconds), max(seconds)))
    return f"{middle:.1f} ({least:.1f}-{most:.1f})"


if __name__ == "__main__":
    main()
