"""Other engines, where their environments are there: the pages of one worker arrive at the other."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from hurray_rdma.bench import perftest
from hurray_rdma.bench.external import KINDS, External, PeerFailedError, find_python
from hurray_rdma.bench.messages import Party

# Stands in for NIXL: says in a file what it was asked for, and tells the target through another.
FAKE_NIXL = """
import os, pathlib
LOG = pathlib.Path(__file__).parent.parent
class nixl_agent_config:
    def __init__(self, enable_prog_thread, backends):
        self.thread = enable_prog_thread
class nixl_agent:
    def __init__(self, name, config):
        self.thread, self.seen = config.thread, 0
    def register_memory(self, regions, kind):
        if os.environ.get("FAKE_NIXL_FAILS"):
            raise RuntimeError("no room to register")
        assert len(regions) == 1 and regions[0][0] % 2**21 == 0 and kind == "DRAM"
        self.base = regions[0][0]
    def get_agent_metadata(self):
        return str(os.getpid()).encode()
    def add_remote_agent(self, metadata):
        return metadata
    def make_connection(self, name): pass
    def remove_remote_agent(self, name): pass
    def release_xfer_handle(self, handle): pass
    def release_dlist_handle(self, handle): pass
    def prep_xfer_dlist(self, name, rows, kind):
        assert name == "NIXL_INIT_AGENT" or int(name) != os.getpid()
        return [tuple(row) for row in rows.tolist()]
    def make_prepped_xfer(self, operation, local, local_indices, remote, remote_indices, message):
        assert operation == "WRITE"
        return [(local[i][0] - self.base, remote[j], local[i][1]) for i, j in zip(local_indices, remote_indices)]
    def transfer(self, handle, message):
        with open(LOG / "asked", "a") as asked:
            asked.write(f"{self.thread} {[offset for offset, _, _ in handle]} {[n for _, _, n in handle]}\\n")
        with open(LOG / "told", "a") as told:
            told.write("x")
        return "PROC"
    def check_xfer_state(self, handle):
        return "DONE"
    def get_new_notifs(self):
        path = LOG / "told"
        total = path.stat().st_size if path.exists() else 0
        new, self.seen = total - self.seen, total
        return {"peer": [b"done"] * new} if new else {}
"""


@pytest.fixture
def fake_nixl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = tmp_path / "nixl_cu12"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "_api.py").write_text(FAKE_NIXL)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("party", [Party.NIXL, Party.NIXL_DEFAULT])
def test_workers_are_asked_for_the_pages_of_the_case(fake_nixl: Path, party: Party) -> None:
    assert find_python("nixl", given=sys.executable) == sys.executable
    src, dst = np.array([3, 0, 9], np.uint32), np.array([1, 15, 4], np.uint32)
    with External(party, python=sys.executable, lane="", cores=None, nbytes=16 * 4096, huge_pages=False) as external:
        external.prepare(src, dst, page_nbytes=4096)
        measured = external.measure(party, 2)
        external.contact(num_pages=16, page_nbytes=64)
    assert measured.seconds.shape == measured.usable_s.shape == (2,)
    assert measured.cpu_s is not None
    assert measured.cpu_s > 0
    threads = party is Party.NIXL_DEFAULT
    assert (fake_nixl / "asked").read_text().splitlines() == [
        f"{threads} [12288, 0, 36864] [4096, 4096, 4096]",
        f"{threads} [12288, 0, 36864] [4096, 4096, 4096]",
        f"{threads} [0] [64]",
    ]


def test_a_worker_that_fails_says_why(fake_nixl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NIXL_FAILS", "1")
    with pytest.raises(PeerFailedError, match="nixl's process ended: RuntimeError: no room to register"):
        External(Party.NIXL, python=sys.executable, lane="", cores=None, nbytes=4096, huge_pages=False)


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
