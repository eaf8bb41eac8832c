"""`scripts/vllm-demo`: the same prompts through pairs of vLLM instances, ours and NixlConnector's, in turn.

Prefill and decode are processes of their own. Each round asks every pair in turn; figures are medians over the rounds.
The prefill side has the prompt in its prefix cache after the first round, so that what is timed is the hand-over; the
decode side keeps no prefix. "Transfer" is what each connector tells vLLM of itself: ours from asking for pages to the
confirmation, NixlConnector's from posting its reads to their end. Time to first token is the decode side's, vLLM's own
steps included. All texts are compared with those of one instance alone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hurray_rdma.testing.vllm_instances import HURRAY, NIXL, Instance

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
    parser.add_argument("--without-nixl", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    connectors = [HURRAY] if options.without_nixl else [HURRAY, NIXL]
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
            prefill = Instance(model, core=0, connector=name, role="kv_producer", **engine)
            decode = Instance(model, core=1, connector=name, role="kv_consumer", enable_prefix_caching=False, **engine)
            pairs[name] = running.enter_context(prefill), running.enter_context(decode)
        for pair in pairs.values():
            for instance in pair:
                instance.ready()
        figures: list[Figures] = []
        for length in lengths:
            prompt = _prompt(length)
            alone = pairs[connectors[0]][0].ask(prompt, max_tokens=4)
            now = {name: Figures(name, alone["tokens"], alone["text"], True) for name in connectors}
            for at in range(rounds + 1):  # the first connects, and computes the prompt
                for name, (prefill, decode) in pairs.items():
                    _round(prefill, decode, prompt, now[name], counts=at > 0)
            figures += now.values()
        return figures


def _round(prefill: Instance, decode: Instance, prompt: str, figures: Figures, *, counts: bool) -> None:
    before = prefill.tell("cpu") + decode.tell("cpu")
    known = len(decode.tell("facts")["stats"])
    answer = decode.ask(prompt, prefill.prefill(prompt), max_tokens=4)
    figures.same_text &= answer["text"] == figures.text
    prefill.settled()
    stats = decode.tell("facts")["stats"][known:]
    if not counts:
        return
    figures.first_token_s.append(answer["seconds"])
    figures.cpu_s += prefill.tell("cpu") + decode.tell("cpu") - before
    if figures.connector == HURRAY:
        figures.transfer_s.append(sum(sum(each["seconds"]) for each in stats))
        figures.nbytes = sum(sum(each["nbytes"]) for each in stats)
        figures.lane = "+".join(sorted({lane for each in stats for lane in each["lanes"]}))
    else:
        figures.transfer_s.append(sum(sum(each["transfer_duration"]) for each in stats))
        figures.nbytes = int(sum(sum(each["bytes_transferred"]) for each in stats))
        figures.lane = "NIXL's UCX"


def _prompt(num_tokens: int) -> str:
    return " ".join(_WORDS[at % len(_WORDS)] + str(at % 7) for at in range(num_tokens // 2))


def _table(figures: list[Figures]) -> Table:
    table = Table(title="vLLM, prefill process to decode process; medians")
    for column in ("connector", "tokens", "MiB", "lane", "first token ms", "transfer ms", "CPU s a request"):
        table.add_column(column, justify="left" if column in ("connector", "lane") else "right")
    for each in figures:
        table.add_row(
            each.connector,
            str(each.num_tokens),
            f"{each.nbytes / 2**20:.1f}",
            each.lane,
            f"{statistics.median(each.first_token_s) * 1e3:.0f}",
            f"{statistics.median(each.transfer_s) * 1e3:.2f}",
            f"{each.cpu_s / len(each.first_token_s):.2f}",
        )
    return table


if __name__ == "__main__":
    main()
