"""``hurray-rdma demo``: options to settings, a progress bar meanwhile, the report afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hurray_rdma.cli.output import JsonFile, Output
from hurray_rdma.cli.progress import Bar
from hurray_rdma.errors import ConfigError

__all__ = ["demo"]


def demo(
    *,
    layers: Annotated[int | None, typer.Option(help="Layers.")] = None,
    heads: Annotated[int | None, typer.Option(help="KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Elements per head.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens per page.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Element type, e.g. bfloat16 or float8_e4m3.")] = None,
    sequences: Annotated[int | None, typer.Option(help="Sequences in the batch.")] = None,
    tokens_min: Annotated[int | None, typer.Option(help="Tokens of the shortest sequence.")] = None,
    tokens_max: Annotated[int | None, typer.Option(help="Tokens of the longest sequence.")] = None,
    sharing: Annotated[int | None, typer.Option(help="Sequences that share a prefix.")] = None,
    shared_prefix: Annotated[int | None, typer.Option(help="Tokens of that prefix.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of lengths, page IDs and content.")] = None,
    rounds: Annotated[int | None, typer.Option(help="Transfers, each compared and beside a memcpy.")] = None,
    lane: Annotated[str | None, typer.Option(help="UCX transports (UCX_TLS), e.g. tcp; else UCX chooses.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Time budget of the whole demo, seconds.")] = None,
    llm: Annotated[
        bool, typer.Option("--llm", help="Move a real language model's cache and continue its text.")
    ] = False,
    model: Annotated[
        Path | None, typer.Option(help="GGUF file for --llm (default: what scripts/get-model got).")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file over the defaults of demo.toml.")] = None,
    json: JsonFile = None,
) -> None:
    """Move a paged KV cache between two processes on this machine, and compare every token of it.

    Without options: 10 sequences in a cache of Llama-3-8B's shape, 1.5 GiB of memory, about ten seconds.
    configs/demo.toml has all defaults.
    """
    from hurray_rdma import demo as room  # noqa: PLC0415 - loads UCX
    from hurray_rdma.demo import llm_report, report  # noqa: PLC0415

    made_up = {
        "--layers": layers,
        "--heads": heads,
        "--head-dim": head_dim,
        "--dtype": dtype,
        "--sequences": sequences,
        "--tokens-min": tokens_min,
        "--tokens-max": tokens_max,
        "--sharing": sharing,
        "--shared-prefix": shared_prefix,
    }
    ignored = {"--model": model} if not llm else made_up
    for option, value in ignored.items():
        if value is not None:
            raise ConfigError(
                f"has no meaning {'with' if llm else 'without'} --llm",
                field=option,
                value=str(value),
                fix="Leave it out",
            )
    settings = room.load_config(
        config,
        overrides={
            "cache": {
                "num_layers": layers,
                "num_heads": heads,
                "head_dim": head_dim,
                "page_size": page_size,
                "dtype": dtype,
            },
            "batch": {
                "num_sequences": sequences,
                "tokens_min": tokens_min,
                "tokens_max": tokens_max,
                "num_sharing": sharing,
                "shared_prefix_tokens": shared_prefix,
                "seed": seed,
            },
            "run": {"rounds": rounds, "lane": lane, "deadline_s": deadline},
            "llm": {"page_size": page_size, "rounds": rounds, "deadline_s": deadline},
        },
    )
    output = Output(json, wide=False)
    told: room.DemoReport | room.LlmReport
    try:
        with Bar(room.num_llm_steps(settings) if llm else room.num_steps(settings)) as bar:
            if llm:
                told = room.run_llm(settings, model=model, on_step=bar.step)
            else:
                told = room.run_demo(settings, on_step=bar.step)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if isinstance(told, room.LlmReport):
        llm_report.print_llm_report(told, console=output.console)
    else:
        report.print_report(told, console=output.console)
    output.write(told)
