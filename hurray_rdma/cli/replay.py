"""``hurray-rdma replay``: options to settings, a progress bar meanwhile, table, JSON file and page afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hurray_rdma.cli.output import JsonFile, Output
from hurray_rdma.cli.progress import Bar

__all__ = ["replay"]


def replay(
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="A Mooncake trace: timestamp, input_length, output_length, hash_ids."),
    ],
    *,
    requests: Annotated[int | None, typer.Option(min=1, help="Take so many from the start of the trace.")] = None,
    skip_malformed: Annotated[
        bool, typer.Option("--skip-malformed", help="Report lines that are no requests and go on; else they are fatal.")
    ] = False,
    prefill: Annotated[int | None, typer.Option(help="Sending processes.")] = None,
    decode: Annotated[int | None, typer.Option(help="Receiving processes.")] = None,
    prefill_pages: Annotated[int | None, typer.Option(help="Pages of each sending process.")] = None,
    decode_pages: Annotated[int | None, typer.Option(help="Pages of each receiving process.")] = None,
    in_flight: Annotated[int | None, typer.Option(help="Requests that a sending process sends at a time.")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens that a block of 512 becomes.")] = None,
    speed: Annotated[
        float | None, typer.Option(help="How many times as fast as the trace was; inf: as fast as it goes.")
    ] = None,
    kill_decode_at: Annotated[
        int | None, typer.Option(help="SIGKILL a receiving process once so many requests are through; start it again.")
    ] = None,
    lane: Annotated[str | None, typer.Option(help="UCX transports (UCX_TLS), e.g. tcp; else UCX chooses.")] = None,
    deadline: Annotated[float | None, typer.Option(help="Time budget of everything, seconds.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file over the defaults of replay.toml.")] = None,
    json: JsonFile = None,
    report: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write a page with plots into this folder: index.html.")
    ] = None,
) -> None:
    """Send the requests of a production trace from prefill to decode processes; exit code 1 if anything is wrong.

    Without options: 20 times as fast as it was, two processes of each kind. configs/replay.toml has all defaults.
    """
    from hurray_rdma import replay as room  # noqa: PLC0415 - loads UCX
    from hurray_rdma.bench import check_report_folder  # noqa: PLC0415

    settings = room.load_config(
        config,
        overrides={
            "cache": {"page_size": page_size},
            "workers": {
                "prefill": prefill,
                "decode": decode,
                "prefill_pages": prefill_pages,
                "decode_pages": decode_pages,
                "in_flight": in_flight,
            },
            "run": {"speed": speed, "lane": lane, "deadline_s": deadline},
        },
    )
    output = Output(json)
    if report is not None:
        check_report_folder(report)
    read = room.read_trace(trace, skip_malformed=skip_malformed, limit=requests)
    try:
        with Bar(room.NUM_STEPS, first="starting the workers") as bar:
            told = room.run_replay(settings, read, name=trace.name, kill_decode_at=kill_decode_at, on_step=bar.step)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    output.write(told)
    room.print_report(told, console=output.console)
    if report is not None:
        output.console.print(f"The page: {room.write_page(told, report)}", highlight=False)
    if told.problems:
        raise typer.Exit(1)
