"""What Prometheus reads: names, labels and numbers through a real registry, both text formats and HTTP."""

from __future__ import annotations

import subprocess
import sys
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest, start_http_server
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from hurray_rdma.cache import PageAccounts
from hurray_rdma.engine import EngineCollector, EngineStats, TransferStats
from hurray_rdma.engine.tally import BOUNDS_S, Tally
from hurray_rdma.errors import PeerLostError, PoolExhaustedError

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class Source:
    """A tally and an engine's present."""

    def __init__(self) -> None:
        self.tally = Tally()

    def stats(self) -> EngineStats:
        accounts = PageAccounts(num_pages=10, free=4, leased=5, quarantined=1, num_leases=3, num_free_runs=2)
        return self.tally.stats(
            pools={"full": accounts},
            generations={"full": 7},
            num_sessions=2,
            num_peers=3,
            num_waiting=4,
            num_arriving=5,
        )

    def send(self, *, seconds: float) -> None:
        self.tally.sent(
            TransferStats(
                key="req-1",
                num_sequences=1,
                num_tokens=9,
                num_table_entries=6,
                num_pages=4,
                num_resident=1,
                logical_nbytes=1200,
                sent_nbytes=800,
                num_operations=3,
                seconds=seconds,
                write_seconds=0.001,
                lane="cma",
                path="put",
            )
        )


@pytest.fixture
def source() -> Source:
    source = Source()
    source.send(seconds=0.003)
    source.send(seconds=0.01)
    source.send(seconds=1000.0)
    source.tally.received(nbytes=70, num_pages=1, num_resident=2, lane="sysv", path="mapped", seconds=0.2, waited_s=0.1)
    source.tally.served(nbytes=5)
    source.tally.failed("send", PeerLostError("gone"))
    source.tally.failed("receive", PoolExhaustedError("full"))
    source.tally.connected()
    source.tally.connected()
    source.tally.reconnected()
    source.tally.disconnected(PeerLostError("gone"))
    source.tally.fallback()
    source.tally.quarantined(6)
    source.tally.recovered(5)
    source.tally.lease_expired()
    return source


def registry_of(source: Source) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=True)
    registry.register(EngineCollector(source.stats))
    return registry


def samples(families: list[Metric]) -> Samples:
    """By name and labels; each must occur once."""
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, f"{key} occurs twice"
            found[key] = sample.value
    return found


def read(text: str) -> Samples:
    return samples(list(text_string_to_metric_families(text)))


def at(found: Samples, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_every_number_has_its_name_and_labels(source: Source) -> None:
    found = read(generate_latest(registry_of(source)).decode())
    assert at(found, "hurray_transfers_total", direction="send") == 3
    assert at(found, "hurray_transfers_total", direction="fetch") == 0
    assert at(found, "hurray_bytes_total", direction="send", lane="cma", path="put") == 2400
    assert at(found, "hurray_bytes_total", direction="receive", lane="sysv", path="mapped") == 70
    assert at(found, "hurray_bytes_total", direction="serve", lane="", path="") == 5
    assert at(found, "hurray_logical_bytes_total", direction="send") == 3600
    assert at(found, "hurray_pages_total", direction="send") == 12
    assert at(found, "hurray_pages_total", direction="receive") == 1
    assert at(found, "hurray_resident_pages_total", direction="receive") == 2
    assert at(found, "hurray_operations_total", direction="send") == 9
    assert at(found, "hurray_failures_total", direction="send", kind="PeerLostError") == 1
    assert at(found, "hurray_failures_total", direction="receive", kind="PoolExhaustedError") == 1
    assert at(found, "hurray_connects_total") == 2
    assert at(found, "hurray_reconnects_total") == 1
    assert at(found, "hurray_disconnects_total") == 1
    assert at(found, "hurray_losses_total", kind="PeerLostError") == 1
    assert at(found, "hurray_fallbacks_total") == 1
    assert at(found, "hurray_quarantined_pages_total") == 6
    assert at(found, "hurray_recovered_pages_total") == 5
    assert at(found, "hurray_expired_leases_total") == 1
    assert at(found, "hurray_sessions") == 2
    assert at(found, "hurray_peers") == 3
    assert at(found, "hurray_waiting_offers") == 4
    assert at(found, "hurray_arriving_transfers") == 5
    for state, number in {"free": 4, "leased": 5, "quarantined": 1}.items():
        assert at(found, "hurray_pool_pages", pool="full", state=state) == number
    assert at(found, "hurray_pool_leases", pool="full") == 3
    assert at(found, "hurray_pool_generation", pool="full") == 7


def test_buckets_are_cumulated_and_bounds_inclusive(source: Source) -> None:
    found = read(generate_latest(registry_of(source)).decode())
    for le, number in {"1e-05": 0, "0.002": 0, "0.005": 1, "0.01": 2, "100.0": 2, "+Inf": 3}.items():
        assert at(found, "hurray_transfer_seconds_bucket", direction="send", le=le) == number
    assert at(found, "hurray_transfer_seconds_count", direction="send") == 3
    assert at(found, "hurray_transfer_seconds_sum", direction="send") == pytest.approx(1000.013)
    assert at(found, "hurray_grant_wait_seconds_count") == 1
    assert at(found, "hurray_grant_wait_seconds_bucket", le="0.1") == 1
    assert at(found, "hurray_grant_wait_seconds_bucket", le="0.05") == 0
    buckets = [key for key in found if key[0] == "hurray_grant_wait_seconds_bucket"]
    assert len(buckets) == len(BOUNDS_S) + 1


def test_what_a_side_cannot_know_is_absent_instead_of_zero(source: Source) -> None:
    names = {
        (name, dict(labels).get("direction")) for name, labels in read(generate_latest(registry_of(source)).decode())
    }
    for name in ("hurray_pages_total", "hurray_operations_total", "hurray_transfer_seconds_count"):
        assert (name, "send") in names
        assert (name, "serve") not in names
    assert ("hurray_operations_total", "receive") not in names


def test_every_family_is_explained_and_strict_openmetrics(source: Source) -> None:
    text = generate_openmetrics(registry_of(source)).decode()
    families = list(parse_openmetrics(text))  # stricter than the classic parser: suffixes, bucket order, +Inf
    assert len(families) == len({family.name for family in families}) == 24
    assert all(family.documentation.endswith(".") and family.name.startswith("hurray_") for family in families)
    assert samples(families) == read(generate_latest(registry_of(source)).decode())


def test_an_engine_that_did_nothing_can_be_scraped() -> None:
    found = read(generate_latest(registry_of(Source())).decode())
    assert at(found, "hurray_transfers_total", direction="receive") == 0
    assert at(found, "hurray_transfer_seconds_count", direction="receive") == 0


def test_each_scrape_has_the_numbers_of_its_moment(source: Source) -> None:
    registry = registry_of(source)
    generate_latest(registry)
    source.tally.quarantined(4)
    assert registry.get_sample_value("hurray_quarantined_pages_total") == 10


def test_a_second_engine_in_one_registry_is_refused(source: Source) -> None:
    registry = registry_of(source)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        registry.register(EngineCollector(source.stats))


def test_names_of_pools_may_hold_anything(source: Source) -> None:
    accounts = source.stats().pools["full"]
    name = 'a"b\\c\nd'

    def stats() -> EngineStats:
        return source.tally.stats(
            pools={name: accounts}, generations={}, num_sessions=0, num_peers=0, num_waiting=0, num_arriving=0
        )

    registry = CollectorRegistry()
    registry.register(EngineCollector(stats))
    found = read(generate_latest(registry).decode())
    assert at(found, "hurray_pool_pages", pool=name, state="free") == 4


def test_scrape_over_http(source: Source) -> None:
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry_of(source))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as response:
            assert response.status == 200
            found = read(response.read().decode())
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
    assert at(found, "hurray_bytes_total", direction="send", lane="cma", path="put") == 2400


def test_who_is_not_scraped_does_not_load_the_client() -> None:
    script = "import sys, hurray_rdma.engine as e; a = 'prometheus_client' in sys.modules; e.EngineCollector; print(a)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
