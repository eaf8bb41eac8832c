"""Other engines, where their environments are there: the pages of one worker arrive at the other."""

from __future__ import annotations

import numpy as np
import pytest

from hurray_rdma.bench import perftest
from hurray_rdma.bench.external import KINDS, External, find_python
from hurray_rdma.bench.messages import Party


@pytest.mark.parametrize("party", [Party.NIXL, Party.NIXL_DEFAULT, Party.MOONCAKE])
def test_a_worker_moves_pages_and_tells_when(party: Party) -> None:
    python = find_python(KINDS[party], given=None)
    if python is None:
        pytest.skip(f"{KINDS[party]} is not installed: scripts/bench-peers {KINDS[party]}")
    src, dst = np.array([3, 0, 9], np.uint32), np.array([1, 15, 4], np.uint32)
    with External(party, python=python, lane="", cores=None, nbytes=16 * 4096, huge_pages=False) as external:
        external.prepare(src, dst, page_nbytes=4096)
        measured = external.measure(party, 3)
        assert (measured.seconds > 0).all()
        assert (measured.usable_s > 0).all()
        assert measured.seconds.shape == measured.usable_s.shape == (3,)
        if party is not Party.MOONCAKE:
            assert external.contact(num_pages=16, page_nbytes=4096) > 0


def test_ucx_perftest_is_in_the_wheel_and_tells_a_bandwidth() -> None:
    path = perftest.binary()
    if path is None:
        pytest.skip("this libucx package has no ucx_perftest")
    measured = perftest.measure(path, page_nbytes=32768, num_pages=200, lane="", cores=None)
    assert measured.seconds.shape == (1,)
    assert measured.seconds[0] > 0
    assert measured.cpu_s is None
