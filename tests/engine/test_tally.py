"""Counts: what each event adds, on many threads at once, and that the sum is plain data."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.cache import PageAccounts, PageAllocator
from hurray_rdma.engine.stats import DIRECTIONS, EngineStats, Histogram, LaneStats, TransferStats
from hurray_rdma.engine.tally import BOUNDS_S, Tally
from hurray_rdma.errors import PeerLostError, TransferAbortedError


def transfer_stats(*, seconds: float = 0.003, lane: str = "cma", path: str = "put", nbytes: int = 800) -> TransferStats:
    return TransferStats(
        key="req-1",
        num_sequences=2,
        num_tokens=21,
        num_table_entries=6,
        num_pages=4,
        num_resident=1,
        logical_nbytes=1200,
        sent_nbytes=nbytes,
        num_operations=3,
        seconds=seconds,
        write_seconds=seconds / 2,
        lane=lane,
        path=path,
    )


def stats_of(tally: Tally, pools: Mapping[str, PageAccounts] | None = None) -> EngineStats:
    return tally.stats(
        pools=pools or {},
        generations=dict.fromkeys(pools or {}, 1),
        num_sessions=2,
        num_peers=3,
        num_waiting=4,
        num_arriving=5,
    )


def full_bucket(times: Histogram) -> tuple[float, float]:
    """(above, up to) of the one bucket that has observations."""
    (index,) = [index for index, count in enumerate(times.counts) if count]
    bounds = (-math.inf, *times.bounds_s, math.inf)
    return bounds[index], bounds[index + 1]


def test_bounds_are_fixed_from_10_us_to_100_s() -> None:
    assert BOUNDS_S[:4] == (1e-5, 2e-5, 5e-5, 1e-4)
    assert BOUNDS_S[-4:] == (10.0, 20.0, 50.0, 100.0)
    assert len(BOUNDS_S) == 7 * 3 + 1
    assert list(BOUNDS_S) == sorted(set(BOUNDS_S))


def test_nothing_has_happened_yet() -> None:
    stats = stats_of(Tally())
    for direction in DIRECTIONS:
        flow = stats.direction(direction)
        assert (flow.num_transfers, flow.nbytes, flow.lanes, flow.failures) == (0, 0, (), {})
    assert stats.grant_wait.count == 0


@pytest.mark.parametrize("direction", ["send", "fetch"])
def test_who_moves_pages_knows_all_about_them(direction: str) -> None:
    tally = Tally()
    tell = tally.sent if direction == "send" else tally.fetched
    tell(transfer_stats())
    tell(transfer_stats(nbytes=200))
    tell(transfer_stats(nbytes=50, lane="tcp"))
    stats = stats_of(tally)
    flow = getattr(stats, direction)
    assert (flow.num_transfers, flow.num_pages, flow.num_resident, flow.num_operations) == (3, 12, 3, 9)
    assert (flow.nbytes, flow.logical_nbytes) == (1050, 3600)
    assert flow.lanes == (LaneStats("cma", "put", 1000), LaneStats("tcp", "put", 50))
    assert full_bucket(flow.seconds) == (0.002, 0.005)
    assert flow.seconds.sum_s == pytest.approx(0.009)
    assert {stats.direction(other).num_transfers for other in DIRECTIONS if other != direction} == {0}


def test_a_receiver_knows_pages_and_how_long_the_grant_took() -> None:
    tally = Tally()
    tally.received(nbytes=800, num_pages=4, num_resident=1, lane="sysv", path="mapped", seconds=0.5, waited_s=2e-5)
    stats = stats_of(tally)
    flow = stats.receive
    assert (flow.num_transfers, flow.nbytes, flow.num_pages, flow.num_resident) == (1, 800, 4, 1)
    assert (flow.num_operations, flow.logical_nbytes) == (None, None)
    assert flow.lanes == (LaneStats("sysv", "mapped", 800),)
    assert flow.seconds is not None
    assert full_bucket(flow.seconds) == (0.2, 0.5)
    assert full_bucket(stats.grant_wait) == (1e-5, 2e-5)


def test_lanes_that_peers_make_up_are_counted_together() -> None:
    tally = Tally()
    for n in range(1000):
        tally.received(nbytes=1, num_pages=0, num_resident=0, lane=f"lane {n}", path="put", seconds=0.0, waited_s=0.0)
    lanes = stats_of(tally).receive.lanes
    assert len(lanes) == 65
    assert {lane.nbytes for lane in lanes if lane.lane != "other"} == {1}
    assert [lane.nbytes for lane in lanes if lane.lane == "other"] == [1000 - 64]


def test_who_is_read_from_knows_bytes_alone() -> None:
    tally = Tally()
    tally.served(nbytes=300)
    tally.served(nbytes=20)
    flow = stats_of(tally).serve
    assert (flow.num_transfers, flow.nbytes, flow.lanes) == (2, 320, (LaneStats("", "", 320),))
    assert (flow.num_pages, flow.num_resident, flow.num_operations, flow.seconds) == (None,) * 4


def test_failures_are_told_apart_by_class_and_direction() -> None:
    tally = Tally()
    tally.failed("send", PeerLostError("gone"))
    tally.failed("send", PeerLostError("gone, too"))
    tally.failed("send", KeyboardInterrupt())
    tally.failed("receive", TransferAbortedError("no"))
    stats = stats_of(tally)
    assert stats.send.failures == {"PeerLostError": 2, "KeyboardInterrupt": 1}
    assert stats.receive.failures == {"TransferAbortedError": 1}
    assert (stats.fetch.failures, stats.serve.failures) == ({}, {})
    assert stats.send.num_transfers == 0


def test_sessions_and_pages_in_doubt() -> None:
    tally = Tally()
    for _ in range(3):
        tally.connected()
    tally.reconnected()
    tally.disconnected(None)
    tally.disconnected(PeerLostError("gone"))
    tally.fallback()
    tally.quarantined(9)
    tally.quarantined(2)
    tally.recovered(5)
    tally.lease_expired()
    stats = stats_of(tally)
    assert (stats.num_connects, stats.num_reconnects, stats.num_disconnects, stats.num_fallbacks) == (3, 1, 2, 1)
    assert stats.losses == {"PeerLostError": 1}
    assert (stats.num_quarantined, stats.num_recovered, stats.num_leases_expired) == (11, 5, 1)
    assert (stats.num_sessions, stats.num_peers, stats.num_waiting, stats.num_arriving) == (2, 3, 4, 5)


def test_stats_are_json() -> None:
    tally = Tally()
    tally.sent(transfer_stats())
    tally.failed("serve", PeerLostError("gone"))
    allocator = PageAllocator(8)
    lease = allocator.lease(3)
    told = json.loads(json.dumps(dataclasses.asdict(stats_of(tally, {"full": allocator.accounts()}))))
    lease.release()
    assert told["pools"]["full"] == {
        "num_pages": 8,
        "free": 5,
        "leased": 3,
        "quarantined": 0,
        "num_leases": 1,
        "num_free_runs": 1,
    }
    assert told["generations"] == {"full": 1}
    assert told["send"]["lanes"] == [{"lane": "cma", "path": "put", "nbytes": 800}]
    assert sum(told["send"]["seconds"]["counts"]) == 1
    assert told["serve"]["failures"] == {"PeerLostError": 1}


def test_printed_stats_are_a_table_of_what_a_person_asks_first() -> None:
    tally = Tally()
    tally.sent(transfer_stats(nbytes=3 * 2**20, seconds=0.001))
    tally.sent(transfer_stats(nbytes=2**20, seconds=0.003, lane="sysv", path="mapped"))
    tally.served(nbytes=2**19)
    tally.failed("send", TransferAbortedError("so"))
    tally.connected()
    tally.disconnected(PeerLostError("gone"))
    lines = str(stats_of(tally, {"default": PageAllocator(16).accounts()})).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["transfers", "failed", "pages", "bytes", "mean", "time", "over"],
        ["send", "2", "1", "8", "4.0", "MiB", "2.0", "ms", "cma,", "put;", "sysv,", "mapped"],
        ["receive", "0", "0", "0", "0.0", "MiB", "-"],
    ]
    assert lines[4].split() == ["serve", "1", "0", "-", "0.5", "MiB", "-"]
    assert lines[5:] == [
        "failed to send: TransferAbortedError 1",
        "pool 'default': 16 pages, 16 free, 0 leased, 0 in quarantine",
        "sessions: 3 open to others, 2 from others; 1 opened so far, 0 of them anew; lost: PeerLostError 1",
        "now: 5 transfers arriving, 4 offers waiting for pages",
    ]
    tally.quarantined(1234)
    assert str(stats_of(tally)).splitlines()[-1] == "pages ever in quarantine: 1,234"


def test_stats_stay_as_they_were() -> None:
    tally = Tally()
    tally.failed("send", PeerLostError("gone"))
    before = stats_of(tally)
    tally.failed("send", PeerLostError("gone"))
    tally.sent(transfer_stats())
    assert before.send.failures == {"PeerLostError": 1}
    assert before.send.num_transfers == 0


def test_no_event_of_many_threads_is_lost() -> None:
    tally, num_threads, num_rounds = Tally(), 8, 500
    together = threading.Barrier(num_threads + 1)
    torn = []

    def work() -> None:
        together.wait(10)
        for _ in range(num_rounds):
            tally.sent(transfer_stats())
            tally.failed("send", PeerLostError("gone"))
            tally.quarantined(2)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    together.wait(10)
    while any(thread.is_alive() for thread in threads):
        flow = stats_of(tally).send
        assert flow.seconds is not None
        if not flow.nbytes == 800 * flow.num_transfers == 800 * flow.seconds.count:
            torn.append(flow)
    for thread in threads:
        thread.join(10)
    stats = stats_of(tally)
    assert torn == []
    assert stats.send.num_transfers == num_threads * num_rounds
    assert stats.send.failures == {"PeerLostError": num_threads * num_rounds}
    assert stats.num_quarantined == 2 * num_threads * num_rounds


@given(st.lists(st.floats(0, 1000) | st.sampled_from(BOUNDS_S), max_size=50))
def test_each_observation_is_in_the_first_bucket_that_reaches_it(observed: list[float]) -> None:
    tally = Tally()
    for seconds in observed:
        tally.sent(transfer_stats(seconds=seconds))
    times = stats_of(tally).send.seconds
    assert times is not None
    for index, bound in enumerate(times.bounds_s):
        assert sum(times.counts[: index + 1]) == sum(seconds <= bound for seconds in observed)
    assert times.count == len(observed)
    assert times.sum_s == pytest.approx(sum(observed))
