"""Names of lanes, by what UCX reports of an endpoint on a machine with GPUs and network cards."""

from __future__ import annotations

import pytest

from hurray_rdma.engine.reach import Reach, reach_of
from hurray_rdma.transport.lanes import Lane, LaneReport


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
        (report("cma", "cuda_ipc"), "cuda:0", "cuda:1", "cuda_ipc", Reach.ADDRESS),
        (report("cma", "cuda_ipc"), "cuda:0", "cpu", "posix (staged)", Reach.SOCKET),
        (report("cma"), "cuda:0", "cuda:0", "posix (staged)", Reach.SOCKET),
        (report("tcp", messages=("tcp", "cuda_copy")), "cpu", "cuda:0", "tcp (staged)", Reach.SOCKET),
        (report("rc_mlx5", "rc_mlx5", messages=("rc_mlx5",)), "cuda:0", "cuda:0", "rc_mlx5", Reach.KEY),
        (report("rc_mlx5", "cuda_ipc"), "cuda:0", "cuda:1", "cuda_ipc", Reach.ADDRESS),
        (report("rc_mlx5", "cma"), "cpu", "cuda:1", "rc_mlx5", Reach.KEY),
        (report("cuda_ipc", messages=("tcp",)), "cpu", "cpu", "tcp (emulated)", Reach.SOCKET),
    ],
)
def test_a_lane_is_named_by_the_memory_at_its_two_ends(
    lanes: LaneReport, here: str, there: str, name: str, reach: Reach
) -> None:
    assert lanes.name_between(here, there) == name
    assert reach_of("put", name) is reach
