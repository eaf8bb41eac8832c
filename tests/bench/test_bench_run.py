"""The benchmark as a person runs it, tiny: what it prints and writes, who is left out. Time decides nothing here."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import hurray_rdma.bench.run
from hurray_rdma.bench import BenchReport, load_config, num_steps, run_bench
from hurray_rdma.bench.machine import own_addresses
from hurray_rdma.bench.messages import Party
from hurray_rdma.testing.commands import run_command

COMMAND = [sys.executable, "-m", "hurray_rdma.cli"]
TINY = """
[run]
rounds = 2
deadline_s = 110
seed = 5
peers = ["cma", "ucx_put", "socket"]
huge_pages = false

[[sweep]]
lane = ""
page_nbytes = [4096, 32768]
transfer_mib = [1]
patterns = ["random", "contiguous"]

[[sweep]]
lane = "tcp"
page_nbytes = [32768]
transfer_mib = [1]
patterns = ["fragmented"]

[latency]
page_nbytes = 32768
num_pages = [1, 8]
repeats = 5

[overlap]
num_layers = 4
layer_mib = 1
page_nbytes = 32768
compute_ratio = 1.0

[planning]
num_pages = [100]

[overhead]
page_nbytes = 64
num_pages = 1000

[contact]
page_nbytes = 64
pool_pages = [100, 1000]

[idle]
seconds = 0.1

[fresh]
mib = 4
page_nbytes = 32768
"""
ALWAYS = {Party.HURRAY, Party.HURRAY_CALLER, Party.HURRAY_PULL, Party.MEMCPY, Party.STREAM, Party.MAPPED}
WITHIN = ALWAYS | {Party.CMA, Party.UCX_PUT, Party.SOCKET}


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | environment,
    )


def test_a_run_end_to_end(tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts, folder = tmp_path / "facts.json", tmp_path / "page"
    done = run("bench", "--config", str(tiny), "--json", str(facts), "--report", str(folder))
    assert (done.returncode, done.stderr) == (0, "")

    report = msgspec.json.decode(facts.read_bytes(), type=BenchReport)
    cases = {(row.lane, row.pattern, row.page_nbytes, row.num_pages) for row in report.sweep}
    assert cases == {
        ("", "random", 4096, 256),
        ("", "random", 32768, 32),
        ("", "contiguous", 4096, 256),
        ("", "contiguous", 32768, 32),
        ("tcp", "fragmented", 32768, 32),
    }
    skipped = {each.party for each in report.skipped}
    assert skipped - {Party.CMA} == {Party.MAPPED}  # over tcp nothing is mapped; where ptrace is forbidden, no cma
    assert {row.lane for row in report.sweep if row.party is Party.MAPPED} == {""}
    for case in cases:
        rows = [row for row in report.sweep if (row.lane, row.pattern, row.page_nbytes, row.num_pages) == case]
        assert {row.party for row in rows} | skipped == WITHIN
        memcpy = next(row for row in rows if row.party is Party.MEMCPY)
        assert memcpy.ratio == 1.0
        for row in rows:
            assert row.seconds.count in (2, 4)  # who is quick is measured three times from the second round on
            assert row.seconds.min <= row.seconds.median <= row.seconds.max
            assert row.ratio <= memcpy.seconds.max / row.seconds.min + 1e-9
            assert row.ratio >= memcpy.seconds.min / row.seconds.max - 1e-9
            assert row.cpu_s_per_gib is not None
            assert row.direction == ("pull" if row.party is Party.HURRAY_PULL else "push")
    lanes = {(row.lane, row.party): row.carried_by for row in report.sweep}
    assert lanes["", Party.HURRAY].endswith(", mapped")
    assert lanes["tcp", Party.HURRAY] == "tcp, stream"
    # Each case sends everything once to each of two engines, and has it pulled once; the receiver compares it.
    sections = 3 * (32768 + 8 * 32768) + 4 * 2**20 + 1000 * 64 + 2 * 64 + 8 * 32768 + 4 * 2**20
    assert report.compared_nbytes == 3 * 5 * 2**20 + sections

    assert {(row.num_pages, row.party) for row in report.latency} >= {(1, Party.HURRAY), (8, Party.HURRAY)}
    assert all(row.count == 10 and row.min_us <= row.p50_us <= row.p99_us <= row.max_us for row in report.latency)
    assert report.overlap is not None
    assert report.overlap.possible == 0.75
    assert len(report.overlap.timeline) == 4
    for layer in report.overlap.timeline:
        assert 0 <= layer.computed[0] < layer.computed[1] <= layer.sent[0] < layer.sent[1]
        assert layer.sent[0] < layer.usable
    assert [row.num_pages for row in report.planning] == [100]
    assert report.overhead is not None
    assert report.overhead.us_per_page == pytest.approx(
        (report.overhead.send_s.median - report.overhead.memcpy_s.median) / 1000 * 1e6
    )
    assert [(row.party, row.pool_pages) for row in report.contact] == [(Party.HURRAY, 100), (Party.HURRAY, 1000)]
    assert report.idle is not None
    assert report.idle.cpu_share >= 0
    assert report.fresh is not None
    assert report.fresh.nbytes == 4 * 2**20

    assert "transfers over the lane that UCX chooses" in done.stdout
    assert "small transfers" in done.stdout
    page = (folder / "index.html").read_text()
    assert page.count("<svg") == 3 + 1 + 1  # two patterns and one more lane, latency, layers
    assert report.facts.cpu in page
    assert "src=" not in page
    assert "<link" not in page


def test_every_step_is_told_and_engines_that_are_not_installed_are_named(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hurray_rdma.bench.run, "find_python", lambda kind, given: None)
    tiny.write_text(TINY.partition('[[sweep]]\nlane = "tcp"')[0])
    config = load_config(str(tiny), overrides={"peers": ("nixl", "mooncake"), "rounds": 1})
    steps: list[str] = []
    report = run_bench(config, name="tiny", pythons={}, on_step=steps.append)
    assert len(steps) == num_steps(config)
    assert {each.party for each in report.skipped} == {Party.NIXL, Party.NIXL_DEFAULT, Party.MOONCAKE}
    for each in report.skipped:
        assert "not installed" in each.reason
        assert "scripts/bench-peers" in each.fix
    assert {row.party for row in report.sweep} == ALWAYS


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--config", "/absent.toml"], "--config = '/absent.toml': does not exist. Give quick, full"),
        (["--peer", "pigeon"], "run.peers = 'pigeon': must be one of"),
        (["--peer-python", "pigeon=/bin/true"], "--peer-python = 'pigeon=/bin/true'"),
        (["--peer", "nixl", "--peer-python", "nixl=/absent"], "cannot import nixl_cu12"),
        (["--token-file", "/absent"], "has no meaning without --connect"),
        (["--tls-ca", "/absent"], "--tls-ca = '/absent': has no meaning without --connect"),
        (["--connect", "127.0.0.1:9", "--tls-ca", "/absent"], "--tls-ca = '/absent': cannot be read"),
        (["--json", "/absent/facts.json"], "--json = '/absent/facts.json'"),
        (["--connect", "127.0.0.1:9", "--config", "quick"], "needs both processes on this machine"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments: list[str], told: str) -> None:
    done = run_command("bench", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


CERTIFICATES = Path(__file__).parents[1] / "control" / "tls"


def tls(name: str) -> list[str]:
    return ["--tls-ca", str(CERTIFICATES / "ca.pem"), "--tls-cert", str(CERTIFICATES / f"{name}.pem")]


@contextlib.contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """``hurray-rdma serve`` on a port of its own, and its address."""
    # Without a buffer: one may take more than the first line, and keep it from whoever reads the rest.
    server = subprocess.Popen(
        [*COMMAND, "serve", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    try:
        assert server.stdout is not None
        yield server, server.stdout.readline().decode().removeprefix("listening on ").strip()
    finally:
        server.kill()
        server.communicate()


def told_to_end(server: subprocess.Popen[bytes]) -> tuple[str, str]:
    """What it printed since, and its errors."""
    server.send_signal(signal.SIGTERM)
    printed, errors = server.communicate(timeout=30)
    return printed.decode(), errors.decode()


def test_two_machines(tmp_path: Path) -> None:
    path, facts = tmp_path / "two.toml", tmp_path / "facts.json"
    path.write_text(
        "[run]\nrounds = 2\ndeadline_s = 60\nseed = 1\npeers = []\nhuge_pages = false\n"
        "[[sweep]]\nlane = ''\npage_nbytes = [4096, 32768]\ntransfer_mib = [1]\npatterns = ['gather', 'contiguous']\n"
        "[latency]\npage_nbytes = 32768\nnum_pages = [1]\nrepeats = 5\n"
        "[serve]\npage_nbytes = [4096, 32768]\npool_mib = 2\n"
    )
    token = tmp_path / "token"
    token.write_text("a secret\n")
    shared = ["--config", str(path), "--token-file", str(token)]
    with serving("--listen", "127.0.0.1:0", *shared) as (server, address):
        done = run("bench", "--connect", address, *shared, "--json", str(facts))
        assert (done.returncode, done.stderr) == (0, "")
        refused = run("bench", "--connect", address, "--config", str(path))
        assert refused.returncode == 1
        assert "no token was given" in refused.stderr
        assert "--token-file FILE" in refused.stderr
        printed, errors = told_to_end(server)
    assert server.returncode == 0
    (warning,) = errors.splitlines()
    assert "refused: no token was given" in warning
    assert f"to send: hurray-rdma bench --connect {address} --token-file FILE\n" in printed
    report = msgspec.json.decode(facts.read_bytes(), type=BenchReport)
    assert report.peer == address
    assert {(row.pattern, row.page_nbytes) for row in report.sweep} == {
        (pattern, size) for pattern in ("gather", "contiguous") for size in (4096, 32768)
    }
    assert {row.party for row in report.sweep} == {Party.HURRAY, Party.MEMCPY, Party.STREAM}
    # Of each case a first transfer beside those measured; of the small ones a first, twenty to warm up, five a round.
    large = 4 + sum(row.seconds.count for row in report.sweep if row.party is Party.HURRAY)
    transfers, nbytes = large + 1 + 20 + 2 * 5, large * 2**20 + 31 * 32768
    total = printed.splitlines()[-1]
    assert total.startswith(f"in all: {transfers} transfers, {nbytes / 2**20:,.1f} MiB in ")
    assert total.endswith(", mapped")


SMALL_SERVE = "[run]\nrounds = 1\ndeadline_s = 60\nseed = 1\npeers = []\nhuge_pages = false\n" + (
    "[latency]\npage_nbytes = 4096\nnum_pages = [1]\nrepeats = 2\n[serve]\npage_nbytes = [4096]\npool_mib = 1\n"
)


def test_two_machines_with_certificates(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(SMALL_SERVE)
    config = ["--config", str(path)]
    with serving("--listen", "localhost:0", *config, *tls("server")) as (_, address):
        name = re.sub(r".*:", "localhost:", address)  # whom the certificate names
        done = run("bench", "--connect", name, *config, *tls("client"), "--json", "-")
        assert (done.returncode, done.stderr) == (0, "")
        assert msgspec.json.decode(done.stdout.encode(), type=BenchReport).latency
        stranger = run("bench", "--connect", name, *config, "--tls-ca", str(CERTIFICATES / "ca.pem"))
        assert stranger.returncode == 1
        assert "client certificate" in stranger.stderr
        plain = run("bench", "--connect", name, *config)
        assert plain.returncode == 1
        assert "whether it wants TLS" in plain.stderr


def test_a_receiver_that_is_killed_is_told_as_lost(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(SMALL_SERVE.replace("repeats = 2", "repeats = 1000000"))
    with serving("--listen", "127.0.0.1:0", "--config", str(path)) as (server, address):
        sending = subprocess.Popen(
            [*COMMAND, "bench", "--connect", address, "--config", str(path)], stderr=subprocess.PIPE, text=True
        )
        assert server.stdout is not None
        while b"transfers" not in server.stdout.readline():
            assert sending.poll() is None
        server.kill()
        _, told = sending.communicate(timeout=60)
    assert sending.returncode == 1
    assert f"the session with {address} was lost: " in told or f"{address} cannot be reached" in told
    assert "was lost: " in told


def test_serve_refuses_before_it_sets_anything_up(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(SMALL_SERVE.replace("pool_mib = 1", "pool_mib = 1000000"))  # no machine of ours has that
    for arguments, told in (
        (["--listen", "0.0.0.0:0"], "--listen = '0.0.0.0:0': anyone who reaches"),
        (["--listen", "0.0.0.0:0"], "Give --token-file FILE, or --tls-cert and --tls-ca, or listen on 127.0.0.1"),
        (["--listen", "no-such-host.invalid:0"], "the name cannot be resolved"),
        (["--tls-ca", str(CERTIFICATES / "ca.pem")], "needs --tls-cert"),
    ):
        done = run_command("serve", "--config", str(path), *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_port_in_use_is_known_before_it_sets_anything_up(tmp_path: Path) -> None:
    path, huge = tmp_path / "two.toml", tmp_path / "huge.toml"
    path.write_text(SMALL_SERVE)
    huge.write_text(SMALL_SERVE.replace("pool_mib = 1", "pool_mib = 1000000"))
    with serving("--listen", "127.0.0.1:0", "--config", str(path)) as (_, address):
        done = run_command("serve", "--listen", address, "--config", str(huge))
        assert done.returncode == 2
        assert "the port is in use" in done.stderr


def test_an_address_that_stands_for_all_is_told_as_one_that_others_can_use(tmp_path: Path) -> None:
    path, token = tmp_path / "two.toml", tmp_path / "token"
    path.write_text(SMALL_SERVE)
    token.write_text("a secret")
    with serving("--listen", "0.0.0.0:0", "--config", str(path), "--token-file", str(token)) as (server, address):
        printed, _ = told_to_end(server)
    port = address.removeprefix("0.0.0.0:")
    addresses = [each for each in own_addresses(ipv6=False) if not each.startswith("127.")] or ["0.0.0.0"]
    for each in addresses:
        assert f"hurray-rdma bench --connect {each}:{port} --token-file FILE" in printed
