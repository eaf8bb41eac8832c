"""``hurray-rdma bench``: options to settings, a progress bar meanwhile, table, JSON file and page afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hurray_rdma.cli.progress import Bar
from hurray_rdma.cli.token import read_token
from hurray_rdma.errors import ConfigError

__all__ = ["bench"]

_PIPED_WIDTH = 132


def bench(
    *,
    config: Annotated[
        str, typer.Option(help="quick, full, two-machines, or a TOML file (configs/bench-quick.toml explains one).")
    ] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Who takes part besides the engine: memcpy, cma, ucx_put, ucx_perftest, socket, nixl, mooncake. "
            "Repeat it for several; without it, those of the settings."
        ),
    ] = None,
    peer_python: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND=PATH", help="Python of the environment that has nixl or mooncake."),
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of every section.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Time budget of everything, seconds.")] = None,
    connect: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Send to a `hurray-rdma serve` on another machine.")
    ] = None,
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token of that serve.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write everything that was measured to this file.")] = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a page with plots into this folder: index.html.")
    ] = None,
) -> None:
    """Measure the engine beside memcpy, the kernel's ways and other engines, in turns, on this machine."""
    from hurray_rdma import bench as room  # noqa: PLC0415 - loads UCX
    from hurray_rdma.bench.table import print_report  # noqa: PLC0415
    from hurray_rdma.demo.report import check_json_path, write_json  # noqa: PLC0415

    if token_file is not None and connect is None:
        raise ConfigError(
            "has no meaning without --connect", field="--token-file", value=str(token_file), fix="Leave it out"
        )
    name = config or ("two-machines" if connect is not None else "quick")
    settings = room.load_config(
        name, overrides={"rounds": rounds, "deadline_s": deadline, "peers": None if peer is None else tuple(peer)}
    )
    check_json_path(json)
    if report is not None:
        room.check_report_folder(report)
    pythons = _pythons(peer_python or [])
    num_steps = room.num_steps(settings) if connect is None else room.num_remote_steps(settings)
    try:
        with Bar(num_steps) as bar:
            if connect is not None:
                told = room.run_remote(
                    settings, name=name, address=connect, token=read_token(token_file), on_step=bar.step
                )
            else:
                told = room.run_bench(settings, name=name, pythons=pythons, on_step=bar.step)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PIPED_WIDTH)
    print_report(told, console=console)
    if json is not None:
        write_json(told, json)
    if report is not None:
        console.print(f"The page: {room.write_page(told, report)}", highlight=False)


def _pythons(given: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for kind, _, path in pairs:
        if kind not in ("nixl", "mooncake") or not path:
            raise ConfigError(
                "must be nixl=PATH or mooncake=PATH", field="--peer-python", value=kind + ("=" + path) * bool(path)
            )
    return {kind: path for kind, _, path in pairs}
