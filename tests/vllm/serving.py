"""Pairs of `vllm serve` behind the proxy, started by the README's own lines, and what clients ask them over HTTP."""

from __future__ import annotations

import http.client
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hurray_rdma.testing.vllm_servers import Server, free_port, vllm_serve
from tests.vllm.prompts import MODEL

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


def commands(mode: str, replaced: Mapping[str, str]) -> list[list[str]]:
    """Lines of the README that start a pair and its proxy.

    Args:
        mode: ``pull`` or ``push``; the README has them in this order.
        replaced: what stands there, and what is to be in its place.
    """
    section = (Path(__file__).parents[2] / "README.md").read_text().partition("\n## vLLM\n")[2]
    pull, push = re.findall(r"\n\n    (vllm serve MODEL.*?)\n\n", section, re.DOTALL)
    block = {"pull": pull, "push": push}[mode]
    for printed, ours in replaced.items():
        assert printed in block
        block = block.replace(printed, ours)
    return [shlex.split(line.replace("\\\n", " ")) for line in re.split(r"\n    (?=\S)", block)]


@contextmanager
def serving(mode: str, replaced: Mapping[str, str], logs: Path, **settings: Any) -> Iterator[Served]:
    """The two and the proxy, all on other ports; arguments as of `commands` and `vllm_serve`."""
    ports = {printed: free_port() for printed in (8100, 8200, PROXY_PORT)}
    ours = {str(printed): str(port) for printed, port in ports.items() if printed != PROXY_PORT}
    first, second, third = commands(mode, ours | dict(replaced) | {" MODEL": f" {MODEL}"})
    assert (first[:2], second[:2], third[0]) == (["vllm", "serve"], ["vllm", "serve"], "python")
    with ExitStack() as running:
        prefill, decode = (
            running.enter_context(vllm_serve(line[2:], port=port, core=core, log=logs / f"{core}.log", **settings))
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


def until(holds: Callable[[], bool], *, timeout_s: float = 30, told: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, told()
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
