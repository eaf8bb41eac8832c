"""Prompts computed by one real vLLM and continued by another: the same text as from one alone, and no block is lost.

One instance computes prompts, two continue them: one with few blocks of the same size, that fails what it cannot load;
one with blocks twice as large, that computes it anew. All tests share them, since each takes a minute to start.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hurray_rdma.connectors.vllm.handoff import RemotePrefill
from hurray_rdma.testing.vllm_instances import Instance
from tests.vllm.prompts import MODEL, PROMPTS

TOKEN = "between us"
BLOCK = 32


@dataclass
class Trio:
    prefill: Instance
    decode: Instance
    larger: Instance
    free: dict[str, int]
    """Free blocks of each before the first request."""

    def check_accounts(self) -> None:
        """Every block is free again, on every side, and the engines hold nothing for anybody."""
        for name in ("prefill", "decode", "larger"):
            facts = getattr(self, name).settled()
            assert facts["free"] == self.free[name], name
            for pages in facts["engine"].pools.values():
                assert (pages.quarantined, pages.num_leases) == (0, 1), "the pool's own lease of all its pages"


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    secret = tmp_path_factory.mktemp("secrets") / "token"
    secret.write_text(TOKEN)
    extra = {"token_file": str(secret), "timeout_s": 20}
    with (
        Instance(MODEL, core=0, role="kv_producer", extra=extra) as prefill,
        Instance(MODEL, core=1, role="kv_consumer", extra=extra, num_gpu_blocks_override=40) as decode,
        Instance(MODEL, core=1, role="kv_consumer", extra=extra, policy="recompute", block_size=2 * BLOCK) as larger,
    ):
        instances = {"prefill": prefill, "decode": decode, "larger": larger}
        free = {name: instance.ready().tell("facts")["free"] for name, instance in instances.items()}
        yield Trio(prefill, decode, larger, free)


def signed(params: dict[str, Any]) -> dict[str, Any]:
    """As prefill would have signed them."""
    return RemotePrefill.from_params(params, token=None).to_params(token=TOKEN)


@pytest.fixture(scope="module")
def alone(trio: Trio) -> list[dict[str, Any]]:
    """What one instance alone answers."""
    return [trio.prefill.ask(prompt, max_tokens=6) for prompt in PROMPTS]


def fetched(instance: Instance) -> Any:
    return instance.tell("facts")["engine"].fetch


def test_one_by_one(trio: Trio, alone: list[dict[str, Any]]) -> None:
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        answer = trio.decode.ask(prompt, trio.prefill.prefill(prompt), max_tokens=6)
        assert (answer["text"], answer["reason"]) == (expected["text"], expected["reason"])
    assert fetched(trio.decode).num_transfers == len(PROMPTS)
    assert {lane.path for lane in fetched(trio.decode).lanes} <= {"mapped", "put"}
    trio.check_accounts()


def test_blocks_of_another_size(trio: Trio, alone: list[dict[str, Any]]) -> None:
    """Two blocks of 32 tokens make one of 64, with tails; where keys are tiled (AMX) that is refused and computed."""
    asked = (0, 3, 6, 7)
    for at in asked:
        params = trio.prefill.prefill(PROMPTS[at])
        answer = trio.larger.ask(PROMPTS[at], dict(params), max_tokens=6)
        assert answer["text"] == alone[at]["text"]
    if params["remote_layout"] == "cpu-vec":
        assert fetched(trio.larger).num_transfers == 2 * len(asked), "keys and values"
        assert trio.larger.tell("facts")["failures"] == {}
    else:
        assert trio.larger.tell("facts")["failures"] == {"ConfigError": len(asked)}
    trio.check_accounts()


def test_all_at_once_with_fewer_blocks_than_all_need(trio: Trio, alone: list[dict[str, Any]]) -> None:
    """Those that find no blocks wait, and the prefill side keeps theirs."""
    # Other first words, so that no prefix is there already.
    prompts = [f"Number {at}. {prompt}" for at, prompt in enumerate(PROMPTS)]
    prefilling = [trio.prefill.submit(prompt, {"do_remote_decode": True}) for prompt in prompts]
    params = [trio.prefill.result(name)["params"] for name in prefilling]
    before = fetched(trio.decode).num_transfers
    decoding = [trio.decode.submit(prompt, each, max_tokens=6) for prompt, each in zip(prompts, params, strict=True)]
    texts = [trio.decode.result(name)["text"] for name in decoding]
    assert fetched(trio.decode).num_transfers == before + len(prompts)
    alone_now = [trio.prefill.submit(prompt, max_tokens=6) for prompt in prompts]
    assert texts == [trio.prefill.result(name)["text"] for name in alone_now]
    trio.check_accounts()


def test_a_prefix_that_is_here_is_not_fetched_again(trio: Trio) -> None:
    start = "The lighthouse keeper counted the ships that passed before dawn, and wrote each of them down. " * 6
    longer = start + "In the evening he"
    expected = trio.prefill.ask(longer, max_tokens=6)["text"]
    assert trio.decode.ask(start, max_tokens=1)["tokens"] >= 3 * BLOCK
    before = fetched(trio.decode)
    answer = trio.decode.ask(longer, trio.prefill.prefill(longer), max_tokens=6)
    assert answer["text"] == expected
    after = fetched(trio.decode)
    num_blocks = -(-answer["tokens"] // BLOCK)
    num_present = (after.num_resident or 0) - (before.num_resident or 0)
    assert num_present >= 3
    assert (after.num_pages or 0) - (before.num_pages or 0) == num_blocks - num_present
    # All but the last block is here now; that block, not whole, is fetched.
    again = trio.decode.ask(longer, trio.prefill.prefill(longer), max_tokens=6)
    assert again["text"] == expected
    assert (fetched(trio.decode).num_pages or 0) - (after.num_pages or 0) == 1
    trio.check_accounts()


@pytest.mark.parametrize(
    ("change", "is_signed", "error"),
    [
        ({"remote_request_id": "never published"}, True, "NotPublishedError"),
        ({"remote_addresses": ["127.0.0.1:1"]}, True, "PeerLostError"),
        ({"remote_addresses": ["127.0.0.1:2"]}, False, "ConfigError"),
        ({"remote_model": "LlamaForCausalLM-of-somebody-else"}, True, "ConfigError"),
        ({"remote_addresses": ["a", "b"]}, True, "ConfigError"),
        ({"remote_num_tokens": "many"}, False, "ConfigError"),
    ],
)
def test_what_cannot_be_loaded_fails_or_is_computed_here(
    trio: Trio, change: dict[str, Any], is_signed: bool, error: str
) -> None:
    """As vLLM's failure policy says."""
    prompt = f"A prompt whose pages do not come, because of {next(iter(change.values()))}: it says"
    params = trio.prefill.prefill(prompt) | change
    if is_signed:
        params = signed(params)
    before = dict(trio.decode.tell("facts")["failures"])
    assert trio.decode.ask(prompt, dict(params), max_tokens=4)["reason"] == "error"
    after = trio.decode.tell("facts")["failures"]
    assert after[error] == before.get(error, 0) + 1
    answer = trio.larger.ask(prompt, dict(params), max_tokens=4)
    assert answer["reason"] == "length"
    assert answer["text"] == trio.prefill.ask(prompt, max_tokens=4)["text"]
    trio.larger.settled()
    trio.decode.settled()


def test_an_abort_while_pages_are_awaited_frees_the_blocks_at_once(trio: Trio) -> None:
    prompt = "An unhurried request that nobody waits for"
    params = trio.prefill.prefill(prompt)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # connects, and never says a word
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        name = trio.decode.submit(prompt, signed(params | {"remote_addresses": [address]}))
        time.sleep(1)
        assert trio.decode.tell("facts")["requests"] == 1
        trio.decode.abort(name)
        assert trio.decode.result(name)["reason"] == "abort"
        assert trio.decode.settled(within_s=10)["free"] == trio.free["decode"]


def test_a_wrong_token_is_told(trio: Trio, tmp_path: Path) -> None:
    """Before anything is connected: neither side shows the other its own."""
    secret = tmp_path / "token"
    secret.write_text("guessed")
    extra = {"token_file": str(secret)}
    with Instance(MODEL, core=1, role="kv_consumer", extra=extra, policy="recompute") as stranger:
        prompt = "A stranger asks for what is not his"
        answer = stranger.ask(prompt, trio.prefill.prefill(prompt), max_tokens=4)
        assert answer["text"] == trio.prefill.ask(prompt, max_tokens=4)["text"]
        assert stranger.settled()["failures"] == {"ConfigError": 1}


def test_prefill_stopped_and_killed(trio: Trio) -> None:
    """The last test: afterwards there is no prefill side any more."""
    first, second, third = (f"Prompt {n} of an instance that dies" for n in ("one", "two", "three"))
    params = [trio.prefill.prefill(prompt) for prompt in (first, second, third)]
    expected = trio.prefill.ask(third, max_tokens=4)["text"]
    after = trio.decode.ask(first, params[0], max_tokens=4)  # killed after: it has all it needs
    assert after["reason"] == "length"
    trio.prefill.signal(signal.SIGSTOP)
    name = trio.decode.submit(second, params[1], max_tokens=4)
    time.sleep(1)
    trio.prefill.signal(signal.SIGKILL)
    assert trio.decode.result(name, timeout_s=30)["reason"] == "error"
    assert trio.larger.ask(third, params[2], max_tokens=4)["text"] == expected
    for name in ("decode", "larger"):
        assert getattr(trio, name).settled()["free"] == trio.free[name]
