"""The README's quickstart, run as printed: both sides, two real processes."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


def example(name: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if block.startswith(f"# {name}\n")]
    return str(found)


def port() -> int:
    """The one that is printed, unless somebody else listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for number in (7400, 0):
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", number))
                break
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("sender", ["prefill.py", "prefill_sync.py"])
def test_quickstart_runs_as_printed(tmp_path: Path, sender: str) -> None:
    address = f"127.0.0.1:{port()}"
    for name in ("decode.py", sender):
        (tmp_path / name).write_text(example(name).replace("127.0.0.1:7400", address))
    decode = subprocess.Popen(
        [sys.executable, tmp_path / "decode.py"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert decode.stdout is not None
        assert decode.stdout.readline() == f"listening on {address}\n"
        prefill = subprocess.run(
            [sys.executable, tmp_path / sender], capture_output=True, text=True, timeout=60, check=False
        )
        out, err = decode.communicate(timeout=30)
    finally:
        decode.kill()
        decode.communicate()
    assert (prefill.returncode, prefill.stderr) == (0, "")
    assert prefill.stdout in {f"4 pages for 6 table entries over {lane}\n" for lane in ("sysv", "posix")}
    assert (decode.returncode, err) == (0, "")
    key_line, token_line = out.splitlines()
    # Pages 2, 3, 7, 9 of the sender get pages 0 to 3 of the empty pool.
    assert key_line == "req-17 [40 45] [2 1 3 2 1 0]"
    assert token_line == "last key of sequence 1: [3 3 3 3]"


@pytest.mark.parametrize("command", ["./scripts/demo", "./scripts/test"])
def test_the_two_commands_come_first_and_exist(command: str) -> None:
    text = README.read_text()
    assert command in text.split("## ")[1]
    assert (README.parent / command).stat().st_mode & 0o111
