"""``hurray-rdma serve``: a receiver for `hurray-rdma bench --connect`, or for a first trial of one's own sender."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hurray_rdma.cli.token import read_token
from hurray_rdma.errors import ConfigError

if TYPE_CHECKING:
    from hurray_rdma.bench import Served, Serving

__all__ = ["serve"]


def serve(
    *,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; beyond this host a token is needed.")
    ] = "127.0.0.1:7400",
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token that senders must show.")] = None,
    tls: Annotated[str, typer.Option(help="UCX transports, e.g. tcp; empty leaves the choice to UCX.")] = "",
    config: Annotated[
        str, typer.Option(help="two-machines, or a TOML file with a [serve] table: page sizes and memory.")
    ] = "two-machines",
) -> None:
    """Take transfers into pools of several page sizes and give their pages back, until SIGTERM or Ctrl-C."""
    from hurray_rdma import bench as room  # noqa: PLC0415 - loads UCX

    settings = room.load_config(config).serve
    if settings is None:
        raise ConfigError("has no table [serve]", field="--config", value=config, fix="See bench-two-machines.toml")
    console = Console(highlight=False)

    def tell(what: Serving | Served) -> None:
        if isinstance(what, room.Serving):
            sizes = ", ".join(f"{size:,}" for size in what.page_nbytes)
            console.print(f"listening on {what.address}", soft_wrap=True)
            console.print(
                f"pages of {sizes} bytes, {what.pool_nbytes / 2**20:,.0f} MiB each; "
                f"hurray-rdma bench --connect {what.address}",
                soft_wrap=True,
            )
        else:
            console.print(_line(what), soft_wrap=True)
        console.file.flush()

    total = asyncio.run(room.serve(settings, listen=listen, lane=tls, token=read_token(token_file), tell=tell))
    console.print("in all: " + _line(total), soft_wrap=True)


def _line(served: Served) -> str:
    failed = f", {served.num_failed} failed" if served.num_failed else ""
    line = f"{served.num_arrivals:,} transfers{failed}, {served.nbytes / 2**20:,.1f} MiB in {served.seconds:.1f} s"
    return line + (f", over {' and '.join(served.lanes)}" if served.lanes else "")
