"""Prompts that go out layer by layer while they are computed: what a prefill worker pushes.

Knows the layers of vLLM's step by their names, and a transfer for each prompt and pool; nothing here waits for a peer.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hurray_rdma.cache import Snapshot
from hurray_rdma.connectors.vllm.caches import Caches
from hurray_rdma.connectors.vllm.steps import Publish
from hurray_rdma.engine import TransferStats
from hurray_rdma.engine.sync import Peer
from hurray_rdma.engine.sync.push import Push

__all__ = ["Pushes"]


@dataclass(slots=True, eq=False)
class _Pushed:
    push: Push
    layers: Mapping[str, range]
    """Those of the pool, by vLLM's names."""


class Pushes:
    """Those of the step that is computed now.

    Args:
        caches: the worker's.
    """

    def __init__(self, caches: Caches) -> None:
        self._caches = caches
        self._now: list[_Pushed] = []
        self.num_early = 0
        """Layers that were at the other side before the last one of their step was computed."""

    def begin(self, each: Publish, end: str, peer: Peer) -> Future[TransferStats]:
        """Offers a prompt whose last tokens are computed in the step that begins.

        Args:
            each: which, and where to.
            end: the pool, as of `Caches.pools`.
            peer: who expects it.

        Raises:
            GeometryError: the blocks are none of the cache's.
        """
        pool = self._caches.pools[end]
        num_tokens = self._caches.num_tokens(end, each.block_ids, each.num_tokens)
        snapshot = Snapshot.from_block_tables(pool, [each.block_ids], seq_lens=[num_tokens])
        push = peer.begin_async(snapshot, key=each.key + end, pool=end or None)
        self._now.append(_Pushed(push, self._caches.layers_of(end)))
        return push.future

    def layer_ready(self, name: str, stream: Any = None) -> None:
        """The layer's part of the step is computed, or queued on the stream."""
        for each in self._now:
            for layer in each.layers.get(name, ()):
                if each.push.is_last(layer):
                    self.num_early += each.push.num_sent
                each.push.layer_ready(layer, stream=stream)

    @property
    def num_sent(self) -> int:
        """Layers of the step that are at the other side."""
        return sum(each.push.num_sent for each in self._now)

    def step_computed(self, stream: Any = None) -> None:
        """All layers are: what was not said by name goes out, too."""
        for each in self._now:
            each.push.rest_ready(stream=stream)
        self._now.clear()
