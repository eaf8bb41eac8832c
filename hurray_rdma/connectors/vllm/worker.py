"""A worker's side: the engine over vLLM's own cache tensors, and the hand-overs that are under way.

Knows pools, keys and the engine; what it is to do comes with each step. vLLM calls it on the thread that computes, so
nothing here waits for a peer: transfers are futures, whose ends are picked up by the step after them.
"""

from __future__ import annotations

import logging
import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from hurray_rdma.cache import PagePool, Snapshot
from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.handoff import RemotePrefill
from hurray_rdma.connectors.vllm.steps import Load, Publish, Step
from hurray_rdma.engine import FetchedSnapshot, Placement, TransferStats
from hurray_rdma.engine.sync import Engine, Peer
from hurray_rdma.errors import ConfigError, HurrayError

__all__ = ["Ended", "WorkerSide"]

_log = logging.getLogger(__name__)

_SIGNS_OF_LIFE = 3
"""In the time of a lease."""


@dataclass(slots=True)
class Ended:
    """What has ended since the last step."""

    sent: set[str] = field(default_factory=set)
    """Requests whose blocks nobody reads any more."""
    received: set[str] = field(default_factory=set)
    """Requests whose loads have ended, failed ones included: nothing writes into their blocks any more."""
    failed_block_ids: set[int] = field(default_factory=set)
    """Blocks of failed loads; what is in them is undefined."""
    transfers: list[TransferStats] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Kinds of errors."""


@dataclass(slots=True, eq=False)
class _Publication:
    request_id: str
    key: str


@dataclass(slots=True, eq=False)
class _Loading:
    future: Future[FetchedSnapshot]
    written: list[int]


@dataclass(slots=True, eq=False)
class _Hold:
    remote: RemotePrefill
    due: float


class WorkerSide:
    """The engine of one worker. Close it, then the pool.

    Args:
        pool: over the worker's cache tensors.
        config: of the instance.
        tp_rank: of the worker.
        listens: whether others may read from it.
    """

    def __init__(self, pool: PagePool, config: ConnectorConfig, *, tp_rank: int, listens: bool) -> None:
        self._pool = pool
        self._config = config
        self._tp_rank = tp_rank
        port = config.port + tp_rank if config.port else 0
        self._engine = Engine(
            pool,
            listen=f"{_bracketed(config.host)}:{port}" if listens else None,
            token=config.secret(),
            timeout_s=config.timeout_s,
            lease_s=config.lease_s,
            peer_timeout_s=config.peer_timeout_s,
            allow_unauthenticated=config.allow_unauthenticated,
        )
        self._engine.start()
        self.address = self._advertised() if listens else ""
        """What the other side is to connect to; empty where it does not listen."""
        self._peers: dict[str, Peer] = {}
        self._published: dict[str, _Publication] = {}
        self._may_be_sent: set[str] = set()
        self._unread: queue.SimpleQueue[_Publication] = queue.SimpleQueue()
        self._loading: dict[str, _Loading] = {}
        self._loaded: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._held: dict[str, _Hold] = {}
        self._ended = Ended()

    def begin(self, step: Step) -> None:
        """Starts what the step asks for, but for `publish`; waits for nothing."""
        for request_id in step.retire:
            publication = self._published.get(request_id)
            if publication is not None:
                self._engine.unpublish(publication.key)
        for request_id in step.abort:
            loading = self._loading.get(request_id)
            if loading is not None:
                loading.future.cancel()
        for request_id, remote in step.hold.items():
            self._held[request_id] = _Hold(remote, time.monotonic() + remote.lease_s / _SIGNS_OF_LIFE)
        for request_id in step.unhold:
            self._held.pop(request_id, None)
        for load in step.load:
            self._load(load)
        for remote in step.decline:
            self._decline(remote)
        self._show_life()

    def publish(self, step: Step) -> None:
        """Lets prompts be read whose pages are complete by now."""
        for each in step.publish:
            self._publish(each)

    def ended(self, finished_request_ids: set[str]) -> Ended:
        """What has ended since the last call.

        Args:
            finished_request_ids: requests that vLLM has finished in the meantime; only of these it may be said that
                they were sent.
        """
        self._may_be_sent |= finished_request_ids & self._published.keys()
        while not self._unread.empty():
            publication = self._unread.get()
            if self._published.get(publication.request_id) is publication:
                publication.key = ""
        for request_id in [each for each in self._may_be_sent if not self._published[each].key]:
            self._may_be_sent.remove(request_id)
            del self._published[request_id]
            self._ended.sent.add(request_id)
        while not self._loaded.empty():
            self._end_load(self._loaded.get())
        ended, self._ended = self._ended, Ended()
        return ended

    def close(self) -> None:
        """Ends everything under way, then the engine; returns when nothing reads or writes the tensors any more."""
        self._engine.close()

    # Handing over.

    def _publish(self, each: Publish) -> None:
        earlier = self._published.pop(each.request_id, None)
        if earlier is not None:  # it was preempted, and computed again into other blocks
            self._engine.unpublish(earlier.key)
        publication = self._published[each.request_id] = _Publication(each.request_id, each.key)
        try:
            snapshot = Snapshot.from_block_tables(self._pool, [each.block_ids], seq_lens=[each.num_tokens])
            self._engine.publish(each.key, snapshot, max_readers=1, on_end=lambda *_: self._unread.put(publication))
        except HurrayError as error:
            _log.error("request %s cannot be handed over: %s", each.request_id, error)
            self._ended.failures.append(type(error).__name__)
            self._unread.put(publication)

    # Taking over.

    def _load(self, load: Load) -> None:
        written = load.block_ids[load.num_present :]
        future: Future[FetchedSnapshot]
        try:
            if load.remote is None:
                raise ConfigError(load.refusal)
            present = np.arange(len(load.block_ids)) < load.num_present
            placement = Placement(self._pool, load.block_ids, present=present)
            future = self._peer(load.remote).fetch_async(load.remote.key, into=placement)
        except HurrayError as error:
            future = Future()
            future.set_exception(error)
        self._loading[load.request_id] = _Loading(future, written)
        future.add_done_callback(lambda _: self._loaded.put(load.request_id))

    def _end_load(self, request_id: str) -> None:
        loading = self._loading.pop(request_id)
        self._ended.received.add(request_id)
        if loading.future.cancelled():
            return
        error = loading.future.exception()
        if error is None:
            with loading.future.result() as fetched:
                self._ended.transfers.append(fetched.stats)
            return
        _log.error("the pages of request %s could not be loaded: %s", request_id, error)
        self._ended.failed_block_ids.update(loading.written)
        self._ended.failures.append(type(error).__name__)

    def _decline(self, remote: RemotePrefill) -> None:
        """Reads nothing of it to the end: the other side's blocks are free then."""
        count = -(-remote.num_tokens // self._pool.spec.page_size)
        try:
            placement = Placement(self._pool, np.arange(count), present=np.ones(count, np.bool_))
            future = self._peer(remote).fetch_async(remote.key, into=placement)
        except HurrayError as error:
            _log.info("%r could not be declined, and is kept until its lease ends: %s", remote.key, error)
            return
        future.add_done_callback(partial(_log_failure, what=f"{remote.key!r} was not declined"))

    def _show_life(self) -> None:
        now = time.monotonic()
        for hold in self._held.values():
            if now >= hold.due:
                hold.due = now + hold.remote.lease_s / _SIGNS_OF_LIFE
                future = self._peer(hold.remote).refresh_async(hold.remote.key)
                future.add_done_callback(partial(_log_failure, what=f"{hold.remote.key!r} was not refreshed"))

    def _peer(self, remote: RemotePrefill) -> Peer:
        address = remote.addresses[self._tp_rank]
        if address not in self._peers:
            self._peers[address] = self._engine.connect(address)  # connects when it is first used
        return self._peers[address]

    def _advertised(self) -> str:
        address = self._engine.address
        if self._config.advertise is None:
            return address
        return f"{_bracketed(self._config.advertise)}:{address.rpartition(':')[2]}"


def _log_failure(future: Future[Any], what: str) -> None:
    if future.cancelled() or future.exception() is not None:
        _log.info("%s: %s", what, "it was cancelled" if future.cancelled() else future.exception())


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
