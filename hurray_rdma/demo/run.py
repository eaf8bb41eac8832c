"""The demo from the outside: starts both processes, leads them round by round, gathers the report. Moves no bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.demo.batch import Batch
from hurray_rdma.demo.config import DemoConfig
from hurray_rdma.demo.decode import decode
from hurray_rdma.demo.messages import Command, Compared, Copied, Drawn, Listening, Ready, Received, Sent
from hurray_rdma.demo.prefill import cache_spec, prefill
from hurray_rdma.demo.report import DemoReport, PageIdRow, Timing
from hurray_rdma.demo.supervisor import Supervisor

__all__ = ["Step", "num_steps", "run_demo"]

Step = Callable[[str], None]
"""Called with what happens next, `num_steps` times in all."""


def num_steps(config: DemoConfig) -> int:
    """How often `run_demo` reports a step."""
    return 2 + 3 * config.run.rounds


def run_demo(config: DemoConfig, *, on_step: Step) -> DemoReport:
    """Runs the demo; returns only if every byte of every round was equal.

    Args:
        config: what to do.
        on_step: progress.

    Raises:
        HurrayError: a setting is wrong, a process failed or died, time is up, or bytes differ (MismatchError).
    """
    spec = cache_spec(config)
    sent: list[Sent] = []
    copied: list[Copied] = []
    compared_nbytes = 0
    with Supervisor(deadline_s=config.run.deadline_s) as supervisor:
        on_step("drawing the batch")
        receiver = supervisor.start("decode", decode, config)
        sender = supervisor.start("prefill", prefill, config)
        batch = supervisor.receive(sender, Drawn).batch
        nbytes = len(batch.page_ids) * spec.page_nbytes * len(spec.tensors)
        on_step(f"filling {nbytes / 2**20:,.0f} MiB of source pages")
        supervisor.receive(sender, Ready)
        sender.send(supervisor.receive(receiver, Listening))
        for number in range(1, config.run.rounds + 1):
            where = f"round {number} of {config.run.rounds}:"
            on_step(f"{where} transfer")
            receiver.send(Command.TRANSFER)
            sender.send(Command.TRANSFER)
            sent.append(supervisor.receive(sender, Sent))
            received = supervisor.receive(receiver, Received)
            on_step(f"{where} memcpy of the same pages")
            sender.send(Command.COPY)
            copied.append(supervisor.receive(sender, Copied))
            on_step(f"{where} comparing every token")
            receiver.send(Command.COMPARE)
            compared_nbytes += supervisor.receive(receiver, Compared).nbytes
        for process in (sender, receiver):
            process.send(Command.FINISH)
            supervisor.finish(process)
    stats = sent[-1].stats
    return DemoReport(
        num_layers=spec.num_layers,
        num_tensors=len(spec.tensors),
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        dtype=spec.dtype,
        num_sequences=stats.num_sequences,
        num_tokens=stats.num_tokens,
        num_table_entries=stats.num_table_entries,
        num_pages=stats.num_pages,
        lane=stats.lane,
        path=stats.path,
        logical_nbytes=stats.logical_nbytes,
        sent_nbytes=stats.sent_nbytes,
        num_operations=stats.num_operations,
        compared_nbytes=compared_nbytes,
        timing=Timing.of(
            transfer_s=[message.stats.seconds for message in sent],
            write_s=[message.stats.write_seconds for message in sent],
            memcpy_s=[message.seconds for message in copied],
            nbytes=stats.sent_nbytes,
        ),
        block_tables=page_id_rows(batch, received.block_table, received.seq_ptr),
    )


def page_id_rows(batch: Batch, block_table: NDArray[np.uint32], seq_ptr: NDArray[np.uint32]) -> tuple[PageIdRow, ...]:
    """Each sequence's page IDs before and after, with the length of what it shares."""
    uses = np.bincount(np.concatenate(batch.block_tables), minlength=batch.pool_pages)
    return tuple(
        PageIdRow(
            seq=seq,
            num_tokens=int(batch.seq_lens[seq]),
            src_page_ids=tuple(source.tolist()),
            dst_page_ids=tuple(block_table[seq_ptr[seq] : seq_ptr[seq + 1]].tolist()),
            num_shared=int((uses[source] > 1).sum()),
        )
        for seq, source in enumerate(batch.block_tables)
    )
