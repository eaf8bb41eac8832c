"""The proxy between stand-ins for vLLM servers: what each is asked, and what the client gets when one of them fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from hurray_rdma.connectors.vllm.proxy import make_app
from hurray_rdma.testing.vllm_servers import free_port

PARAMS = {"do_remote_prefill": True, "remote_request_id": "somewhere"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Stand:
    """In the place of a vLLM server: keeps what it is asked, and answers as it was told to."""

    def __init__(self, **answer: Any) -> None:
        self.url = ""
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.headers: list[Mapping[str, str]] = []
        self.left = asyncio.Event()
        """The proxy has gone before the answer was complete."""
        self.answer: Handler | None = None
        self._plain = {"kv_transfer_params": None} | answer

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json()))
        self.headers.append(request.headers)
        try:
            return await self.answer(request) if self.answer is not None else web.json_response(self._plain)
        except asyncio.CancelledError:
            self.left.set()
            raise

    async def well(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}], "for": request.headers.get("Authorization")})


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def standing(*stands: Stand) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for stand in stands:
            app = web.Application()
            app.router.add_post("/v1/{kind:.*}", stand.handle)
            app.router.add_get("/v1/models", stand.models)
            app.router.add_get("/health", stand.well)
            stand.url = await stack.enter_async_context(serving(app))
        yield


@contextlib.asynccontextmanager
async def proxied(prefill: list[str], decode: list[str], **push: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with serving(make_app(prefill, decode, **push)) as url, aiohttp.ClientSession(url) as client:
        yield client


@contextlib.asynccontextmanager
async def between(stands: dict[str, Stand], **push: Any) -> AsyncIterator[aiohttp.ClientSession]:
    async with standing(*stands.values()), proxied([stands["prefill"].url], [stands["decode"].url], **push) as client:
        yield client


async def ask(client: aiohttp.ClientSession, path: str, **given: Any) -> tuple[int, Any]:
    """Status and what the body says."""
    method = "POST" if given.keys() & {"json", "data"} else "GET"
    async with client.request(method, path, **given) as answer:
        return answer.status, await answer.json()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("path", "body", "prefilled"),
    [
        (TEXT, {"prompt": "a", "max_tokens": 9}, {"prompt": "a", "max_tokens": 1, "stream": False}),
        (TEXT, {"prompt": [7, 8]}, {"prompt": [7, 8], "max_tokens": 1, "stream": False}),
        (
            CHAT,
            {"messages": [], "max_completion_tokens": 9, "min_tokens": 4, "n": 1},
            {"messages": [], "max_completion_tokens": 1, "max_tokens": 1, "stream": False, "n": 1},
        ),
        (
            TEXT,
            {"prompt": ["a"], "stream": True, "stream_options": {"include_usage": True}},
            {"prompt": ["a"], "max_tokens": 1, "stream": False},
        ),
    ],
)
def test_prefill_is_asked_for_one_token_and_decode_for_all_with_what_it_returned(
    path: str, body: dict[str, Any], prefilled: dict[str, Any]
) -> None:
    async def test() -> None:
        prefill, decode = Stand(kv_transfer_params=PARAMS), Stand(text="b")
        async with standing(prefill, decode), proxied([prefill.url + "/"], [decode.url]) as client:
            headers = {"Authorization": "Bearer secret"}
            # Where pages are read from is not the client's to say.
            asked = body | {"kv_transfer_params": {"remote_addresses": ["elsewhere:1"]}}
            status, told = await ask(client, path, json=asked, headers=headers)
            assert (status, told["text"]) == (200, "b")
        assert prefill.asked == [(path, prefilled | {"kv_transfer_params": {"do_remote_decode": True}})]
        assert decode.asked == [(path, body | {"kv_transfer_params": PARAMS})]
        for name in ("Authorization", "X-Request-Id"):
            assert prefill.headers[0][name] == decode.headers[0][name], "one name in both logs"

    run(test)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "n": 2},
        {"prompt": ["a", "b"]},
        {"prompt": [[1, 2], [3]]},
        {"prompt": "a", "echo": True},
        {"prompt": "a", "prompt_logprobs": 2},
        {"prompt": "a", "use_beam_search": True},
    ],
)
def test_what_one_prompts_pages_do_not_answer_is_for_decode_alone(body: dict[str, Any]) -> None:
    async def test() -> None:
        prefill, decode = Stand(kv_transfer_params=PARAMS), Stand()
        async with standing(prefill, decode), proxied([prefill.url], [decode.url]) as client:
            assert (await ask(client, TEXT, json=body))[0] == 200
        assert (prefill.asked, decode.asked) == ([], [(TEXT, body)])

    run(test)


def test_decode_computes_what_prefill_hands_nothing_over_of() -> None:
    async def test() -> None:
        prefill, decode = Stand(), Stand()
        async with standing(prefill, decode), proxied([prefill.url], [decode.url]) as client:
            assert (await ask(client, TEXT, json={"prompt": "a"}))[0] == 200
        assert decode.asked == [(TEXT, {"prompt": "a"})]

    run(test)


def test_instances_take_turns_and_one_that_does_not_listen_is_passed_over() -> None:
    async def test() -> None:
        prefill, decode = [Stand(kv_transfer_params=PARAMS) for _ in range(2)], [Stand() for _ in range(3)]
        async with standing(*prefill, *decode):
            nobody = f"http://127.0.0.1:{free_port()}"
            urls = [prefill[0].url, nobody, prefill[1].url], [each.url for each in decode]
            async with proxied(*urls) as client:
                for _ in range(6):
                    assert (await ask(client, TEXT, json={"prompt": "a"}))[0] == 200
        assert [len(each.asked) for each in prefill] == [3, 3]
        assert [len(each.asked) for each in decode] == [2, 2, 2]

    run(test)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_errors_of_either_side_are_passed_on(side: str) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async def test() -> None:
        stands = {"prefill": Stand(kv_transfer_params=PARAMS), "decode": Stand()}
        stands[side].answer = refuse
        async with between(stands) as client:
            for stream in (False, True):
                told = await ask(client, CHAT, json={"messages": [], "stream": stream})
                assert told == (400, {"error": {"message": "too long"}})
        assert len(stands["decode"].asked) == (0 if side == "prefill" else 2)

    run(test)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_instance_that_does_not_listen_is_named(side: str) -> None:
    async def test() -> None:
        stand, nobody = Stand(kv_transfer_params=PARAMS), f"http://127.0.0.1:{free_port()}"
        async with standing(stand):
            urls = {"prefill": stand.url, "decode": stand.url} | {side: nobody}
            async with proxied([urls["prefill"]], [urls["decode"]]) as client:
                status, told = await ask(client, TEXT, json={"prompt": "a"})
        assert (status, told["error"]["code"]) == (502, 502)
        assert f"the {side} instance {nobody}" in told["error"]["message"]

    run(test)


@pytest.mark.parametrize(("body", "says"), [(b"{", "is not JSON"), (b"[1]", "must be a JSON object")])
def test_what_is_no_request_is_refused(body: bytes, says: str) -> None:
    async def test() -> None:
        prefill, decode = Stand(), Stand()
        async with standing(prefill, decode), proxied([prefill.url], [decode.url]) as client:
            status, told = await ask(client, TEXT, data=body)
        assert status == 400
        assert says in told["error"]["message"]
        assert (prefill.asked, decode.asked) == ([], [])

    run(test)


def test_a_server_of_another_kind_is_told() -> None:
    async def page(_request: web.Request) -> web.Response:
        return web.Response(text="<html>", content_type="text/html")

    async def test() -> None:
        prefill, decode = Stand(), Stand()
        prefill.answer = page
        async with standing(prefill, decode), proxied([prefill.url], [decode.url]) as client:
            status, told = await ask(client, TEXT, json={"prompt": "a"})
        assert status == 502
        assert "does not answer as vLLM does" in told["error"]["message"]
        assert decode.asked == []

    run(test)


async def begun(request: web.Request) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await stream.prepare(request)
    return stream


def test_a_stream_comes_piece_by_piece() -> None:
    async def test() -> None:
        prefill, decode, first_is_here = Stand(kv_transfer_params=PARAMS), Stand(), asyncio.Event()

        async def answer(request: web.Request) -> web.StreamResponse:
            stream = await begun(request)
            await stream.write(b"data: 1\n\n")
            await first_is_here.wait()
            await stream.write(b"data: 2\n\ndata: [DONE]\n\n")
            return stream

        decode.answer = answer
        async with standing(prefill, decode), proxied([prefill.url], [decode.url]) as client:
            got = await client.post(TEXT, json={"prompt": "a", "stream": True})
            assert (got.status, got.content_type) == (200, "text/event-stream")
            assert await got.content.readuntil(b"\n\n") == b"data: 1\n\n"
            first_is_here.set()
            assert await got.content.read() == b"data: 2\n\ndata: [DONE]\n\n"

    run(test)


def test_a_stream_that_breaks_off_ends_with_an_error() -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        stream = await begun(request)
        await stream.write(b"data: 1\n\n")
        assert request.transport is not None
        request.transport.abort()
        return stream

    async def test() -> None:
        prefill, decode = Stand(kv_transfer_params=PARAMS), Stand()
        decode.answer = broken
        async with standing(prefill, decode), proxied([prefill.url], [decode.url]) as client:
            got = await client.post(TEXT, json={"prompt": "a", "stream": True})
            first, error, end, _ = (await got.content.read()).split(b"\n\n")
        assert (first, end) == (b"data: 1", b"data: [DONE]")
        assert f"the decode instance {decode.url}" in json.loads(error.removeprefix(b"data: "))["error"]["message"]

    run(test)


@pytest.mark.parametrize("side", ["prefill", "decode", "stream"])
def test_a_client_that_goes_away_ends_its_request_everywhere(side: str) -> None:
    async def test() -> None:
        stands, asked = {"prefill": Stand(kv_transfer_params=PARAMS), "decode": Stand()}, asyncio.Event()

        async def never(request: web.Request) -> web.StreamResponse:
            stream = await begun(request) if side == "stream" else None
            asked.set()
            while True:
                if stream is not None:
                    await stream.write(b"data: more\n\n")
                await asyncio.sleep(0.01)

        slow = stands["prefill" if side == "prefill" else "decode"]
        slow.answer = never
        async with between(stands) as client:
            going = asyncio.create_task(client.post(TEXT, json={"prompt": "a", "stream": side == "stream"}))
            await asked.wait()
            if side == "stream":
                (await going).close()
            else:
                going.cancel()
            await slow.left.wait()
        assert len(stands["decode"].asked) == (0 if side == "prefill" else 1)

    run(test)


def test_models_and_health() -> None:
    async def test() -> None:
        prefill, decode, nobody = Stand(), Stand(), f"http://127.0.0.1:{free_port()}"
        async with standing(prefill, decode):
            async with proxied([prefill.url], [decode.url]) as client:
                models = await ask(client, "/v1/models", headers={"Authorization": "Bearer me"})
                assert models == (200, {"data": [{"id": "m"}], "for": "Bearer me"})
                all_well = {"prefill": {prefill.url: "ok"}, "decode": {decode.url: "ok"}}
                assert await ask(client, "/health") == (200, all_well)
            async with proxied([prefill.url], [decode.url, nobody]) as client:
                status, told = await ask(client, "/health")
        assert (status, told["decode"][decode.url]) == (503, "ok")
        assert "Cannot connect" in told["decode"][nobody]

    run(test)
