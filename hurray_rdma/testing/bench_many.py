"""``scripts/bench-many``: crowds of senders, one after the other, into a table. What it shows is measured in `many`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from hurray_rdma.cli.output import JsonFile, Output
from hurray_rdma.testing.chaos.words import Lane
from hurray_rdma.testing.many import crowd

__all__ = ["Row"]

_NUM_SENDERS = (1, 4, 16, 64)
_NUM_PAGES = 4
_WARM_UP = 3
_COUNTED_SENDS = 10
# How pages go, and pages that the receiver grants ahead: of each sender's two grants of 8 pages.
_WAYS: tuple[tuple[str, Lane, int], ...] = (
    ("mapped", "mapped", 0),
    ("mapped, granted ahead", "mapped", 16),
    ("tcp", "tcp", 0),
)
_IN_TIME = ("PING", "PONG")


@dataclass(frozen=True, slots=True)
class Row:
    """One crowd."""

    way: str
    num_senders: int
    num_processes: int
    kib_of_a_sender: float
    """Memory of its own that the receiver has for each."""
    files_of_a_sender: float
    threads_of_a_sender: float
    connect_messages: float
    """Of a sender, until it may send; both ways."""
    transfer_messages: float
    """Of a transfer, both ways."""
    transfers_per_s: float
    receiver_cpu_us: float
    """Of a transfer: processor time of the receiving process."""
    unfairness: float
    """The slowest sender's time for all of its sends over the fastest's."""


async def _row(way: str, lane: Lane, ahead_pages: int, *, num_senders: int, num_processes: int, num_sends: int) -> Row:
    processes, ahead = min(num_senders, num_processes), ahead_pages * num_senders
    counting = crowd(num_senders, num_processes=processes, lane=lane, ahead_pages=ahead, count_messages=True)
    async with counting as (everybody, _):
        connected = _num_messages(everybody.messages)
        await everybody.send(_WARM_UP, num_pages=_NUM_PAGES)
        before = _num_messages(everybody.messages)
        await everybody.send(_COUNTED_SENDS, num_pages=_NUM_PAGES)
        num_messages = _num_messages(everybody.messages) - before
    async with crowd(num_senders, num_processes=processes, lane=lane, ahead_pages=ahead) as (everybody, alone):
        await everybody.send(_WARM_UP, num_pages=_NUM_PAGES)
        warm = await everybody.footprint()
        sent = await everybody.send(num_sends, num_pages=_NUM_PAGES)
        held = await everybody.footprint()
    return Row(
        way=way,
        num_senders=num_senders,
        num_processes=processes,
        kib_of_a_sender=(held.anonymous_nbytes - alone.anonymous_nbytes) / num_senders / 1024,
        files_of_a_sender=(held.num_files - alone.num_files) / num_senders,
        threads_of_a_sender=(held.num_threads - alone.num_threads) / num_senders,
        connect_messages=connected / num_senders,
        transfer_messages=num_messages / (num_senders * _COUNTED_SENDS),
        transfers_per_s=num_senders * num_sends / sent.wall_s,
        receiver_cpu_us=(held.cpu_s - warm.cpu_s) / (num_senders * num_sends) * 1e6,
        unfairness=sent.unfairness,
    )


def _num_messages(messages: Mapping[str, int]) -> int:
    """Those that pass whatever the time."""
    return sum(count for name, count in messages.items() if not name.startswith(_IN_TIME))


def main(
    *,
    sends: Annotated[int, typer.Option(min=1, help="Transfers of each sender.")] = 100,
    processes: Annotated[int, typer.Option(min=1, help="Processes that the senders are spread over, at most.")] = 16,
    json: JsonFile = None,
) -> None:
    """Connect 1, 4, 16 and 64 senders to one receiver, and have all of them send at once."""
    output = Output(json)
    console = output.console
    rows: list[Row] = []
    with console.status("") as status:
        for way, lane, ahead_pages in _WAYS:
            for num_senders in _NUM_SENDERS:
                status.update(f"{way}: {num_senders} senders")
                rows.append(
                    asyncio.run(
                        _row(
                            way,
                            lane,
                            ahead_pages,
                            num_senders=num_senders,
                            num_processes=processes,
                            num_sends=sends,
                        )
                    )
                )
    _show(console, rows)
    output.write(rows)


def _show(console: Console, rows: list[Row]) -> None:
    table = Table(title=f"snapshots of {_NUM_PAGES} pages of 128 bytes, 3 layers", title_justify="left")
    for name in ("pages go", "senders", "processes"):
        table.add_column(name, justify="left" if name == "pages go" else "right")
    for name in ("KiB", "files", "threads", "messages"):
        table.add_column(f"{name}\nof a sender", justify="right")
    for name in ("messages\nof a transfer", "transfers/s", "receiver's\nCPU, us", "slowest /\nfastest"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.way,
            str(row.num_senders),
            str(row.num_processes),
            f"{row.kib_of_a_sender:,.0f}",
            f"{row.files_of_a_sender:.1f}",
            f"{row.threads_of_a_sender:.1f}",
            f"{row.connect_messages:.1f}",
            f"{row.transfer_messages:.1f}",
            f"{row.transfers_per_s:,.0f}",
            f"{row.receiver_cpu_us:,.0f}",
            f"{row.unfairness:.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
