"""``hurray-rdma bench``: options to settings, a progress bar meanwhile, table, JSON file and page afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hurray_rdma.cli.access import Authority, Certificate, PrivateKey, read_tls, read_token
from hurray_rdma.cli.output import JsonFile, Output
from hurray_rdma.cli.progress import Bar
from hurray_rdma.errors import AuthenticationError, ConfigError

__all__ = ["bench"]


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
    tls_cert: Certificate = None,
    tls_key: PrivateKey = None,
    tls_ca: Authority = None,
    json: JsonFile = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a page with plots into this folder: index.html.")
    ] = None,
) -> None:
    """Measure the engine beside memcpy, the kernel's ways and other engines, in turns, on this machine.

    Under a minute without options; with --connect, between this machine and another.
    """
    from hurray_rdma import bench as room  # noqa: PLC0415 - loads UCX
    from hurray_rdma.bench.table import print_report  # noqa: PLC0415

    output = Output(json)
    access = {"--token-file": token_file, "--tls-cert": tls_cert, "--tls-key": tls_key, "--tls-ca": tls_ca}
    for option, path in access.items():
        if path is not None and connect is None:
            raise ConfigError("has no meaning without --connect", field=option, value=str(path), fix="Leave it out")
    token = read_token(token_file)
    tls = read_tls(certificate=tls_cert, private_key=tls_key, authority=tls_ca, listens=False)
    name = config or ("two-machines" if connect is not None else "quick")
    settings = room.load_config(
        name, overrides={"rounds": rounds, "deadline_s": deadline, "peers": None if peer is None else tuple(peer)}
    )
    if report is not None:
        room.check_report_folder(report)
    pythons = _pythons(peer_python or [])
    num_steps = room.num_steps(settings) if connect is None else room.num_remote_steps(settings)
    try:
        with Bar(num_steps) as bar:
            if connect is not None:
                told = room.run_remote(settings, name=name, address=connect, token=token, tls=tls, on_step=bar.step)
            else:
                told = room.run_bench(settings, name=name, pythons=pythons, on_step=bar.step)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except AuthenticationError as error:
        if token is None and tls is None:
            error.add_note("--token-file FILE has it read from a file; --tls-ca and --tls-cert are for certificates")
        raise
    print_report(told, console=output.console)
    output.write(told)
    if report is not None:
        output.console.print(f"The page: {room.write_page(told, report)}", highlight=False)


def _pythons(given: list[str]) -> dict[str, str]:
    pairs = [each.partition("=") for each in given]
    for kind, _, path in pairs:
        if kind not in ("nixl", "mooncake") or not path:
            raise ConfigError(
                "must be nixl=PATH or mooncake=PATH", field="--peer-python", value=kind + ("=" + path) * bool(path)
            )
    return {kind: path for kind, _, path in pairs}
