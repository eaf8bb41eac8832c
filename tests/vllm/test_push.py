"""Prompts pushed by one real vLLM while it computes them, layer by layer, into the blocks that another one has ready.

The decode side asks first unless a test says otherwise, so that its blocks are there when the first layer is computed.
"""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hurray_rdma.testing.vllm_instances import Instance
from hurray_rdma.testing.vllm_servers import free_port
from tests.vllm.prompts import MODEL, PROMPTS

BLOCK = 32
LONG = "A river runs from the hills to the sea, past mills and meadows and towns with old bridges. " * 30


@dataclass
class Trio:
    prefill: Instance
    decode: Instance
    larger: Instance
    free: dict[str, int]

    def begin(self, decode: Instance, prompt: str, *, max_tokens: int = 6, **params: Any) -> tuple[str, str]:
        """The decode side's request, waiting for pages; and its key."""
        key = uuid.uuid4().hex
        asked = {"do_remote_prefill": True, "remote_request_id": key, **params}
        return decode.submit(prompt, asked, max_tokens=max_tokens), key

    def target(self, key: str, decode: Instance, **params: Any) -> dict[str, Any]:
        """What the prefill side is asked with."""
        address = decode.tell("facts")["address"]
        return {"do_remote_decode": True, "remote_request_id": key, "remote_addresses": [address], **params}

    def ask(self, prompt: str, *, max_tokens: int = 6) -> dict[str, Any]:
        """A request through both."""
        name, key = self.begin(self.decode, prompt, max_tokens=max_tokens)
        until(self.decode, "loading", 1)
        self.prefill.ask(prompt, self.target(key, self.decode))
        return self.decode.result(name)

    def check_accounts(self) -> None:
        """Every block is free again, on every side, and the engines hold nothing for anybody."""
        for name, free in self.free.items():
            facts = getattr(self, name).settled()
            assert facts["free"] == free, name
            for pages in facts["engine"].pools.values():
                assert (pages.quarantined, pages.num_leases) == (0, 1), "the pool's own lease of all its pages"


def until(instance: Instance, fact: str, value: Any) -> None:
    deadline = time.monotonic() + 60
    while instance.tell("facts")[fact] != value:
        assert time.monotonic() < deadline, instance.tell("facts")
        time.sleep(0.02)


def sent(instance: Instance) -> Any:
    return instance.tell("facts")["engine"].send


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    extra = {"mode": "push", "timeout_s": 120, "lease_s": 120}
    ports = [free_port() for _ in range(2)]
    source = extra | {"push_to": [f"127.0.0.1:{port}" for port in ports]}
    here, there = (extra | {"port": port} for port in ports)
    with (
        Instance(MODEL, core=0, role="kv_producer", extra=source, max_num_batched_tokens=512) as prefill,
        Instance(MODEL, core=1, role="kv_consumer", extra=here, num_gpu_blocks_override=40) as decode,
        Instance(MODEL, core=1, role="kv_consumer", extra=there, policy="recompute", block_size=2 * BLOCK) as larger,
    ):
        instances = {"prefill": prefill, "decode": decode, "larger": larger}
        free = {name: instance.ready().tell("facts")["free"] for name, instance in instances.items()}
        yield Trio(prefill, decode, larger, free)


@pytest.fixture(scope="module")
def alone(trio: Trio) -> list[dict[str, Any]]:
    """What one instance alone answers."""
    return [trio.larger.ask(prompt, max_tokens=6) for prompt in PROMPTS]


def test_one_by_one(trio: Trio, alone: list[dict[str, Any]]) -> None:
    """The prefill side computes each anew, so that layers leave while others are computed."""
    for prompt, expected in zip(PROMPTS, alone, strict=True):
        answer = trio.ask(prompt)
        assert (answer["text"], answer["reason"]) == (expected["text"], expected["reason"])
    facts = trio.prefill.tell("facts")
    assert facts["engine"].send.num_transfers == len(PROMPTS)
    assert facts["failures"] == {}
    assert facts["early"] > 0, "layers were at the decode side before the last one of their prompt was computed"
    assert {lane.path for lane in facts["engine"].send.lanes} == {"mapped"}
    trio.check_accounts()


def test_a_prompt_in_chunks_goes_with_its_last_one(trio: Trio) -> None:
    expected = trio.larger.ask(LONG, max_tokens=6)
    assert expected["tokens"] > 512, "more than are computed in a step"
    answer = trio.ask(LONG)
    assert answer["text"] == expected["text"]
    trio.check_accounts()


def test_prefill_first_as_with_a_proxy_that_asks_one_after_the_other(trio: Trio) -> None:
    prompt = "First the one, then the other: a patient proxy says"
    key = uuid.uuid4().hex
    params = trio.prefill.ask(prompt, trio.target(key, trio.decode))["params"]
    assert params["do_remote_prefill"] is True
    answer = trio.decode.ask(prompt, params, max_tokens=6)
    assert answer["text"] == trio.larger.ask(prompt, max_tokens=6)["text"]
    trio.check_accounts()


def test_prefill_pushes_to_nobody_whom_its_settings_do_not_list(trio: Trio) -> None:
    prompt, before = "Somebody else is listening there", sent(trio.prefill)
    params = {"do_remote_decode": True, "remote_request_id": "key", "remote_addresses": [f"127.0.0.1:{free_port()}"]}
    answer = trio.prefill.ask(prompt, params)
    assert (answer["reason"], answer["params"]) == ("length", None)
    facts = trio.prefill.settled()
    assert facts["engine"].send.num_transfers == before.num_transfers
    assert facts["failures"] == {"ConfigError": 1}
    trio.check_accounts()


def test_blocks_of_another_size(trio: Trio, alone: list[dict[str, Any]]) -> None:
    """Where keys are tiled (AMX) nothing comes, and it is computed."""
    before = sent(trio.prefill).num_transfers
    asked = (0, 3, 6)
    for at in asked:
        prompt = f"Of another size. {PROMPTS[at]}"
        name, key = trio.begin(trio.larger, prompt, remote_block_size=BLOCK)
        until(trio.larger, "loading", 1)
        trio.prefill.ask(prompt, trio.target(key, trio.larger, remote_block_size=2 * BLOCK))
        text = trio.larger.result(name)["text"]
        assert text == trio.decode.ask(prompt, max_tokens=6)["text"]
    if trio.larger.tell("facts")["failures"] == {}:
        assert sent(trio.prefill).num_transfers == before + 2 * len(asked), "keys and values"
    trio.check_accounts()


def test_all_at_once_with_fewer_blocks_than_all_need(trio: Trio) -> None:
    """Those that find no blocks wait, and so do the pages."""
    prompts = [f"Number {at}. {prompt}" for at, prompt in enumerate(PROMPTS)]
    decoding = [trio.begin(trio.decode, prompt) for prompt in prompts]
    prefilling = [
        trio.prefill.submit(prompt, trio.target(key, trio.decode))
        for prompt, (_, key) in zip(prompts, decoding, strict=True)
    ]
    texts = [trio.decode.result(name)["text"] for name, _ in decoding]
    for name in prefilling:
        trio.prefill.result(name)
    assert texts == [trio.larger.ask(prompt, max_tokens=6)["text"] for prompt in prompts]
    trio.check_accounts()


def test_a_prefix_that_is_here_is_not_sent_again(trio: Trio) -> None:
    start = "The lighthouse keeper counted the ships that passed before dawn, and wrote each of them down. " * 6
    longer = start + "In the evening he"
    expected = trio.larger.ask(longer, max_tokens=6)["text"]
    assert trio.decode.ask(start, max_tokens=1)["tokens"] >= 3 * BLOCK
    before = sent(trio.prefill)
    answer = trio.ask(longer)
    assert answer["text"] == expected
    after = sent(trio.prefill)
    num_present = (after.num_resident or 0) - (before.num_resident or 0)
    assert num_present >= 3
    assert (after.num_pages or 0) - (before.num_pages or 0) == -(-answer["tokens"] // BLOCK) - num_present
    trio.check_accounts()


def test_an_abort_on_the_decode_side(trio: Trio) -> None:
    """Before anything is offered: its blocks are free at once, and the push that comes ends without moving a byte."""
    prompt = "Nobody waits for this any more"
    name, key = trio.begin(trio.decode, prompt)
    until(trio.decode, "loading", 1)
    trio.decode.abort(name)
    assert trio.decode.result(name)["reason"] == "abort"
    assert trio.decode.settled(within_s=30)["free"] == trio.free["decode"]
    before = sent(trio.prefill)
    trio.prefill.ask(prompt, trio.target(key, trio.decode))
    trio.check_accounts()
    after = sent(trio.prefill)
    assert (after.num_transfers, after.nbytes) == (before.num_transfers + 1, before.nbytes)


def test_an_abort_on_both_sides_as_of_a_proxy_whose_client_has_gone(trio: Trio) -> None:
    name, key = trio.begin(trio.decode, "Aborted. " + LONG)
    until(trio.decode, "loading", 1)
    prefilling = trio.prefill.submit("Aborted. " + LONG, trio.target(key, trio.decode))
    trio.prefill.abort(prefilling)
    assert trio.prefill.result(prefilling)["reason"] == "abort"
    trio.decode.abort(name)
    assert trio.decode.result(name)["reason"] == "abort"
    trio.check_accounts()


def test_prefill_killed_while_it_pushes(trio: Trio) -> None:
    """The last test: afterwards there is no prefill side any more."""
    name, key = trio.begin(trio.decode, "Killed. " + LONG)
    until(trio.decode, "loading", 1)
    trio.prefill.submit("Killed. " + LONG, trio.target(key, trio.decode))
    deadline = time.monotonic() + 60
    while max(pages.num_leases for pages in trio.decode.tell("facts")["engine"].pools.values()) < 2:  # granted
        assert time.monotonic() < deadline
    trio.prefill.signal(signal.SIGKILL)
    assert trio.decode.result(name, timeout_s=60)["reason"] == "error"
    facts = trio.decode.settled()
    assert facts["free"] == trio.free["decode"]
    assert sum(facts["failures"].values()) > 0
