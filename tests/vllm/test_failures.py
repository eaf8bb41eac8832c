"""Hand-overs between real vLLM instances that are disturbed in the middle: at a certain call, not after a certain time.

One instance computes prompts in small steps, one continues them and fails what it cannot load, one computes that anew;
the instances that die are others. After each test every block is free again on all sides.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hurray_rdma.testing.vllm_instances import Instance
from tests.vllm.prompts import MODEL

BLOCK = 32
LEASE_S = 20
READ = "hurray_rdma.transport.remote:RemoteMemory.read_rows"
"""Pages move; with `AT_ONCE` set to 1, a block with each call."""
AT_ONCE = "hurray_rdma.engine.exchange:STEP_NBYTES"
PUBLISH = "hurray_rdma.connectors.vllm.worker:WorkerSide.publish"
"""A prompt has been computed."""
SETTINGS: dict[str, Any] = {"num_gpu_blocks_override": 30, "max_model_len": 768, "max_num_batched_tokens": 64}
"""Of the 30 blocks one is vLLM's own."""
EXTRA = {"timeout_s": 60, "lease_s": LEASE_S}


def numbered(start: int, count: int) -> list[int]:
    """A prompt of so many tokens, unlike those of other starts."""
    return [1000 + start * 100 + at % 97 for at in range(count)]


def instance(**more: Any) -> Instance:
    made = Instance(MODEL, **({"extra": EXTRA, "deadline_s": 3000} | SETTINGS | more))
    made.tune(AT_ONCE, 1)
    return made


@dataclass
class Trio:
    prefill: Instance
    decode: Instance
    computes: Instance
    """Decodes, and computes what it cannot load."""
    free: dict[str, int]

    def settled(self, *names: str) -> None:
        """Every block is free again, and the engines hold nothing for anybody."""
        for name in names or self.free:
            instance, deadline = getattr(self, name), time.monotonic() + 30
            while True:
                facts = instance.settled(within_s=4 * LEASE_S)
                assert facts["free"] == self.free[name], name
                held = {(pages.quarantined, pages.num_leases) for pages in facts["engine"].pools.values()}
                if held == {(0, 1)}:  # the pool's own lease of all its pages
                    break
                assert time.monotonic() < deadline, (name, held)  # what was aborted is declined now
                time.sleep(0.1)

    def alone(self, prompt: list[int], *, max_tokens: int = 4) -> str:
        return str(self.prefill.ask(prompt, max_tokens=max_tokens)["text"])


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    with (
        instance(core=0, role="kv_producer") as prefill,
        instance(core=1, role="kv_consumer") as decode,
        instance(core=1, role="kv_consumer", policy="recompute") as computes,
    ):
        instances = {"prefill": prefill, "decode": decode, "computes": computes}
        free = {name: each.ready().tell("facts")["free"] for name, each in instances.items()}
        assert free == dict.fromkeys(instances, 29)
        yield Trio(prefill, decode, computes, free)


def failures_of(instance: Instance) -> dict[str, int]:
    return dict(instance.tell("facts")["failures"])


def test_prefill_killed_while_pages_move(trio: Trio) -> None:
    prompts = {"decode": numbered(1, 400), "computes": numbered(2, 400)}
    expected = trio.alone(prompts["computes"])
    with instance(core=0, role="kv_producer", extra=EXTRA | {"lease_s": 300}) as doomed:
        params = {name: doomed.prefill(prompt) for name, prompt in prompts.items()}
        names = {}
        for side in ("decode", "computes"):
            decode = getattr(trio, side)
            decode.hold(READ, call=2)
            names[side] = decode.submit(prompts[side], params[side], max_tokens=4)
            decode.wait_held()
        doomed.signal(signal.SIGKILL)
        doomed.gone()
    for side in ("decode", "computes"):
        getattr(trio, side).release()
    failed = trio.decode.result(names["decode"])
    assert (failed["reason"], failed["text"]) == ("error", "")
    assert "could not be loaded" in trio.decode.tell("facts")["said"][-1]
    assert trio.computes.result(names["computes"])["text"] == expected
    trio.settled()


def test_prefill_stopped_while_pages_move_and_alive_again(trio: Trio) -> None:
    prompt = numbered(3, 400)
    expected = trio.alone(prompt)
    trio.decode.hold(READ, call=2)
    name = trio.decode.submit(prompt, trio.prefill.prefill(prompt), max_tokens=4)
    trio.decode.wait_held()
    trio.prefill.signal(signal.SIGSTOP)
    try:
        trio.decode.release()
        assert trio.decode.result(name)["reason"] == "error"
        # Lost; or it is asked anew, where something still accepts connections, and that takes all the time there is.
        assert failures_of(trio.decode).keys() & {"PeerLostError", "DeadlineExceededError"}
        trio.settled("decode")
    finally:
        trio.prefill.signal(signal.SIGCONT)
    trio.settled()
    assert trio.decode.ask(prompt, trio.prefill.prefill(prompt), max_tokens=4)["text"] == expected
    trio.settled()


def test_decode_killed_while_pages_move(trio: Trio) -> None:
    prompt = numbered(4, 400)
    with instance(core=1, role="kv_consumer") as doomed:
        doomed.ready()
        doomed.hold(READ, call=2)
        doomed.submit(prompt, trio.prefill.prefill(prompt))
        doomed.wait_held()
        doomed.signal(signal.SIGKILL)
        doomed.gone()
    trio.settled()


def test_an_abort_on_the_decode_side_while_pages_move(trio: Trio) -> None:
    """The blocks are written to until the reading has stopped, and no request may have them before."""
    prompt = numbered(5, 400)
    params = trio.prefill.prefill(prompt)
    trio.decode.hold(READ, call=2)
    name = trio.decode.submit(prompt, params)
    trio.decode.wait_held()
    trio.decode.abort(name)
    assert trio.decode.result(name)["reason"] == "abort"
    another = trio.decode.ask(numbered(6, 40), max_tokens=8)  # steps go on meanwhile
    assert another["reason"] == "length"
    facts = trio.decode.tell("facts")
    assert trio.free["decode"] - facts["free"] == -(-len(prompt) // BLOCK)
    before, expired = dict(facts["failures"]), trio.prefill.tell("facts")["engine"].num_leases_expired
    trio.decode.release()
    trio.settled()
    assert failures_of(trio.decode) == before, "nobody wanted it: that is no failure"
    assert trio.prefill.tell("facts")["engine"].num_leases_expired == expired, "it was told, and need not wait"


def test_an_abort_on_the_prefill_side_before_the_prompt_is_computed(trio: Trio) -> None:
    prompt = numbered(7, 400)
    trio.prefill.steps(0)
    name = trio.prefill.submit(prompt, {"do_remote_decode": True})
    trio.prefill.steps(2)
    assert trio.prefill.tell("facts")["free"] < trio.free["prefill"]
    trio.prefill.abort(name)
    trio.prefill.go()
    assert trio.prefill.result(name) == {"text": "", "reason": "abort", "params": None}
    trio.settled("prefill")


def test_an_abort_on_the_prefill_side_when_the_prompt_has_just_been_computed(trio: Trio) -> None:
    """It can be read already then, though nobody has been told."""
    prompt = numbered(8, 400)
    trio.prefill.steps(0)
    name = trio.prefill.submit(prompt, {"do_remote_decode": True})
    trio.prefill.abort_at(name, PUBLISH)
    trio.prefill.go()
    assert trio.prefill.result(name)["reason"] == "abort"
    trio.prefill.release()
    trio.settled("prefill")
    expected = trio.alone(prompt)
    assert trio.decode.ask(prompt, trio.prefill.prefill(prompt), max_tokens=4)["text"] == expected
    trio.settled()


def test_a_prompt_that_nobody_asks_for_in_time(trio: Trio) -> None:
    prompt, before = numbered(9, 100), failures_of(trio.decode)
    params = trio.prefill.prefill(prompt)
    trio.settled("prefill")
    failed = trio.decode.ask(prompt, dict(params), max_tokens=4)
    assert failed["reason"] == "error"
    assert failures_of(trio.decode)["NotPublishedError"] == before.get("NotPublishedError", 0) + 1
    assert "fetch it before its lease ends" in trio.decode.tell("facts")["said"][-1]
    assert trio.computes.ask(prompt, dict(params), max_tokens=4)["text"] == trio.alone(prompt)
    trio.settled()


def test_what_decode_refuses_is_free_at_once_where_it_was_computed(trio: Trio) -> None:
    """It is declined, and need not wait for the end of its lease."""
    prompt = numbered(17, 100)
    facts, before = trio.prefill.tell("facts"), failures_of(trio.decode)
    address, expired = facts["address"], facts["engine"].num_leases_expired
    changes = ({"remote_model": "other"}, {"remote_num_tokens": 101}, {"remote_addresses": [address, address]})
    for change in changes:
        for side in (trio.decode, trio.computes):
            answer = side.ask(prompt, trio.prefill.prefill(prompt) | change, max_tokens=4)
            assert answer["reason"] == ("error" if side is trio.decode else "length")
            trio.settled()
    assert failures_of(trio.decode)["ConfigError"] == before.get("ConfigError", 0) + len(changes)
    assert trio.prefill.tell("facts")["engine"].num_leases_expired == expired


def test_preemption_on_the_decode_side(trio: Trio) -> None:
    """Four prompts of 7 blocks fit into 29, and their texts do not: what gives way is computed again, not loaded.

    (All blocks but one are taken before the first of them runs, so that two cannot be past their third token at once.)
    """
    prompts = [numbered(at, 7 * BLOCK - 2) for at in (10, 11, 12, 16)]
    expected = [trio.alone(prompt, max_tokens=16) for prompt in prompts]
    before = trio.decode.tell("facts")
    params = [trio.prefill.prefill(prompt) for prompt in prompts]
    trio.decode.steps(0)
    names = [trio.decode.submit(prompt, each, max_tokens=16) for prompt, each in zip(prompts, params, strict=True)]
    trio.decode.go()
    answers = [trio.decode.result(name) for name in names]
    assert [(answer["reason"], answer["text"]) for answer in answers] == [("length", text) for text in expected]
    after = trio.decode.tell("facts")
    assert after["preempted"] > before["preempted"]
    assert after["engine"].fetch.num_transfers == before["engine"].fetch.num_transfers + len(prompts)
    trio.settled()


def test_preemption_on_the_prefill_side_in_the_middle_of_a_prompt(trio: Trio) -> None:
    prompt = numbered(13, 400)
    trio.prefill.steps(0)
    name = trio.prefill.submit(prompt, {"do_remote_decode": True})
    trio.prefill.steps(3)
    before = trio.prefill.tell("facts")
    assert before["running"] == 1
    trio.prefill.preempt()
    trio.prefill.go()
    params = trio.prefill.result(name)["params"]
    assert trio.prefill.tell("facts")["preempted"] == before["preempted"] + 1
    assert trio.decode.ask(prompt, params, max_tokens=4)["text"] == trio.alone(prompt)
    trio.settled()


def test_preemption_on_the_prefill_side_by_another_request(trio: Trio) -> None:
    """One that grows takes the block that a prompt of 21 blocks needs for its end; the prompt is computed again."""
    grows, prompt = numbered(14, 8 * BLOCK - 2), numbered(15, 21 * BLOCK - 8)
    before = trio.prefill.tell("facts")
    trio.prefill.steps(0)
    text = trio.prefill.submit(grows, max_tokens=24)
    trio.prefill.steps(4)  # its prompt, 64 tokens at a time
    name = trio.prefill.submit(prompt, {"do_remote_decode": True})
    trio.prefill.go()
    assert trio.prefill.result(text)["reason"] == "length"
    params = trio.prefill.result(name)["params"]
    assert trio.prefill.tell("facts")["preempted"] > before["preempted"]
    assert trio.decode.ask(prompt, params, max_tokens=4)["text"] == trio.alone(prompt)
    trio.settled()
