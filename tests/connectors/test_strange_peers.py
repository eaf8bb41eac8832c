"""What a worker is told of other instances may lead nowhere: it goes on, and keeps nothing of them."""

from __future__ import annotations

import logging
import socket
import time
from dataclasses import replace

import pytest

from hurray_rdma.connectors.vllm.handoff import PushedPrefill, RemotePrefill
from hurray_rdma.connectors.vllm.steps import Load, Publish, Step
from hurray_rdma.connectors.vllm.worker import WorkerSide
from tests.connectors.test_worker_side import at, caches, fill, tokens, until, worker

UNREADABLE = [("nonsense:port:9",), ("host:99999",), ()]
"""The last has no worker of this rank."""


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize("addresses", UNREADABLE)
def test_signs_of_life_for_nobody_end_nothing(addresses: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    with worker(caches(), listens=True, lease_s=1) as (source, _), worker(caches()) as (reader, _):
        source.publish(Step(publish=[Publish("p", "key", [9, 2], 8)]))
        kept = at(source, "key", 8, lease_s=0.9)
        reader.begin(Step(hold={"bad": replace(kept, addresses=addresses), "good": kept}))
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline:
            reader.begin(Step())
            assert source.ended({"p"}).sent == set(), "the other one is kept"
            time.sleep(0.02)
        assert "'key' was not refreshed: " in caplog.text


@pytest.mark.parametrize("addresses", UNREADABLE)
def test_what_cannot_be_declined_is_left_to_its_lease(
    addresses: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with worker(caches(), listens=True) as (source, _), worker(caches()) as (reader, _):
        reader.begin(Step(decline=[replace(at(source, "key", 8), addresses=addresses)]))
        assert ("'key' could not be declined" in caplog.text) == bool(addresses)
        # However long it says that it is, it is declined.
        source.publish(Step(publish=[Publish("p", "all", list(range(16)), 64)]))
        reader.begin(Step(decline=[at(source, "all", 2**60)]))
        assert until(source, lambda ended: bool(ended.sent), {"p"}).sent == {"p"}


def test_a_push_that_is_longer_than_the_cache_is_not_declined(caplog: pytest.LogCaptureFixture) -> None:
    with worker(caches(), listens=True, mode="push") as (reader, _):
        reader.begin(Step(decline=[PushedPrefill(key="key", num_tokens=65, block_size=4)]))
        assert "'key' could not be declined" in caplog.text


def test_a_load_from_no_worker_of_this_rank_fails_as_others_do(caplog: pytest.LogCaptureFixture) -> None:
    with worker(caches(), listens=True) as (source, _), worker(caches()) as (reader, _):
        reader.begin(Step(load=[Load("d", replace(at(source, "key", 4), addresses=()), "", [3], 0)]))
        ended = until(reader, lambda ended: bool(ended.received))
        assert (ended.failed_block_ids, ended.failures) == ({3}, ["ConfigError"])
        assert "has none for rank 0" in caplog.text


def closed_ports(count: int) -> list[str]:
    """Where nobody listens, as far as anybody can say."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    finally:
        for each in sockets:
            each.close()


def load(side: WorkerSide, name: str, remote: RemotePrefill) -> list[str]:
    side.begin(Step(load=[Load(name, remote, "", [3], 0)]))
    return until(side, lambda ended: name in ended.received).failures


def test_of_instances_that_are_gone_nothing_is_kept() -> None:
    theirs, mine = caches(), caches()
    fill(theirs)
    with worker(theirs, listens=True) as (source, _), worker(mine) as (reader, _):
        source.publish(Step(publish=[Publish(name, name, [9], 4) for name in ("first", "second")]))
        assert load(reader, "d", at(source, "first", 4)) == []
        for number, address in enumerate(closed_ports(5)):
            remote = replace(at(source, "key", 4), addresses=(address,))
            assert load(reader, f"gone {number}", remote) == ["PeerLostError"]
        assert len(reader._peers) == 2, "the one that is connected, and the last"
        assert load(reader, "e", at(source, "second", 4)) == []
        assert tokens(mine, [3], 4).tolist() == tokens(theirs, [9], 4).tolist()
        deadline = time.monotonic() + 10
        while len(reader._engine._engine._peers) > 2:  # closed, too
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_one_that_is_being_asked_is_not_closed() -> None:
    with worker(caches()) as (reader, _), socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        remote = RemotePrefill(
            key="k", addresses=(address,), num_tokens=4, model="m", lease_s=30, block_size=4, layout="rows"
        )
        reader.begin(Step(load=[Load("waits", remote, "", [3], 0)]))
        for gone in closed_ports(2):
            load(reader, gone, replace(remote, addresses=(gone,)))
        assert reader.ended(set()).received == set()
        assert len(reader._peers) == 2
        reader.begin(Step(abort=["waits"]))
        assert until(reader, lambda ended: bool(ended.received)).failures == []
