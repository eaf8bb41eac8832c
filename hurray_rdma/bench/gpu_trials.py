"""The doctor's trial of GPUs: pages go from one to another process of this machine, and UCX says what carried them.

`gpus` judges what the machine has; here it is tried. Needs CuPy where the devices are GPUs.
"""

from __future__ import annotations

import importlib.util

import numpy as np

from hurray_rdma.bench.findings import Finding, Verdict
from hurray_rdma.bench.gpu import receive
from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.demo import Supervisor
from hurray_rdma.errors import HurrayError, TransportError
from hurray_rdma.sync import Engine
from hurray_rdma.transport.cuda import driver

__all__ = ["judge_lane", "lane_between", "try_gpus"]

_SPEC = CacheSpec(num_layers=1, num_heads=8, head_dim=128, page_size=32, dtype="float16", roles=("fused",))
"""Pages of 64 KiB."""
_NUM_PAGES = 64
_DEADLINE_S = 60.0


def try_gpus() -> list[Finding]:
    """A finding for pages between two processes on the first GPU, and for those from the first to the second one."""
    try:
        num_gpus = driver().num_devices
    except TransportError:
        return []
    if importlib.util.find_spec("cupy") is None:
        return []
    return [_try("cuda:0", f"cuda:{other}") for other in range(min(2, num_gpus))]


def _try(device: str, other: str) -> Finding:
    what = f"pages from {device} to {other} of another process"
    try:
        lane = lane_between(device, other)
    except HurrayError as error:
        return Finding(what, Verdict.BROKEN, f"could not be sent: {error}", "Look at UCX_LOG_LEVEL=info")
    return judge_lane(what, lane)


def judge_lane(what: str, lane: str) -> Finding:
    """What a lane between GPUs of one host is worth."""
    if lane == "cuda_ipc":
        return Finding(what, Verdict.OK, f"{lane}: the GPUs copy them")
    if lane.endswith("(staged)"):
        fix = (
            "Look for cuda_ipc in `ucx_info -d`, for P2P in `nvidia-smi topo -p2p r`; in containers give both the "
            "same IPC and PID namespaces, and both GPUs (CUDA_VISIBLE_DEVICES)"
        )
        return Finding(what, Verdict.SLOW, f"{lane}: UCX copies them through the host", fix)
    if lane.endswith("(expected)"):
        fix = "Send pages of 64 KiB and more with UCX_PROTO_INFO=used, which prints what UCX takes"
        return Finding(what, Verdict.NOTE, f"{lane}: UCX has not told what carried them", fix)
    return Finding(what, Verdict.OK, f"{lane}: through the network card, not by cuda_ipc")


def lane_between(device: str, other: str) -> str:
    """What carries pages from a pool here to one of another process.

    Args:
        device: ``"cuda:N"``, or ``"cpu"``.
        other: of the other process.

    Raises:
        HurrayError: they cannot be sent.
    """
    with Supervisor(deadline_s=_DEADLINE_S) as supervisor:
        receiver = supervisor.start("other", receive, _SPEC, _NUM_PAGES, other, False)
        address = supervisor.receive(receiver, str)
        with (
            PagePool.allocate(_SPEC, _NUM_PAGES, device=device) as pool,
            Engine(pool) as engine,
            engine.connect(address) as peer,
        ):
            pages = np.random.default_rng(1).permutation(_NUM_PAGES)
            snapshot = Snapshot.from_block_tables(pool, [pages], seq_lens=[_NUM_PAGES * _SPEC.page_size])
            lane = peer.send(snapshot, pool="default").lane
        receiver.send("end")
        supervisor.finish(receiver)
    return lane
