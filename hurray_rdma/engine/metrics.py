"""An engine's stats in the shape that Prometheus scrapes.

Knows `EngineStats` and prometheus-client, nothing of how things are counted: it is asked for the numbers at each scrape
and keeps none. The only module that imports prometheus-client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from hurray_rdma.engine.stats import DIRECTIONS, EngineStats, Histogram

__all__ = ["EngineCollector"]

_Row = tuple[Sequence[str], float | None]
"""Label values and the number they lead to; None if nobody knows it: there is no sample then."""


class EngineCollector(Collector):
    """Metric families of one engine, for any registry of prometheus-client.

    ::

        REGISTRY.register(EngineCollector(engine.stats))

    Names begin with ``hurray_``. One engine to a registry: a second one has the same names and is refused by it.

    Args:
        stats: called at each scrape, on the scraping thread.
    """

    def __init__(self, stats: Callable[[], EngineStats], /) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """All families, with the numbers of now; one whose labels have not occurred yet is there without samples."""
        stats = self._stats()
        flows = [(direction, stats.direction(direction)) for direction in DIRECTIONS]
        yield _counter(
            "hurray_transfers",
            "Completed transfers; send and receive are the sides of a push, serve and fetch those of a pull.",
            ["direction"],
            (([direction], flow.num_transfers) for direction, flow in flows),
        )
        yield _counter(
            "hurray_failures",
            "Transfers that failed, by the class of the error.",
            ["direction", "kind"],
            (([direction, kind], number) for direction, flow in flows for kind, number in flow.failures.items()),
        )
        yield _counter(
            "hurray_bytes",
            "Page bytes moved, by UCX lane and path; both are empty for what a reader has moved itself.",
            ["direction", "lane", "path"],
            (([direction, each.lane, each.path], each.nbytes) for direction, flow in flows for each in flow.lanes),
        )
        yield _counter(
            "hurray_logical_bytes",
            "Page bytes if every sequence had been sent by itself: above hurray_bytes by what aliases saved.",
            ["direction"],
            (([direction], flow.logical_nbytes) for direction, flow in flows),
        )
        yield _counter(
            "hurray_pages",
            "Pages written at the receiver, of one layer and role.",
            ["direction"],
            (([direction], flow.num_pages) for direction, flow in flows),
        )
        yield _counter(
            "hurray_resident_pages",
            "Pages not sent because the receiver had them, of one layer and role.",
            ["direction"],
            (([direction], flow.num_resident) for direction, flow in flows),
        )
        yield _counter(
            "hurray_operations",
            "Puts and gets posted, and pieces copied through a mapping.",
            ["direction"],
            (([direction], flow.num_operations) for direction, flow in flows),
        )
        yield _histogram(
            "hurray_transfer_seconds",
            "Whole transfers, from the offer (receive: from the grant) to the end.",
            ["direction"],
            (([direction], flow.seconds) for direction, flow in flows),
        )
        yield _histogram("hurray_grant_wait_seconds", "From an offer to its grant.", [], [([], stats.grant_wait)])
        for name, text, number in (
            ("hurray_connects", "Sessions opened, from either side.", stats.num_connects),
            ("hurray_reconnects", "Sessions opened in place of one that had broken.", stats.num_reconnects),
            ("hurray_disconnects", "Sessions that ended, orderly or not.", stats.num_disconnects),
            ("hurray_fallbacks", "Peers whose pages travel on the control channel, without UCX.", stats.num_fallbacks),
            ("hurray_quarantined_pages", "Pages put into quarantine.", stats.num_quarantined),
            ("hurray_recovered_pages", "Pages that came back out of quarantine.", stats.num_recovered),
            ("hurray_expired_leases", "Leases that ran out before their work was done.", stats.num_leases_expired),
        ):
            yield CounterMetricFamily(name, text, value=number)
        yield _counter(
            "hurray_losses",
            "Sessions that an error ended, by its class.",
            ["kind"],
            (([kind], number) for kind, number in stats.losses.items()),
        )
        for name, text, number in (
            ("hurray_sessions", "Open sessions of engines connected to this one.", stats.num_sessions),
            ("hurray_peers", "Open sessions of this engine with others.", stats.num_peers),
            ("hurray_waiting_offers", "Offers in the queue for pages.", stats.num_waiting),
            ("hurray_arriving_transfers", "Transfers granted and not complete.", stats.num_arriving),
        ):
            yield GaugeMetricFamily(name, text, value=number)
        yield _gauge(
            "hurray_pool_pages",
            "Pages of a pool by state; the states of a pool add up to its size.",
            ["pool", "state"],
            (
                ([pool, state], number)
                for pool, pages in stats.pools.items()
                for state, number in (
                    ("free", pages.free),
                    ("leased", pages.leased),
                    ("quarantined", pages.quarantined),
                )
            ),
        )
        yield _gauge(
            "hurray_pool_leases",
            "Leases that hold pages of a pool, quarantined ones included.",
            ["pool"],
            (([pool], pages.num_leases) for pool, pages in stats.pools.items()),
        )
        yield _gauge(
            "hurray_pool_generation",
            "Changes whenever the pool's registration does.",
            ["pool"],
            (([pool], number) for pool, number in stats.generations.items()),
        )


def _counter(name: str, text: str, labels: Sequence[str], rows: Iterable[_Row]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, number in rows:
        if number is not None:
            family.add_metric(values, number)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in rows:
        family.add_metric(values, number)
    return family


def _histogram(
    name: str, text: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], Histogram | None]]
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, times in rows:
        if times is not None:
            bounds = [*map(floatToGoString, times.bounds_s), "+Inf"]
            family.add_metric(values, list(zip(bounds, map(float, accumulate(times.counts)), strict=True)), times.sum_s)
    return family
