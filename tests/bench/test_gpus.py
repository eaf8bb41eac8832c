"""What the doctor says of GPUs, by what the machine says of them; no GPU is needed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hurray_rdma.bench.findings import Verdict
from hurray_rdma.bench.gpu_trials import judge_lane, lane_between, try_gpus
from hurray_rdma.bench.gpus import Gpu, GpuFacts, check_gpus, distance, judge
from hurray_rdma.errors import TransportError

GPU = Gpu(
    name="H200",
    peers=(1, 2),
    gpu_direct=True,
    dma_buf=True,
    flushed=False,
    cards=("mlx5_0 (behind the same PCIe switch)", "mlx5_4 (behind another root of the host)"),
)
FACTS = GpuFacts(cuda="12.9", gpus=(GPU,), peer_memory=False, cupy=True)
CUDA = {"cuda_copy", "cuda_ipc", "tcp", "cma"}
RDMA = CUDA | {"rc_mlx5", "ud_mlx5"}


def test_a_good_machine() -> None:
    (finding,) = judge(FACTS, RDMA)
    assert finding.what == "GPU 0"
    assert finding.verdict is Verdict.OK
    for text in (
        "H200, CUDA 12.9",
        "reaches GPUs 1, 2",
        "network cards mlx5_0 (behind the same PCIe switch), mlx5_4",
        "to a process of this host go by cuda_ipc, to another host rc_mlx5 by dma-buf",
    ):
        assert text in finding.found


@pytest.mark.parametrize(
    ("changes", "transports", "verdict", "found", "fix"),
    [
        (({}, {}), CUDA, Verdict.OK, "to another host staged through the host", ""),
        (({"dma_buf": False}, {"peer_memory": True}), RDMA, Verdict.OK, "rc_mlx5 by nvidia_peermem", ""),
        (({"dma_buf": False}, {}), RDMA, Verdict.SLOW, "neither dma-buf nor nvidia_peermem", "modprobe nvidia_peermem"),
        (({"gpu_direct": False}, {"peer_memory": True}), RDMA, Verdict.SLOW, "no GPUDirect RDMA", "pinned=True"),
        (({"dma_buf": False, "cards": ()}, {}), CUDA, Verdict.OK, "network cards none", ""),
        (({}, {}), {"tcp", "cma"}, Verdict.SLOW, "staged through the host, to another", "libucx-cu12"),
        (({"flushed": True}, {}), RDMA, Verdict.OK, "flushed before kernels see it", ""),
        (({}, {"cupy": False}), RDMA, Verdict.NOTE, "CuPy is not installed", "hurray-rdma[gpu]"),
    ],
)
def test_what_is_slow_comes_with_the_reason_and_the_fix(
    changes: tuple[dict[str, object], dict[str, object]], transports: set[str], verdict: Verdict, found: str, fix: str
) -> None:
    gpu, facts = changes
    changed = replace(FACTS, gpus=(replace(GPU, **gpu),), **facts)  # type: ignore[arg-type]
    (finding,) = judge(changed, transports)
    assert (finding.verdict, found in finding.found, fix in finding.fix) == (verdict, True, True), finding
    assert bool(finding.fix) == (verdict is not Verdict.OK)


def test_a_machine_without_gpus_is_well() -> None:
    (finding,) = judge(replace(FACTS, gpus=()), RDMA)
    assert (finding.verdict, finding.found) == (Verdict.OK, "none, though there is a driver (CUDA 12.9)")
    assert all(each.verdict in (Verdict.OK, Verdict.NOTE, Verdict.SLOW) for each in check_gpus(CUDA))


def test_devices_at_different_roots_are_far() -> None:
    assert distance(("pci0000:16", "0000:17:00.0"), ("pci0000:97", "0000:98:00.0")) == 2
    assert distance(("pci0000:16", "0000:17:00.0"), ("pci0000:16", "0000:18:00.0")) == 1
    switch = ("pci0000:16", "0000:16:01.0", "0000:17:00.0", "0000:18:00.0")
    assert distance((*switch, "0000:19:00.0"), (*switch, "0000:1b:00.0")) == 0


def test_gpus_that_cannot_reach_each_other_are_named() -> None:
    alone = replace(GPU, peers=(2,))
    finding, *_ = judge(replace(FACTS, gpus=(alone, alone, alone)), RDMA)
    assert (
        "to a process of this host go by cuda_ipc (but staged through the host to GPUs 1), to another" in finding.found
    )


def test_the_lane_that_pages_took_is_judged() -> None:
    lanes = ("cuda_ipc", "rc_mlx5", "posix (staged)", "rc_mlx5 (expected)")
    judged = {lane: judge_lane("pages", lane) for lane in lanes}
    assert [each.verdict for each in judged.values()] == [Verdict.OK, Verdict.OK, Verdict.SLOW, Verdict.NOTE]
    assert "through the host" in judged["posix (staged)"].found
    assert "nvidia-smi topo" in judged["posix (staged)"].fix
    assert judge_lane("pages", "cuda_ipc (expected)").verdict is Verdict.NOTE, "nobody has told"


def test_the_trial_sends_pages_to_another_process() -> None:
    """As it does between GPUs, on the host."""
    assert lane_between("cpu", "cpu") in {"sysv", "posix"}


def test_nothing_is_tried_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise TransportError("there is no CUDA driver here")

    monkeypatch.setattr("hurray_rdma.bench.gpu_trials.driver", no_driver)
    assert try_gpus() == []


def test_a_trial_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str, other: str) -> str:
        raise TransportError(f"{device} is not what {other} is")

    monkeypatch.setattr("hurray_rdma.bench.gpu_trials.driver", lambda: SimpleNamespace(num_devices=3))
    monkeypatch.setattr("hurray_rdma.bench.gpu_trials.lane_between", fails)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    findings = try_gpus()
    assert [each.what for each in findings] == [
        "pages from cuda:0 to cuda:0 of another process",
        "pages from cuda:0 to cuda:1 of another process",
    ]
    assert all(each.verdict is Verdict.BROKEN and "is not what" in each.found for each in findings)
