"""The checks of the chaos harness can fail: content, aliases, free pages, and what the two sides say."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from hurray_rdma import CacheSpec, PagePool, Snapshot
from hurray_rdma.control.codes import MessageType
from hurray_rdma.testing.chaos import ChaosProxy
from hurray_rdma.testing.chaos.faults import Direction
from hurray_rdma.testing.chaos.guard import Guard
from hurray_rdma.testing.chaos.judge import judge
from hurray_rdma.testing.chaos.kinds import KINDS
from hurray_rdma.testing.chaos.leftovers import leftovers
from hurray_rdma.testing.chaos.recipe import Recipe, mismatch, paint, raw, shape_of
from hurray_rdma.testing.chaos.schedule import Blow, Episode, draw_scene
from hurray_rdma.testing.chaos.seats import ReceiverSeat, SceneFailedError, SenderSeat
from hurray_rdma.testing.chaos.words import Received, ReceiverSettings, Send, SenderSettings, Sent
from hurray_rdma.testing.shared_memory import SharedMemory

SPEC = CacheSpec(num_layers=2, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16")


@pytest.fixture
def pool() -> Iterator[PagePool]:
    with PagePool.allocate(SPEC, 16) as made:
        yield made


def delivered(pool: PagePool, recipe: Recipe) -> Snapshot:
    shape = shape_of(recipe, SPEC)
    page_ids = np.arange(recipe.num_pages, dtype=np.uint32)[::-1] + np.uint32(2)
    paint(recipe, pool, page_ids)
    return Snapshot.from_block_tables(pool, [page_ids[table] for table in shape.tables], seq_lens=shape.seq_lens)


RECIPE = Recipe("a", 7, 6)


def test_recipe_and_key_are_inverse() -> None:
    recipe = Recipe("e1.2", 2**31, 5, "abort at once", 0.25)
    assert Recipe.of(recipe.key) == recipe


@pytest.mark.parametrize("num_pages", range(1, 9))
def test_shape_holds_every_page_and_only_last_pages_of_their_own_are_partial(num_pages: int) -> None:
    shape = shape_of(Recipe("a", num_pages, num_pages), SPEC)
    assert sorted({page for table in shape.tables for page in table}) == list(range(num_pages))
    for table, tokens in zip(shape.tables, shape.seq_lens, strict=True):
        assert tokens == sum(shape.num_tokens[table])
        assert all(shape.num_tokens[page] == SPEC.page_size for page in table[:-1])


def test_painted_snapshot_is_right_and_each_wrong_byte_of_a_valid_token_is_found(pool: PagePool) -> None:
    snapshot = delivered(pool, RECIPE)
    assert mismatch(RECIPE, snapshot) is None
    assert mismatch(Recipe("b", 7, 6), snapshot) is not None
    shape = shape_of(RECIPE, SPEC)
    token_nbytes = SPEC.page_nbytes // SPEC.page_size
    for role, layer in SPEC.tensors:
        for logical, page_id in enumerate(range(7, 1, -1)):
            for at in (0, shape.num_tokens[logical] * token_nbytes - 1):
                raw(pool, role, layer)[page_id, at] ^= 1
                assert "1 bytes of" in (mismatch(RECIPE, snapshot) or "")
                raw(pool, role, layer)[page_id, at] ^= 1
    assert mismatch(RECIPE, snapshot) is None


def test_wrong_table_is_found(pool: PagePool) -> None:
    snapshot = delivered(pool, RECIPE)
    table = snapshot.block_table.copy()
    other = Snapshot(pool, block_table=table[::-1], seq_ptr=snapshot.seq_ptr, seq_lens=snapshot.seq_lens)
    assert mismatch(RECIPE, other) is not None
    unshared = table.copy()
    unshared[snapshot.seq_ptr[1]] = 15  # page 0, which the second sequence shares
    other = Snapshot(pool, block_table=unshared, seq_ptr=snapshot.seq_ptr, seq_lens=snapshot.seq_lens)
    assert "aliases" in (mismatch(RECIPE, other) or "")


def test_guard_finds_a_byte_in_a_free_page_by_patrol_and_at_the_grant(pool: PagePool) -> None:
    guard = Guard(pool)
    held = pool.allocator.lease(4)
    assert sorted(guard.watched) == sorted(set(range(16)) - set(held.page_ids.tolist()))
    raw(pool, "key", 0)[held.page_ids] = 1
    guard.check()
    assert guard.violations == []
    raw(pool, "value", 1)[guard.watched[3], 5] ^= 1
    page_id = guard.watched[3]
    guard.check()
    assert len(guard.violations) == 1
    assert f"free page {page_id} changed while it was free: 1 bytes of value of layer 1, from 5" in guard.violations[0]
    raw(pool, "key", 1)[guard.watched[0], 0] ^= 1
    pool.allocator.lease(12)
    assert "when it was granted" in guard.violations[1]


@pytest.fixture
def seats(tmp_path: Path) -> tuple[ReceiverSeat, SenderSeat]:
    common = {
        "lane": "tcp",
        "size": "small",
        "num_pages": 4,
        "lease_s": 1,
        "timeout_s": 1,
        "peer_timeout_s": 1,
        "deadline_s": 1,
    }
    receiver = ReceiverSeat("receiver0", tmp_path, print, ReceiverSettings(listen="", **common))  # type: ignore[arg-type]
    settings = SenderSettings(address="", **common)  # type: ignore[arg-type]
    proxy = ChaosProxy("127.0.0.1", 1)
    return receiver, SenderSeat("sender0", tmp_path, print, settings, receiver=receiver, proxy=proxy)


SEND = Send(RECIPE)
EPISODE = Episode("the connection is cut", 0, ((0, SEND),))


@pytest.mark.parametrize(
    ("sent", "received", "fine"),
    [
        ("sent", ["delivered"], True),
        ("sent", ["typed", "delivered"], True),  # the offer was made anew
        ("typed", ["delivered"], True),  # the acknowledgement was lost
        ("typed", ["typed"], True),
        ("typed", [], True),
        (None, ["typed"], True),  # the sender was killed
        ("sent", [], False),
        ("sent", ["typed"], False),
        ("sent", ["delivered", "delivered"], False),
        ("typed", ["delivered", "delivered"], False),
        ("hang", ["typed"], False),
        ("untyped", ["typed"], False),
        ("typed", ["hang"], False),
        ("typed", ["untyped"], False),
    ],
)
def test_what_two_sides_may_say(
    seats: tuple[ReceiverSeat, SenderSeat], sent: str | None, received: list[str], fine: bool
) -> None:
    receiver, sender = seats
    if sent is not None:
        sender.sent["a"] = Sent("a", sent, "", 0.1)
    receiver.received["a"] = [Received("a", each, "") for each in received]
    if fine:
        assert judge(EPISODE, SEND, sender=sender, struck=sender) is ("delivered" in received)
        assert not sender.sent
        assert not receiver.received
    else:
        with pytest.raises(SceneFailedError):
            judge(EPISODE, SEND, sender=sender, struck=sender)


def test_late_sends_and_failures_of_nothing_are_found_and_a_killed_receiver_is_silent(
    seats: tuple[ReceiverSeat, SenderSeat],
) -> None:
    receiver, sender = seats
    sender.sent["a"] = Sent("a", "typed", "", 60.0)
    with pytest.raises(SceneFailedError, match=r"60\.0 s"):
        judge(EPISODE, SEND, sender=sender, struck=sender)
    sender.sent["a"] = Sent("a", "typed", "", 0.1)
    with pytest.raises(SceneFailedError, match="failed of nothing"):
        judge(replace(EPISODE, all_succeed=True), SEND, sender=sender, struck=sender)
    sender.sent["a"] = Sent("a", "sent", "", 0.1)
    killed = replace(EPISODE, blow=Blow("kill", "receiver", 0.0))
    assert not judge(killed, SEND, sender=sender, struck=sender)
    assert not receiver.received


def test_leftovers_are_seen(tmp_path: Path) -> None:
    (tmp_path / "stderr").touch()
    memory = SharedMemory()
    assert leftovers([2**30], ["127.0.0.1:1"], tmp_path, memory=memory) == []
    (tmp_path / "core").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = leftovers([os.getpid()], [f"127.0.0.1:{server.getsockname()[1]}"], tmp_path, memory=memory)
    assert [line.split()[0] for line in found] == ["process", "socket", "file"]


def test_shared_memory_is_told_by_who_made_or_mapped_it(pool: PagePool) -> None:
    memory, others = SharedMemory(), SharedMemory()
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)
        with mmap.mmap(file.fileno(), 4096):
            memory.look([os.getpid()])
            others.look([os.getppid(), 2**30])
        found = memory.left()
        assert f"file {file.name}" in found
        assert any(line.startswith("shared memory segment ") for line in found)  # the pool's
        assert not found & others.left()
    assert f"file {file.name}" not in memory.left()


def test_a_seed_draws_the_same_scenes_and_another_draws_others() -> None:
    scene = draw_scene(5, 3, num_episodes=40)
    assert scene == draw_scene(5, 3, num_episodes=40)
    assert scene.episodes[:10] == draw_scene(5, 3, num_episodes=10).episodes
    assert scene.episodes != draw_scene(6, 3, num_episodes=40).episodes
    assert scene.episodes != draw_scene(5, 4, num_episodes=40).episodes


def test_the_end_that_is_spoiled_is_one_that_passes() -> None:
    """With three layers of two roles: an ENDED for each layer, or in frames a TENSOR_DATA_END for each role of each."""
    drawn: set[tuple[str, str]] = set()
    for index in range(150):
        scene = draw_scene(1, index, num_episodes=80)
        for episode in scene.episodes:
            spoil, (_, send) = episode.spoil, episode.sends[0]
            if spoil is None or spoil.kind not in {MessageType.ENDED, MessageType.TENSOR_DATA_END}:
                continue
            drawn.add((spoil.kind.name, send.how))
            if spoil.kind is MessageType.ENDED:
                assert scene.cast.lane != "frames"
                assert 1 <= spoil.nth <= (3 if send.how == "layers" else 1)
                assert send.how in {"whole", "layers"}
            else:
                assert 1 <= spoil.nth <= (6 if scene.cast.lane == "frames" else 1)
                # A reader says it once, its source or a sender in frames for each.
                to_sender = spoil.direction is Direction.TO_CLIENT
                assert (send.how == "fetch") == (to_sender or scene.cast.lane != "frames")
    every = [*product(["ENDED"], ["whole", "layers"]), *product(["TENSOR_DATA_END"], ["fetch", "whole", "layers"])]
    assert drawn == set(every)


def test_every_kind_of_fault_is_drawn() -> None:
    drawn = {episode.kind for index in range(150) for episode in draw_scene(1, index, num_episodes=80).episodes}
    assert drawn == set(KINDS)
    casts = [draw_scene(1, index, num_episodes=0).cast for index in range(60)]
    assert {cast.num_receivers + cast.num_senders for cast in casts} == {2, 3, 4}
    assert {cast.lane for cast in casts} == {"mapped", "cma", "tcp", "frames"}
