"""What clients of two vLLM instances talk to as if they were one: asks prefill for the prompt, decode for the rest.

    python -m hurray_rdma.connectors.vllm.proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200

Knows vLLM's HTTP interface and that `kv_transfer_params` are passed on; what is in them is the connectors' business,
and pages never come here. Needs aiohttp, which vLLM brings along.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Annotated, Any

import aiohttp
import typer
from aiohttp import web

__all__ = ["main", "make_app"]

_log = logging.getLogger(__name__)

_MAX_REQUEST_NBYTES = 64 << 20
_CONNECT_S = 10.0
"""Time for a connection to an instance; what it computes takes as long as it takes."""
_HEALTH_S = 5.0
_EVENTS = "text/event-stream"
_PASSED_ON = ("Authorization", "X-Request-Id")


class _RefusedError(Exception):
    """An answer for the client in the place of the one that it wants."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(status, body)
        self.status, self.body, self.content_type = status, body, content_type

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body, content_type=self.content_type)


class _Proxy:
    """Handlers; `make_app` says the rest."""

    def __init__(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        self._sides = {"prefill": _urls(prefill), "decode": _urls(decode)}
        self._next = {side: itertools.cycle(urls) for side, urls in self._sides.items()}
        self._client: aiohttp.ClientSession

    async def connected(self, _app: web.Application) -> AsyncIterator[None]:
        """Connections to the instances, for as long as the proxy runs."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as self._client:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A prompt: to a prefill side, and with what that returned to a decode side."""
        headers = {"X-Request-Id": uuid.uuid4().hex} | _passed_on(request)
        try:
            body = await _body_of(request)
            if _fits(body):
                params = await self._prefill(request.path, body, headers)
                if params is None:
                    _log.warning("request %s: no pages came of the prefill side", headers["X-Request-Id"])
                else:
                    body["kv_transfer_params"] = params
            return await self._decode(request, body, headers)
        except _RefusedError as refusal:
            return refusal.response()

    async def models(self, request: web.Request) -> web.Response:
        """As a decode side says."""
        url = next(self._next["decode"])
        try:
            async with self._client.get(url + request.path, headers=_passed_on(request)) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
        except (aiohttp.ClientError, TimeoutError) as error:
            return _unreachable("decode", url, error).response()

    async def health(self, _request: web.Request) -> web.Response:
        """200 when all instances are well, else 503; which are not is in the body."""
        asked = [(side, url) for side, urls in self._sides.items() for url in urls]
        told = await asyncio.gather(*(self._health_of(url) for _, url in asked))
        state: dict[str, dict[str, str]] = {side: {} for side in self._sides}
        for (side, url), word in zip(asked, told, strict=True):
            state[side][url] = word
        return web.json_response(state, status=200 if all(word == "ok" for word in told) else 503)

    async def _health_of(self, url: str) -> str:
        try:
            async with asyncio.timeout(_HEALTH_S), self._client.get(f"{url}/health") as answer:
                return "ok" if answer.status == 200 else f"status {answer.status}"
        except TimeoutError:
            return f"no answer in {_HEALTH_S:.0f} s"
        except aiohttp.ClientError as error:
            return str(error)

    async def _prefill(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> dict[str, Any] | None:
        """Has the prompt computed; where its pages are."""
        asked = dict(body) | {"max_tokens": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
        for name in ("stream_options", "min_tokens"):
            asked.pop(name, None)
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        async with self._asked("prefill", path, asked, headers) as (url, answer):
            content = await _content_of("prefill", url, answer)
            if answer.status != 200:
                raise _RefusedError(answer.status, content, answer.content_type)
            try:
                params: dict[str, Any] | None = json.loads(content)["kv_transfer_params"]
            except (ValueError, TypeError, KeyError) as error:
                raise _refusal(502, f"the prefill instance {url} does not answer as vLLM does: {error!r}") from error
            return params

    async def _decode(
        self, request: web.Request, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Passes on what the decode side says, as it comes."""
        async with self._asked("decode", request.path, body, headers) as (url, answer):
            if answer.content_type != _EVENTS:
                content = await _content_of("decode", url, answer)
                return web.Response(status=answer.status, body=content, content_type=answer.content_type)
            response = web.StreamResponse(status=answer.status, headers={"Content-Type": _EVENTS})
            await response.prepare(request)
            async for piece in _pieces_of(url, answer):
                await response.write(piece)
            await response.write_eof()
            return response

    @contextlib.asynccontextmanager
    async def _asked(
        self, side: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[str, aiohttp.ClientResponse]]:
        """The instance whose turn it is, or the next one where it does not listen; and its answer, as soon as that
        begins. It is cut off when the block ends before it."""
        for left in reversed(range(len(self._sides[side]))):
            url = next(self._next[side])
            try:
                answer = await self._client.post(url + path, json=body, headers=headers)
            except aiohttp.ClientConnectorError as error:  # nothing was asked yet: another one may be
                refusal = _unreachable(side, url, error)
                if not left:
                    raise refusal from error
            except (aiohttp.ClientError, TimeoutError) as error:
                raise _unreachable(side, url, error) from error
            else:
                break
        async with answer:
            yield url, answer


def make_app(prefill: Iterable[str], decode: Iterable[str]) -> web.Application:
    """The proxy, to be run with ``handler_cancellation=True``: a client that goes away ends its request everywhere.

    It answers ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models`` and ``/health``. An instance's error is
    passed on with its status; 502 says which one could not be reached, or broke off.

    Args:
        prefill: URLs of instances that compute prompts, which take turns.
        decode: URLs of those that continue them.
    """
    proxy = _Proxy(prefill, decode)
    app = web.Application(client_max_size=_MAX_REQUEST_NBYTES)
    app.cleanup_ctx.append(proxy.connected)
    app.router.add_post("/v1/completions", proxy.complete)
    app.router.add_post("/v1/chat/completions", proxy.complete)
    app.router.add_get("/v1/models", proxy.models)
    app.router.add_get("/health", proxy.health)
    return app


def main(
    prefill: Annotated[list[str], typer.Option(help="URL of an instance that computes prompts; may be repeated.")],
    decode: Annotated[list[str], typer.Option(help="URL of an instance that continues them; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
) -> None:
    """Joins vLLM instances that compute prompts with ones that continue them; clients talk to it as to one vLLM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    web.run_app(make_app(prefill, decode), host=host, port=port, handler_cancellation=True)


def _passed_on(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}


async def _content_of(side: str, url: str, answer: aiohttp.ClientResponse) -> bytes:
    try:
        content: bytes = await answer.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _unreachable(side, url, error) from error
    return content


async def _pieces_of(url: str, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Of a decode side's stream; an error as vLLM tells one in a stream, if it breaks off."""
    try:
        async for piece in answer.content.iter_any():
            yield piece
    except (aiohttp.ClientError, TimeoutError) as error:
        yield b"data: " + _unreachable("decode", url, error).body + b"\n\ndata: [DONE]\n\n"


async def _body_of(request: web.Request) -> dict[str, Any]:
    """What the client asks; where pages are is not the client's to say."""
    try:
        body = await request.json()
    except ValueError as error:
        raise _refusal(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _refusal(400, "the body must be a JSON object")
    body.pop("kv_transfer_params", None)
    return body


def _fits(body: Mapping[str, Any]) -> bool:
    """Whether one prompt becomes one answer. Others are for the decode side alone: pages are handed over once, and what
    is asked about the prompt itself comes of computing it."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt)
    unfit = any(body.get(name) for name in ("echo", "prompt_logprobs", "use_beam_search", "prompt_embeds"))
    return not several and not unfit and body.get("n") in (None, 1)


def _urls(urls: Iterable[str]) -> list[str]:
    return [url.rstrip("/") for url in urls]


def _refusal(status: int, message: str) -> _RefusedError:
    """In the shape of vLLM's own errors."""
    kind = "BadRequestError" if status == 400 else "BadGatewayError"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return _RefusedError(status, json.dumps({"error": error}).encode())


def _unreachable(side: str, url: str, error: Exception) -> _RefusedError:
    _log.error("%s instance %s: %r", side, url, error)
    return _refusal(
        502, f"the {side} instance {url} could not be reached, or broke off: {error or type(error).__name__}"
    )


if __name__ == "__main__":
    typer.run(main)
