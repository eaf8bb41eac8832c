"""`vllm serve` twice and the proxy before them, by the README's own lines: over HTTP, each with an engine process.

The servers take a minute to start, and all tests share them; the last one kills the prefill side.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from hurray_rdma.testing.vllm_servers import Server
from tests.vllm.prompts import PROMPTS
from tests.vllm.serving import (
    BLOCK,
    BLOCK_NBYTES,
    CHAT,
    TEXT,
    Served,
    Stream,
    answer,
    asked,
    chatted,
    serving,
    text_of,
    until,
)

CONTEXT = 8192
"""Tokens of a request. A client that goes away leaves far more of them than a stall of a busy machine lasts."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving("pull", {}, tmp_path_factory.mktemp("logs"), max_model_len=CONTEXT) as servers:
        yield servers


def read_of(server: Server, what: str) -> float:
    return server.metric(f"vllm:hurray_read_{what}_total")


def test_the_same_text_as_from_one_and_the_metrics_say_what_was_moved(served: Served) -> None:
    names = ("vllm:hurray_transfer_seconds_count", "vllm:hurray_transfer_blocks_total")
    names = (*names, "vllm:hurray_resident_blocks_total", "vllm:hurray_transfer_bytes_total")
    before = {name: served.decode.metric(name) for name in names}
    read = {what: read_of(served.prefill, what) for what in ("prompts", "blocks", "bytes")}
    num_blocks = 0
    for path, make, prompts in ((TEXT, asked, PROMPTS), (CHAT, chatted, PROMPTS[:3])):
        for prompt in prompts:
            alone = answer(served.prefill, path, make(prompt))
            both = answer(served.proxy, path, make(prompt))
            assert text_of(both) == text_of(alone)
            assert both["usage"] == alone["usage"]
            num_blocks += -(-both["usage"]["prompt_tokens"] // BLOCK)
    num_requests = len(PROMPTS) + 3
    until(lambda: served.decode.metric(names[0]) - before[names[0]] >= num_requests)
    transfers, moved, resident, nbytes = (served.decode.metric(name) - before[name] for name in names)
    assert transfers == num_requests
    assert moved + resident == num_blocks
    assert moved > num_blocks / 2
    assert nbytes == moved * BLOCK_NBYTES
    assert served.decode.metric("vllm:hurray_failed_transfers_total") == 0
    # The side that was read from knows of it, too: of all blocks, for which were there it is not told.
    until(lambda: read_of(served.prefill, "prompts") - read["prompts"] >= num_requests)
    read = {what: read_of(served.prefill, what) - count for what, count in read.items()}
    assert read == {"prompts": num_requests, "blocks": num_blocks, "bytes": num_blocks * BLOCK_NBYTES}
    assert served.prefill.metric(names[0]) == 0, "it moves none itself"
    assert read_of(served.decode, "prompts") == 0


@pytest.mark.parametrize(("path", "make"), [(TEXT, asked), (CHAT, chatted)])
def test_streamed(served: Served, path: str, make: Callable[..., dict[str, Any]]) -> None:
    prompt = "A stream begins in the hills and"
    expected = text_of(answer(served.prefill, path, make(prompt)))
    with closing(Stream(served.proxy, path, make(prompt, stream_options={"include_usage": True}))) as stream:
        events = list(stream)
    choices = [event["choices"][0] for event in events if event["choices"]]
    pieces = [choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices]
    assert "".join(pieces) == expected
    assert events[-1]["usage"]["completion_tokens"] == 6


def test_at_once(served: Served) -> None:
    prompts = [f"Request {at}. {prompt}" for at, prompt in enumerate(PROMPTS[:6])]
    with ThreadPoolExecutor(len(prompts)) as clients:
        alone = [text_of(told) for told in clients.map(lambda each: answer(served.prefill, TEXT, asked(each)), prompts)]
        both = [text_of(told) for told in clients.map(lambda each: answer(served.proxy, TEXT, asked(each)), prompts)]
    assert both == alone


def test_what_vllm_refuses_is_passed_on(served: Served) -> None:
    status, told = served.proxy.post(TEXT, asked("too long " * CONTEXT))
    assert status == 400
    assert "maximum context length" in told["error"]["message"]
    assert served.proxy.post(TEXT, asked("x", model="of somebody else"))[0] == 404
    # Two answers to one prompt: by the decode side alone.
    before = served.decode.metric("vllm:hurray_transfer_seconds_count")
    told = answer(served.proxy, TEXT, asked("Two answers to", n=2, temperature=1))
    assert len(told["choices"]) == 2
    assert served.decode.metric("vllm:hurray_transfer_seconds_count") == before


def test_a_client_that_goes_away_ends_its_request(served: Served) -> None:
    num_tokens = served.decode.metric("vllm:generation_tokens_total")
    wanted = asked("Count to a thousand: one, two,", max_tokens=CONTEXT - 100, ignore_eos=True)
    stream = Stream(served.proxy, TEXT, wanted)
    next(iter(stream))
    assert served.decode.metric("vllm:num_requests_running") == 1
    stream.close()
    until(
        lambda: served.decode.metric("vllm:num_requests_running") == 0,
        told=lambda: f"proxy:\n{served.proxy.log()[-2000:]}\ndecode:\n{served.decode.log()[-2000:]}",
    )
    assert served.decode.metric("vllm:generation_tokens_total") - num_tokens < CONTEXT - 100


def test_prefill_killed(served: Served) -> None:
    """The last test. Decode, which has not read yet, computes the prompt, as its policy says; then the proxy tells."""
    prompt = "The prefill side of this request dies, and"
    expected = text_of(answer(served.prefill, TEXT, asked(prompt)))
    wanted = asked(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    params = answer(served.prefill, TEXT, wanted)["kv_transfer_params"]
    assert served.proxy.get("/health")[0] == 200
    served.prefill.kill()
    assert text_of(answer(served.decode, TEXT, asked(prompt, kv_transfer_params=params))) == expected
    until(lambda: served.decode.metric("vllm:hurray_failed_transfers_total") == 1)
    status, told = served.proxy.post(TEXT, asked(prompt))
    assert status == 502
    assert f"the prefill instance {served.prefill.url} could not be reached" in told["error"]["message"]
    status, health = served.proxy.get("/health")
    assert status == 503
    assert json.loads(health)["decode"] == {served.decode.url: "ok"}
    assert json.loads(health)["prefill"] != {served.prefill.url: "ok"}
