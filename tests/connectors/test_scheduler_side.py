"""The scheduler's side by itself: which requests are handed over, when, and what becomes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hurray_rdma import ConfigError
from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.handoff import RemotePrefill
from hurray_rdma.connectors.vllm.scheduler import SchedulerSide
from hurray_rdma.connectors.vllm.steps import Load

BLOCK = 4


@dataclass
class FakeRequest:
    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int = 10
    num_computed_tokens: int = 0
    max_tokens: int = 16


def side(blocks: dict[str, list[int]] | None = None, **changes: Any) -> SchedulerSide:
    settings: dict[str, Any] = {
        "block_size": BLOCK,
        "layout": "rows",
        "model": "m",
        "tp_size": 1,
        "lease_s": 60.0,
        "token": None,
        "push_to": ["decode:1"],
    }
    settings |= changes
    made = SchedulerSide(block_ids_of=(blocks or {}).__getitem__, **settings)
    made.set_addresses(["host:1"] * settings["tp_size"])
    return made


def remote(token: str | None = None, **changes: Any) -> dict[str, Any]:
    told = RemotePrefill(
        key="k", addresses=("host:1",), num_tokens=10, model="m", lease_s=60.0, block_size=BLOCK, layout="rows"
    )
    return told.to_params(token=token) | changes


def test_a_prompt_is_published_in_the_step_that_computes_its_last_token() -> None:
    prefill = side({"p": [5, 6, 7, 8]})
    request = FakeRequest("p", {"do_remote_decode": True})
    prefill.new_request(request)
    assert request.max_tokens == 1, "what came after the prompt would be computed twice"
    assert prefill.matched_tokens(request, 0) == (0, False)
    prefill.allocated(request, [5, 6], 0)
    assert prefill.take_step({"p": 6}).publish == []
    request.num_computed_tokens = 6
    assert prefill.take_step({}).publish == [], "it was not scheduled"
    (published,) = prefill.take_step({"p": 4}).publish
    assert (published.request_id, published.block_ids, published.num_tokens) == ("p", [5, 6, 7], 10)
    delayed, params = prefill.finished(request, complete=True)
    assert delayed
    told = RemotePrefill.from_params(params or {}, token=None)
    assert (told.key, told.addresses, told.num_tokens) == (published.key, ("host:1",), 10)
    assert "p" in told.key
    assert told.key != "p", "request IDs come again after a restart"
    assert prefill.take_step({}).publish == []


def test_a_prefill_that_is_aborted_is_not_offered_to_anybody() -> None:
    prefill = side({"p": [5, 6, 7]})
    early, late = FakeRequest("p", {"do_remote_decode": True}), FakeRequest("p", {"do_remote_decode": True})
    prefill.allocated(early, [5], 0)
    assert prefill.finished(early, complete=False) == (False, None)
    assert prefill.take_step({"p": 10}).publish == []
    prefill.allocated(late, [5], 0)
    assert len(prefill.take_step({"p": 10}).publish) == 1
    assert prefill.finished(late, complete=False) == (True, None), "somebody may be reading: the workers say when not"
    assert prefill.take_step({}).retire == ["p"]


def test_one_that_is_preempted_is_published_anew() -> None:
    blocks = {"p": [5, 6, 7]}
    prefill = side(blocks)
    request = FakeRequest("p", {"do_remote_decode": True})
    prefill.allocated(request, [5], 0)
    assert prefill.take_step({"p": 10}).publish[0].block_ids == [5, 6, 7]
    blocks["p"] = [1, 2, 3]
    prefill.allocated(request, [1], 0)
    assert prefill.take_step({"p": 10}).publish[0].block_ids == [1, 2, 3]


def test_other_requests_are_left_alone() -> None:
    plain = FakeRequest("a", None)
    either = side()
    either.new_request(plain)
    assert plain.max_tokens == 16
    assert either.matched_tokens(plain, 0) == (0, False)
    either.allocated(plain, [1], 0)
    assert either.finished(plain, complete=True) == (False, None)
    step = either.take_step({"a": 10})
    assert (step.publish, step.load, step.decline, step.hold) == ([], [], [], {})


@pytest.mark.parametrize(("num_computed", "num_present"), [(0, 0), (4, 1), (8, 2)])
def test_what_the_other_side_has_is_loaded_into_the_blocks_that_are_no_prefix_hits(
    num_computed: int, num_present: int
) -> None:
    decode = side()
    request = FakeRequest("d", remote())
    decode.new_request(request)
    assert list(decode.take_step({}).hold) == ["d"], "the other side hears of it while it waits"
    assert decode.matched_tokens(request, num_computed) == (10 - num_computed, True)
    assert decode.matched_tokens(request, num_computed) == (10 - num_computed, True)
    decode.allocated(request, [3, 1, 2, 9], 10 - num_computed)
    step = decode.take_step({})
    assert step.unhold == ["d"]
    assert step.load == [Load("d", RemotePrefill.from_params(remote(), token=None), "", [3, 1, 2], num_present)]
    # Once: it is called again when it has blocks for what follows, and after a preemption.
    decode.allocated(request, [3, 1, 2, 9], 0)
    assert decode.matched_tokens(request, 0) == (0, False)
    assert decode.take_step({}).load == []
    decode.received(["d"])
    assert decode.finished(request, complete=True) == (False, None)
    assert decode.take_step({}).abort == []


def test_what_is_here_already_is_declined() -> None:
    decode = side()
    request = FakeRequest("d", remote(remote_num_tokens=8))
    decode.new_request(request)
    assert decode.matched_tokens(request, 8) == (0, False)
    decode.allocated(request, [3, 1], 0)
    step = decode.take_step({})
    assert (step.load, [each.key for each in step.decline]) == ([], ["k"])


def test_aborts_of_the_decode_side() -> None:
    decode = side()
    waiting, loading = FakeRequest("w", remote()), FakeRequest("l", remote())
    for request in (waiting, loading):
        decode.new_request(request)
    decode.allocated(loading, [1, 2, 3], 10)
    decode.take_step({})
    assert decode.finished(waiting, complete=False) == (False, None)
    assert decode.finished(loading, complete=False) == (False, None)
    step = decode.take_step({})
    assert (step.abort, step.unhold) == (["l"], ["w"])
    assert [each.key for each in step.decline] == ["k"], "so that the other side frees what nobody will read"


def test_one_that_vllm_refuses_before_it_is_a_request_is_declined() -> None:
    """vLLM brings it in aborted, with the parameters that came, and one token as its prompt."""
    decode = side()
    refused = FakeRequest("r", remote(), num_prompt_tokens=1)
    decode.new_request(refused)
    assert decode.finished(refused, complete=False) == (False, None)
    assert [each.key for each in decode.take_step({}).decline] == ["k"]


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (remote(remote_model="other"), "model = 'other': of the prefill side; this side has 'm'"),
        (remote(remote_addresses=["a:1", "b:1"]), "tensor_parallel_size = 2: of the prefill side; this side has 1"),
        (remote(remote_layout="cpu-amx"), "layout of the cache = 'cpu-amx': of the prefill side; this side has 'rows'"),
        (remote(remote_num_tokens=11), "remote_num_tokens = 11: is above the 10 tokens of the prompt here"),
        (remote(remote_num_tokens=0), "remote_num_tokens = 0: must be above 0"),
        (remote(remote_num_tokens=-(10**30)), "must be above 0"),
        (remote(remote_num_tokens=2**60), "remote_num_tokens = 1152921504606846976: is above the 10 tokens"),
        (remote(remote_block_size=0), "remote_block_size = 0: must be above 0"),
        (remote(remote_lease_s=0), "remote_lease_s = 0.0: must be a time above 0"),
        (remote(remote_lease_s=-5), "remote_lease_s = -5.0: must be a time above 0"),
        (remote(remote_lease_s=float("nan")), "remote_lease_s = nan: must be a time above 0"),
        (remote(remote_lease_s=float("inf")), "remote_lease_s = inf: must be a time above 0"),
        (remote(remote_lease_s=10**400), "remote_lease_s = inf: must be a time above 0"),
        (remote(remote_addresses=["a:b:c"]), "'a:b:c'"),
        (remote(remote_addresses=["host:99999"]), "'host:99999'"),
        (remote(remote_addresses=["ho st:1"]), "'ho st:1'"),
        (remote(remote_num_tokens=True), "kv_transfer_params.remote_num_tokens = True"),
        (remote(remote_addresses="a:1"), "kv_transfer_params.remote_addresses = 'a:1'"),
        (remote(remote_addresses=[]), "remote_addresses = []"),
        (remote(remote_request_id=None), "kv_transfer_params.remote_request_id = None"),
        ({"do_remote_prefill": True}, "Pass the kv_transfer_params of the prefill side's answer on"),
    ],
)
def test_what_does_not_fit_is_refused_and_named(params: dict[str, Any], why: str) -> None:
    """It fails as a load does, so that vLLM's failure policy decides; and the other side hears that nobody reads it, if
    it can be told."""
    decode = side()
    request = FakeRequest("d", dict(params))
    decode.new_request(request)
    assert decode.take_step({}).hold == {}
    assert decode.matched_tokens(request, 4) == (6, True)
    decode.allocated(request, [1, 2, 3], 6)
    step = decode.take_step({})
    (load,) = step.load
    assert (load.remote, load.block_ids, load.num_present) == (None, [1, 2, 3], 1)
    assert why in load.refusal
    readable = "this side has" in why or "is above" in why
    assert [each.key for each in step.decline] == ["k"] * readable
    decode.received(["d"])
    decode.finished(request, complete=False)
    aborted = FakeRequest("a", dict(params), num_prompt_tokens=1)  # before it had blocks
    decode.new_request(aborted)
    decode.finished(aborted, complete=False)
    assert [each.key for each in decode.take_step({}).decline] == ["k"] * readable, "once each"


@pytest.mark.parametrize(("layout", "refused"), [("rows", False), ("cpu-vec", False), ("cpu-amx", True)])
def test_blocks_of_another_size_are_taken_where_it_is_known_what_is_in_them(layout: str, refused: bool) -> None:
    decode = side(layout=layout)
    request = FakeRequest("d", remote(remote_block_size=8, remote_layout=layout))
    decode.allocated(request, [1, 2, 3], 10)
    (load,) = decode.take_step({}).load
    assert ("block_size = 8: of the prefill side; this side has 4" in load.refusal) == refused
    assert (load.remote is None) == refused


def test_a_prompt_may_go_on_after_what_was_prefilled() -> None:
    decode = side()
    request = FakeRequest("d", remote(remote_num_tokens=6))
    assert decode.matched_tokens(request, 0) == (6, True)
    decode.allocated(request, [1, 2, 3], 6)
    assert decode.take_step({}).load[0].block_ids == [1, 2]


def test_a_short_lease_does_not_make_every_step_a_sign_of_life() -> None:
    assert RemotePrefill.from_params(remote(remote_lease_s=1e-9), token=None).lease_s == 1
    assert RemotePrefill.from_params(remote(remote_lease_s=1.5), token=None).lease_s == 1.5


def test_settings(tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text("t\n")
    extra = {"port": 7400, "lease_s": 5, "token_file": str(secret), "allow_unauthenticated": True}
    config = ConnectorConfig.from_extra(extra)
    assert (config.port, config.lease_s, config.secret()) == (7400, 5, "t")
    assert ConnectorConfig.from_extra({}).secret() is None


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"prot": 1}, "kv_connector_extra_config = 'prot': is no key"),
        ({"token": "hidden"}, "kv_connector_extra_config = 'token': is no key"),
        ({"token": "hidden"}, "as token_file"),
        ({"port": "hidden"}, "type of port = 'str': must be int"),
        ({"token_file": ["hidden"]}, "type of token_file = 'list': must be str"),
        ({"port": True}, "type of port = 'bool': must be int"),
        ({"port": 70000}, "port = 70000: must be from 0 to 65535"),
        ({"mode": "shove"}, "mode = 'shove': must be one of ['pull', 'push']"),
        ({"push_to": "decode:1"}, "type of push_to = 'str': must be list"),
        ({"push_to": ["decode:1", 2]}, "push_to = 'int': must be of strings"),
        ({"push_to": ["decode:99999"]}, "'decode:99999'"),
        ({"lease_s": 0}, "lease_s = 0: must be above 0"),
        ({"token_file": "/nowhere/at/all"}, "token_file = '/nowhere/at/all': cannot be read"),
    ],
)
def test_settings_that_are_refused(extra: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ConnectorConfig.from_extra(extra).secret()
    assert why in str(caught.value)
    assert "hidden" not in str(caught.value)


def test_who_pushes_needs_somebody_to_push_to() -> None:
    with pytest.raises(ConfigError, match=r"push_to = \[\]: is empty.*fixed port"):
        ConnectorConfig(mode="push").check_role(produces=True)
    ConnectorConfig(mode="push").check_role(produces=False)
    ConnectorConfig(mode="push", push_to=["decode:1"]).check_role(produces=True)
    ConnectorConfig().check_role(produces=True)


TARGET = {"do_remote_decode": True, "remote_request_id": "name", "remote_addresses": ["decode:1"]}
SOURCE = {"do_remote_prefill": True, "remote_request_id": "name"}


def test_a_prompt_is_pushed_in_the_step_that_computes_its_last_token_under_a_key_that_decode_expects() -> None:
    prefill, decode = side({"p": [5, 6, 7, 8]}, pushes=True), side(pushes=True)
    request = FakeRequest("p", dict(TARGET))
    prefill.new_request(request)
    prefill.allocated(request, [5, 6], 0)
    assert prefill.take_step({"p": 6}).publish == []
    request.num_computed_tokens = 6
    (published,) = prefill.take_step({"p": 4}).publish
    assert published.push_to is not None
    assert (published.push_to.addresses, published.push_to.block_size) == (("decode:1",), BLOCK)
    assert (published.block_ids, published.num_tokens) == ([5, 6, 7], 10)
    delayed, params = prefill.finished(request, complete=True)
    assert delayed
    for asked in (dict(SOURCE), params):  # at once, or one after the other
        waiting = FakeRequest("d", asked)
        decode.new_request(waiting)
        assert decode.matched_tokens(waiting, 4) == (6, True)
        decode.allocated(waiting, [1, 2, 3], 6)
        step = decode.take_step({})
        (load,) = step.load
        assert load.remote is not None
        assert (load.remote.key, load.remote.block_size) == (published.key, BLOCK)
        assert (load.block_ids, load.num_present, load.refusal) == ([1, 2, 3], 1, "")
        assert (step.hold, step.decline) == ({}, [])
        decode.received(["d"])


def test_another_model_expects_another_key() -> None:
    keys = set()
    for model in ("m", "n"):
        decode, waiting = side(pushes=True, model=model), FakeRequest("d", dict(SOURCE))
        decode.allocated(waiting, [1, 2, 3], 10)
        (load,) = decode.take_step({}).load
        assert load.remote is not None
        keys.add(load.remote.key)
    assert len(keys) == 2


@pytest.mark.parametrize("missing", ["remote_addresses", "remote_request_id"])
def test_what_cannot_be_pushed_is_not_kept(missing: str, caplog: pytest.LogCaptureFixture) -> None:
    prefill = side({"p": [5, 6, 7]}, pushes=True)
    request = FakeRequest("p", {name: value for name, value in TARGET.items() if name != missing})
    prefill.allocated(request, [5, 6, 7], 0)
    step = prefill.take_step({"p": 10})
    assert (step.publish, step.num_refused) == ([], 1)
    assert missing in caplog.text
    assert prefill.finished(request, complete=True) == (False, None)


@pytest.mark.parametrize("address", ["decode:2", "elsewhere:1", "nonsense:port:9"])
def test_nothing_is_pushed_to_whom_the_settings_do_not_list(address: str, caplog: pytest.LogCaptureFixture) -> None:
    prefill = side({"p": [5, 6, 7]}, pushes=True)
    request = FakeRequest("p", TARGET | {"remote_addresses": [address]})
    prefill.allocated(request, [5, 6, 7], 0)
    step = prefill.take_step({"p": 10})
    assert (step.publish, step.num_refused) == ([], 1)
    assert address in caplog.text
    assert prefill.finished(request, complete=True) == (False, None)


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("again", [True, False])
def test_a_preempted_prompt_is_withdrawn_before_the_next_step(mode: str, again: bool) -> None:
    """Steps are put together ahead: the one after a prompt's last may give its blocks to others."""
    blocks = {"p": [5, 6, 7]}
    prefill, request = side(blocks, pushes=mode == "push"), FakeRequest("p", dict(TARGET))
    prefill.allocated(request, blocks["p"], 0)
    assert len(prefill.take_step({"p": 10}).publish) == 1
    assert prefill.take_step({}, preempted=["p", "other"]).preempted == {"p": False}
    if not again:  # it ends by the token of the step that was under way, or is aborted
        assert prefill.finished(request, complete=True) == (False, None)
        assert prefill.take_step({}).retire == []
        return
    blocks["p"] = [1, 2, 3]
    prefill.allocated(request, blocks["p"], 0)
    (published,) = prefill.take_step({"p": 10}).publish
    assert published.block_ids == [1, 2, 3]
    delayed, params = prefill.finished(request, complete=True)
    assert delayed
    assert params is not None
    # Finished and preempted between two steps: vLLM waits to hear of it.
    assert prefill.take_step({}, preempted=["p"]).preempted == {"p": True}
    assert prefill.take_step({}, preempted=["p"]).preempted == {}


def test_more_workers_than_there_are_here_are_not_pushed_to(caplog: pytest.LogCaptureFixture) -> None:
    prefill = side({"p": [5, 6, 7]}, pushes=True)
    request = FakeRequest("p", TARGET | {"remote_addresses": ["a:1", "b:1"]})
    prefill.allocated(request, [5, 6, 7], 0)
    assert prefill.take_step({"p": 10}).publish == []
    assert "must be the 1 workers of this side" in caplog.text


def test_a_push_that_is_not_needed_is_declined_and_one_that_says_no_name_fails() -> None:
    decode = side(pushes=True)
    here, gone = FakeRequest("d", dict(SOURCE)), FakeRequest("e", dict(SOURCE))
    decode.allocated(here, [1, 2, 3], 0)
    decode.new_request(gone)
    decode.finished(gone, complete=False)
    declined = decode.take_step({}).decline
    assert [(each.num_tokens, each.block_size) for each in declined] == [(10, BLOCK)] * 2
    nameless = FakeRequest("f", {"do_remote_prefill": True})
    assert decode.matched_tokens(nameless, 0) == (10, True)
    decode.allocated(nameless, [1, 2, 3], 10)
    (load,) = decode.take_step({}).load
    assert load.remote is None
    assert "remote_request_id" in load.refusal
