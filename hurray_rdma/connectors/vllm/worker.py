"""A worker's side: the engine over vLLM's own cache tensors, and the hand-overs that are under way.

Knows pools, keys and the engine; what it is to do comes with each step. vLLM calls it on the thread that computes, so
nothing here waits for a peer: transfers are futures, whose ends are picked up by the step after them. (`withdraw` waits
until pushes have been called off.)
"""

from __future__ import annotations

import logging
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np

from hurray_rdma.cache import Snapshot
from hurray_rdma.connectors.vllm.caches import KEYS, VALUES, WHOLE, Caches
from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.handoff import PushedPrefill, PushTarget, RemotePrefill
from hurray_rdma.connectors.vllm.peers import Peers
from hurray_rdma.connectors.vllm.pushes import Pushes
from hurray_rdma.connectors.vllm.steps import Load, Publish, Step
from hurray_rdma.engine import FetchedSnapshot, Placement, TransferStats
from hurray_rdma.engine.sync import Arrival, Engine, Peer
from hurray_rdma.errors import ConfigError, HurrayError

__all__ = ["Ended", "WorkerSide"]

_log = logging.getLogger(__name__)

T = TypeVar("T")

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
    open: set[str]
    """Ends of the keys under which it can be read, or is being read."""
    read: set[str] = field(default_factory=set)
    pushes: list[Future[TransferStats]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Loading:
    remote: RemotePrefill | PushedPrefill | None
    futures: list[Future[Any]]
    """Of `FetchedSnapshot` or `Arrival`."""
    written: list[int]


@dataclass(slots=True, eq=False)
class _Hold:
    remote: RemotePrefill
    due: float


class WorkerSide:
    """The engine of one worker. Close it, then the caches.

    Args:
        caches: the worker's.
        config: of the instance.
        tp_rank: of the worker.
        listens: whether others may read from it, or write.
        first_worker: how many workers of other data-parallel ranks come before this one's rank 0.
    """

    def __init__(
        self, caches: Caches, config: ConnectorConfig, *, tp_rank: int, listens: bool, first_worker: int = 0
    ) -> None:
        self._caches = caches
        self._config = config
        self._tp_rank = tp_rank
        self._engine = Engine(
            caches.whole,
            listen=f"{_bracketed(config.host)}:{config.port_of(first_worker + tp_rank)}" if listens else None,
            token=config.secret(),
            timeout_s=config.timeout_s,
            lease_s=config.lease_s,
            peer_timeout_s=config.peer_timeout_s,
            allow_unauthenticated=config.allow_unauthenticated,
        )
        self._engine.start()
        if sys.getswitchinterval() > config.switch_interval_s:
            sys.setswitchinterval(config.switch_interval_s)
        if listens:
            for end, pool in caches.pools.items():
                if end != WHOLE:
                    self._engine.add_pool(pool, name=end)
        if listens and config.pushes:
            for pool in caches.pools.values():  # from its first expectation on a pool lets offers wait for theirs
                self._engine.expect("", Placement(pool, [0]))
                self._engine.unexpect("", pool)
        self._pushes = Pushes(caches)
        self.address = self._advertised() if listens else ""
        """What the other side is to connect to; empty where it does not listen."""
        self._peers = Peers(self._engine)
        self._published: dict[str, _Publication] = {}
        self._may_be_sent: set[str] = set()
        self._unread: queue.SimpleQueue[tuple[_Publication, str, int]] = queue.SimpleQueue()
        self._pushed: queue.SimpleQueue[tuple[_Publication, str, Future[TransferStats]]] = queue.SimpleQueue()
        self._loading: dict[str, _Loading] = {}
        self._loaded: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._held: dict[str, _Hold] = {}
        self._ended = Ended()

    def begin(self, step: Step) -> None:
        """Starts what the step asks for, but for what is published or pushed; waits for nothing."""
        for request_id in step.retire:
            publication = self._published.get(request_id)
            if publication is not None:
                self._unpublish(publication)
        for request_id in step.abort:
            loading = self._loading.get(request_id)
            for future in loading.futures if loading is not None else ():
                future.cancel()
        for request_id, remote in step.hold.items():
            self._held[request_id] = _Hold(remote, time.monotonic() + remote.lease_s / _SIGNS_OF_LIFE)
        for request_id in step.unhold:
            self._held.pop(request_id, None)
        for load in step.load:
            self._load(load)
        if self._tp_rank == 0:
            self._ended.failures += [ConfigError.__name__] * step.num_refused
        for unwanted in step.decline:
            self._decline(unwanted)
        self._show_life()

    def withdraw(self, request_id: str, *, keep: bool = False) -> None:
        """Ends what reads blocks that are about to be overwritten; returns when nothing pushes them any more.

        Args:
            request_id: whose they were.
            keep: it is still to be said of it that it was sent.
        """
        publication = self._published.get(request_id)
        if publication is not None:
            self._unpublish(publication)
            wait(publication.pushes)
            if not keep:
                del self._published[request_id]

    def push(self, step: Step) -> None:
        """Begins to push the prompts whose last tokens are computed in the step that begins."""
        for each in step.publish:
            if each.push_to is not None:
                self._push(each, each.push_to)

    def layer_computed(self, name: str, stream: Any = None) -> None:
        """The layer's part of the step is, or is queued on the stream: it may go out."""
        self._pushes.layer_ready(name, stream)

    def publish(self, step: Step) -> None:
        """Lets prompts be read whose pages are complete by now, and the rest of those that are pushed go out."""
        self._pushes.step_computed()
        for each in step.publish:
            if each.push_to is None:
                self._publish(each)

    def ended(self, finished_request_ids: set[str]) -> Ended:
        """What has ended since the last call.

        Args:
            finished_request_ids: requests that vLLM has finished in the meantime; only of these it may be said that
                they were sent.
        """
        self._may_be_sent |= finished_request_ids & self._published.keys()
        while not self._unread.empty():
            self._end_publication(*self._unread.get())
        while not self._pushed.empty():
            self._end_push(*self._pushed.get())
        for request_id in [each for each in self._may_be_sent if not self._published[each].open]:
            self._may_be_sent.remove(request_id)
            del self._published[request_id]
            self._ended.sent.add(request_id)
        while not self._loaded.empty():
            request_id = self._loaded.get()
            if request_id in self._loading and all(future.done() for future in self._loading[request_id].futures):
                self._end_load(request_id)
        ended, self._ended = self._ended, Ended()
        return ended

    def close(self) -> None:
        """Ends everything under way, then the engine; returns when nothing reads or writes the tensors any more."""
        self._engine.close()

    # Handing over.

    def _publish(self, each: Publish) -> None:
        publication = self._publication(each, set(self._caches.pools))
        for end, pool in self._caches.pools.items():
            num_tokens = self._caches.num_tokens(end, each.block_ids, each.num_tokens)
            try:
                snapshot = Snapshot.from_block_tables(pool, [each.block_ids], seq_lens=[num_tokens])
                ended = partial(self._read_or_not, publication, end)
                self._engine.publish(each.key + end, snapshot, max_readers=1, on_end=ended)
            except HurrayError as error:
                _log.error("request %s cannot be handed over: %s", each.request_id, error)
                self._ended.failures.append(type(error).__name__)
                publication.open.discard(end)

    def _publication(self, each: Publish, ends: set[str]) -> _Publication:
        self.withdraw(each.request_id)  # of the same name as one before
        publication = self._published[each.request_id] = _Publication(each.request_id, each.key, ends)
        return publication

    def _read_or_not(self, publication: _Publication, end: str, _key: str, num_read: int) -> None:
        """On the engine's thread."""
        self._unread.put((publication, end, num_read))

    def _end_publication(self, publication: _Publication, end: str, num_read: int) -> None:
        publication.open.discard(end)
        if num_read:
            publication.read.add(end)
        if publication.read in ({WHOLE}, {KEYS, VALUES}):  # whoever it was for has it
            self._unpublish(publication)

    def _unpublish(self, publication: _Publication) -> None:
        for end in publication.open if not publication.pushes else ():
            self._engine.unpublish(publication.key + end)
        for future in publication.pushes:
            future.cancel()

    def _push(self, each: Publish, target: PushTarget) -> None:
        ends = self._caches.ends_for(target.block_size)
        publication = self._publication(each, set(ends))
        for end in ends:
            try:
                future = self._call(target.addresses, partial(self._pushes.begin, each, end))
            except HurrayError as error:
                future = Future()
                future.set_exception(error)
            publication.pushes.append(future)
            future.add_done_callback(partial(self._push_ended, publication, end))

    def _push_ended(self, publication: _Publication, end: str, future: Future[TransferStats]) -> None:
        """On the engine's thread."""
        self._pushed.put((publication, end, future))

    def _end_push(self, publication: _Publication, end: str, future: Future[TransferStats]) -> None:
        publication.open.discard(end)
        if future.cancelled():
            return
        error = future.exception()
        if error is None:
            self._ended.transfers.append(future.result())
        else:
            _log.error("the pages of request %s could not be pushed: %s", publication.request_id, error)
            self._ended.failures.append(type(error).__name__)

    # Taking over.

    def _load(self, load: Load) -> None:
        futures: list[Future[Any]] = []
        try:
            if load.remote is None:
                raise ConfigError(load.refusal)
            present = np.arange(len(load.block_ids)) < load.num_present
            for end in self._caches.ends_for(load.remote.block_size):
                placement = Placement(self._caches.pools[end], load.block_ids, present=present)
                futures.append(self._coming(load.remote, end, placement))
        except HurrayError as error:
            futures.append(Future())
            futures[-1].set_exception(error)
        self._loading[load.request_id] = _Loading(load.remote, futures, load.block_ids[load.num_present :])
        for future in futures:
            future.add_done_callback(lambda _: self._loaded.put(load.request_id))

    def _coming(self, remote: RemotePrefill | PushedPrefill, end: str, placement: Placement) -> Future[Any]:
        """Pages that are read, or that the other side pushes."""
        if isinstance(remote, PushedPrefill):
            wait_s = self._config.lease_s  # prefill computes the prompt first
            return self._engine.receive_async(remote.key + end, placement, wait_s=wait_s)
        return self._call(remote.addresses, lambda peer: peer.fetch_async(remote.key + end, into=placement))

    def _end_load(self, request_id: str) -> None:
        loading = self._loading.pop(request_id)
        self._ended.received.add(request_id)
        if loading.remote is not None and any(future.cancelled() for future in loading.futures):
            self._decline(loading.remote)
        for future in loading.futures:
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                come: FetchedSnapshot | Arrival = future.result()
                if isinstance(come, FetchedSnapshot):
                    self._ended.transfers.append(come.stats)
                come.release()
                continue
            _log.error("the pages of request %s could not be loaded: %s", request_id, error)
            self._ended.failed_block_ids.update(loading.written)
            self._ended.failures.append(type(error).__name__)

    def _decline(self, remote: RemotePrefill | PushedPrefill) -> None:
        """Takes nothing of it to the end: the other side's blocks are free then."""
        try:
            for end in self._caches.ends_for(remote.block_size):
                pool = self._caches.pools[end]
                count = -(-remote.num_tokens // pool.spec.page_size)
                if count > pool.num_pages:
                    raise ConfigError(
                        f"is more than the {pool.num_pages} blocks here hold",
                        field="remote_num_tokens",
                        value=remote.num_tokens,
                    )
                placement = Placement(pool, np.arange(count), present=np.ones(count, np.bool_))
                future = self._coming(remote, end, placement)
                future.add_done_callback(partial(_let_go, what=f"{remote.key!r} was not declined"))
        except HurrayError as error:
            _log.info("%r could not be declined, and is kept until its lease ends: %s", remote.key, error)

    def _show_life(self) -> None:
        now = time.monotonic()
        for hold in self._held.values():
            if now >= hold.due:
                hold.due = now + hold.remote.lease_s / _SIGNS_OF_LIFE
                self._refresh(hold.remote)

    def _refresh(self, remote: RemotePrefill) -> None:
        try:
            for end in self._caches.ends_for(remote.block_size):
                future = self._call(remote.addresses, partial(Peer.refresh_async, key=remote.key + end))
                future.add_done_callback(partial(_log_failure, what=f"{remote.key!r} was not refreshed"))
        except HurrayError as error:
            _log.info("%r was not refreshed: %s", remote.key, error)

    def _call(self, addresses: tuple[str, ...], method: Callable[[Peer], Future[T]]) -> Future[T]:
        """Of the worker that has the same heads.

        Raises:
            HurrayError: as `Peers.call`; or there are not as many workers there as here.
        """
        if self._tp_rank >= len(addresses):
            raise ConfigError(f"has none for rank {self._tp_rank}", field="remote_addresses", value=addresses)
        return self._peers.call(addresses[self._tp_rank], method)

    def _advertised(self) -> str:
        address = self._engine.address
        if self._config.advertise is None:
            return address
        return f"{_bracketed(self._config.advertise)}:{address.rpartition(':')[2]}"


def _log_failure(future: Future[Any], what: str) -> None:
    if future.cancelled() or future.exception() is not None:
        _log.info("%s: %s", what, "it was cancelled" if future.cancelled() else future.exception())


def _let_go(future: Future[Any], what: str) -> None:
    _log_failure(future, what)
    if not future.cancelled() and future.exception() is None:
        future.result().release()


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
