"""What a replay must come to, counted from the trace: unique blocks, and which blocks a bounded prefix cache holds.

Knows block numbers, counts and the order of events; knows no engine, no page ID and no allocator, and shares no code
with `hurray_rdma.replay.kept`, whose rule it follows by itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hurray_rdma.replay.messages import Service
from hurray_rdma.replay.work import Work

__all__ = ["Bounds", "bounds_of", "check_services"]

_GRANTED, _SEEN, _COMPLETED, _RELEASED = range(4)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the trace says of the requests of one decode worker."""

    num_unique: int
    """Distinct blocks of those that are not larger than its pool: each must be sent at least once."""
    num_resident_most: int
    """Blocks that an endless cache would hold when they come again, were requests served one after the other."""


def bounds_of(work: Work, worker: int) -> Bounds:
    """Counts them."""
    num_resident = 0
    seen: set[int] = set()
    for request in np.flatnonzero(work.decode_of == worker).tolist():
        blocks = work.trace.blocks_of(request).tolist()
        if len(blocks) > work.config.workers.decode_pages:
            continue
        full = blocks[:-1] if work.trace.ragged[request] else blocks
        num_resident += sum(block in seen for block in full)
        seen.update(blocks)
    return Bounds(len(seen), num_resident)


@dataclass(slots=True, eq=False)
class _Copy:
    """A block in a page."""

    block: int
    holders: int = 0
    """Requests that have it, and one if it is kept."""
    users: int = 0
    """Requests that the worker has taken and not released."""
    kept: bool = False


@dataclass(slots=True)
class _Cache:
    num_free: int
    headroom: int
    complete: dict[int, list[_Copy]] = field(default_factory=dict)
    """By block: its copies, in the order in which they came to be complete."""
    idle: OrderedDict[_Copy, None] = field(default_factory=OrderedDict)
    """Kept and without users, from the one used longest ago."""

    def find(self, block: int) -> _Copy | None:
        """The one that was completed last, of those that somebody holds still."""
        return next((copy for copy in reversed(self.complete.get(block, ())) if copy.holders), None)

    def drop(self, copy: _Copy) -> None:
        copy.holders -= 1
        self.num_free += not copy.holders

    def make_room(self) -> None:
        while self.idle and self.num_free < self.headroom:
            copy, _ = self.idle.popitem(last=False)
            copy.kept = False
            self.drop(copy)


def check_services(work: Work, services: Sequence[Service]) -> tuple[int, list[str]]:
    """Serves the requests of a decode worker's whole life once more, in a model of its cache.

    What is resident depends on the order in which grants, arrivals' ends and releases fell; that order is taken from
    the worker's times, nothing else is.

    Args:
        work: the replay.
        services: everything that the worker was granted.

    Returns:
        Blocks that must have been resident, and what the worker says otherwise, at most ten lines.
    """
    cache = _Cache(work.config.workers.decode_pages, work.headroom_pages)
    held: dict[int, list[_Copy]] = {}
    written: dict[int, list[_Copy]] = {}
    num_resident, wrong = 0, []
    for _, kind, at in _events(services):
        service = services[at]
        num_full = len(service.resident) - int(work.trace.ragged[service.request])
        free = None
        if kind == _GRANTED:
            blocks = work.trace.blocks_of(service.request).tolist()
            found = [cache.find(block) if place < num_full else None for place, block in enumerate(blocks)]
            resident = [copy is not None for copy in found]
            num_resident += sum(resident)
            if resident != service.resident.tolist():
                wrong.append(
                    f"request {service.request}: {sum(resident)} blocks must be resident, "
                    f"{int(service.resident.sum())} were"
                )
            held[at] = [copy or _Copy(block) for copy, block in zip(found, blocks, strict=True)]
            written[at] = [copy for copy in held[at][:num_full] if not copy.holders]
            cache.num_free -= len(blocks) - sum(resident)
            for copy in held[at]:
                copy.holders += 1
        elif kind == _COMPLETED:
            for copy in written.pop(at):
                cache.complete.setdefault(copy.block, []).append(copy)
        elif kind == _SEEN:
            for copy in held[at][:num_full]:
                copy.users += 1
                cache.idle.pop(copy, None)
            cache.make_room()
            free = service.free_when_seen
        else:
            for copy in reversed(held[at][:num_full]):
                copy.users -= 1
                if not copy.users:
                    copy.holders += not copy.kept
                    copy.kept = True
                    cache.idle[copy] = None
            for copy in held.pop(at):
                cache.drop(copy)
            cache.make_room()
            free = service.free_when_released
        if free is not None and free != cache.num_free:
            wrong.append(f"request {service.request}: {cache.num_free} pages must be free, {free} were")
        if len(wrong) >= 10:
            break
    return num_resident, wrong


def _events(services: Sequence[Service]) -> list[tuple[float, int, int]]:
    """Time, kind and place in ``services``, in order."""
    events = []
    for at, service in enumerate(services):
        times = (service.granted_s, service.seen_s, service.completed_s, service.released_s)
        events += [(time_s, kind, at) for kind, time_s in enumerate(times)]
    return sorted(events)
