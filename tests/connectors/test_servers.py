"""Servers that tests start: what they leave in shared memory when they are killed."""

from __future__ import annotations

import sys
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from hurray_rdma.testing.vllm_servers import Server, free_port

PROGRAM = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.server.told.encode())

def serve(port):  # in a process of its own, as vLLM's engine is
    memory, lock = SharedMemory(create=True, size=4096), get_context("spawn").Lock()
    server = HTTPServer(("127.0.0.1", port), Handler)
    server.told = f"{memory.name} {lock._semlock.name}"
    server.serve_forever()

get_context("fork").Process(target=serve, args=(int(sys.argv[1]),)).start()
"""


@pytest.mark.parametrize("killed", [False, True])
def test_what_a_killed_server_left_is_removed_and_nothing_else(killed: bool, tmp_path: Path) -> None:
    port = free_port()
    other = SharedMemory(create=True, size=4096)
    try:
        command = [sys.executable, "-c", PROGRAM, str(port)]
        with Server(command, port=port, log=tmp_path / "log") as server:
            memory, lock = server.ready(timeout_s=30).get("/names")[1].split()
            files = [Path("/dev/shm", memory), Path(f"/dev/shm/sem.{lock.strip('/')}")]
            assert all(file.exists() for file in files)
            if killed:
                server.kill()
        assert not any(file.exists() for file in files)
        assert Path("/dev/shm", other.name).exists()
    finally:
        other.close()
        other.unlink()
