"""What is wrong with a replay: what senders and receivers said of each request, held to the trace and to each other.

Knows the trace, messages and counts; knows neither processes nor the model of a worker's cache (`expected` has that).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hurray_rdma.replay.expected import bounds_of
from hurray_rdma.replay.messages import Delivery, Failure, Service
from hurray_rdma.replay.work import Work

__all__ = ["Heard", "check_failures", "check_worker"]

_TOLD = 10
"""Requests of which one kind of fault is told."""


@dataclass(frozen=True, slots=True)
class Heard:
    """All that was said of one decode worker, in all its lives."""

    worker: int
    killed: bool
    services: Sequence[Service]
    """By itself."""
    deliveries: Sequence[Delivery]
    """By the senders, of the requests that go to it."""
    num_again: int
    """Requests that were sent to it more than once."""
    received_nbytes: int
    """What its engine wrote into its pool, by the engine's own count."""


def check_failures(work: Work, failures: Mapping[int, Failure]) -> list[str]:
    """Requests must fail if, and only if, they are larger than the pool that they go to."""
    too_large = set(np.flatnonzero(work.trace.lengths > work.config.workers.decode_pages).tolist())
    refused = {request for request, each in failures.items() if each.kind == "PoolExhaustedError"}
    others = [failures[request] for request in sorted(failures.keys() - (too_large & refused))]
    wrong = [f"request {each.request}: {each.kind}: {each.text}" for each in others]
    missing = sorted(too_large - failures.keys())
    return wrong[:_TOLD] + [f"request {each}: larger than the pool, and not refused" for each in missing[:_TOLD]]


def check_worker(work: Work, heard: Heard) -> list[str]:
    """What is wrong with one decode worker's requests.

    What a killed worker had not said when it died is not known: of such a one each request is held to the trace, but
    not the number of them. A worker that lives leaves no such excuse.
    """
    each_block = work.spec.page_nbytes * len(work.spec.tensors)
    wrong = [text for service in heard.services for text in _of_service(work, heard.worker, service, each_block)]
    wrong += [text for delivery in heard.deliveries for text in _of_delivery(work, delivery, each_block)]
    del wrong[_TOLD:]
    if heard.killed:
        return wrong
    if heard.num_again:
        return [*wrong, f"{heard.num_again} requests were sent again, though it lived: its counts are not checked"]
    fitting = np.flatnonzero(
        (work.decode_of == heard.worker) & (work.trace.lengths <= work.config.workers.decode_pages)
    )
    expected = Counter(fitting.tolist())
    for who, requests in (("sender", heard.deliveries), ("receiver", heard.services)):
        for request, times in _unequal(expected, (each.request for each in requests)):
            wrong.append(f"request {request}: {expected[request]} times through by the trace, {times} by its {who}")
    resident = {each.request: int(each.resident.sum()) for each in heard.services}
    for each in heard.deliveries:
        if each.num_resident != resident.get(each.request, each.num_resident):
            wrong.append(
                f"request {each.request}: {each.num_resident} blocks were resident by its sender, "
                f"{resident[each.request]} by its receiver"
            )
    del wrong[_TOLD:]
    num_resident, most = sum(resident.values()), bounds_of(work, heard.worker).num_resident_most
    if num_resident > most:
        wrong.append(f"{num_resident} blocks were resident, of at most {most}")
    nbytes = (int(work.trace.lengths[fitting].sum()) - num_resident) * each_block
    if heard.received_nbytes != nbytes:
        wrong.append(f"bytes received: must be {nbytes:,} by the trace, {heard.received_nbytes:,} by its engine")
    return wrong


def _of_service(work: Work, worker: int, service: Service, block_nbytes: int) -> list[str]:
    request, wrong = service.request, []
    if work.decode_of[request] != worker:
        wrong.append(f"request {request}: was to go to decode worker {work.decode_of[request]}")
    nbytes = int(work.num_tokens[request]) * block_nbytes // work.config.cache.page_size
    if service.compared_nbytes != nbytes:
        wrong.append(f"request {request}: {nbytes:,} bytes must be compared, {service.compared_nbytes:,} were")
    return wrong


def _of_delivery(work: Work, delivery: Delivery, block_nbytes: int) -> list[str]:
    num_blocks = int(work.trace.lengths[delivery.request])
    expected = {
        "blocks": (num_blocks, delivery.num_entries),
        "logical bytes": (num_blocks * block_nbytes, delivery.logical_nbytes),
        "bytes sent": ((num_blocks - delivery.num_resident) * block_nbytes, delivery.sent_nbytes),
    }
    return [
        f"request {delivery.request}: {what}: must be {must:,}, {was:,} found"
        for what, (must, was) in expected.items()
        if must != was
    ]


def _unequal(expected: Counter[int], found: Iterable[int]) -> list[tuple[int, int]]:
    counted = Counter(found)
    return sorted((each, counted[each]) for each in expected | counted if expected[each] != counted[each])
