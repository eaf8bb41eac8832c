"""What clients of two vLLM instances talk to as if they were one: asks prefill for the prompt, decode for the rest.

    python -m hurray_rdma.connectors.vllm.proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8200

With `--push-to` for instances in push mode, which it asks both at once. Knows vLLM's HTTP interface and that
`kv_transfer_params` are passed on; what is in them is the connectors' business, and pages never come here. Needs
aiohttp, which vLLM brings along.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

try:
    import aiohttp
    from aiohttp import web
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    sys.exit("The proxy needs aiohttp, which vLLM brings along, and which is not installed: pip install aiohttp")

from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.handoff import push_params
from hurray_rdma.connectors.vllm.instances import Instances, RefusedError, refusal_of
from hurray_rdma.control import parse_address
from hurray_rdma.errors import ConfigError

__all__ = ["main", "make_app"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_REQUEST_NBYTES = 64 << 20
_CONNECT_S = 10.0
"""Time for a connection to an instance; what it computes takes as long as it takes."""
_EVENTS = "text/event-stream"
_PASSED_ON = ("Authorization", "X-Request-Id")


class _Proxy:
    """Handlers; `make_app` says the rest."""

    def __init__(
        self, prefill: Iterable[str], decode: Iterable[str], *, push_to: Sequence[Sequence[str]], token: str | None
    ) -> None:
        self._prefill, self._decode = Instances("prefill", prefill), Instances("decode", decode)
        self._push_to = dict(zip(self._decode.urls, push_to, strict=True)) if push_to else {}
        self._token = token

    async def connected(self, _app: web.Application) -> AsyncIterator[None]:
        """Connections to the instances, for as long as the proxy runs."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as client:
            self._prefill.client = self._decode.client = client
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """A prompt: to a prefill side, and to a decode side."""
        headers = {"X-Request-Id": uuid.uuid4().hex} | _passed_on(request)
        try:
            body = await _body_of(request)
            if not _fits(body):
                return await self._continue(request, body, headers)
            if self._push_to:
                return await self._push(request, body, headers)
            params = await self._compute(request.path, body, headers, {"do_remote_decode": True})
            return await self._continue(request, body if params is None else body | _with(params), headers)
        except RefusedError as refusal:
            return refusal.response()

    async def models(self, request: web.Request) -> web.Response:
        """As a decode side says."""
        url = next(self._decode.turn())
        try:
            async with self._decode.client.get(url + request.path, headers=_passed_on(request)) as answer:
                return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
        except (aiohttp.ClientError, TimeoutError) as error:
            return self._decode.unreachable(url, error).response()

    async def health(self, _request: web.Request) -> web.Response:
        """200 when all instances are well, else 503; which are not is in the body."""
        state: dict[str, dict[str, str]] = {}
        for instances in (self._prefill, self._decode):
            told = await asyncio.gather(*(instances.health_of(url) for url in instances.urls))
            state[instances.side] = dict(zip(instances.urls, told, strict=True))
        all_well = all(word == "ok" for words in state.values() for word in words.values())
        return web.json_response(state, status=200 if all_well else 503)

    async def _compute(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], params: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Has prefill compute a prompt; what it tells decode of its pages."""
        asked = dict(body) | {"max_tokens": 1, "stream": False} | _with(params)
        for name in ("stream_options", "min_tokens"):
            asked.pop(name, None)
        if "max_completion_tokens" in asked:
            asked["max_completion_tokens"] = 1
        async with self._prefill.asked(path, asked, headers) as (url, answer):
            content = await self._prefill.content_of(url, answer)
            if answer.status != 200:
                raise RefusedError(answer.status, content, answer.content_type)
            try:
                told: dict[str, Any] | None = json.loads(content)["kv_transfer_params"]
            except (ValueError, TypeError, KeyError) as error:
                raise refusal_of(502, f"the prefill instance {url} does not answer as vLLM does: {error!r}") from error
            if told is None:
                _log.warning("request %s: no pages came of the prefill side", headers["X-Request-Id"])
            return told

    async def _continue(
        self, request: web.Request, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> web.StreamResponse:
        """Decode's answer, after prefill's or without it."""
        async with self._decode.asked(request.path, body, headers) as (url, answer):
            return await self._passed_back(request, url, answer)

    async def _push(self, request: web.Request, body: dict[str, Any], headers: Mapping[str, str]) -> web.StreamResponse:
        """Asks prefill and the decode instance whose turn it is, or the next one where it does not listen."""
        refusal: RefusedError | None = None
        for url in self._decode.turn():
            try:
                response = await self._pushed(request, url, body, headers)
            except aiohttp.ClientConnectorError as error:
                refusal = self._decode.unreachable(url, error)
            else:
                # Where no pages come, what was asked of that instance is undone, and it would only have waited.
                return response if response is not None else await self._continue(request, body, headers)
        assert refusal is not None, "there are none"
        raise refusal

    async def _pushed(
        self, request: web.Request, url: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> web.StreamResponse | None:
        """Both at once, under a name that nobody can guess: pages come while prefill computes. None if none do."""
        name = uuid.uuid4().hex
        target = push_params(name, token=self._token, addresses=self._push_to[url])
        expecting = body | _with(push_params(name, token=self._token))
        async with contextlib.AsyncExitStack() as going:
            computing = await going.enter_async_context(_going(self._compute(request.path, body, headers, target)))
            decoding = await going.enter_async_context(_going(self._decode.post(url, request.path, expecting, headers)))
            going.callback(_cut_off, decoding)
            await asyncio.wait((computing, decoding), return_when=asyncio.FIRST_COMPLETED)
            if not decoding.done() and await computing is None:
                return None
            return await self._passed_back(request, url, await decoding)

    async def _passed_back(self, request: web.Request, url: str, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        """What decode says, as it comes."""
        if answer.content_type != _EVENTS:
            content = await self._decode.content_of(url, answer)
            return web.Response(status=answer.status, body=content, content_type=answer.content_type)
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": _EVENTS})
        await response.prepare(request)
        async for piece in self._decode.pieces_of(url, answer):
            await response.write(piece)
        await response.write_eof()
        return response


def make_app(
    prefill: Iterable[str], decode: Iterable[str], *, push_to: Sequence[Sequence[str]] = (), token: str | None = None
) -> web.Application:
    """The proxy, to be run with ``handler_cancellation=True``: a client that goes away ends its request everywhere.

    It answers ``/v1/completions``, ``/v1/chat/completions``, ``/v1/models`` and ``/health``. An instance's error is
    passed on with its status; 502 says which one could not be reached, or broke off.

    Args:
        prefill: URLs of instances that compute prompts, which take turns.
        decode: URLs of those that continue them.
        push_to: where the workers of each of ``decode`` listen, as ``host:port``, for instances in push mode; none is
            for those in pull mode.
        token: of all instances, in push mode; None is none.

    Raises:
        ConfigError: ``push_to`` is not one for each of ``decode``, or cannot be read.
    """
    decode = list(decode)
    if push_to and len(push_to) != len(decode):
        raise ConfigError(f"must be one for each of {len(decode)} decode", field="len(push_to)", value=len(push_to))
    for address in (address for addresses in push_to for address in addresses):
        parse_address(address)
    proxy = _Proxy(prefill, decode, push_to=push_to, token=token)
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
    *,
    push_to: Annotated[
        list[str] | None,
        typer.Option(help="In push mode, once for each decode: host:port of its workers, with commas between them."),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(help="In push mode: the instances' token_file, to sign names of hand-overs with.")
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
) -> None:
    """Joins vLLM instances that compute prompts with ones that continue them; clients talk to it as to one vLLM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        token = ConnectorConfig(token_file=token_file).secret()
        app = make_app(prefill, decode, push_to=[each.split(",") for each in push_to or ()], token=token)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    web.run_app(app, host=host, port=port, handler_cancellation=True)


@contextlib.asynccontextmanager
async def _going(work: Coroutine[Any, Any, T]) -> AsyncIterator[asyncio.Task[T]]:
    """Work beside other work; it has ended when the block has."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.exception()  # who wanted to know has awaited it


def _cut_off(asked: asyncio.Task[aiohttp.ClientResponse]) -> None:
    """The answer, where it is not complete."""
    if asked.done() and not asked.cancelled() and asked.exception() is None:
        asked.result().close()


def _with(params: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_transfer_params": dict(params)}


def _passed_on(request: web.Request) -> dict[str, str]:
    return {name: request.headers[name] for name in _PASSED_ON if name in request.headers}


async def _body_of(request: web.Request) -> dict[str, Any]:
    """What the client asks; where pages are is not the client's to say."""
    try:
        body = await request.json()
    except ValueError as error:
        raise refusal_of(400, f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise refusal_of(400, "the body must be a JSON object")
    body.pop("kv_transfer_params", None)
    return body


def _fits(body: Mapping[str, Any]) -> bool:
    """Whether one prompt becomes one answer. Others are for the decode side alone: pages are handed over once, and what
    is asked about the prompt itself comes of computing it."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt)
    unfit = any(body.get(name) for name in ("echo", "prompt_logprobs", "use_beam_search", "prompt_embeds"))
    return not several and not unfit and body.get("n") in (None, 1)


if __name__ == "__main__":
    typer.run(main)
