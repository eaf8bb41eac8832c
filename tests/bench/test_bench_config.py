"""Settings of the benchmark: the shipped files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hurray_rdma.bench import load_config, num_steps
from hurray_rdma.bench.config import RunConfig
from hurray_rdma.bench.run import needed_nbytes
from hurray_rdma.errors import ConfigError

RUN = "[run]\nrounds = 2\ndeadline_s = 9\nseed = 1\npeers = []\nhuge_pages = false\n"


@pytest.mark.parametrize("name", ["quick", "full", "two-machines"])
def test_the_shipped_files_are_right(name: str) -> None:
    config = load_config(name)
    assert config.sweep
    assert config.latency is not None
    assert (config.serve is not None) == (name == "two-machines")
    assert num_steps(config) > 0


def test_options_outrank_the_file_and_absent_sections_are_not_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(RUN + "[idle]\nseconds = 1\n")
    config = load_config(str(path), overrides={"rounds": 5, "peers": ("cma",), "deadline_s": None})
    assert (config.run.rounds, config.run.peers, config.run.deadline_s) == (5, ("cma",), 9.0)
    assert config.latency is None
    assert num_steps(config) == 1


def test_a_file_needs_nothing_but_what_is_to_be_measured(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[idle]\nseconds = 1\n")
    config = load_config(str(path), overrides={"rounds": None})
    assert config.run == RunConfig()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[run]\nrounds = 0\n", "run.rounds = 0: "),
        (
            RUN + "[latency]\npage_nbytes = 64\nnum_pages = [1]\nrepeats = 1\ncolour = 1\n",
            "latency.colour = 1: is no setting",
        ),
        (RUN + "[idle]\nseconds = 'long'\n", "idle.seconds = 'long': "),
        (RUN.replace("[]", "['nixxl']"), "run.peers = 'nixxl': must be one of memcpy, cma"),
        (RUN + "[[sweep]]\nlane = ''\npage_nbytes = [64]\ntransfer_mib = [1]\npatterns = ['zigzag']\n", "zigzag"),
        ("rounds = [", "is not TOML"),
        (
            "[run]\nround = 1\n",
            "run.round = 1: is no setting of the benchmark. There are rounds, deadline_s, seed, peers",
        ),
        (
            "[[sweep]]\nlanes = ''\n",
            "sweep[0].lanes = '': is no setting of the benchmark. There are lane, page_nbytes, transfer_mib, patterns",
        ),
        ("[idles]\n", "idles = {}: is no setting of the benchmark. There are run, sweep, latency"),
        ("[idle]\n", "idle = {}: Object missing required field `seconds`"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(str(path))
    assert told in str(caught.value)


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config = '/absent\.toml': does not exist"):
        load_config("/absent.toml")


def test_other_engines_have_memory_for_each_section(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(RUN + "[latency]\npage_nbytes = 64\nnum_pages = [1, 700]\nrepeats = 1\nahead_pages = 256\n")
    assert needed_nbytes(load_config(str(path))) == 64 * (2 * 700 + 256)
    path.write_text(RUN + "[latency]\npage_nbytes = 64\nnum_pages = [1]\nrepeats = 1\n")
    assert needed_nbytes(load_config(str(path))) == 64 * 1024
    path.write_text(RUN + "[contact]\npage_nbytes = 64\npool_pages = [100, 5000]\n")
    assert needed_nbytes(load_config(str(path))) == 64 * 5000
