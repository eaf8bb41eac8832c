"""Transfers between two processes whose caches differ: every token compared, whatever the geometry of the two sides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, DeadlineExceededError, Engine, GeometryError, PagePool, Peer, Snapshot
from hurray_rdma.cache import PoolGroups, SnapshotGroups, snapshot_keys
from hurray_rdma.testing.processes import Child

SPEC = CacheSpec(num_layers=2, num_heads=4, head_dim=8, page_size=8, dtype="bfloat16", total_heads=4)
TABLES = [[7, 3, 9], [7, 3, 2], [11], [], [12, 13, 14, 15]]
SEQ_LENS = [24, 17, 1, 0, 30]  # the shared prefix of 16 tokens ends inside a page of 32


def strided_pool(spec: CacheSpec, num_pages: int) -> PagePool:
    """FlashInfer's way: one tensor [num_pages, 2, page_size, heads, dim] for each layer."""
    whole = [np.empty((num_pages, 2, *spec.page_shape), spec.storage_dtype) for _ in range(spec.num_layers)]
    return PagePool.from_arrays(spec, {"key": [w[:, 0] for w in whole], "value": [w[:, 1] for w in whole]})


def parts(pool: PagePool, role: str, layer: int) -> list[np.ndarray]:
    arrays = [pool.pages(role, layer)]
    if pool.spec.scale_dtype is not None:
        arrays.append(pool.scales(role, layer))
    if pool.spec.zero_points:
        arrays.append(pool.zero_points(role, layer))
    return arrays


def fill(pool: PagePool, seed: int) -> None:
    random = np.random.default_rng(seed)
    for role, layer in pool.spec.tensors:
        for array in parts(pool, role, layer):
            array[...] = random.integers(0, 256, (*array.shape, array.itemsize), np.uint8).view(array.dtype)[..., 0]


def contents(snapshot: Snapshot) -> dict[tuple[str, int, int], list[np.ndarray]]:
    """Per role, layer and sequence: its tokens [seq_len, heads, dim], then its scales and zero points [seq_len]."""
    spec, found = snapshot.pool.spec, {}
    for role, layer in spec.tensors:
        for seq in range(snapshot.num_seqs):
            tokens = np.ascontiguousarray(snapshot.tokens(role, layer=layer, seq=seq)).view(np.uint8)
            pages, length = snapshot.seq_pages(seq), int(snapshot.seq_lens[seq])
            of_slots = [
                np.ascontiguousarray(a[pages].reshape(-1)[:length]) for a in parts(snapshot.pool, role, layer)[1:]
            ]
            found[role, layer, seq] = [tokens, *(a.view(np.uint8) for a in of_slots)]
    return found


def receiver(connection: Connection, spec: CacheSpec, num_pages: int, strided: bool, count: int) -> None:
    """Receives ``count`` snapshots, holding all; for each: key, lens, contents, bytes past the valid tokens."""

    async def run() -> None:
        with strided_pool(spec, num_pages) if strided else PagePool.allocate(spec, num_pages) as pool:
            for tensor in spec.tensors:
                for array in parts(pool, *tensor):
                    array.view(np.uint8)[...] = 0xEE
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=20, lease_s=2) as engine:
                connection.send(engine.address)
                held = []
                async for arrival in engine.arrivals():
                    held.append(arrival)
                    try:
                        snapshot = await arrival.snapshot()
                    except DeadlineExceededError:
                        connection.send("incomplete")
                        break
                    tails = set()
                    for seq in range(snapshot.num_seqs):
                        length, pages = int(snapshot.seq_lens[seq]), snapshot.seq_pages(seq)
                        if length % spec.page_size:
                            for tensor in spec.tensors:
                                last = pool.pages(*tensor)[pages[-1]]
                                last = last.swapaxes(0, 1) if str(spec.order) == "HND" else last
                                tails |= set(last[length % spec.page_size :].view(np.uint8).reshape(-1).tolist())
                    connection.send((arrival.key, snapshot.seq_lens.tolist(), contents(snapshot), tails))
                    if len(held) == count:
                        break
                for arrival in held:
                    arrival.release()
                accounts = pool.allocator.accounts()
                connection.send((accounts.free, accounts.leased, accounts.quarantined))
                await asyncio.to_thread(connection.recv)

    asyncio.run(run())


def send(address: str, snapshot: Snapshot, **settings: Any) -> Any:
    async def run() -> Any:
        async with Engine(snapshot.pool, timeout_s=20) as engine, engine.connect(address) as peer:
            return await peer.send(snapshot, **settings)

    return asyncio.run(run())


INT8 = replace(SPEC, dtype="int8", scale_dtype="float16", zero_points=True)
MLA = CacheSpec(num_layers=2, num_heads=1, head_dim=576, page_size=8, dtype="bfloat16", roles=("fused",))


@pytest.mark.parametrize(
    ("source", "dest", "strided"),
    [
        (SPEC, SPEC, True),
        (SPEC, SPEC.with_order("HND"), False),
        (SPEC.with_order("HND"), SPEC, True),
        (SPEC.with_order("HND"), SPEC.with_order("HND"), False),
        (SPEC, replace(SPEC, page_size=2), False),
        (SPEC, replace(SPEC, page_size=32), False),
        (SPEC.with_order("HND"), replace(SPEC, page_size=32), False),
        (SPEC, replace(SPEC, num_heads=2, head_offset=1), False),
        (INT8, INT8, False),
        (INT8, replace(INT8, page_size=16), False),
        (INT8, replace(INT8, page_size=4, num_heads=1, head_offset=3), False),
        (MLA, replace(MLA, page_size=16), False),
        (replace(SPEC, layers=(3, 9)), replace(SPEC, layers=(3, 9)), False),
        (SPEC, replace(SPEC, roles=("value", "key")), False),
    ],
    ids=[
        "strided receiver",
        "NHD to HND",
        "HND to NHD, strided",
        "HND to HND",
        "pages of 8 to 2",
        "pages of 8 to 32",
        "HND pages of 8 to NHD pages of 32",
        "two of four heads",
        "int8 with scales and zero points",
        "int8, pages of 8 to 16",
        "int8, pages of 8 to 4, one head",
        "latent",
        "some layers of a hybrid model",
        "roles in another order",
    ],
)
def test_every_token_arrives(source: CacheSpec, dest: CacheSpec, strided: bool) -> None:
    with Child(receiver, dest, 64, strided, 1) as child, PagePool.allocate(source, 32) as pool:
        address = child.receive()
        fill(pool, 5)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
        stats = send(address, sent, key="unlike")
        key, seq_lens, received, _ = child.receive()
        assert (key, seq_lens) == ("unlike", SEQ_LENS)
        first = dest.head_offset - source.head_offset
        for at, (tokens, *of_slots) in contents(sent).items():
            got_tokens, *got_of_slots = received[at]
            assert np.array_equal(got_tokens, tokens[:, first : first + dest.num_heads]), at
            assert len(got_of_slots) == len(of_slots)
            for got, expected in zip(got_of_slots, of_slots, strict=True):
                assert np.array_equal(got, expected), at
        if dest.page_size <= source.page_size:  # a page is sent once, whoever shares it, so never more than all pages
            heads = dest.num_heads / source.num_heads
            assert stats.sent_nbytes <= 9 * source.page_nbytes * len(source.tensors) * (heads if not of_slots else 1.5)
        assert child.receive() == (64, 0, 0)
        child.send("end")


def halved_pool(spec: CacheSpec, num_pages: int) -> PagePool:
    """FlashAttention's way: one tensor [2, num_pages, page_size, heads, dim] for each layer."""
    whole = [np.empty((2, num_pages, *spec.page_shape), spec.storage_dtype) for _ in range(spec.num_layers)]
    return PagePool.from_arrays(spec, {"key": [w[0] for w in whole], "value": [w[1] for w in whole]})


@pytest.mark.parametrize("make_pool", [strided_pool, halved_pool])
@pytest.mark.parametrize("strided", [False, True])
def test_interleaved_tensors_of_attention_libraries_are_sent_in_place(
    make_pool: Callable[[CacheSpec, int], PagePool], strided: bool
) -> None:
    with Child(receiver, SPEC, 64, strided, 1) as child, make_pool(SPEC, 32) as pool:
        address = child.receive()
        fill(pool, 8)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
        send(address, sent, key="interleaved")
        _, seq_lens, received, _ = child.receive()
        assert seq_lens == SEQ_LENS
        for at, (tokens,) in contents(sent).items():
            assert np.array_equal(received[at][0], tokens), at
        assert child.receive() == (64, 0, 0)
        child.send("end")


def test_one_sender_of_eight_heads_feeds_four_receivers_of_two() -> None:
    whole = replace(SPEC, num_heads=8, total_heads=8)
    slices = [replace(whole, num_heads=2, head_offset=2 * n) for n in range(4)]
    with ExitStack() as stack:
        pool = stack.enter_context(PagePool.allocate(whole, 32))
        fill(pool, 6)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
        children = [stack.enter_context(Child(receiver, spec, 64, False, 1)) for spec in slices]
        addresses = [child.receive() for child in children]

        async def job() -> None:
            async with Engine(pool, timeout_s=20) as engine:

                async def one(address: str) -> None:
                    async with engine.connect(address) as peer:
                        await peer.send(sent, key="split")

                await asyncio.gather(*map(one, addresses))

        asyncio.run(job())
        expected = contents(sent)
        for spec, child in zip(slices, children, strict=True):
            first, last = spec.heads
            _, seq_lens, received, _ = child.receive()
            assert seq_lens == SEQ_LENS
            for at, (tokens,) in expected.items():
                assert np.array_equal(received[at][0], tokens[:, first:last]), (first, at)
            assert child.receive() == (64, 0, 0)
            child.send("end")


def test_four_senders_of_a_head_each_fill_one_arrival() -> None:
    with Child(receiver, SPEC, 64, False, 1) as child:
        address = child.receive()
        slices = [replace(SPEC, num_heads=1, head_offset=n) for n in range(4)]
        pools = [PagePool.allocate(spec, 32) for spec in slices]
        shifted = [[[(page * 5 + n) % 31 for page in row] for row in TABLES] for n in range(4)]  # page IDs of their own
        snapshots = [Snapshot.from_block_tables(p, t, seq_lens=SEQ_LENS) for p, t in zip(pools, shifted, strict=True)]
        for seed, pool in enumerate(pools):
            fill(pool, seed)

        async def job() -> None:
            engines = [Engine(pool, timeout_s=20) for pool in pools]

            async def one(engine: Engine, snapshot: Snapshot) -> None:
                async with engine, engine.connect(address) as peer:
                    await peer.send(snapshot, key="joint")
                    if snapshot is snapshots[1]:
                        with pytest.raises(GeometryError, match="brings heads 1 to 1"):
                            await peer.send(snapshot, key="joint", timeout_s=5)

            # One after the other, then two at once: the second of the same heads is refused while the rest is missing.
            await one(engines[0], snapshots[0])
            await one(engines[1], snapshots[1])
            await asyncio.gather(one(engines[2], snapshots[2]), one(engines[3], snapshots[3]))

        asyncio.run(job())
        _, _, received, _ = child.receive()
        expected = [contents(snapshot) for snapshot in snapshots]
        for at, (tokens,) in received.items():
            assert np.array_equal(tokens, np.concatenate([each[at][0] for each in expected], axis=1)), at
        assert child.receive() == (64, 0, 0)
        child.send("end")
        for pool in pools:
            pool.close()


def test_a_slice_whose_siblings_never_come_is_given_up_and_leaks_nothing() -> None:
    with Child(receiver, SPEC, 64, False, 1) as child, PagePool.allocate(replace(SPEC, num_heads=2), 32) as pool:
        send(child.receive(), Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS), key="half")
        assert child.receive() == "incomplete"
        assert child.receive() == (64, 0, 0)
        child.send("end")


@pytest.mark.parametrize("page_size", [8, 4, 16])
def test_resident_pages_are_not_sent_wherever_they_are(page_size: int) -> None:
    with (
        Child(receiver, replace(SPEC, page_size=page_size), 64, False, 3) as child,
        PagePool.allocate(SPEC, 32) as pool,
    ):
        address = child.receive()
        fill(pool, 6)
        prompt = np.arange(16)
        tokens = [np.concatenate([prompt, np.full(8, 100 + n)]) for n in range(3)]
        # The common part lies in other pages each time, with the same bytes, as a prefix cache would have it.
        tables = [[1, 2, 3], [4, 5, 6], [7, 8, 3]]
        for role, layer in SPEC.tensors:
            pages = pool.pages(role, layer)
            pages[[4, 5]] = pages[[1, 2]]
            pages[[7, 8]] = pages[[1, 2]]
        tokens[2] = tokens[0]
        sent = [Snapshot.from_block_tables(pool, [table], seq_lens=[24]) for table in tables]
        per_page = 8 / page_size
        expected = [(3, 0), (1, 2), (0, 3)] if page_size <= 8 else [(1.5, 0), (1, 0.5), (0.5, 1)]
        if page_size == 16:
            expected = [(2, 0), (1, 1), (1, 1)]  # 24 tokens fill one page of 16 and half of another, which has no key
            per_page = 1
        for n, snapshot in enumerate(sent):
            stats = send(address, snapshot, key=str(n), page_keys=snapshot_keys(snapshot, [tokens[n]]))
            assert (stats.num_pages, stats.num_resident) == tuple(int(e * per_page) for e in expected[n])
            key, _, received, _ = child.receive()
            assert key == str(n)
            for at, (got,) in received.items():
                assert np.array_equal(got, contents(snapshot)[at][0]), at
        assert child.receive() == (64, 0, 0)
        child.send("end")


@pytest.mark.parametrize("dest", [SPEC, SPEC.with_order("HND"), replace(SPEC, page_size=32)], ids=["same", "HND", "32"])
def test_slots_past_the_valid_tokens_arrive_as_zeros_when_asked(dest: CacheSpec) -> None:
    with Child(receiver, dest, 64, False, 1) as child, PagePool.allocate(SPEC, 32) as pool:
        address = child.receive()
        fill(pool, 7)
        sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
        send(address, sent, zero_tails=True)
        _, _, received, tails = child.receive()
        assert tails == {0}
        for at, (tokens,) in contents(sent).items():
            assert np.array_equal(received[at][0], tokens), at
        assert child.receive() == (64, 0, 0)
        child.send("end")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"dtype": "float16"}, "dtype"),
        ({"head_dim": 16}, "head_dim"),
        ({"num_layers": 3, "layers": None}, "num_layers"),
        ({"layers": (0, 2)}, "layers"),
        ({"roles": ("fused",)}, "roles"),
        ({"page_size": 12}, "page_size"),
        ({"num_heads": 8, "total_heads": 8}, "total_heads"),
    ],
)
def test_pairs_that_cannot_be_are_refused_before_anything_moves(changes: dict[str, Any], field: str) -> None:
    async def run() -> None:
        with PagePool.allocate(SPEC, 8) as pool, PagePool.allocate(replace(SPEC, **changes), 8) as other:
            async with Engine(pool, listen="127.0.0.1:0") as engine, Engine(other) as sender:
                async with sender.connect(engine.address) as peer:
                    await refused(peer, Snapshot.from_block_tables(other, [[1]], seq_lens=[4]), field)
                assert pool.allocator.accounts().free == 8

    asyncio.run(run())


async def refused(peer: Peer, snapshot: Snapshot, field: str) -> None:
    with pytest.raises(GeometryError) as caught:
        await peer.send(snapshot)
    assert caught.value.field == field


GROUPS = {
    "full": replace(SPEC, layers=(0, 2), page_size=8),
    "window": replace(SPEC, layers=(1, 3), page_size=4, num_heads=2, total_heads=2),
}


def groups_receiver(connection: Connection, specs: dict[str, CacheSpec]) -> None:
    """Receives one snapshot of each group; reports the contents by group, then the free pages of each."""

    async def run() -> None:
        with PoolGroups.allocate({name: (spec, 32) for name, spec in specs.items()}) as pools:
            async with Engine(pools, listen="127.0.0.1:0", timeout_s=20) as engine:
                connection.send(engine.address)
                found: dict[str | None, Any] = {}
                async for arrival in engine.arrivals():
                    snapshot = await arrival.snapshot()
                    found[arrival.group] = (arrival.key, contents(snapshot))
                    arrival.release()
                    if len(found) == len(specs):
                        break
                connection.send(found)
                connection.send({name: pool.allocator.accounts().free for name, pool in pools.items()})
                await asyncio.to_thread(connection.recv)

    asyncio.run(run())


def test_cache_groups_of_a_hybrid_model_travel_together() -> None:
    # The receiver's groups have other page sizes and come in another order.
    theirs = {"window": replace(GROUPS["window"], page_size=8), "full": GROUPS["full"].with_order("HND")}
    with Child(groups_receiver, theirs) as child:
        address = child.receive()
        with PoolGroups.allocate({name: (spec, 32) for name, spec in GROUPS.items()}) as pools:
            for seed, pool in enumerate(pools.values()):
                fill(pool, seed)
            sent = SnapshotGroups(
                pools,
                {
                    "full": Snapshot.from_block_tables(pools["full"], TABLES, seq_lens=SEQ_LENS),
                    "window": Snapshot.from_block_tables(
                        pools["window"], [[7, 3], [9], [11], [], [12, 13]], seq_lens=[8, 4, 1, 0, 6]
                    ),
                },
            )

            async def run() -> dict[str, Any]:
                async with Engine(pools, timeout_s=20) as engine, engine.connect(address) as peer:
                    with PagePool.allocate(SPEC, 8) as other, pytest.raises(GeometryError, match="pools with layers"):
                        await peer.send(Snapshot.from_block_tables(other, [[1]], seq_lens=[4]))
                    return await peer.send_groups(sent, key="hybrid")

            stats = asyncio.run(run())
            assert {name: each.num_pages for name, each in stats.items()} == {
                "full": 9,
                "window": 4,
            }  # two pages of 4 make one of 8
            received = child.receive()
            assert set(received) == {"full", "window"}
            for name, (key, found) in received.items():
                assert key == "hybrid"
                for at, (tokens,) in contents(sent[name]).items():
                    assert np.array_equal(found[at][0], tokens), (name, at)
        assert child.receive() == {"window": 32, "full": 32}
        child.send("end")


@pytest.mark.parametrize("physical", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_every_physical_order_of_vllm_arrives(physical: str) -> None:
    """vLLM's logical cache is [layers, blocks, heads, tokens, content], keys and values packed, in one allocation."""
    fused = CacheSpec(num_layers=2, num_heads=4, head_dim=16, page_size=8, dtype="bfloat16", roles=("fused",))
    spec = fused.with_order("HND")
    sizes = dict(zip("LBHNC", (2, 32, 4, 8, 16), strict=True))
    whole = np.empty([sizes[axis] for axis in physical], spec.storage_dtype)
    logical = whole.transpose([physical.index(axis) for axis in "LBHNC"])
    dest = replace(fused, page_size=16)
    with Child(receiver, dest, 64, False, 1) as child:
        address = child.receive()
        with PagePool.from_arrays(spec, {"fused": list(logical)}) as pool:
            fill(pool, 9)
            sent = Snapshot.from_block_tables(pool, TABLES, seq_lens=SEQ_LENS)
            send(address, sent)
            _, _, received, _ = child.receive()
            for at, (tokens,) in contents(sent).items():
                assert np.array_equal(received[at][0], tokens), at
        assert child.receive() == (64, 0, 0)
        child.send("end")
