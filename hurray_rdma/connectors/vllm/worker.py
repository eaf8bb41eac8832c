"""A worker's side: the engine over vLLM's own cache tensors, and the prompts that it hands over.

Knows pools, keys and the engine; what it is to do comes with each step. What it takes over is `takeovers`' business.
vLLM calls it on the thread that computes, so nothing here waits for a peer: transfers are futures, whose ends are
picked up by the step after them. (`withdraw` waits until pushes have been called off.)
"""

from __future__ import annotations

import logging
import queue
import sys
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hurray_rdma.cache import Snapshot
from hurray_rdma.connectors.vllm.caches import KEYS, VALUES, WHOLE, Caches
from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.handoff import PushTarget
from hurray_rdma.connectors.vllm.peers import Peers, of_rank
from hurray_rdma.connectors.vllm.pushes import Pushes
from hurray_rdma.connectors.vllm.steps import Ended, Publish, Step
from hurray_rdma.connectors.vllm.takeovers import Takeovers
from hurray_rdma.engine import TransferStats
from hurray_rdma.engine.sync import Engine
from hurray_rdma.errors import ConfigError, HurrayError

__all__ = ["WorkerSide"]

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Publication:
    request_id: str
    key: str
    num_blocks: int
    open: set[str]
    """Ends of the keys under which it can be read, or is being read."""
    read: set[str] = field(default_factory=set)
    pushes: list[Future[TransferStats]] = field(default_factory=list)


class WorkerSide:
    """The engine of one worker. Close it, then the caches.

    Args:
        caches: the worker's.
        config: of the instance.
        tp_rank, tp_size: of the worker, and of all of the instance's.
        listens: whether others may read from it, or write.
        first_worker: how many workers of other data-parallel ranks come before this one's rank 0.
    """

    def __init__(
        self,
        caches: Caches,
        config: ConnectorConfig,
        *,
        tp_rank: int,
        listens: bool,
        tp_size: int = 1,
        first_worker: int = 0,
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
            for pool in caches.pools.values():  # prefill may offer before vLLM has blocks for it here
                self._engine.let_offers_wait(pool)
        self._pushes = Pushes(caches)
        self.address = self._advertised() if listens else ""
        """What the other side is to connect to; empty where it does not listen."""
        self._peers = Peers(self._engine)
        self._published: dict[str, _Publication] = {}
        self._may_be_sent: set[str] = set()
        self._unread: queue.SimpleQueue[tuple[_Publication, str, int]] = queue.SimpleQueue()
        self._pushed: queue.SimpleQueue[tuple[_Publication, str, Future[TransferStats]]] = queue.SimpleQueue()
        self._takeovers = Takeovers(
            caches, self._engine, self._peers, tp_rank=tp_rank, tp_size=tp_size, wait_s=config.lease_s
        )
        self._ended = Ended()

    def begin(self, step: Step) -> None:
        """Starts what the step asks for, but for what is published or pushed; waits for nothing."""
        for request_id in step.retire:
            publication = self._published.get(request_id)
            if publication is not None:
                self._unpublish(publication)
        if self._tp_rank == 0:
            self._ended.failures += [ConfigError.__name__] * step.num_refused
        self._takeovers.begin(step)

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
        self._takeovers.end(self._ended)
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
        publication = self._published[each.request_id] = _Publication(
            each.request_id, each.key, len(each.block_ids), ends
        )
        return publication

    def _read_or_not(self, publication: _Publication, end: str, _key: str, num_read: int) -> None:
        """On the engine's thread."""
        self._unread.put((publication, end, num_read))

    def _end_publication(self, publication: _Publication, end: str, num_read: int) -> None:
        publication.open.discard(end)
        if num_read:
            publication.read.add(end)
            if publication.read in ({WHOLE}, {KEYS, VALUES}):  # whoever it was for has it
                self._ended.num_read_prompts += self._tp_rank == 0
                self._ended.num_read_blocks += publication.num_blocks
                self._ended.read_nbytes += publication.num_blocks * self._caches.block_nbytes
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
                address = of_rank(target.addresses, self._tp_rank)
                future = self._peers.call(address, partial(self._pushes.begin, each, end))
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

    def _advertised(self) -> str:
        address = self._engine.address
        if self._config.advertise is None:
            return address
        return f"{_bracketed(self._config.advertise)}:{address.rpartition(':')[2]}"


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
