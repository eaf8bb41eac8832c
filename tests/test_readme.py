"""The README's examples, run as printed: both sides, two real processes."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
LAST_KEY = "last key of sequence 1: [3 3 3 3]"


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


class Examples:
    """Runs examples that share an address."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.address = f"127.0.0.1:{port()}"

    def path(self, name: str) -> Path:
        path = self._folder / name
        path.write_text(example(name).replace("127.0.0.1:7400", self.address))
        return path

    @contextlib.contextmanager
    def started(self, name: str) -> Iterator[subprocess.Popen[str]]:
        """The side that listens, until it says so; killed at the end if it is still there."""
        pipe = subprocess.PIPE
        process = subprocess.Popen([sys.executable, self.path(name)], stdout=pipe, stderr=pipe, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline().endswith(f" {self.address}\n")
            yield process
        finally:
            process.kill()
            process.communicate()

    def run(self, name: str) -> str:
        done = subprocess.run(
            [sys.executable, self.path(name)], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout


@pytest.fixture
def examples(tmp_path: Path) -> Examples:
    return Examples(tmp_path)


@pytest.mark.parametrize("sender", ["prefill.py", "prefill_sync.py"])
def test_quickstart_runs_as_printed(examples: Examples, sender: str) -> None:
    with examples.started("decode.py") as decode:
        sent = examples.run(sender)
        out, err = decode.communicate(timeout=30)
    assert sent in {f"4 pages for 6 table entries over {lane}\n" for lane in ("sysv", "posix")}
    assert (decode.returncode, err) == (0, "")
    # Pages 2, 3, 7, 9 of the sender get pages 0 to 3 of the empty pool.
    assert out.splitlines() == ["req-17 [40 45] [2 1 3 2 1 0]", LAST_KEY]


def test_pull_runs_as_printed(examples: Examples) -> None:
    with examples.started("source.py") as source:
        assert examples.run("reader.py").splitlines() == ["[40 45] [2 1 3 2 1 0]", LAST_KEY]
        source.send_signal(signal.SIGINT)
        assert source.communicate(timeout=30) == ("", "")
    assert source.returncode == 0


def test_ctrl_c_ends_the_waiting_side_of_the_quickstart_without_a_traceback(examples: Examples) -> None:
    with examples.started("decode.py") as decode:
        decode.send_signal(signal.SIGINT)
        assert decode.communicate(timeout=30) == ("", "")
    assert decode.returncode == 0


@pytest.mark.parametrize("command", ["./scripts/demo", "./scripts/test"])
def test_the_two_commands_come_first_and_exist(command: str) -> None:
    text = README.read_text()
    assert command in text.split("## ")[1]
    assert (README.parent / command).stat().st_mode & 0o111
