"""How a request becomes pages, keys and a worker."""

from __future__ import annotations

import numpy as np
import pytest

from hurray_rdma.errors import ConfigError
from hurray_rdma.replay import load_config
from hurray_rdma.replay.trace import parse_trace
from hurray_rdma.replay.work import Work, choose_workers
from tests.replay.traces import line


def work_of(*lines: bytes, **workers: int) -> Work:
    config = load_config(overrides={"workers": workers, "run": {"speed": 10.0, "token_ms": 20.0}})
    trace = parse_trace(lines, skip_malformed=False)
    return Work(config, trace, choose_workers(trace, config.workers.decode))


def test_a_block_becomes_a_page_and_one_that_is_not_full_a_page_that_is_not() -> None:
    lengths = {512: 8, 1024: 16, 513: 9, 1023: 15, 512 + 64: 9, 512 + 128: 10, 1: 1}
    work = work_of(
        *(line([10 * n + at for at in range(-(-tokens // 512))], tokens=tokens) for n, tokens in enumerate(lengths))
    )
    assert work.num_tokens.tolist() == list(lengths.values())
    for request, ragged in enumerate(work.trace.ragged):
        keys = work.keys_of(request)
        assert keys.shape == (len(work.trace.blocks_of(request)), 8)
        assert keys.any(axis=1).tolist() == [True] * (len(keys) - 1) + [not ragged]
        batch = work.batch_of(request)
        assert batch.seq_lens.tolist() == [work.num_tokens[request]]


def test_equal_blocks_have_equal_keys_and_others_have_not() -> None:
    work = work_of(line([5, 6, 7]), line([5, 6, 8]))
    first, second = work.keys_of(0), work.keys_of(1)
    assert (first == second).all(axis=1).tolist() == [True, True, False]
    assert len(np.unique(np.concatenate([first, second]), axis=0)) == 4


def test_times_are_compressed() -> None:
    work = work_of(line([1], timestamp=1000), line([2], timestamp=3000, output=100))
    assert work.due_s(1) == pytest.approx(0.2)
    assert work.decode_s(1) == pytest.approx(100 * 0.020 / 10)
    config = load_config(overrides={"run": {"speed": float("inf")}})
    fast = Work(config, work.trace, work.decode_of)
    assert (fast.due_s(1), fast.decode_s(1)) == (0.0, 0.0)


def test_requests_follow_most_of_their_prefix_and_else_the_least_load() -> None:
    trace = parse_trace(
        [
            line([0, 1, 2, 3]),  # new: worker 0
            line([0, 4, 5, 6]),  # the shared system prompt is less than half: the other worker
            line([0, 1, 2, 7]),  # most of the first
            line([0, 4, 5, 6, 8, 9, 10, 11]),  # half of the second
            line([0, 4, 20, 21, 22, 23]),  # less than half: worker 0 has 5 of its own, worker 1 7
        ],
        skip_malformed=False,
    )
    assert choose_workers(trace, 2).tolist() == [0, 1, 0, 1, 0]
    assert choose_workers(trace, 1).tolist() == [0] * 5


def test_headroom_is_the_largest_request_that_fits() -> None:
    lines = (line(list(range(9))), line(list(range(30))))
    assert work_of(*lines, decode_pages=100).headroom_pages == 30
    assert work_of(*lines, decode_pages=29).headroom_pages == 9


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"cache": {"page_size": 1}}, "cache.page_size = 1: must be 2 or more"),
        ({"workers": {"decode": 0}}, "workers.decode = 0"),
        ({"run": {"speed": 0}}, "run.speed = 0"),
        ({"run": {"pace": 3}}, "run.pace = 3: is no setting of the replay"),
    ],
)
def test_a_wrong_setting_is_named(overrides: dict[str, dict[str, int]], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(overrides=overrides)
