"""A worker's side of prompts that another instance has computed: they are loaded, kept alive until there is room for
them, or declined.

Knows pools, keys and peers; nothing here waits for one. What cannot be told to a peer is left to its lease.
"""

from __future__ import annotations

import logging
import queue
import time
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from hurray_rdma.connectors.vllm.caches import KEYS, VALUES, WHOLE, Caches
from hurray_rdma.connectors.vllm.handoff import Layout, PushedPrefill, RemotePrefill
from hurray_rdma.connectors.vllm.peers import Peers, of_rank
from hurray_rdma.connectors.vllm.steps import Ended, Load, Step
from hurray_rdma.control import NotPublishedError
from hurray_rdma.engine import FetchedSnapshot, Placement
from hurray_rdma.engine.sync import Arrival, Engine, Peer
from hurray_rdma.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
)

__all__ = ["Takeovers"]

_log = logging.getLogger(__name__)

_SIGNS_OF_LIFE = 3
"""In the time of a lease."""
_NOBODY_TO_TELL = (NotPublishedError, PeerLostError, DeadlineExceededError, AuthenticationError)
"""Failures of loads after which the other side keeps nothing, or does not listen."""


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


class Takeovers:
    """Those of one worker.

    Args:
        caches: the worker's.
        engine: over them.
        peers: of the engine.
        tp_rank, tp_size: of the worker, and of all of the instance's.
        wait_s: how long blocks wait for prefill to begin a push.
    """

    def __init__(
        self, caches: Caches, engine: Engine, peers: Peers, *, tp_rank: int, tp_size: int, wait_s: float
    ) -> None:
        self._caches = caches
        self._engine = engine
        self._peers = peers
        self._tp_rank = tp_rank
        self._tp_size = tp_size
        self._wait_s = wait_s
        self._loading: dict[str, _Loading] = {}
        self._loaded: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._held: dict[str, _Hold] = {}

    def __len__(self) -> int:
        """Loads under way."""
        return len(self._loading)

    def begin(self, step: Step) -> None:
        """Starts what the step asks for; waits for nothing."""
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
        for unwanted in step.decline:
            self._decline(unwanted)
        self._show_life()

    def end(self, ended: Ended) -> None:
        """Adds what has ended since the last call."""
        while not self._loaded.empty():
            request_id = self._loaded.get()
            if request_id in self._loading and all(future.done() for future in self._loading[request_id].futures):
                self._end_load(request_id, ended)

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
            return self._engine.receive_async(remote.key + end, placement, wait_s=self._wait_s)
        address = of_rank(remote.addresses, self._tp_rank)
        return self._peers.call(address, lambda peer: peer.fetch_async(remote.key + end, into=placement))

    def _end_load(self, request_id: str, ended: Ended) -> None:
        loading = self._loading.pop(request_id)
        ended.received.add(request_id)
        unread = False
        for future in loading.futures:
            if future.cancelled():
                unread = True
                continue
            error = future.exception()
            if error is None:
                come: FetchedSnapshot | Arrival = future.result()
                if isinstance(come, FetchedSnapshot):
                    ended.transfers.append(come.stats)
                come.release()
                continue
            _log.error("the pages of request %s could not be loaded: %s", request_id, error)
            ended.failed_block_ids.update(loading.written)
            ended.failures.append(type(error).__name__)
            unread |= isinstance(loading.remote, RemotePrefill) and not isinstance(error, _NOBODY_TO_TELL)
        if unread and loading.remote is not None:
            self._decline(loading.remote)

    def _decline(self, remote: RemotePrefill | PushedPrefill) -> None:
        """Nothing of it is taken over: the other side's blocks are free then."""
        told = partial(_let_go, what=f"{remote.key!r} was not declined")
        try:
            if isinstance(remote, PushedPrefill):
                for end in self._caches.ends_for(remote.block_size):
                    pool = self._caches.pools[end]
                    count = -(-remote.num_tokens // pool.spec.page_size)
                    placement = Placement(pool, np.arange(count), present=np.ones(count, np.bool_))
                    self._coming(remote, end, placement).add_done_callback(told)
                return
            # Of all workers, though they are not as many as here, and all that is published.
            for address in remote.addresses[self._tp_rank :: self._tp_size]:
                for end in (WHOLE, KEYS, VALUES) if remote.layout == Layout.CPU_VEC else (WHOLE,):
                    declined = self._peers.call(address, partial(Peer.decline_async, key=remote.key + end))
                    declined.add_done_callback(told)
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
            address = of_rank(remote.addresses, self._tp_rank)
            for end in self._caches.ends_for(remote.block_size):
                future = self._peers.call(address, partial(Peer.refresh_async, key=remote.key + end))
                future.add_done_callback(partial(_let_go, what=f"{remote.key!r} was not refreshed"))
        except HurrayError as error:
            _log.info("%r was not refreshed: %s", remote.key, error)


def _let_go(future: Future[Any], what: str) -> None:
    """Logs a failure; what has come is not needed."""
    if future.cancelled() or future.exception() is not None:
        _log.info("%s: %s", what, "it was cancelled" if future.cancelled() else future.exception())
    elif future.result() is not None:
        future.result().release()
