"""The pools of a peer, as it announced them, over one connection.

Which of them is meant is told by their layouts alone; to open one costs the unpacking of a key for each of its regions.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

from hurray_rdma.cache import CacheSpec, PoolLayout
from hurray_rdma.control import MAX_DESCRIPTORS, DeviceUnavailableError, Pool
from hurray_rdma.engine.apart import apart
from hurray_rdma.engine.compat import announced_layout, same_kind, same_tensors
from hurray_rdma.engine.logs import EngineLog
from hurray_rdma.engine.permits import can_stream
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.engine.tally import Tally
from hurray_rdma.errors import GeometryError, HurrayError, ProtocolError, TransportError
from hurray_rdma.transport import Endpoint, PageStream, Path, RemoteMemory, RemoteRegion

__all__ = ["RemotePools"]

_FASTER = (
    "In a container allow ptrace (--cap-add SYS_PTRACE), or let PagePool.allocate make the receiving pool; see "
    "`hurray-rdma doctor`"
)


class RemotePools:
    """Announcements, checked; opened when they are first used, of which most may never be (on GPUs: `open_on_devices`).

    Args:
        log: of the connection.
        tally: counts what falls back to the control channel.
    """

    def __init__(self, log: EngineLog, *, tally: Tally) -> None:
        self._log = log
        self._tally = tally
        self._endpoint: Endpoint | None = None
        self._stream: PageStream | None = None
        self._announced: dict[int, tuple[Pool, PoolLayout]] = {}
        self._open: dict[int, RemotePool] = {}
        self._fell_back = False
        self._staged: set[tuple[str, str]] = set()
        self._same_host: bool | None = None
        self._judged = False
        self.useless: HurrayError | None = None
        """Why an announced pool cannot be used, if one could not."""

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._announced)

    @property
    def names(self) -> tuple[str, ...]:
        """In the order of their numbers."""
        return tuple(self._announced[pool_id][0].name for pool_id in sorted(self._announced))

    @property
    def num_tensors(self) -> int:
        """Roles and layers of the one that has most; of what can be in a snapshot."""
        counts = (len(layout.spec.tensors) for _, layout in self._announced.values())
        return min(MAX_DESCRIPTORS, max(counts, default=1))

    @property
    def numbers(self) -> Collection[int]:
        """Of those that can be used."""
        return self._announced.keys()

    def use(self, endpoint: Endpoint | None, stream: PageStream | None) -> None:
        """Reaches them over an endpoint, and those on the host over the stream, if there is one; without an endpoint,
        over the control channel."""
        self._endpoint, self._stream = endpoint, stream

    def hear(self, pool: Pool) -> None:
        """Takes an announcement, in place of any older one."""
        self.remove(pool.pool_id)
        try:
            self._announced[pool.pool_id] = pool, announced_layout(pool)
        except HurrayError as error:
            self._warn_of(pool, error)

    def _warn_of(self, pool: Pool, error: HurrayError) -> None:
        self.useless = error
        self._log.warning("its pool %r cannot be used: %s", pool.name, error)

    def _drop(self, pool: Pool, error: ProtocolError) -> None:
        """A key of it is damaged; the others are not."""
        if self._announced.get(pool.pool_id, (None,))[0] is pool:
            del self._announced[pool.pool_id]
            self._warn_of(pool, error)

    @property
    def on_devices(self) -> bool:
        """Whether pools on GPUs are to be opened yet (`open_on_devices`)."""
        if len(self._open) == len(self._announced):
            return False
        return any(pool_id not in self._open and pool.device != "cpu" for pool_id, (pool, _) in self._announced.items())

    async def open_on_devices(self) -> None:
        """Opens those, off the loop: CUDA takes its time to map them, and may wait for what is on a GPU.

        Let the endpoint be until it returns.
        """
        while self.on_devices and self._endpoint is not None:
            for pool_id, (pool, layout) in list(self._announced.items()):
                if pool.device == "cpu" or pool_id in self._open:
                    continue
                try:
                    remote = await apart(partial(self._opened, pool, layout))
                except ProtocolError as error:
                    self._drop(pool, error)
                    continue
                if self._announced.get(pool_id, (None,))[0] is pool and pool_id not in self._open:
                    self._keep(remote)
                else:
                    _close(remote)

    def remove(self, pool_id: int) -> None:
        """It is no more, or not as it was."""
        self._announced.pop(pool_id, None)
        old = self._open.pop(pool_id, None)
        if old is not None:
            _close(old)

    def clear(self) -> None:
        """All of them; the endpoint has closed their memory."""
        self._announced.clear()
        self._open.clear()

    def by_id(self, pool_id: int) -> RemotePool | None:
        """The pool of that number."""
        if pool_id not in self._announced:
            return None
        if pool_id not in self._open:
            pool, layout = self._announced[pool_id]
            try:
                self._keep(self._opened(pool, layout))
            except ProtocolError as error:
                self._drop(pool, error)
                return None
        return self._open[pool_id]

    def _keep(self, remote: RemotePool) -> None:
        self._open[remote.pool.pool_id] = remote
        self._warn_if_slow(remote)

    def first(self) -> RemotePool | None:
        """The one of the lowest number that can be used."""
        remotes = (self.by_id(pool_id) for pool_id in sorted(self._announced))
        return next((remote for remote in remotes if remote is not None), None)

    def first_reach(self) -> tuple[str, str] | None:
        """Lane and path of `first`, as of `RemotePool`; one on a GPU is not opened for it."""
        for pool_id in sorted(self._announced):
            device = self._announced[pool_id][0].device
            if device != "cpu" and pool_id not in self._open and self._endpoint is not None:
                return self._endpoint.lanes.name_between("cpu", device), Path.PUT.value
            if (remote := self.by_id(pool_id)) is not None:
                return remote.lane, remote.path
        return None

    def pool_for(self, spec: CacheSpec, name: str | None, *, device: str) -> RemotePool:
        """The one that is to take pages of ``spec`` from a device; only by its name one on another kind of device.

        No other is opened for it.

        Raises:
            DeviceUnavailableError: there are some, on other kinds of devices.
            GeometryError: none has that name, or those layers and roles.
        """
        while True:
            if (remote := self.by_id(self._pick(spec, name, device))) is not None:
                return self._from(remote, device)
            # A key of it is damaged, and it was dropped for that: another one may do.

    def _pick(self, spec: CacheSpec, name: str | None, device: str) -> int:
        """The number of that one.

        Raises:
            DeviceUnavailableError, GeometryError: as of `pool_for`.
        """
        announced = [self._announced[pool_id] for pool_id in sorted(self._announced)]
        if not announced and self.useless is not None:
            raise self.useless
        if name is not None:
            for pool, _ in announced:
                if (pool.name or "default") == (name or "default"):
                    return pool.pool_id
            names = [pool.name or "default" for pool, _ in announced]
            raise GeometryError(
                f"the receiving side has pools {names}", field="pool", value=name, fix="It may add one: Engine.add_pool"
            )
        one = len(announced) == 1
        fitting = [pool for pool, layout in announced if one or same_tensors(layout.spec, spec)]
        if not fitting:
            raise GeometryError(
                f"the receiving side has pools with layers {[layout.spec.layer_indices for _, layout in announced]}",
                field="layers",
                value=spec.layer_indices,
            )
        for pool in fitting:
            if same_kind(pool.device, device):
                return pool.pool_id
        named = fitting[0].name or "default"
        raise DeviceUnavailableError(
            f"the receiving side's pools for these layers are on {[pool.device for pool in fitting]}",
            field="device of the snapshot",
            value=device,
            fix=f"Pages go to another kind of device only where that is asked for: pool={named!r}",
        )

    def _from(self, remote: RemotePool, device: str) -> RemotePool:
        """Says once of each kind of device that UCX has no lane for it."""
        seen = remote.seen_from(device)
        if seen.lane.endswith("(staged)") and (kinds := (device[:4], remote.pool.device[:4])) not in self._staged:
            self._staged.add(kinds)
            self._log.warning(
                "pages from %s to %s travel over %s: UCX copies them through the host; see `hurray-rdma doctor`",
                device,
                remote.pool.device,
                seen.lane,
            )
        return seen

    def warn_if_slow(self, *, same_host: bool) -> None:
        """UCX takes a slow lane without a word: says so of the first pool that is not mapped, now or once it is opened.

        Opens `first`, so that what is wrong is heard of before anything is sent.
        """
        self._same_host = same_host
        self.first()
        for pool_id in sorted(self._open):
            self._warn_if_slow(self._open[pool_id])

    def _warn_if_slow(self, remote: RemotePool) -> None:
        slow = (Path.PUT.value, Path.STREAM.value)
        if self._same_host is None or self._judged or remote.path not in slow:
            return
        self._judged = True
        lane, same_host = remote.lane, self._same_host
        if lane.endswith("(emulated)"):
            self._log.warning(
                "pages travel over %s: UCX copies them in software, at a tenth of the speed. %s", lane, _FASTER
            )
        elif lane == "tcp" and same_host:
            self._log.warning("pages travel over tcp although the peer is on this host. %s", _FASTER)

    def fall_back(self, error: HurrayError) -> None:
        """Pages travel on the control channel; said once."""
        if not self._fell_back:
            self._fell_back = True
            self._tally.fallback()
            self._log.warning("pages travel on the control channel, which is slow: %s", error)

    def _opened(self, pool: Pool, layout: PoolLayout) -> RemotePool:
        """Raises:
        ProtocolError: a key is damaged; nothing of the pool stays open.
        """
        memories: list[RemoteMemory] = []
        if self._endpoint is not None:
            try:
                stream = self._stream if can_stream(layout) else None
                for index, region in enumerate(pool.regions):
                    remote = RemoteRegion(
                        remote_addr=region.remote_addr, nbytes=region.nbytes, rkey=region.rkey, device=pool.device
                    )
                    memories.append(self._endpoint.open_region(remote, stream=stream, index=index))
                    if pool.device == "cpu" and memories[-1].path is Path.PUT and self._endpoint.lanes.queued:
                        raise TransportError(
                            f"UCX has only {self._endpoint.lanes.name}, where a sender that is killed stops all others",
                            fix=_FASTER,
                        )
            except HurrayError as error:
                for memory in memories:
                    memory.close()
                memories.clear()
                if not isinstance(error, TransportError):
                    raise
                if not self._endpoint.closed:
                    self.fall_back(error)
        return RemotePool(pool, layout, tuple(memories))


def _close(remote: RemotePool) -> None:
    for memory in remote.memories:
        memory.close()
