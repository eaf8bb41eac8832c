"""Parameters that pass through clients' hands: whoever has a token believes only who has it, too."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hurray_rdma import ConfigError
from hurray_rdma.connectors.vllm.handoff import RemotePrefill, push_params
from hurray_rdma.connectors.vllm.scheduler import SchedulerSide
from hurray_rdma.connectors.vllm.steps import Step
from tests.connectors.test_scheduler_side import FakeRequest, remote, side

TOKEN = "between us"


def signed(**changes: Any) -> dict[str, Any]:
    params: dict[str, Any] = json.loads(json.dumps(remote(TOKEN)))  # as through a proxy
    return params | changes


def test_what_the_other_side_has_signed_is_believed() -> None:
    assert RemotePrefill.from_params(signed(), token=TOKEN) == RemotePrefill.from_params(remote(), token=None)
    # What a proxy adds, and how it writes numbers, changes nothing.
    assert RemotePrefill.from_params(signed(proxy="x", remote_lease_s=60), token=TOKEN).lease_s == 60


def test_the_token_is_not_in_them() -> None:
    assert TOKEN not in json.dumps(signed())
    assert "remote_signature" not in remote(), "nothing to sign with"


@pytest.mark.parametrize(
    "change",
    [
        {"remote_request_id": "other"},
        {"remote_addresses": ["elsewhere:1"]},
        {"remote_addresses": ["host:1", "elsewhere:1"]},
        {"remote_num_tokens": 9},
        {"remote_model": "other"},
        {"remote_lease_s": 61.0},
        {"remote_block_size": 8},
        {"remote_layout": "cpu-vec"},
        {"remote_signature": None},
        {"remote_signature": ""},
        {"remote_signature": "0" * 64},
        {"remote_signature": "ü\ud800"},
        {"remote_signature": remote("guessed")["remote_signature"]},
    ],
)
def test_what_it_has_not_signed_is_refused_before_anything_is_done_about_it(change: dict[str, Any]) -> None:
    params = signed(**change)
    with pytest.raises(ConfigError, match="remote_signature") as caught:
        RemotePrefill.from_params(params, token=TOKEN)
    assert TOKEN not in str(caught.value)
    decode = side(token=TOKEN)
    request, unread = FakeRequest("d", dict(params)), FakeRequest("u", dict(params))
    for each in (request, unread):
        decode.new_request(each)
    decode.matched_tokens(request, 0)
    decode.allocated(request, [1, 2, 3], 10)
    decode.finished(unread, complete=False)  # aborted while it waited
    step = decode.take_step({})
    assert (step.hold, step.decline, [load.remote for load in step.load]) == ({}, [], [None])
    assert "remote_signature" in step.load[0].refusal
    assert decode.take_step({}) == Step()


def test_every_field_is_signed() -> None:
    """So that none that is added later is forgotten above."""
    known = {"remote_signature", "do_remote_prefill", "do_remote_decode"}
    changed = {name for mark in test_what_it_has_not_signed_is_refused_before_anything_is_done_about_it.pytestmark
               for change in mark.args[1] for name in change}  # fmt: skip
    assert remote(TOKEN).keys() - known == changed - known


def test_prefill_signs_and_decode_of_the_same_token_takes_it() -> None:
    prefill: SchedulerSide = side({"p": [5, 6, 7]}, token=TOKEN)
    asked = FakeRequest("p", {"do_remote_decode": True})
    prefill.allocated(asked, [5], 0)
    prefill.take_step({"p": 10})
    _, params = prefill.finished(asked, complete=True)
    for token, known in ((TOKEN, True), ("another", False), (None, True)):
        decode = side(token=token)
        decode.new_request(FakeRequest("d", dict(params or {})))
        assert bool(decode.take_step({}).hold) is known


def pushed(side: str, *, name: str = "name", token: str | None = TOKEN, **changes: Any) -> dict[str, Any]:
    """What a proxy asks one of the sides with."""
    addresses = ["decode:1"] if side == "prefill" else None
    params: dict[str, Any] = json.loads(json.dumps(push_params(name, token=token, addresses=addresses)))
    return params | changes


@pytest.mark.parametrize(
    ("side_of", "change"),
    [
        ("prefill", {"remote_request_id": "of another client"}),
        ("prefill", {"remote_addresses": ["decode:2"]}),
        ("prefill", {"remote_block_size": 8}),
        ("prefill", {"remote_signature": None}),
        ("prefill", {"remote_signature": pushed("prefill", token="guessed")["remote_signature"]}),
        ("prefill", {"remote_signature": remote(TOKEN)["remote_signature"]}),
        ("prefill", {"remote_signature": pushed("decode")["remote_signature"]}),
        ("decode", {"remote_request_id": "of another client"}),
        ("decode", {"remote_block_size": 8}),
        ("decode", {"remote_addresses": ["decode:1"]}),
        ("decode", {"remote_signature": None}),
        ("decode", {"remote_signature": pushed("prefill")["remote_signature"]}),
    ],
)
def test_a_name_that_no_one_with_the_token_gave_is_pushed_by_nobody_and_to_nobody(
    side_of: str, change: dict[str, Any]
) -> None:
    """So that no client has pages of its own put where another's are expected, or another's put into its blocks."""
    instance = side({"r": [5, 6, 7]}, pushes=True, token=TOKEN)
    request = FakeRequest("r", pushed(side_of) | change)
    instance.new_request(request)
    instance.matched_tokens(request, 0)
    instance.allocated(request, [5, 6, 7], 10)
    step = instance.take_step({"r": 10})
    assert (step.publish, step.decline) == ([], [])
    assert [load.remote for load in step.load] == ([] if side_of == "prefill" else [None])
    if side_of == "prefill":
        assert step.num_refused == 1
        return
    assert "remote_signature" in step.load[0].refusal
    unread = FakeRequest("u", pushed("decode") | change)
    assert instance.finished(unread, complete=False) == (False, None)
    assert instance.take_step({}).decline == []


def test_what_a_proxy_with_the_token_asks_for_is_pushed_and_expected_and_what_prefill_returns_too() -> None:
    prefill, decode = side({"p": [5, 6, 7]}, pushes=True, token=TOKEN), side(pushes=True, token=TOKEN)
    asked = FakeRequest("p", pushed("prefill", proxy="x"))
    prefill.allocated(asked, [5], 0)
    (publish,) = prefill.take_step({"p": 10}).publish
    _, returned = prefill.finished(asked, complete=True)
    for params in (pushed("decode"), json.loads(json.dumps(returned))):
        request = FakeRequest("d", params)
        decode.new_request(request)
        assert decode.matched_tokens(request, 0) == (10, True)
        decode.allocated(request, [1, 2, 3], 10)
        (load,) = decode.take_step({}).load
        assert load.remote is not None
        assert load.remote.key == publish.key


def test_without_a_token_a_name_is_believed() -> None:
    prefill = side({"p": [5, 6, 7]}, pushes=True)
    asked = FakeRequest("p", pushed("prefill", token=None))
    prefill.allocated(asked, [5], 0)
    assert len(prefill.take_step({"p": 10}).publish) == 1
    assert "remote_signature" not in (prefill.finished(asked, complete=True)[1] or {})
