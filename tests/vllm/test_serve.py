"""`vllm serve` twice and the proxy before them, by the README's own lines: over HTTP, each with an engine process.

The servers take a minute to start, and all tests share them; the last one kills the prefill side.
"""

from __future__ import annotations

import http.client
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hurray_rdma.testing.vllm_servers import Server, free_port, vllm_serve
from tests.vllm.prompts import MODEL, PROMPTS

BLOCK = 32
BLOCK_NBYTES = 30 * 3 * 2 * 64 * BLOCK * 2
"""Of the model: layers, heads, keys and values, head size; in bfloat16."""
PROXY_PORT = 8000
"""Where the proxy listens unless it is told otherwise."""
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass
class Served:
    prefill: Server
    decode: Server
    proxy: Server


def commands(ports: dict[int, int]) -> list[list[str]]:
    """The lines of the README that start the two and the proxy, with other ports in the place of its own."""
    section = (Path(__file__).parents[2] / "README.md").read_text().partition("\n## vLLM\n")[2]
    block = section[section.index("    vllm serve MODEL") :].partition("\n\n")[0]
    for printed, port in ports.items():
        assert str(printed) in block or printed == PROXY_PORT
        block = block.replace(str(printed), str(port))
    return [shlex.split(line.replace("MODEL", MODEL)) for line in re.split(r"\n    (?=\S)", block.removeprefix("    "))]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    logs = tmp_path_factory.mktemp("logs")
    ports = {printed: free_port() for printed in (8100, 8200, PROXY_PORT)}
    first, second, third = commands(ports)
    assert (first[:2], second[:2], third[0]) == (["vllm", "serve"], ["vllm", "serve"], "python")
    with ExitStack() as running:
        prefill, decode = (
            running.enter_context(vllm_serve(line[2:], port=port, core=core, log=logs / f"{core}.log"))
            for core, (line, port) in enumerate(zip((first, second), ports.values(), strict=False))
        )
        port = ports[PROXY_PORT]
        command = [sys.executable, *third[1:], f"--port={port}"]
        before = running.enter_context(Server(command, port=port, log=logs / "proxy.log"))
        yield Served(prefill.ready(), decode.ready(), before.ready())


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "temperature": 0, "max_tokens": 6} | more


def chatted(prompt: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": prompt}
    return {"model": MODEL, "messages": [message], "temperature": 0, "max_completion_tokens": 6} | more


def answer(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, told = server.post(path, body)
    assert status == 200, told
    return dict(told)


def text_of(told: dict[str, Any]) -> str:
    choice = told["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def until(holds: Callable[[], bool], *, timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


class Stream:
    """One streamed answer."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", path, json.dumps(body | {"stream": True}), headers)
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200
        assert self._answer.headers["Content-Type"].startswith("text/event-stream")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._answer:
            if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                yield json.loads(line.removeprefix(b"data: "))

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


def test_the_same_text_as_from_one_and_the_metrics_say_what_was_moved(served: Served) -> None:
    names = ("vllm:hurray_transfer_seconds_count", "vllm:hurray_transfer_blocks_total")
    names = (*names, "vllm:hurray_resident_blocks_total", "vllm:hurray_transfer_bytes_total")
    before = {name: served.decode.metric(name) for name in names}
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
    status, text = served.prefill.get("/metrics")
    assert (status, "vllm:hurray_transfer_seconds_count" in text) == (200, True)


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
    status, told = served.proxy.post(TEXT, asked("too long " * 2000))
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
    stream = Stream(served.proxy, TEXT, asked("Count to a thousand: one, two,", max_tokens=900, ignore_eos=True))
    next(iter(stream))
    assert served.decode.metric("vllm:num_requests_running") == 1
    stream.close()
    until(lambda: served.decode.metric("vllm:num_requests_running") == 0)
    assert served.decode.metric("vllm:generation_tokens_total") - num_tokens < 900


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
