"""``hurray-rdma serve``: a receiver for `hurray-rdma bench --connect`, or for a first trial of one's own sender."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from hurray_rdma.cli.access import Authority, Certificate, PrivateKey, read_tls, read_token
from hurray_rdma.cli.progress import Bar
from hurray_rdma.errors import ConfigError

if TYPE_CHECKING:
    from hurray_rdma.bench import Served, Serving

__all__ = ["serve"]


def serve(
    *,
    listen: Annotated[
        str,
        typer.Option(metavar="HOST:PORT", help="Where to listen; beyond this host --token-file or --tls-ca is needed."),
    ] = "127.0.0.1:7400",
    token_file: Annotated[Path | None, typer.Option(help="File that holds the token that senders must show.")] = None,
    tls_cert: Certificate = None,
    tls_key: PrivateKey = None,
    tls_ca: Authority = None,
    lane: Annotated[str, typer.Option(help="UCX transports (UCX_TLS), e.g. tcp; else UCX chooses.")] = "",
    config: Annotated[
        str, typer.Option(help="two-machines, or a TOML file with a [serve] table: page sizes and memory.")
    ] = "two-machines",
) -> None:
    """Take transfers into pools of several page sizes and give their pages back, until SIGTERM or Ctrl-C.

    The pools take 2.5 GiB of memory, unless --config says otherwise.
    """
    from hurray_rdma import bench as room  # noqa: PLC0415 - loads UCX
    from hurray_rdma.control import ExposedError  # noqa: PLC0415

    settings = room.load_config(config).serve
    if settings is None:
        raise ConfigError("has no table [serve]", field="--config", value=config, fix="See bench-two-machines.toml")
    token = read_token(token_file)
    tls = read_tls(certificate=tls_cert, private_key=tls_key, authority=tls_ca, listens=True)
    needed = {" --token-file FILE": token, " --tls-ca PEM": tls, " --tls-cert PEM": tls_ca}
    proofs = "".join(option for option, asked in needed.items() if asked is not None)
    console = Console(highlight=False, soft_wrap=True)
    total_mib = settings.pool_mib * len(settings.page_nbytes)
    starting = contextlib.ExitStack()

    def tell(what: Serving | Served) -> None:
        if isinstance(what, room.Serving):
            starting.close()
            console.print(f"listening on {what.address}")
            sizes = ", ".join(f"{size:,}" for size in what.page_nbytes)
            console.print(f"pages of {sizes} bytes, {what.pool_nbytes / 2**20:,.0f} MiB each")
            for number, address in enumerate(what.reachable):
                console.print(f"{'or' if number else 'to send:'} hurray-rdma bench --connect {address}{proofs}")
        else:
            console.print(_line(what))
        console.file.flush()

    with starting:
        starting.enter_context(Bar(1, first=f"making pools of {total_mib:,} MiB in all"))
        try:
            total = asyncio.run(room.serve(settings, listen=listen, lane=lane, token=token, tls=tls, tell=tell))
        except KeyboardInterrupt:  # while it made the pools
            raise typer.Exit(130) from None
        except ExposedError as error:
            fix = "Give --token-file FILE, or --tls-cert and --tls-ca, or listen on 127.0.0.1"
            raise ConfigError(error.rule, field="--listen", value=listen, fix=fix) from error
    console.print("in all: " + _line(total))


def _line(served: Served) -> str:
    failed = f", {served.num_failed} failed" if served.num_failed else ""
    line = f"{served.num_arrivals:,} transfers{failed}, {served.nbytes / 2**20:,.1f} MiB in {served.seconds:.1f} s"
    return line + (f", over {' and '.join(served.lanes)}" if served.lanes else "")
