"""Where reports go: a text and a file of facts, or the facts alone on standard output."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from hurray_rdma.cli.output import Output
from hurray_rdma.errors import ConfigError


@dataclass(frozen=True)
class Report:
    lane: str
    pages: tuple[int, ...]


REPORT = Report("sysv", (7, 4))


def test_a_file_gets_the_facts_and_standard_output_the_text(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    path = tmp_path / "facts.json"
    output = Output(path)
    output.console.print("a text")
    output.write(REPORT)
    assert json.loads(path.read_text()) == {"lane": "sysv", "pages": [7, 4]}
    assert capfdbinary.readouterr() == (b"a text\n", b"")


def test_a_dash_is_standard_output_which_then_has_nothing_else(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    output = Output(Path("-"))
    output.console.print("a text")
    output.write(REPORT)
    out, err = capfdbinary.readouterr()
    assert json.loads(out) == {"lane": "sysv", "pages": [7, 4]}
    assert err == b""
    assert list(tmp_path.iterdir()) == []


def test_nobody_wants_facts(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    output = Output(None)
    output.write(REPORT)
    assert capfdbinary.readouterr() == (b"", b"")


def test_a_file_that_cannot_be_written_is_known_before_the_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "facts.json"):
        with pytest.raises(ConfigError, match="--json"):
            Output(path)
