"""One pool of a peer, as those who move pages to it or from it see it."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from hurray_rdma.cache import PagePool, PoolLayout
from hurray_rdma.control import Pool
from hurray_rdma.engine.frames import FRAMES_LANE, FRAMES_PATH
from hurray_rdma.plan import WholePages
from hurray_rdma.transport import Path, RemoteMemory

__all__ = ["RemotePool", "one_path"]


class RemotePool:
    """A pool that the peer announced, its layout checked and its regions opened.

    Args:
        pool: as announced.
        layout: of it.
        memories: its regions; empty where pages travel on the control channel.
        device: of the pages here that go there, or come from there.
    """

    __slots__ = ("_whole", "device", "layout", "memories", "path", "pool")

    def __init__(
        self, pool: Pool, layout: PoolLayout, memories: tuple[RemoteMemory, ...], *, device: str = "cpu"
    ) -> None:
        self.pool = pool
        self.layout = layout
        self.memories = memories
        self.device = device
        self.path: str = one_path(memories, device).value if memories else FRAMES_PATH
        """How pages are moved: ``mapped``, ``put`` (or got), ``stream`` or ``frames``."""
        self._whole: WeakKeyDictionary[PagePool, WholePages | None] = WeakKeyDictionary()

    def seen_from(self, device: str) -> RemotePool:
        """The same pool, to or from pages on a device."""
        return self if device == self.device else RemotePool(self.pool, self.layout, self.memories, device=device)

    @property
    def mapped(self) -> bool:
        """Whether pages are copied through a mapping: all of them."""
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
            return _telling(self.memories, self.device).lane_from(self.device)
        lanes = [memory.lane_from(self.device) for memory in self.memories]
        return next((lane for lane in lanes if lane.endswith("(staged)")), lanes[0])


def one_path(memories: tuple[RemoteMemory, ...], device: str) -> Path:
    """How pages are moved between the regions of a pool and a device here, all in one way: what the peer is told of a
    transfer holds for every byte of it. So ``mapped`` only where all regions are, else that of the first which is not.
    """
    return _telling(memories, device).path_from(device)


def _telling(memories: tuple[RemoteMemory, ...], device: str) -> RemoteMemory:
    return next((memory for memory in memories if memory.path_from(device) is not Path.MAPPED), memories[0])
