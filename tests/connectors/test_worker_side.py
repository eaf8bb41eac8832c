"""The workers' sides of two instances, each over cache tensors like vLLM's: who reads what, and who is told when."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hurray_rdma import GeometryError, PagePool
from hurray_rdma.connectors.vllm.caches import Caches, pool_of
from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.handoff import Layout, RemotePrefill
from hurray_rdma.connectors.vllm.steps import Load, Publish, Step
from hurray_rdma.connectors.vllm.worker import Ended, WorkerSide

LAYERS, HEADS, CONTENT = 12, 2, 8
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""Physical order of vLLM's logical axes [layers, blocks, heads, tokens, content] (vLLM 0.32, kv_cache_layout.py)."""


def caches(*, num_blocks: int = 16, block_size: int = 4, order: str = "LBHNC", heads: int = HEADS) -> dict[str, Any]:
    """By layer, in an order that is not theirs: one allocation, seen as ``[blocks, heads, tokens, content]``."""
    shape = (LAYERS, num_blocks, heads, block_size, CONTENT)
    physical = np.zeros([shape[axis] for axis in ORDERS[order]], ml_dtypes.bfloat16)
    logical = physical.transpose(np.argsort(ORDERS[order]))
    return {f"model.layers.{layer}.self_attn.attn": logical[layer] for layer in reversed(range(LAYERS))}


def tokens(tensors: dict[str, Any], block_ids: list[int], num_tokens: int) -> np.ndarray:
    """``[layers, tokens, heads, content]``."""
    layers = [tensors[f"model.layers.{layer}.self_attn.attn"][block_ids] for layer in range(LAYERS)]
    gathered = [layer.transpose(0, 2, 1, 3).reshape(-1, layer.shape[1], CONTENT)[:num_tokens] for layer in layers]
    return np.stack(gathered)


def fill(tensors: dict[str, Any]) -> None:
    random = np.random.default_rng(5)
    for tensor in tensors.values():
        tensor[...] = random.integers(-99, 99, tensor.shape)


@contextlib.contextmanager
def worker(
    tensors: dict[str, Any], *, listens: bool = False, layout: str = Layout.ROWS, **extra: Any
) -> Iterator[tuple[WorkerSide, PagePool]]:
    shape = next(iter(tensors.values())).shape
    with contextlib.closing(Caches.of(tensors, layout, block_size=shape[2], total_heads=shape[1])) as made:
        config = ConnectorConfig.from_extra({"timeout_s": 10, "lease_s": 30} | extra)
        with contextlib.closing(WorkerSide(made, config, tp_rank=0, listens=listens)) as side:
            yield side, made.whole


def test_the_engine_need_not_wait_long_for_pythons_lock() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(5e-3)
        with worker(caches(), switch_interval_s=2e-3):
            assert sys.getswitchinterval() == pytest.approx(2e-3, abs=2e-6)
        with worker(caches()):
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=2e-6)
        with worker(caches(), switch_interval_s=2e-3):
            assert sys.getswitchinterval() == pytest.approx(1e-4, abs=2e-6), "a shorter one stays"
    finally:
        sys.setswitchinterval(before)


def at(source: WorkerSide, key: str, num_tokens: int, **changes: Any) -> RemotePrefill:
    facts = {"key": key, "addresses": (source.address,), "num_tokens": num_tokens, "model": "m", "lease_s": 30.0}
    return RemotePrefill(**(facts | {"block_size": 4, "layout": Layout.ROWS} | changes))


def until(side: WorkerSide, holds: Callable[[Ended], bool], finished: set[str] | None = None) -> Ended:
    """Steps without anything new, until one brings what is waited for."""
    deadline = time.monotonic() + 15
    while not holds(ended := side.ended(finished or set())):
        assert time.monotonic() < deadline
        side.begin(Step())
        time.sleep(0.005)
    return ended


@pytest.mark.parametrize("order", ORDERS)
def test_a_prompt_goes_over_whatever_the_order_of_the_cache(order: str) -> None:
    theirs, mine = caches(order=order), caches(order=order)
    fill(theirs)
    with worker(theirs, listens=True) as (source, _), worker(mine) as (reader, pool):
        source.publish(Step(publish=[Publish("p", "key", [9, 2, 5], 10)]))
        reader.begin(Step(load=[Load("d", at(source, "key", 10), "", [3, 8, 1], 0)]))
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.received, ended.failed_block_ids, ended.failures) == ({"d"}, set(), [])
        assert [each.num_pages for each in ended.transfers] == [3]
        np.testing.assert_array_equal(tokens(mine, [3, 8, 1], 10), tokens(theirs, [9, 2, 5], 10))
        assert not any(tensor[block].any() for tensor in mine.values() for block in set(range(16)) - {1, 3, 8})
        assert pool.allocator.accounts().num_leases == 1
        # vLLM is told that they were sent only once it has finished the request.
        assert source.ended(set()).sent == set()
        assert until(source, lambda ended: bool(ended.sent), {"p"}).sent == {"p"}


@pytest.mark.parametrize("whole_allocations", [True, False])
def test_caches_on_the_cpu_are_mapped_where_they_can_be(
    whole_allocations: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Above 32 MiB an allocation is always a mapping of its own; smaller ones may lie in the heap, and small ones do.
    large = caches(num_blocks=24576) if whole_allocations else caches()
    fill(large)
    before = {name: tensor.copy() for name, tensor in large.items()}
    made = Caches.of(large, Layout.ROWS, block_size=4, total_heads=HEADS, mappable=True)
    with contextlib.closing(made):
        assert all(region.replaced is whole_allocations for region in made.whole.regions)
        assert ("half the speed" in caplog.text) is not whole_allocations
    for name, tensor in large.items():
        np.testing.assert_array_equal(tensor, before[name])


@pytest.mark.parametrize(("theirs_size", "mine_size"), [(4, 8), (8, 4)])
def test_blocks_of_unlike_sizes(theirs_size: int, mine_size: int) -> None:
    theirs, mine = caches(block_size=theirs_size), caches(block_size=mine_size)
    fill(theirs)
    from_blocks, to_blocks = ([9, 2, 5], [3, 8]) if theirs_size == 4 else ([9, 2], [3, 8, 1])
    with worker(theirs, listens=True) as (source, _), worker(mine) as (reader, _):
        source.publish(Step(publish=[Publish("p", "key", from_blocks, 10)]))
        reader.begin(Step(load=[Load("d", at(source, "key", 10), "", to_blocks, 0)]))
        assert until(reader, lambda ended: bool(ended.received)).failures == []
        np.testing.assert_array_equal(tokens(mine, to_blocks, 10), tokens(theirs, from_blocks, 10))


@pytest.mark.parametrize("theirs_size", [4, 8])
@pytest.mark.parametrize("num_present", [0, 1])
def test_blocks_of_unlike_sizes_whose_keys_lie_by_content(theirs_size: int, num_present: int) -> None:
    """As vLLM's CPU backend has them: of each head first keys, [content, tokens], then values, [tokens, content]."""
    mine_size, half, num_tokens = 12 - theirs_size, CONTENT // 2, 14
    theirs, mine = caches(block_size=theirs_size), caches(block_size=mine_size)
    fill(theirs)
    from_blocks, to_blocks = ([9, 2, 5, 11], [3, 8]) if theirs_size == 4 else ([9, 2], [3, 8, 1, 7])

    def content(tensors: dict[str, Any], block_ids: list[int], size: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values, each ``[layers, heads, tokens, half]``."""
        blocks = np.stack([tensors[f"model.layers.{n}.self_attn.attn"][block_ids] for n in range(LAYERS)])
        planes = blocks.reshape(LAYERS, len(block_ids), HEADS, 2, size * half)
        keys = planes[:, :, :, 0].reshape(LAYERS, len(block_ids), HEADS, half, size).swapaxes(3, 4)
        values = planes[:, :, :, 1].reshape(LAYERS, len(block_ids), HEADS, size, half)
        keys, values = (each.swapaxes(1, 2).reshape(LAYERS, HEADS, -1, half) for each in (keys, values))
        first = num_present * mine_size
        return keys[:, :, first:num_tokens], values[:, :, first:num_tokens]

    with (
        worker(theirs, listens=True, layout=Layout.CPU_VEC) as (source, _),
        worker(mine, layout=Layout.CPU_VEC) as (reader, _),
    ):
        source.publish(Step(publish=[Publish("p", "key", from_blocks, num_tokens)]))
        remote = at(source, "key", num_tokens, block_size=theirs_size)
        reader.begin(Step(load=[Load("d", remote, "", to_blocks, num_present)]))
        assert until(reader, lambda ended: bool(ended.received)).failures == []
        there, here = content(theirs, from_blocks, theirs_size), content(mine, to_blocks, mine_size)
        np.testing.assert_array_equal(here[0], there[0])
        np.testing.assert_array_equal(here[1], there[1])
        assert not any(tensor[to_blocks[:num_present]].any() for tensor in mine.values())
        assert until(source, lambda ended: bool(ended.sent), {"p"}).sent == {"p"}, "read in two halves, or whole"


def test_opaque_blocks_travel_whole() -> None:
    """Whatever is in them: of the keys of one token each element is elsewhere."""
    theirs, mine = caches(), caches()
    fill(theirs)
    with (
        worker(theirs, listens=True, layout="cpu-amx") as (source, _),
        worker(mine, layout="cpu-amx") as (reader, _),
    ):
        source.publish(Step(publish=[Publish("p", "key", [9, 2], 5)]))
        reader.begin(Step(load=[Load("d", at(source, "key", 5), "", [3, 8], 0)]))
        assert until(reader, lambda ended: bool(ended.received)).failures == []
        for name, tensor in mine.items():
            np.testing.assert_array_equal(tensor[[3, 8]], theirs[name][[9, 2]])
        assert until(source, lambda ended: bool(ended.sent), {"p"}).sent == {"p"}


def test_prefix_hits_stay_as_they_are() -> None:
    theirs, mine = caches(), caches()
    fill(theirs)
    with worker(theirs, listens=True) as (source, _), worker(mine) as (reader, _):
        source.publish(Step(publish=[Publish("p", "key", [9, 2, 5], 10)]))
        reader.begin(Step(load=[Load("d", at(source, "key", 10), "", [3, 8, 1], 2)]))
        (transfer,) = until(reader, lambda ended: bool(ended.received)).transfers
        assert (transfer.num_pages, transfer.num_resident) == (1, 2)
        assert not tokens(mine, [3, 8], 8).any()
        np.testing.assert_array_equal(tokens(mine, [1], 2), tokens(theirs, [5], 2))


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        ({"key": "other"}, "NotPublishedError", "key = 'other': nothing is published"),
        ({"addresses": ("127.0.0.1:1",)}, "PeerLostError", "127.0.0.1:1"),
        ({"addresses": ("nonsense:port:9",)}, "ConfigError", "nonsense"),
    ],
)
def test_loads_that_fail_are_told_by_block(
    change: dict[str, Any], kind: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    with worker(caches(), listens=True) as (source, _), worker(caches()) as (reader, _):
        reader.begin(Step(load=[Load("d", replace(at(source, "key", 10), **change), "", [3, 8, 1], 1)]))
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.received, ended.failed_block_ids, ended.failures) == ({"d"}, {8, 1}, [kind])
        assert words in caplog.text


def test_what_the_scheduler_has_refused_fails_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with worker(caches()) as (reader, _):
        reader.begin(Step(load=[Load("d", None, "model = 'x': of the prefill side", [3], 0)]))
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.failed_block_ids, ended.failures) == ({3}, ["ConfigError"])
        assert "model = 'x'" in caplog.text


def test_unlike_heads_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with worker(caches(), listens=True) as (source, _), worker(caches(heads=3)) as (reader, _):
        source.publish(Step(publish=[Publish("p", "key", [9], 4)]))
        reader.begin(Step(load=[Load("d", at(source, "key", 4), "", [3], 0)]))
        assert until(reader, lambda ended: bool(ended.received)).failures == ["GeometryError"]
        assert "total_heads" in caplog.text
        # Nobody will read it: its blocks need not wait for the end of their lease.
        ended = until(source, lambda ended: bool(ended.sent), {"p"})
        assert (ended.sent, ended.num_read_prompts) == ({"p"}, 0)


@pytest.mark.parametrize("layout", [Layout.ROWS, Layout.CPU_VEC])
def test_what_was_refused_is_declined_to_all_workers_that_have_it(layout: str) -> None:
    """There may be more of them than here."""
    with (
        worker(caches(), listens=True, layout=layout) as (first, _),
        worker(caches(), listens=True, layout=layout) as (second, _),
        worker(caches()) as (reader, _),
    ):
        for source in (first, second):
            source.publish(Step(publish=[Publish("p", "key", [9, 2], 8)]))
        addresses = (first.address, second.address)
        refused = at(first, "key", 8, addresses=addresses, layout=layout, block_size=3, model="other")
        reader.begin(Step(decline=[refused]))
        for source in (first, second):
            ended = until(source, lambda ended: bool(ended.sent), {"p"})
            assert (ended.sent, ended.failures, ended.num_read_prompts) == ({"p"}, [], 0)


@pytest.mark.parametrize(("theirs_size", "mine_size"), [(4, 4), (4, 8)])
def test_what_others_have_read_is_counted_where_it_was(theirs_size: int, mine_size: int) -> None:
    """With blocks of another size the planes are read, and the prompt counts once."""
    theirs, mine = caches(block_size=theirs_size), caches(block_size=mine_size)
    with (
        worker(theirs, listens=True, layout=Layout.CPU_VEC) as (source, _),
        worker(mine, layout=Layout.CPU_VEC) as (reader, _),
    ):
        source.publish(Step(publish=[Publish("p", "key", [9, 2, 5], 10), Publish("q", "other", [1], 4)]))
        remote = at(source, "key", 10, layout=Layout.CPU_VEC)
        reader.begin(Step(load=[Load("d", remote, "", [3, 8, 1][: -(-10 // mine_size)], 0)]))
        assert until(reader, lambda ended: bool(ended.received)).failures == []
        ended = until(source, lambda ended: bool(ended.sent), {"p"})
        block_nbytes = LAYERS * HEADS * theirs_size * CONTENT * 2
        assert (ended.num_read_prompts, ended.num_read_blocks, ended.read_nbytes) == (1, 3, 3 * block_nbytes)
        source.begin(Step(retire=["q"]))
        ended = until(source, lambda ended: bool(ended.sent), {"q"})
        assert (ended.num_read_prompts, ended.num_read_blocks) == (0, 0)


def test_a_load_that_nobody_wants_any_more_ends_without_a_failure() -> None:
    with worker(caches(), listens=True) as (reader, pool), socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        remote = replace(at(reader, "key", 4), addresses=(address,))
        reader.begin(Step(load=[Load("d", remote, "", [3], 0)]))
        assert reader.ended(set()).received == set()
        reader.begin(Step(abort=["d"]))
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.failed_block_ids, ended.failures) == (set(), [])
        assert pool.allocator.accounts().num_leases == 1


def test_blocks_that_nobody_reads_come_back() -> None:
    """Declined by the other side; aborted here; or when the lease is over."""
    with worker(caches(), listens=True, lease_s=0.3) as (source, _), worker(caches()) as (reader, pool):
        step = [Publish(name, f"key of {name}", [9, 2], 8) for name in ("declined", "retired", "forgotten")]
        source.publish(Step(publish=step))
        reader.begin(Step(decline=[at(source, "key of declined", 8)]))
        assert until(source, lambda ended: bool(ended.sent), {"declined"}).sent == {"declined"}
        source.begin(Step(retire=["retired"]))
        assert until(source, lambda ended: bool(ended.sent), {"retired"}).sent == {"retired"}
        assert until(source, lambda ended: bool(ended.sent), {"forgotten"}).sent == {"forgotten"}
        until(reader, lambda _: pool.allocator.accounts().num_leases == 1)


def test_blocks_of_who_still_waits_for_room_are_kept() -> None:
    with worker(caches(), listens=True, lease_s=0.5) as (source, _), worker(caches()) as (reader, _):
        source.publish(Step(publish=[Publish("p", "key", [9, 2], 8)]))
        remote = at(source, "key", 8, lease_s=0.5)
        reader.begin(Step(hold={"d": remote}))
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            reader.begin(Step())
            assert source.ended({"p"}).sent == set()
            time.sleep(0.01)
        reader.begin(Step(unhold=["d"], load=[Load("d", remote, "", [1, 2], 0)]))
        assert until(reader, lambda ended: bool(ended.received)).failures == []


def test_one_that_is_published_anew_is_read_from_its_new_blocks() -> None:
    theirs, mine = caches(), caches()
    fill(theirs)
    with worker(theirs, listens=True) as (source, _), worker(mine) as (reader, _):
        source.publish(Step(publish=[Publish("p", "key", [9], 4)]))
        source.publish(Step(publish=[Publish("p", "key", [7], 4)]))
        assert source.ended({"p"}).sent == set()
        reader.begin(Step(load=[Load("d", at(source, "key", 4), "", [3], 0)]))
        until(reader, lambda ended: bool(ended.received))
        np.testing.assert_array_equal(tokens(mine, [3], 4), tokens(theirs, [7], 4))
        assert until(source, lambda ended: bool(ended.sent), {"p"}).sent == {"p"}


def test_what_is_no_cache_of_vllm_is_refused_by_the_layer() -> None:
    layer = np.zeros((4, 2, 8), np.float16)
    with pytest.raises(GeometryError, match=r"kv_caches\['a.0'\].shape = \(4, 2, 8\): must be \[blocks, heads"):
        pool_of({"a.0": layer}, block_size=8, total_heads=2)
    split = np.zeros((4, 2, 8, 16), np.float16)
    with pytest.raises(GeometryError, match=r"must be the 16 tokens of a block"):
        pool_of({"a.0": split}, block_size=16, total_heads=2)
    with pytest.raises(GeometryError, match="must have a tensor"):
        pool_of({}, block_size=16, total_heads=2)


def test_layers_that_share_a_tensor_count_once_and_ranks_have_their_heads() -> None:
    one, other = np.zeros((4, 2, 8, 16), np.float16), np.zeros((4, 2, 8, 16), np.float16)
    with pool_of({"a.0": one, "a.1": other, "a.2": other}, block_size=8, total_heads=8, tp_rank=3, tp_size=4) as pool:
        assert (pool.spec.num_layers, pool.spec.heads, pool.spec.heads_of_model) == (2, (6, 8), 8)
    # More ranks than heads: each has a copy of one.
    single = np.zeros((4, 1, 8, 16), np.float16)
    with pool_of({"a.0": single}, block_size=8, total_heads=2, tp_rank=3, tp_size=4) as pool:
        assert pool.spec.heads == (1, 2)
