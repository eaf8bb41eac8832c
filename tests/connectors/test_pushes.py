"""A worker's side in push mode: prompts go out layer by layer, real engines, caches of NumPy arrays."""

from __future__ import annotations

import time

import numpy as np
import pytest

from hurray_rdma.connectors.vllm.handoff import Layout, PushedPrefill, PushTarget
from hurray_rdma.connectors.vllm.steps import Load, Publish, Step
from hurray_rdma.connectors.vllm.worker import WorkerSide
from tests.connectors.test_worker_side import LAYERS, caches, fill, tokens, until, worker


def target(reader: WorkerSide, block_size: int = 4) -> PushTarget:
    return PushTarget(key="key", addresses=(reader.address,), block_size=block_size)


def pushed(block_size: int = 4, num_tokens: int = 10) -> PushedPrefill:
    return PushedPrefill(key="key", num_tokens=num_tokens, block_size=block_size)


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("num_present", [0, 1])
def test_layers_are_pushed_while_others_are_computed(first: str, num_present: int) -> None:
    theirs, mine = caches(), caches()
    names = [f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS)]
    with worker(theirs, mode="push") as (source, _), worker(mine, listens=True, mode="push") as (reader, pool):
        load = Step(load=[Load("d", pushed(), "", [3, 8, 1], num_present)])
        step = Step(publish=[Publish("p", "key", [9, 2, 5], 10, target(reader))])
        if first == "decode":
            reader.begin(load)
        source.push(step)
        fill(theirs)  # the model
        for name in names[:-1]:
            source.layer_computed(name)
        if first == "prefill":
            reader.begin(load)
        deadline = time.monotonic() + 15
        while source._pushes.num_sent < LAYERS - 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert mine[names[-2]][[8, 1]].any()
        assert not mine[names[-1]].any(), "not computed yet"
        assert reader.ended(set()).received == set()
        source.layer_computed(names[-1])
        assert source._pushes.num_early == LAYERS - 1
        source.publish(step)
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.received, ended.failed_block_ids, ended.failures) == ({"d"}, set(), [])
        if num_present:
            assert not any(tensor[3].any() for tensor in mine.values()), "it was there already"
        blocks, from_blocks = [3, 8, 1][num_present:], [9, 2, 5][num_present:]
        count = 10 - 4 * num_present
        np.testing.assert_array_equal(tokens(mine, blocks, count), tokens(theirs, from_blocks, count))
        assert until(source, lambda ended: bool(ended.sent), {"p"}).sent == {"p"}
        assert pool.allocator.accounts().num_leases == 1


@pytest.mark.parametrize(("theirs_size", "mine_size"), [(4, 8), (8, 4)])
@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.CPU_VEC])
def test_blocks_of_unlike_sizes_are_pushed(theirs_size: int, mine_size: int, layout: str) -> None:
    theirs, mine = caches(block_size=theirs_size), caches(block_size=mine_size)
    from_blocks, to_blocks = ([9, 2, 5], [3, 8]) if theirs_size == 4 else ([9, 2], [3, 8, 1])
    with (
        worker(theirs, mode="push", layout=layout) as (source, _),
        worker(mine, listens=True, mode="push", layout=layout) as (reader, _),
    ):
        reader.begin(Step(load=[Load("d", pushed(theirs_size), "", to_blocks, 0)]))
        step = Step(publish=[Publish("p", "key", from_blocks, 10, target(reader, mine_size))])
        source.push(step)
        fill(theirs)
        source.publish(step)
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.failures, ended.failed_block_ids) == ([], set())
        if layout == Layout.ROWS:
            np.testing.assert_array_equal(tokens(mine, to_blocks, 10), tokens(theirs, from_blocks, 10))
        else:
            assert all(tensor[to_blocks].any() for tensor in mine.values())
        assert until(source, lambda ended: bool(ended.sent), {"p"}).failures == []


def test_a_push_that_prefill_aborts_frees_both_sides() -> None:
    theirs, mine = caches(), caches()
    with (
        worker(theirs, mode="push") as (source, _),
        worker(mine, listens=True, mode="push") as (reader, pool),
    ):
        reader.begin(Step(load=[Load("d", pushed(), "", [3, 8, 1], 0)]))
        source.push(Step(publish=[Publish("p", "key", [9, 2, 5], 10, target(reader))]))
        source.layer_computed("model.layers.0.self_attn.attn")
        deadline = time.monotonic() + 15
        while source._pushes.num_sent < 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        source.begin(Step(retire=["p"]))
        ended = until(source, lambda ended: bool(ended.sent), {"p"})
        assert (ended.sent, ended.failures) == ({"p"}, [])
        source.publish(Step())  # the forward pass ends all the same
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.received, ended.failed_block_ids, len(ended.failures)) == ({"d"}, {1, 3, 8}, 1)
        assert pool.allocator.accounts().num_leases == 1


@pytest.mark.parametrize("begun", [False, True])
def test_a_preempted_push_sends_nothing_of_what_its_blocks_hold_next(begun: bool) -> None:
    """It waits for its grant, or layers of it have gone out; then it is computed again into other blocks."""
    theirs, mine = caches(), caches()
    fill(theirs)
    load = Step(load=[Load("d", pushed(), "", [3, 8, 1], 0)])
    with worker(theirs, mode="push") as (source, _), worker(mine, listens=True, mode="push") as (reader, pool):
        first = Step(publish=[Publish("p", "key", [9, 2, 5], 10, target(reader))])
        if begun:
            reader.begin(load)
        source.push(first)
        source.layer_computed("model.layers.0.self_attn.attn")
        deadline = time.monotonic() + 15
        while begun and source._pushes.num_sent < 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        if not begun:
            source.publish(first)  # all of it may go out
        source.withdraw("p")
        before = {name: tensor.copy() for name, tensor in mine.items()}
        for tensor in theirs.values():
            tensor[[9, 2, 5]] = 77  # another request's
        if begun:
            source.publish(first)
            ended = until(reader, lambda ended: bool(ended.received))
            assert (ended.failed_block_ids, len(ended.failures)) == ({1, 3, 8}, 1)
            assert all((mine[name] == before[name]).all() for name in mine)
        reader.begin(load)
        second = Step(publish=[Publish("p", "key", [4, 6, 7], 10, target(reader))])
        source.push(second)
        source.publish(second)
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.received, ended.failures) == ({"d"}, [])
        np.testing.assert_array_equal(tokens(mine, [3, 8, 1], 10), tokens(theirs, [4, 6, 7], 10))
        ended = until(source, lambda ended: bool(ended.sent), {"p"})
        assert (ended.sent, ended.failures) == ({"p"}, [])
        assert pool.allocator.accounts().num_leases == 1


def test_a_push_of_the_same_name_ends_the_one_before() -> None:
    theirs, mine = caches(), caches()
    fill(theirs)
    with worker(theirs, mode="push") as (source, _), worker(mine, listens=True, mode="push") as (reader, _):
        source.push(Step(publish=[Publish("p", "key", [9, 2, 5], 10, target(reader))]))
        (waiting,) = source._published["p"].pushes
        second = Step(publish=[Publish("p", "key", [4, 6, 7], 10, target(reader))])
        source.push(second)
        assert waiting.cancelled()
        source.publish(second)
        reader.begin(Step(load=[Load("d", pushed(), "", [3, 8, 1], 0)]))
        assert until(reader, lambda ended: bool(ended.received)).failures == []
        np.testing.assert_array_equal(tokens(mine, [3, 8, 1], 10), tokens(theirs, [4, 6, 7], 10))


def test_of_a_request_that_finishes_while_its_blocks_are_taken_away_it_is_said_that_it_was_sent() -> None:
    theirs, mine = caches(), caches()
    with worker(theirs, mode="push") as (source, _), worker(mine, listens=True, mode="push") as (reader, _):
        source.push(Step(publish=[Publish(name, name, [9, 2, 5], 10, target(reader)) for name in ("p", "q")]))
        pushes = [push for name in ("p", "q") for push in source._published[name].pushes]
        source.withdraw("p", keep=True)
        source.withdraw("q")
        assert all(push.cancelled() for push in pushes)
        source.begin(Step(retire=["p"]))
        ended = until(source, lambda ended: bool(ended.sent), {"p", "q"})
        assert (ended.sent, ended.failures) == ({"p"}, [])


def test_prompts_that_are_not_pushed_count_as_failures() -> None:
    with worker(caches(), mode="push") as (source, _):
        source.begin(Step(num_refused=2))
        assert source.ended(set()).failures == ["ConfigError"] * 2


def test_a_push_that_decode_does_not_want_any_more_brings_nothing() -> None:
    theirs, mine = caches(), caches()
    fill(theirs)
    with worker(theirs, mode="push") as (source, _), worker(mine, listens=True, mode="push") as (reader, pool):
        reader.begin(Step(load=[Load("e", pushed(), "", [4, 5, 6], 0)]))
        reader.begin(Step(abort=["e"]))
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.received, ended.failures) == ({"e"}, [])
        step = Step(publish=[Publish("q", "key", [9, 2, 5], 10, target(reader))])
        source.push(step)
        source.publish(step)
        assert until(source, lambda ended: bool(ended.sent), {"q"}).failures == []
        assert not any(tensor.any() for tensor in mine.values())
        deadline = time.monotonic() + 15
        while pool.allocator.accounts().num_leases != 1:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def test_a_push_that_nobody_makes_or_takes_fails_in_time() -> None:
    theirs, mine = caches(), caches()
    with (
        worker(theirs, mode="push", timeout_s=1) as (source, _),
        worker(mine, listens=True, mode="push", lease_s=1) as (reader, _),
    ):
        reader.begin(Step(load=[Load("d", pushed(), "", [3, 8, 1], 1)]))
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.failed_block_ids, ended.failures) == ({8, 1}, ["DeadlineExceededError"])
        step = Step(publish=[Publish("p", "key", [9, 2, 5], 10, target(reader))])
        source.push(step)
        source.publish(step)
        sent = until(source, lambda ended: bool(ended.sent), {"p"})
        assert (sent.sent, sent.failures) == ({"p"}, ["DeadlineExceededError"])
