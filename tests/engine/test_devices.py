"""Devices: what HELLO, announcements and descriptors say of them, and that pages never change their kind unasked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from hurray_rdma import Engine, PagePool, Snapshot
from hurray_rdma.control import (
    DeviceUnavailableError,
    Granted,
    Offer,
    Pool,
    PoolsAnnounced,
    Refused,
    SessionClosed,
)
from hurray_rdma.engine.compat import announcement
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.remote_pools import RemotePools
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import ProtocolError
from hurray_rdma.format import DeviceTag, Dialect, encode_many
from hurray_rdma.transport import Path
from tests.engine.hands import Hand, shaken
from tests.hazards.scenes import SPEC, make_pool, run, snapshot_of


@pytest.fixture
def pool() -> Iterator[PagePool]:
    with make_pool(SPEC, 8) as pool:
        yield pool


def offer_from(hand: Hand, snapshot: Snapshot, device: DeviceTag) -> int:
    """Offers the snapshot as if its pages were on a device."""
    descriptors = [
        replace(each, buffers=tuple(replace(buffer, device_tag=device) for buffer in each.buffers))
        for each in snapshot.descriptors()
    ]
    offer = Offer(
        key="from a device",
        pool_id=0,
        generation=1,
        descriptors=encode_many(descriptors, dialect=Dialect.ADR_024),
        block_table=snapshot.block_table,
        seq_ptr=snapshot.seq_ptr,
        seq_lens=snapshot.seq_lens,
        total_heads=SPEC.heads_of_model,
        deadline_s=10,
        lane="tcp",
        path="put",
    )
    return int(hand.do("offer", offer, timeout_s=10))


def test_an_engine_says_in_its_hello_what_its_ucx_can_move(pool: PagePool) -> None:
    async def job() -> None:
        async with Engine(pool, listen="127.0.0.1:0") as engine, shaken(engine.address) as hand:
            await hand.expect(PoolsAnnounced)
            assert hand.session.peer is not None
            kinds = pool.regions[0].context.device_kinds
            assert hand.session.peer.devices == tuple(DeviceTag[kind.upper()] for kind in kinds)
            assert kinds[0] == "cpu"
            assert [each.device for each in hand.session.pools.values()] == ["cpu"]

    run(job())


def test_a_peer_that_has_no_device_in_common_is_refused(pool: PagePool) -> None:
    async def job() -> None:
        async with Engine(pool, listen="127.0.0.1:0") as engine:
            with pytest.raises(DeviceUnavailableError, match="none is common"):
                async with shaken(engine.address, devices=(DeviceTag.ROCM,)) as hand:
                    raise (await hand.expect(SessionClosed)).error

    run(job())


def test_a_snapshot_on_a_device_that_its_sender_has_not_named_is_refused(pool: PagePool) -> None:
    async def job() -> None:
        async with Engine(pool, listen="127.0.0.1:0") as engine:
            async with shaken(engine.address) as hand:
                await hand.expect(PoolsAnnounced)
                offer_from(hand, snapshot_of(pool, [3, 1]), DeviceTag.CUDA)
                refused = await hand.expect(Refused)
                assert isinstance(refused.error, DeviceUnavailableError)
                assert "device_tag" in str(refused.error)
            async with shaken(engine.address, devices=(DeviceTag.CPU, DeviceTag.CUDA)) as hand:
                await hand.expect(PoolsAnnounced)
                transfer_id = offer_from(hand, snapshot_of(pool, [3, 1]), DeviceTag.CUDA)
                granted = await hand.expect(Granted)
                assert granted.transfer_id == transfer_id
                assert len(granted.grant.page_ids) == 2

    run(job())


def announced(pool: PagePool, pool_id: int, name: str, device: str) -> Pool:
    return replace(announcement(pool, pool_id=pool_id, generation=1, name=name), device=device)


def told_of(*pools: Pool) -> RemotePools:
    remotes = RemotePools(EngineLog(logging.getLogger(__name__)), tally=Tally())
    for pool in pools:
        remotes.hear(pool)
    return remotes


def test_a_sender_picks_the_pool_on_its_kind_of_device(pool: PagePool) -> None:
    remotes = told_of(announced(pool, 0, "", "cpu"), announced(pool, 1, "gpu", "cuda:3"))
    assert remotes.pool_for(SPEC, None, device="cpu").pool.pool_id == 0
    assert remotes.pool_for(SPEC, None, device="cuda:0").pool.pool_id == 1


@pytest.mark.parametrize(("here", "there"), [("cuda:0", "cpu"), ("cpu", "cuda:0")])
def test_pages_go_to_another_kind_of_device_only_where_its_pool_is_named(pool: PagePool, here: str, there: str) -> None:
    for name in ("", "store"):
        remotes = told_of(announced(pool, 0, name, there))
        with pytest.raises(DeviceUnavailableError) as caught:
            remotes.pool_for(SPEC, None, device=here)
        assert caught.value.value == here
        assert there in str(caught.value)
        named = name or "default"
        assert f"pool={named!r}" in str(caught.value)
        assert remotes.pool_for(SPEC, named, device=here).pool.device == there


def test_a_pool_with_a_damaged_key_costs_none_of_the_others(pool: PagePool, caplog: pytest.LogCaptureFixture) -> None:
    context = pool.regions[0].context
    worker = context.open_worker()
    endpoint = worker.connect(worker.address, timeout_s=10)
    good, damaged = announced(pool, 1, "good", "cpu"), announced(pool, 0, "damaged", "cpu")
    (*whole, last) = damaged.regions
    damaged = replace(damaged, regions=(*whole, replace(last, rkey=last.rkey[:-1])))
    remotes = told_of(damaged, good)
    remotes.use(endpoint, None)
    with caplog.at_level(logging.WARNING):
        assert remotes.pool_for(SPEC, None, device="cpu").pool.name == "good"
    assert ["'damaged' cannot be used" in record.message for record in caplog.records] == [True]
    assert remotes.names == ("good",)
    assert len(endpoint._remote_memories) == len(good.regions), "none of the other is left open"
    remotes.remove(1)
    remotes.hear(damaged)
    with pytest.raises(ProtocolError, match="rkey"):
        remotes.pool_for(SPEC, None, device="cpu")
    remotes.hear(replace(damaged, device="cuda:0"))
    asyncio.run(remotes.open_on_devices())
    assert not remotes
    assert not endpoint._remote_memories
    assert endpoint.close()
    worker.close()


def test_a_fetch_takes_pages_of_another_kind_of_device_only_into_a_pool_that_is_named(pool: PagePool) -> None:
    async def job() -> None:
        async with Engine(pool) as engine:
            assert engine._pool_for(SPEC, "cpu") is pool
            with pytest.raises(DeviceUnavailableError, match="into=pool"):
                engine._pool_for(SPEC, "cuda:0")

    run(job())


class StagedMemory:
    """A region that UCX reaches through the host only."""

    def lane_from(self, device: str) -> str:
        return "sysv" if device == "cpu" else "tcp (staged)"

    def path_from(self, device: str) -> Path:
        return Path.MAPPED if device == "cpu" else Path.PUT


def test_a_lane_through_the_host_is_warned_of_once(pool: PagePool, caplog: pytest.LogCaptureFixture) -> None:
    remotes = told_of(announced(pool, 0, "", "cpu"))
    remote = remotes.first()
    assert remote is not None
    remotes._open[0] = RemotePool(remote.pool, remote.layout, (StagedMemory(),))  # type: ignore[arg-type]
    assert remotes.pool_for(SPEC, None, device="cpu").lane == "sysv"
    assert caplog.text == ""
    for _ in range(2):
        seen = remotes.pool_for(SPEC, "default", device="cuda:1")
        assert (seen.lane, seen.path) == ("tcp (staged)", "put")
    (record,) = caplog.records
    assert "from cuda:1 to cpu travel over tcp (staged)" in record.getMessage()


@dataclass
class MovedMemory:
    """A region of which UCX has said what carries it."""

    lane: str

    def lane_from(self, device: str) -> str:
        return self.lane

    def path_from(self, device: str) -> Path:
        return Path.PUT


@pytest.mark.parametrize(
    ("lanes", "told"),
    [
        (("cuda_ipc", "cuda_ipc"), "cuda_ipc"),
        (("cuda_ipc", "posix (staged)", "cuda_ipc"), "posix (staged)"),
        (("tcp (staged)",), "tcp (staged)"),
    ],
)
def test_the_lane_of_a_gpu_pool_is_the_slow_one_where_its_regions_differ(
    pool: PagePool, lanes: tuple[str, ...], told: str
) -> None:
    remotes = told_of(announced(pool, 0, "", "cuda:0"))
    remote = remotes.first()
    assert remote is not None
    remotes._open[0] = RemotePool(remote.pool, remote.layout, tuple(map(MovedMemory, lanes)))  # type: ignore[arg-type]
    assert remotes.pool_for(SPEC, None, device="cuda:1").lane == told
