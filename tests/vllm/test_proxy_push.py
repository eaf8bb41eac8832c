"""The proxy in push mode between stand-ins for vLLM servers: who is asked what and when, and what the client gets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from hurray_rdma import ConfigError
from hurray_rdma.connectors.vllm import proxy
from hurray_rdma.connectors.vllm.handoff import PushedPrefill, PushTarget
from hurray_rdma.testing.vllm_servers import free_port
from tests.vllm.test_proxy import PARAMS, TEXT, Handler, Stand, ask, begun, between, proxied, run, standing

WORKERS = [["decode:1", "decode:2"]]


def answers(**told: Any) -> Handler:
    async def answer(_request: web.Request) -> web.Response:
        return web.json_response({"kv_transfer_params": None} | told)

    return answer


class Pair(dict[str, Stand]):
    """Decode answers when prefill has been asked, as if it waited for pages; and the other way round, so that a proxy
    that asks one after the other gets no answer."""

    def __init__(self, *, decode: Handler, prefill: Handler) -> None:
        super().__init__(prefill=Stand(), decode=Stand())
        asked = self._asked = {side: asyncio.Event() for side in self}

        def waiting(side: str, other: str, then: Handler) -> Handler:
            async def answer(request: web.Request) -> web.StreamResponse:
                asked[side].set()
                await asked[other].wait()
                return await then(request)

            return answer

        self["prefill"].answer = waiting("prefill", "decode", prefill)
        self["decode"].answer = waiting("decode", "prefill", decode)

    async def both_asked(self) -> None:
        for event in self._asked.values():
            await event.wait()

    def params(self, side: str, at: int = 0) -> dict[str, Any]:
        return dict(self[side].asked[at][1]["kv_transfer_params"])


async def never(_request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    raise AssertionError


async def too_long(_request: web.Request) -> web.Response:
    return web.json_response({"error": {"message": "too long"}}, status=400)


@pytest.mark.parametrize("token", [None, "between us"])
def test_both_are_asked_at_once_under_one_name_of_the_proxys_own(token: str | None) -> None:
    async def test() -> None:
        pair = Pair(prefill=answers(kv_transfer_params=PARAMS), decode=answers(text="b"))
        async with between(pair, push_to=WORKERS, token=token) as client:
            body = {"prompt": "a", "max_tokens": 9, "kv_transfer_params": {"remote_request_id": "the client's"}}
            for _ in range(2):
                status, told = await ask(client, TEXT, json=body, headers={"X-Request-Id": "the client's"})
                assert (status, told["text"]) == (200, "b")
        names = set()
        for at in range(2):
            target = PushTarget.from_params(pair.params("prefill", at), block_size=32, token=token)
            pushed = PushedPrefill.from_params(pair.params("decode", at), num_tokens=5, block_size=32, token=token)
            assert (target.key, target.addresses) == (pushed.key, ("decode:1", "decode:2"))
            names.add(target.key)
            assert (pair["prefill"].asked[at][1]["max_tokens"], pair["decode"].asked[at][1]["max_tokens"]) == (1, 9)
        assert len(names) == 2
        assert all(len(name) >= 32 and "client" not in name for name in names)

    run(test)


def test_decode_is_asked_anew_when_nothing_is_pushed() -> None:
    """It would wait for pages that do not come, and then say that they failed."""

    async def test() -> None:
        pair = Pair(prefill=answers(), decode=never)
        async with between(pair, push_to=WORKERS) as client:
            going = asyncio.create_task(ask(client, TEXT, json={"prompt": "a"}))
            await pair["decode"].left.wait()
            pair["decode"].answer = answers(text="alone")
            assert (await going)[1]["text"] == "alone"
        assert pair["decode"].asked[-1] == (TEXT, {"prompt": "a"})

    run(test)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_error_of_one_side_is_passed_on_and_ends_the_request_on_the_other(side: str) -> None:
    async def test() -> None:
        other = "decode" if side == "prefill" else "prefill"
        pair = Pair(**{side: too_long, other: never})
        async with between(pair, push_to=WORKERS) as client:
            told = await ask(client, TEXT, json={"prompt": "a", "stream": True})
            assert told == (400, {"error": {"message": "too long"}})
            await pair[other].left.wait()
        assert len(pair["decode"].asked) == 1

    run(test)


def test_a_stream_that_begins_before_prefill_has_answered() -> None:
    async def test() -> None:
        first_is_here = asyncio.Event()

        async def stream(request: web.Request) -> web.StreamResponse:
            response = await begun(request)
            await response.write(b"data: 1\n\n")
            await first_is_here.wait()
            await response.write(b"data: [DONE]\n\n")
            return response

        pair = Pair(prefill=never, decode=stream)
        async with between(pair, push_to=WORKERS) as client:
            got = await client.post(TEXT, json={"prompt": "a", "stream": True})
            assert await got.content.readuntil(b"\n\n") == b"data: 1\n\n"
            first_is_here.set()
            assert await got.content.read() == b"data: [DONE]\n\n"
            await pair["prefill"].left.wait()

    run(test)


def test_a_client_that_goes_away_ends_its_request_everywhere() -> None:
    async def test() -> None:
        pair = Pair(prefill=never, decode=never)
        async with between(pair, push_to=WORKERS) as client:
            going = asyncio.create_task(client.post(TEXT, json={"prompt": "a"}))
            await pair.both_asked()
            going.cancel()
            for stand in pair.values():
                await stand.left.wait()

    run(test)


def test_instances_take_turns_and_prefill_is_told_of_the_one_whose_turn_it_is() -> None:
    async def test() -> None:
        prefill, decode = Stand(kv_transfer_params=PARAMS), [Stand() for _ in range(2)]
        async with standing(prefill, *decode):
            nobody = f"http://127.0.0.1:{free_port()}"
            urls, push_to = [decode[0].url, nobody, decode[1].url], [["first:1"], ["nobody:1"], ["last:1"]]
            async with proxied([prefill.url], urls, push_to=push_to) as client:
                for _ in range(4):
                    assert (await ask(client, TEXT, json={"prompt": "a"}))[0] == 200
                several = {"prompt": ["a", "b"]}  # which no prefill is asked for
                assert (await ask(client, TEXT, json=several))[0] == 200
        told = [body["kv_transfer_params"] for _, body in prefill.asked]
        pushed = {each["remote_request_id"]: each["remote_addresses"] for each in told}
        for stand, address in zip(decode, ("first:1", "last:1"), strict=True):
            expected = [body["kv_transfer_params"] for _, body in stand.asked if body["prompt"] == "a"]
            assert [pushed[each["remote_request_id"]] for each in expected] == [[address]] * 2

    run(test)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_instance_that_does_not_listen_is_named(side: str) -> None:
    async def test() -> None:
        stand, nobody = Stand(), f"http://127.0.0.1:{free_port()}"
        stand.answer = never
        async with standing(stand):
            urls = {"prefill": stand.url, "decode": stand.url} | {side: nobody}
            async with proxied([urls["prefill"]], [urls["decode"]], push_to=WORKERS) as client:
                status, told = await ask(client, TEXT, json={"prompt": "a"})
        assert (status, told["error"]["code"]) == (502, 502)
        assert f"the {side} instance {nobody}" in told["error"]["message"]

    run(test)


@pytest.mark.parametrize(
    ("push_to", "says"), [([["a:1"]], "must be one for each of 2"), ([["a:1"], ["b:99999"]], "'b:99999'")]
)
def test_addresses_that_do_not_fit_are_refused(push_to: list[list[str]], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        proxy.make_app(["http://p"], ["http://d", "http://e"], push_to=push_to)


def test_so_does_the_command_line() -> None:
    app = proxy.typer.Typer()
    app.command()(proxy.main)
    given = ["--prefill", "http://p", "--decode", "http://d"]
    assert "must be one for each" in CliRunner().invoke(app, [*given, "--push-to", "a:1", "--push-to", "b:1"]).output
    assert "cannot be read" in CliRunner().invoke(app, [*given, "--token-file", "/nowhere"]).output
