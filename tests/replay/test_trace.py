"""Traces: what a line must be, what is said of one that is not, and what the made trace has."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hurray_rdma.errors import ConfigError
from hurray_rdma.replay.trace import parse_trace, read_trace
from tests.replay.traces import PUBLIC, line, lines_of, make_trace, needs_public


def test_requests_are_in_order_of_time_and_blocks_are_numbered_anew() -> None:
    trace = parse_trace(
        [line([900, 7], tokens=600, timestamp=4000, output=3), b"\n", line([900], timestamp=1000, output=2)],
        skip_malformed=False,
    )
    assert len(trace) == 2
    assert trace.lines.tolist() == [3, 1]
    assert trace.arrival_s.tolist() == [0.0, 3.0]
    assert trace.input_tokens.tolist() == [512, 600]
    assert trace.output_tokens.tolist() == [2, 3]
    assert [trace.blocks_of(each).tolist() for each in (0, 1)] == [[0], [0, 1]]
    assert trace.num_blocks == 2
    assert trace.ragged.tolist() == [False, True]
    assert trace.lengths.tolist() == [1, 2]


BAD = {
    b"{": "truncated",
    b"[]": "Expected `object`",
    b'{"timestamp": 0, "input_length": 5, "output_length": 1}': "hash_ids",
    line([1, 2], tokens=512): "len(hash_ids) = 2: must be 1 for input_length 512",
    line([1], tokens=513): "len(hash_ids) = 1: must be 2 for input_length 513",
    line([1, 1]): "has an ID twice",
    line([], tokens=0): "input_length",
    line([1], timestamp=-1): "timestamp",
    line([1], output=-1): "output_length",
    line([1]).replace(b"512", b'"many"'): "Expected `int`, got `str`",
    b"\xff\xfe": "malformed",
    b'{"more": ' + b"[" * 100_000: "nested too deep",
    b"\xef\xbb\xbf" + line([1]): "byte order mark",
    line([3, 1]): "hash_ids[1] = 1: stands first in line 1",
    line([9, 8], tokens=600): "hash_ids[1] = 8: has 88 tokens here and 512 in line 2",
    line([7, 8]): "hash_ids[1] = 8: comes after 9 in line 2",
}


@pytest.mark.parametrize("bad", BAD, ids=range(len(BAD)))
def test_a_malformed_line_is_fatal_or_skipped_and_named_by_its_number(bad: bytes) -> None:
    lines = [line([1]), line([9, 8]), bad, line([2])]
    with pytest.raises(ConfigError, match=r"some\.jsonl.*line 3 is no request") as caught:
        parse_trace(lines, skip_malformed=False, name="some.jsonl")
    assert BAD[bad] in str(caught.value)
    trace = parse_trace(lines, skip_malformed=True)
    assert trace.lines.tolist() == [1, 2, 4]
    (malformed,) = trace.malformed
    assert malformed.line == 3
    assert BAD[bad] in malformed.rule


def test_a_limit_counts_requests_and_reads_no_further() -> None:
    trace = parse_trace([b"no", line([1]), line([2]), b"never read"], skip_malformed=True, limit=2)
    assert trace.lines.tolist() == [2, 3]
    assert [each.line for each in trace.malformed] == [1]


def test_a_trace_without_requests_or_without_a_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must have a request: it has none, and 1 malformed lines"):
        parse_trace([b"no"], skip_malformed=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "absent", skip_malformed=True)


def test_the_made_trace_has_shared_prefixes_bursts_and_repeats(tmp_path: Path) -> None:
    path = make_trace(tmp_path, requests=300)
    assert path.read_bytes() == make_trace(tmp_path, requests=300).read_bytes()
    lines = lines_of(path)
    trace = read_trace(path, skip_malformed=False)
    assert len(trace) == len(lines) == 300
    first = Counter(request["hash_ids"][0] for request in lines)
    assert len(first) == 3  # system prompts
    assert max(Counter(request["timestamp"] for request in lines).values()) >= 5
    words = Counter(json.dumps(request["hash_ids"]) for request in lines)
    assert sum(count - 1 for count in words.values()) >= 10
    # An ID stands for everything before it, too.
    before: dict[int, int | None] = {}
    for request in lines:
        for left, block in zip([None, *request["hash_ids"]], request["hash_ids"], strict=False):
            assert before.setdefault(block, left) == left


@needs_public
def test_the_public_trace_is_read_whole() -> None:
    trace = read_trace(PUBLIC, skip_malformed=False)
    lines = lines_of(PUBLIC)
    assert len(trace) == len(lines)
    assert trace.num_blocks == len({block for request in lines for block in request["hash_ids"]})
    assert int(trace.block_ptr[-1]) == sum(len(request["hash_ids"]) for request in lines)
    assert trace.malformed == ()
