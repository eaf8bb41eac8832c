"""The command line: help, version, exit codes, one line per failure."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from hurray_rdma.testing.commands import run_command


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hurray_rdma.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )


def test_version_and_help() -> None:
    assert run("--version").stdout == f"hurray-rdma {version('hurray-rdma')}\n"
    told = run("--help")
    assert told.returncode == 0
    assert "demo" in told.stdout
    told = run("demo", "--help")
    assert told.returncode == 0
    for option in ("--layers", "--sequences", "--lane", "--llm", "--json", "--config"):
        assert option in told.stdout


def test_help_loads_neither_ucx_nor_torch() -> None:
    script = "import sys, hurray_rdma.cli.main; sys.exit(bool({'libucx', 'ucxx', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--layers", "0"], "cache.num_layers = 0: "),
        (["--dtype", "bfloat17"], "'bfloat17'"),
        (["--model", "/nowhere.gguf"], "--model = '/nowhere.gguf': has no meaning without --llm"),
        (["--llm", "--layers", "3"], "--layers = '3': has no meaning with --llm"),
        (["--llm", "--sequences", "3"], "--sequences = '3': has no meaning with --llm"),
        (["--tokens-min", "500", "--tokens-max", "20"], "batch.tokens_max = 20: must be at least batch.tokens_min 500"),
        (["--config", "/absent.toml"], "'/absent.toml': cannot be read"),
        (["--json", "/absent/facts.json"], "--json = '/absent/facts.json'"),
        (["--seed", "-1"], "batch.seed = -1"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments: list[str], told: str) -> None:
    done = run_command("demo", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_without_arguments_it_says_what_there_is_and_where_to_begin() -> None:
    done = run()
    assert done.returncode == 2
    told = done.stdout + done.stderr
    assert "Begin with `hurray-rdma demo`" in told
    assert "..." not in told.partition("Commands:")[2]  # no line is cut


@pytest.mark.parametrize("command", ["demo", "bench", "serve"])
def test_one_word_for_transports(command: str) -> None:
    told = run_command(command, "--help").stdout
    assert "--tls " not in told
    assert ("--lane" in told) == (command != "bench")  # whose settings have it for each section
    assert ("--tls-ca" in told) == (command != "demo")  # which never leaves this machine


def test_usage_errors_are_exit_code_2() -> None:
    assert run_command("demo", "--layers", "many").returncode == 2
    assert run_command("dance").returncode == 2


def test_a_transport_that_does_not_exist_fails_with_its_name() -> None:
    done = run("demo", "--layers", "1", "--lane", "carrier_pigeon")
    assert done.returncode == 1
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_llm_without_its_extra_or_model_says_which_command_gets_it(tmp_path: Path) -> None:
    done = run_command("demo", "--llm", environment={"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 2
    assert "pip install" in done.stderr or "scripts/get-model" in done.stderr
