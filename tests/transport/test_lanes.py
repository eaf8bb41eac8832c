"""Names of lanes, by what UCX reports of an endpoint on a machine with GPUs and network cards."""

from __future__ import annotations

import pytest

from hurray_rdma.engine.reach import Reach, reach_of
from hurray_rdma.transport.lanes import Lane, LaneReport, carried_by


def report(*rma: str, messages: tuple[str, ...] = ("posix",)) -> LaneReport:
    return LaneReport(
        rma=tuple(Lane(name, "device") for name in rma),
        messages=tuple(Lane(name, "device") for name in messages),
        error_handling=True,
    )


@pytest.mark.parametrize(
    ("lanes", "here", "there", "name", "reach"),
    [
        (report("cma", "cuda_ipc"), "cpu", "cpu", "cma", Reach.ADDRESS),
        (report("cma", "cuda_ipc"), "cuda:0", "cuda:1", "cuda_ipc (expected)", Reach.ADDRESS),
        (report("cma", "cuda_ipc"), "cuda:0", "cpu", "posix (staged)", Reach.ADDRESS),
        (report("cma"), "cuda:0", "cuda:0", "posix (staged)", Reach.ADDRESS),
        (report("tcp", messages=("tcp", "cuda_copy")), "cpu", "cuda:0", "tcp (staged)", Reach.ADDRESS),
        (report("rc_mlx5", "rc_mlx5", messages=("rc_mlx5",)), "cuda:0", "cuda:0", "rc_mlx5 (expected)", Reach.ADDRESS),
        (report("rc_mlx5", "cuda_ipc"), "cuda:0", "cuda:1", "cuda_ipc (expected)", Reach.ADDRESS),
        (report("rc_mlx5", "cma"), "cpu", "cuda:1", "rc_mlx5 (expected)", Reach.ADDRESS),
        (report("cuda_ipc", messages=("tcp",)), "cpu", "cpu", "tcp (emulated)", Reach.SOCKET),
    ],
)
def test_a_lane_is_named_by_the_memory_at_its_two_ends(
    lanes: LaneReport, here: str, there: str, name: str, reach: Reach
) -> None:
    assert lanes.name_between(here, there) == name
    assert reach_of("put", name) is reach


@pytest.mark.parametrize(
    ("said", "lane", "reach"),
    [
        (
            "{proto|cb|init} put(multi) from cuda memory length 65536 zero-copy cuda_ipc/cuda 9 MB/s",
            "cuda_ipc",
            Reach.ADDRESS,
        ),
        ("{cpml|proto} put(multi) from cuda/gpu0 length 65536 zero-copy cuda_ipc/cuda", "cuda_ipc", Reach.ADDRESS),
        ("put from host memory length 4096 software emulation posix/memory 11.9 MB/s", "posix (staged)", Reach.ADDRESS),
        ("put from cuda memory length 4096 software emulation rc_mlx5/mlx5_0:1", "rc_mlx5 (staged)", Reach.ADDRESS),
        (
            "put from cuda memory length 65536 zero-copy 50% on rc_mlx5/mlx5_0:1 and 50% on rc_mlx5/mlx5_1:1",
            "rc_mlx5",
            Reach.KEY,
        ),
        ("get into cuda memory length 64 copy-out dc_mlx5/mlx5_2:1 1 MB/s", "dc_mlx5", Reach.KEY),
    ],
)
def test_ucx_says_what_carries_memory_of_a_device(said: str, lane: str, reach: Reach) -> None:
    assert carried_by(said) == lane
    assert reach_of("put", lane) is reach


@pytest.mark.parametrize(
    ("lanes", "only_tcp", "queued"),
    [
        (report("cma"), False, False),
        (report("rc_mlx5", messages=("rc_mlx5",)), False, False),
        (report(), False, True),
        (report("cuda_ipc"), False, True),
        (report("cuda_ipc", "cma"), False, False),
        (report(messages=("posix", "tcp")), False, True),
        (report(messages=("ud_mlx5",)), False, False),
        (report("tcp", messages=("tcp",)), True, False),
        (report("cuda_ipc", messages=("tcp",)), True, False),
    ],
)
def test_what_host_memory_had_better_not_go_by(lanes: LaneReport, only_tcp: bool, queued: bool) -> None:
    assert (lanes.only_tcp, lanes.queued) == (only_tcp, queued)


def test_nothing_is_made_of_what_says_nothing() -> None:
    assert carried_by("") == ""
    assert carried_by("{cpml|cb} <no debug info> 3/4 of it, 12 MB/s") == ""


def test_emulated_puts_are_messages_whatever_carries_them() -> None:
    assert reach_of("put", "rc_mlx5 (emulated)") is Reach.SOCKET
    assert reach_of("put", "rc_mlx5") is Reach.KEY
