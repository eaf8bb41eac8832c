"""Plans are made without UCX, asyncio or a device library being loaded."""

from __future__ import annotations

import subprocess
import sys


def test_planning_loads_neither_ucx_nor_asyncio() -> None:
    code = (
        "import sys, hurray_rdma.cache, hurray_rdma.plan\n"
        "loaded = {'hurray_rdma.transport', 'ucxx', 'libucx', 'asyncio', 'cupy', 'torch'} & set(sys.modules)\n"
        "sys.exit(repr(loaded) if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
