"""What moves of pages on GPUs cost, beside copies of the same pages on one GPU and UCX's own benchmark.

Between two processes of this machine: GPU to GPU, and GPU to a page-locked pool on the host; and block tables rewritten
on the GPU. Needs CuPy and a GPU; ``scripts/bench-gpu`` runs it.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hurray_rdma.bench import perftest
from hurray_rdma.bench.measured import Stat
from hurray_rdma.bench.sections import Step
from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.demo import Supervisor
from hurray_rdma.demo.child import Link
from hurray_rdma.engine import Engine
from hurray_rdma.errors import ConfigError, HurrayError, TransportError
from hurray_rdma.plan import rewrite
from hurray_rdma.sync import Engine as SyncEngine

__all__ = ["GpuRow", "Place", "main", "measure_moves", "measure_tables"]

_ROUNDS = 9
_PAGE_NBYTES = (16 << 10, 64 << 10, 256 << 10)
_TRANSFER_NBYTES = 512 << 20
_TABLE_ENTRIES = 1_000_000
_DEADLINE_S = 300.0
_TOKEN_NBYTES = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where arrays are."""

    library: Any
    """CuPy, or NumPy."""
    device: str
    """Of the sending process: ``"cuda:0"``."""
    other: str
    """Of the receiving process."""
    wait: Callable[[], None]
    """Returns when the device has done all that it was given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow:
    """One thing that was measured."""

    what: str
    page_nbytes: int
    """0 where no pages were moved."""
    lane: str
    """What carried them; empty within one process."""
    seconds: Stat
    gib_per_s: float
    """0 where no pages were moved."""


def measure_moves(place: Place, *, page_nbytes: int, transfer_nbytes: int, rounds: int, step: Step) -> list[GpuRow]:
    """Scattered pages into other scattered pages, all parties in turn, round by round; the first round warms up.

    Raises:
        HurrayError: a transfer failed.
    """
    num_pages = transfer_nbytes // page_nbytes
    spec = CacheSpec(
        num_layers=1,
        num_heads=8,
        head_dim=128,
        page_size=page_nbytes // _TOKEN_NBYTES,
        dtype="float16",
        roles=("fused",),
    )
    random = np.random.default_rng(1)
    pages = random.permutation(2 * num_pages)[:num_pages]
    on_gpu = place.device != "cpu"
    step(f"pages of {page_nbytes:,} bytes: set up")
    with Supervisor(deadline_s=_DEADLINE_S) as supervisor:
        receivers = [
            supervisor.start("device", receive, spec, 2 * num_pages, place.other, False),
            supervisor.start("host", receive, spec, 2 * num_pages, "cpu", on_gpu),
        ]
        addresses = [supervisor.receive(each, str) for each in receivers]
        with (
            PagePool.allocate(spec, 2 * num_pages, device=place.device) as pool,
            SyncEngine(pool) as engine,
            engine.connect(addresses[0]) as to_device,
            engine.connect(addresses[1]) as to_host,
        ):
            snapshot = Snapshot.from_block_tables(pool, [pages], seq_lens=[num_pages * spec.page_size])
            source = pool.pages("fused", 0)
            gathered = place.library.empty_like(source[:num_pages])
            src_ids = place.library.asarray(pages)
            lanes: dict[str, str] = {}

            def copy_here() -> None:
                place.library.take(source, src_ids, axis=0, out=gathered)  # each byte read and written once
                place.wait()

            sends = {
                f"send to {place.other}, another process": to_device,
                f"send to a {'pinned ' * on_gpu}pool on the host, another process": to_host,
            }
            parties: dict[str, Callable[[], float]] = {
                name: lambda name=name, peer=peer: _timed(  # type: ignore[misc]
                    lambda: lanes.update({name: peer.send(snapshot, pool="default").lane})
                )
                for name, peer in sends.items()
            }
            parties["gather within one process"] = lambda: _timed(copy_here)
            parties["ucx_perftest"] = lambda: _put_s(page_nbytes, num_pages, "cuda" if on_gpu else "host")
            seconds: dict[str, list[float]] = {name: [] for name in parties}
            for number in range(rounds + 1):
                step(f"pages of {page_nbytes:,} bytes: round {number} of {rounds}")
                for name, party in parties.items():
                    seconds[name].append(party())
        for each in receivers:
            each.send("end")
            supervisor.finish(each)
    nbytes = num_pages * page_nbytes
    return [_row(name, page_nbytes, lanes.get(name, ""), each[1:], nbytes) for name, each in seconds.items()]


async def receive(link: Link, spec: CacheSpec, num_pages: int, device: str, pinned: bool) -> None:
    """The receiving process: takes what comes and gives its pages back, until it is told to end."""
    with PagePool.allocate(spec, num_pages, device=device, pinned=pinned) as pool:
        async with Engine(pool, listen="127.0.0.1:0") as engine:
            link.send(engine.address)

            async def take() -> None:
                async for arrival in engine.arrivals():
                    await arrival.snapshot()
                    arrival.release()

            taking = asyncio.create_task(take())
            await link.receive(str)
        await taking  # arrivals end with the engine


def measure_tables(place: Place, *, num_entries: int, rounds: int) -> list[GpuRow]:
    """A table of random pages, rewritten where it is, and on the host."""
    random = np.random.default_rng(2)
    table = random.integers(0, num_entries, num_entries).astype(np.int32)
    src, dst = np.arange(num_entries, dtype=np.uint32), random.permutation(num_entries).astype(np.uint32)
    tables = {f"rewrite of {num_entries:,} entries on {place.device}": place.library.asarray(table)}
    tables[f"rewrite of {num_entries:,} entries on the host, NumPy"] = table
    seconds: dict[str, list[float]] = {name: [] for name in tables}

    def work(each: Any) -> None:
        rewrite(each, src, dst, num_pages=num_entries)
        place.wait()

    for _ in range(rounds + 1):
        for name, each in tables.items():
            seconds[name].append(_timed(lambda each=each: work(each)))  # type: ignore[misc]
    return [_row(name, 0, "", each[1:], 0) for name, each in seconds.items()]


def _put_s(page_nbytes: int, num_pages: int, memory: str) -> float:
    path = perftest.binary()
    if path is None:
        raise TransportError("the libucx package has no ucx_perftest", fix="Install libucx-cu12 again")
    measured = perftest.measure(path, page_nbytes=page_nbytes, num_pages=num_pages, lane="", cores=None, memory=memory)
    return float(measured.seconds[0])


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _row(what: str, page_nbytes: int, lane: str, seconds: list[float], nbytes: int) -> GpuRow:
    stat = Stat.of(seconds)
    return GpuRow(what=what, page_nbytes=page_nbytes, lane=lane, seconds=stat, gib_per_s=nbytes / stat.median / 2**30)


def _this_place() -> Place:
    try:
        cupy = importlib.import_module("cupy")
        num_gpus = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # CuPy has an error of its own for each way of having no GPU
        raise ConfigError(f"no GPU can be used: {error}", fix="Run it on a machine with a GPU and CuPy") from error
    return Place(
        library=cupy, device="cuda:0", other=f"cuda:{1 % num_gpus}", wait=lambda: cupy.cuda.Device(0).synchronize()
    )


def main() -> int:
    """Prints a line for each measurement; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="scripts/bench-gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the same figures to this file")
    options = parser.parse_args()
    rows: list[GpuRow] = []
    try:
        place = _this_place()
        for page_nbytes in _PAGE_NBYTES:
            rows += measure_moves(
                place,
                page_nbytes=page_nbytes,
                transfer_nbytes=_TRANSFER_NBYTES,
                rounds=_ROUNDS,
                step=lambda text: print(f"... {text}", flush=True),
            )
        rows += measure_tables(place, num_entries=_TABLE_ENTRIES, rounds=_ROUNDS)
    except HurrayError as error:
        print(error)
        return 2
    for row in rows:
        print(_line(row))
    if options.json is not None:
        options.json.write_bytes(msgspec.json.encode(rows))
    return 0


def _line(row: GpuRow) -> str:
    lane = f" ({row.lane})" if row.lane else ""
    if not row.page_nbytes:
        return f"{row.seconds.median * 1e3:8.2f} ms               {row.what}"
    return f"{row.gib_per_s:8.2f} GiB/s  {row.page_nbytes >> 10:4} KiB  {row.what}{lane}"


if __name__ == "__main__":
    raise SystemExit(main())
