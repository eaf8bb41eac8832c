"""The UCX context: where memory is registered and workers are made. One per process, made at first need.

All regions that an engine uses must belong to its context, so pools and engines take one as an argument and default to
`default_context`. Settings that shape the context are read here, before it is made.

UCX reads its own ``UCX_*`` environment variables; the settings below outrank UCX's defaults, not the user's
environment.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import uuid
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from mmap import PAGESIZE
from pathlib import Path

from hurray_rdma.errors import ConfigError, RegistrationError, TransportError
from hurray_rdma.transport.binding import BoundContext, native
from hurray_rdma.transport.cuda import Driver, driver
from hurray_rdma.transport.devices import (
    Backing,
    check_device_memory,
    device_index,
    host_backing,
    missing_flush,
    orders_writes,
)
from hurray_rdma.transport.endpoint import Worker
from hurray_rdma.transport.mappings import is_anonymous, mapping_kind, ucx_copies
from hurray_rdma.transport.memory import Region, RemoteRegion
from hurray_rdma.transport.streams import Gates, StreamWatch

__all__ = ["Context", "default_context"]

_DEFAULT_OPTIONS = {
    # Without these two, endpoints with error handling get no cma and no shared-memory messages on one host, but
    # software RMA over tcp on the loopback device, at a tenth of the speed.
    "CMA_MEMORY_INVALIDATE": "y",
    "POSIX_ERROR_HANDLING": "y",
    # The cache would keep the card's registration of the caller's memory, and its key, beyond `Region.renew`.
    "RCACHE_ENABLE": "n",
}
_MIN_ZEROS_NBYTES = 1 << 20
"""Of memory that is all zeros: it is not made anew for the next larger page."""
_SHARED_MEMORY = re.compile(r"\b(posix|sysv|cma|xpmem|knem)/")


class Context:
    """A UCX context with the RMA feature.

    Args:
        options: UCX configuration without the ``UCX_`` prefix, e.g. ``{"TLS": "tcp"}``; outranks the environment.
        device_index: of the GPU that is used first, if any is: its CUDA context is current while UCX begins, which
            sets it up then, and not when kernels run.

    Raises:
        TransportError: UCX refuses the options, or another copy of UCX is loaded in this process.
    """

    def __init__(self, options: Mapping[str, str] | None = None, *, device_index: int | None = None) -> None:
        if len(copies := ucx_copies()) > 1:
            raise TransportError(
                f"{len(copies)} copies of UCX are loaded in this process, and two of them hang or crash: "
                f"{', '.join(copies)}",
                fix="Use the library that brought the other one in a process of its own, or let both use libucx's",
            )
        self.options = dict(options or {})
        defaults = {name: value for name, value in _DEFAULT_OPTIONS.items() if f"UCX_{name}" not in os.environ}
        with _current(device_index):
            self._bound = BoundContext(defaults | self.options)
        self._pid = os.getpid()
        seen = native.memory_types(self._bound.handle)
        self.device_kinds: tuple[str, ...] = ("cpu", "cuda") if native.CUDA in seen else ("cpu",)
        """Kinds of devices whose memory UCX moves: CUDA where its transports and a driver with a GPU are there."""
        self._flushes: dict[int, int | None] = {}
        self._device_index = device_index if "cuda" in self.device_kinds else None
        """Of the first device in use."""
        self._zeros: dict[int, Region] = {}
        self._zeros_lock = threading.Lock()
        self._workers: weakref.WeakSet[Worker] = weakref.WeakSet()
        self._announced: weakref.WeakSet[Region] = weakref.WeakSet()
        self._announcing = threading.Lock()
        self._lock = threading.Lock()
        self.memory_domain = _memory_domain(self._bound.handle)
        """The same for two processes that UCX lets move bytes through the memory of this host, else different."""

    @functools.cached_property
    def driver(self) -> Driver:
        """CUDA's, where memory of devices is used.

        Raises:
            TransportError: there is none.
        """
        return driver()

    @functools.cached_property
    def streams(self) -> StreamWatch:
        """Tells when work on a CUDA stream has run."""
        return StreamWatch(self.driver)

    @functools.cached_property
    def gates(self) -> Gates:
        """Lets CUDA streams wait for pages."""
        return Gates(self.driver)

    def of_any_device(self) -> AbstractContextManager[None]:
        """While this thread asks CUDA for what needs a context, whichever: that of a device in use, if one is."""
        index = self._device_index
        return self.driver.current(self.driver.active_device() if index is None else index)

    def in_use(self) -> AbstractContextManager[None]:
        """While this thread progresses a worker: CUDA has a context if any device is in use."""
        return nullcontext() if self._device_index is None else self.driver.current(self._device_index)

    def missing_flush(self, index: int) -> int | None:
        """As `devices.missing_flush`, asked once for each device."""
        if index not in self._flushes:
            self._flushes[index] = missing_flush(self.driver, index)
        return self._flushes[index]

    def orders_writes(self, index: int) -> bool:
        """As `devices.orders_writes`."""
        return orders_writes(self.driver, index)

    def allocate(self, nbytes: int, *, pinned: bool = False) -> Region:
        """Host memory of UCX's choice, zero-filled; a peer on this host can map it and write with plain stores.

        Args:
            nbytes: length, > 0.
            pinned: page-locked for CUDA: copies between it and a device run at full speed.

        Raises:
            RegistrationError: no memory, or UCX cannot register it.
            TransportError: ``pinned``, and there is no CUDA driver.
        """
        self._check_process()
        if nbytes <= 0:
            raise RegistrationError("must be above 0", field="nbytes", value=nbytes)
        region = Region(self._allocate(nbytes), device="cpu", context=self, allocated=True, owner=None)
        if pinned:
            try:
                region.pin()
            except BaseException:
                region.close()
                raise
        return region

    def _allocate(self, nbytes: int) -> native.Memory:
        if nbytes > (available := _available_nbytes()):
            # Asked for more than there is, UCX fills all of /dev/shm before it gives up.
            raise RegistrationError(
                f"must be at most the {available} bytes of memory that are available",
                field="nbytes",
                value=nbytes,
                fix="Make the pool smaller",
            )
        try:
            return native.Memory.allocate(self._bound.handle, nbytes, native.HOST, (self._bound.owner,))
        except native.UcxError as error:
            raise RegistrationError(
                f"UCX could not allocate {nbytes} bytes: {error}",
                field="nbytes",
                value=nbytes,
                fix="Free memory, or raise the shared-memory limits (`ipcs -l`, `df /dev/shm`)",
            ) from error

    def register(self, address: int, nbytes: int, *, owner: object, device: str = "cpu") -> Region:
        """Registers the caller's memory, in place.

        Args:
            address: first byte; memory of ``device``.
            nbytes: length, > 0.
            owner: kept alive while the region is registered.
            device: ``"cpu"`` or ``"cuda:N"``.

        Raises:
            RegistrationError: UCX refuses; or CUDA or UCX sees the memory as of another kind than ``device`` says, or
                as a kind that GPUDirect cannot reach; or there is no CUDA driver.
        """
        self._check_process()
        index = device_index(device)
        if nbytes <= 0 or address <= 0:
            raise RegistrationError("must both be above 0", field="(address, nbytes)", value=(address, nbytes))
        if index is None:
            backing = host_backing(self.driver, address) if "cuda" in self.device_kinds else Backing.PLAIN
            memory = self._map(address, nbytes, device, owner)
        else:
            try:
                cuda = self.driver
            except TransportError as error:
                raise RegistrationError(str(error), field="device", value=device) from error
            memory, backing = self._map_device(cuda, address, nbytes, index=index, owner=owner)
            self._adopt(index)
        region = Region(memory, device=device, context=self, allocated=False, owner=owner, backing=backing)
        if index is not None:
            try:
                region.remote()  # now: CUDA is asked for the key, which the event loop must not wait for later
            except RegistrationError:
                region.close()
                raise
        return region

    def zeros_on(self, index: int, nbytes: int) -> Region:
        """Memory of a device that is all zeros, at least so many bytes: the same for all, and to be read only.

        Never given back, since that would wait for all that is on the device. May block: not for the event loop. Pools
        ask for a page of it when they are made, so that nothing is registered while pages move.

        Raises:
            TransportError: CUDA refuses.
            RegistrationError: UCX does.
        """
        with self._zeros_lock:
            zeros = self._zeros.get(index)
            if zeros is None or zeros.nbytes < nbytes:
                nbytes = max(_MIN_ZEROS_NBYTES, 1 << (nbytes - 1).bit_length())
                with self.driver.current(index):
                    address = self.driver.make_zeros(nbytes)
                zeros = self._zeros[index] = self.register(address, nbytes, owner=None, device=f"cuda:{index}")
            return zeros

    def replace(self, address: int, nbytes: int, *, owner: object) -> Region:
        """Replaces the caller's host memory, in place and with its content, by such as `allocate` gives: a peer on this
        host can map it.

        What else lies in its first and its last page of memory goes along. Nobody may write there during the call, and
        a child of a fork shares the memory afterwards. No other registration of it may exist, by CUDA or another
        library: that would go on with the former pages. It takes a quarter of a second for a GiB.

        The memory stays when the region is closed: who has mapped it by then reaches it until he lets go.

        Args:
            address: first byte.
            nbytes: length, > 0.
            owner: kept alive while the region is registered.

        Raises:
            RegistrationError: the memory is no private memory of this process, or pinned; or UCX allocates none that
                could be mapped. Everything is where it was.
        """
        self._check_process()
        if nbytes <= 0 or address <= 0:
            raise RegistrationError("must both be above 0", field="(address, nbytes)", value=(address, nbytes))
        start, end = _whole_pages(address, nbytes)
        pinned = "cuda" in self.device_kinds and host_backing(self.driver, address) is Backing.PINNED
        if pinned or not is_anonymous(start, end):
            raise RegistrationError(
                "is pinned" if pinned else "is not private memory",
                field="address",
                value=f"{address:#x}",
                fix="Register it as it is",
            )
        memory = self._replace(address, nbytes)
        return Region(memory, device="cpu", context=self, allocated=True, owner=owner, place=address)

    def _replace(self, address: int, nbytes: int) -> native.Memory:
        start, end = _whole_pages(address, nbytes)
        new = self._allocate(end - start)
        try:
            if mapping_kind(new.address) == "private":
                raise RegistrationError(
                    "cannot be replaced by memory that peers can map: UCX allocates none",
                    field="address",
                    value=f"{address:#x}",
                    fix="Allow shared memory in UCX_TLS, or register it as it is",
                )
            new.replace(start, address - start, nbytes)
        except OSError as error:
            new.close()
            raise RegistrationError(
                f"cannot be replaced: {error}", field="address", value=f"{address:#x}", fix="Register it as it is"
            ) from error
        except BaseException:
            new.close()
            raise
        return new

    def _map_device(
        self, cuda: Driver, address: int, nbytes: int, *, index: int, owner: object
    ) -> tuple[native.Memory, Backing]:
        with cuda.current(index):
            backing = check_device_memory(cuda, address, nbytes, index=index)
            memory = self._map(address, nbytes, f"cuda:{index}", owner)
            self._check_seen(memory, f"cuda:{index}", backing)
        return memory, backing

    def _map(self, address: int, nbytes: int, device: str, owner: object) -> native.Memory:
        # UCX believes whoever names a type, so that it is left to look for itself wherever that matters.
        memory_type = native.HOST if device == "cpu" else native.UNKNOWN
        try:
            return native.Memory.map(self._bound.handle, address, nbytes, memory_type, (self._bound.owner, owner))
        except native.UcxError as error:
            raise RegistrationError(
                f"UCX could not register {nbytes} bytes at {address:#x} on {device}: {error}",
                field="nbytes",
                value=nbytes,
                fix="Raise the locked-memory limit (`ulimit -l`), or allocate the pool through the engine",
            ) from error

    def remake(self, region: Region) -> native.Memory:
        """A new registration of the region's bytes, for `Region.renew`; the old one stays.

        Raises:
            RegistrationError: UCX refuses, or the memory cannot be replaced in place.
        """
        self._check_process()
        old, device = region.memory, region.device
        if not region.allocated:
            if (index := region.device_index) is not None:
                return self._map_device(self.driver, old.address, old.nbytes, index=index, owner=region.owner)[0]
            return self._map(old.address, old.nbytes, device, region.owner)
        if region.replaced:
            return self._replace(region.seen_address, region.nbytes)
        if mapping_kind(region.seen_address) == "private":
            raise RegistrationError(
                "the memory cannot be replaced in place: UCX allocated it, and not as shared memory",
                field="region",
                value=repr(region),
                fix="Close the pool and make it anew, or make pools that are to be renewed from arrays of your own",
            )
        new = self._allocate(old.nbytes)
        try:
            new.take_over(old, region.seen_address)
        except (OSError, ValueError) as error:
            new.close()
            raise RegistrationError(
                f"the memory of the region cannot be replaced in place: {error}", field="device", value=device
            ) from error
        return new

    def announce(self, region: Region) -> None:
        """The region has said what a peer needs to reach it."""
        with self._announcing:
            self._announced.add(region)

    def owns(self, remote: RemoteRegion) -> bool:
        """Whether that is what a region of this context says of itself, as it is registered now."""
        with self._announcing:
            regions = list(self._announced)
        return any(_says(region, remote) for region in regions)

    def open_worker(self) -> Worker:
        """A worker with a progress thread of its own, about 10 ms and 4 MiB; close it."""
        self._check_process()
        with self._lock:
            index = self._device_index
            with self.in_use():
                bound = self._bound.open_worker(None if index is None else lambda: self.driver.adopt(index))
            worker = Worker(bound, self.in_use, self.owns)
            self._workers.add(worker)
            return worker

    def _adopt(self, index: int) -> None:
        """From the first device on, progress threads have its context: UCX asks CUDA about events on them, and crashes
        without one. Those of workers that are open begin anew."""
        with self._lock:
            if self._device_index is not None:
                return
            self._device_index = index
            for worker in list(self._workers):
                worker.restart(lambda: self.driver.adopt(index))

    @staticmethod
    def _check_seen(memory: native.Memory, device: str, backing: Backing) -> None:
        expected = native.CUDA_MANAGED if backing is Backing.MANAGED else native.CUDA
        seen = memory.memory_type
        if seen == expected:
            return
        memory.close()
        if seen == native.HOST:
            why = "the host's: it would copy pages through the host, or read them there and crash"
            fix = (
                "Check that UCX has CUDA's transports (`hurray-rdma doctor`) and UCX_TLS allows them; if the "
                "memory was allocated before UCX was loaded, or where it does not see that, set UCX_MEMTYPE_CACHE=n"
            )
        else:
            why = f"type {seen}, which it takes stream-ordered pools for: it would use none of the device's lanes"
            fix = "Allocate the arrays with cudaMalloc, not cudaMallocAsync, or use PagePool.allocate"
        raise RegistrationError(f"UCX sees the memory as {why}", field="device", value=device, fix=fix)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                f"the UCX context was made in process {self._pid} and cannot be used in its forked child {os.getpid()}",
                fix="Start processes with multiprocessing's 'spawn' method, or make the engine after the fork",
            )


def _says(region: Region, remote: RemoteRegion) -> bool:
    try:
        return region.remote() == remote
    except RegistrationError:  # it is closed, maybe just now
        return False


def _current(device_index: int | None) -> AbstractContextManager[None]:
    """As of `Driver.current`; of no device, or without a driver, which `Context.register` tells, it is none."""
    if device_index is None:
        return nullcontext()
    try:
        return driver().current(device_index)
    except TransportError:
        return nullcontext()


def _whole_pages(address: int, nbytes: int) -> tuple[int, int]:
    """First byte, and the one after the last, of the pages of memory that have some of it."""
    return address // PAGESIZE * PAGESIZE, -(-(address + nbytes) // PAGESIZE) * PAGESIZE


def _memory_domain(handle: int) -> bytes:
    if _SHARED_MEMORY.search(native.context_info(handle)) is None:
        return uuid.uuid4().bytes
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("ipc", "pid"))
    return ":".join((boot_id, *map(str, namespaces))).encode()


def _available_nbytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


_default: Context | None = None
_default_lock = threading.Lock()


def default_context(options: Mapping[str, str] | None = None, *, device_index: int | None = None) -> Context:
    """The context of this process: made by the first call, the same ever after.

    Args:
        options: as of `Context`; None takes whatever there is.
        device_index: as of `Context`, for the first call.

    Raises:
        ConfigError: the context exists already, with other options.
    """
    global _default  # noqa: PLW0603 - the one piece of module state (DESIGN.md, rooms)
    with _default_lock:
        if _default is None:
            _default = Context(options, device_index=device_index)
        elif options is not None and dict(options) != _default.options:
            raise ConfigError(
                f"the UCX context of this process exists already, with {_default.options}",
                field="options",
                value=dict(options),
                fix="Set UCX options before the first pool or engine is made",
            )
        return _default
