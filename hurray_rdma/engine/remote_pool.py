"""One pool of a peer, as those who move pages to it or from it see it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from hurray_rdma.cache import PagePool, PoolLayout
from hurray_rdma.control import Pool
from hurray_rdma.engine.frames import FRAMES_LANE, FRAMES_PATH
from hurray_rdma.plan import WholePages
from hurray_rdma.transport import Path, RemoteMemory

__all__ = ["RemotePool"]


@dataclass(frozen=True, slots=True, eq=False)
class RemotePool:
    """A pool that the peer announced, its layout checked and its regions opened."""

    pool: Pool
    layout: PoolLayout
    memories: tuple[RemoteMemory, ...]
    """None where pages travel on the control channel."""
    device: str = "cpu"
    """Of the pages here that go there, or come from there."""
    path: str = field(init=False)
    """How they are moved: ``mapped``, ``put`` (or got), ``stream`` or ``frames``."""
    _whole: WeakKeyDictionary[PagePool, WholePages | None] = field(
        init=False, repr=False, default_factory=WeakKeyDictionary
    )

    def __post_init__(self) -> None:
        path = self.memories[0].path_from(self.device).value if self.memories else FRAMES_PATH
        object.__setattr__(self, "path", path)

    def seen_from(self, device: str) -> RemotePool:
        """The same pool, to or from pages on a device."""
        return self if device == self.device else replace(self, device=device)

    @property
    def mapped(self) -> bool:
        """Whether pages are copied through a mapping."""
        return self.path == Path.MAPPED.value

    def whole_into(self, pool: PagePool) -> WholePages | None:
        """Where the pages of both are, the peer's as the source; None where they cannot be read through a mapping as
        they are."""
        if not self.mapped:
            return None
        if pool not in self._whole:
            self._whole[pool] = WholePages.between(self.layout, pool.layout)
        return self._whole[pool]

    def same(self, other: RemotePool) -> bool:
        """Whether both are of one announcement, seen from one device."""
        return self.memories is other.memories and self.device == other.device

    @property
    def lane(self) -> str:
        """UCX transport that carries pages; of a GPU's, where UCX chooses for each region, the slow one it took."""
        if not self.memories:
            return FRAMES_LANE
        if self.device == self.pool.device == "cpu":
            return self.memories[0].lane_from(self.device)
        lanes = [memory.lane_from(self.device) for memory in self.memories]
        return next((lane for lane in lanes if lane.endswith("(staged)")), lanes[0])
