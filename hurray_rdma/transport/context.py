"""The UCX context: where memory is registered and workers are made. One per process, made at first need.

All regions that an engine uses must belong to its context, so pools and engines take one as an argument and default to
`default_context`. Settings that shape the context are read here, before it is made.

UCX reads its own ``UCX_*`` environment variables; the two settings below outrank UCX's defaults, not the user's
environment.
"""

from __future__ import annotations

import os
import re
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path

from hurray_rdma.errors import ConfigError, RegistrationError, TransportError
from hurray_rdma.transport.binding import BoundContext, native
from hurray_rdma.transport.endpoint import Worker
from hurray_rdma.transport.mappings import mapping_kind, ucx_copies
from hurray_rdma.transport.memory import Region

__all__ = ["Context", "default_context"]

_DEFAULT_OPTIONS = {
    # Without these two, endpoints with error handling get no cma and no shared-memory messages on one host, but
    # software RMA over tcp on the loopback device, at a tenth of the speed.
    "CMA_MEMORY_INVALIDATE": "y",
    "POSIX_ERROR_HANDLING": "y",
}
_SHARED_MEMORY = re.compile(r"\b(posix|sysv|cma|xpmem|knem)/")


class Context:
    """A UCX context with the RMA feature.

    Args:
        options: UCX configuration without the ``UCX_`` prefix, e.g. ``{"TLS": "tcp"}``; outranks the environment.

    Raises:
        TransportError: UCX refuses the options, or another copy of UCX is loaded in this process.
    """

    def __init__(self, options: Mapping[str, str] | None = None) -> None:
        if len(copies := ucx_copies()) > 1:
            raise TransportError(
                f"{len(copies)} copies of UCX are loaded in this process, and two of them hang or crash: "
                f"{', '.join(copies)}",
                fix="Use the library that brought the other one in a process of its own, or let both use libucx's",
            )
        self.options = dict(options or {})
        defaults = {name: value for name, value in _DEFAULT_OPTIONS.items() if f"UCX_{name}" not in os.environ}
        self._bound = BoundContext(defaults | self.options)
        self._pid = os.getpid()
        seen = native.memory_types(self._bound.handle)
        self.device_kinds: tuple[str, ...] = ("cpu", "cuda") if native.CUDA in seen else ("cpu",)
        """Kinds of devices whose memory UCX moves: CUDA where its transports and a driver with a GPU are there."""
        self.memory_domain = _memory_domain(self._bound.handle)
        """The same for two processes that UCX lets move bytes through the memory of this host, else different."""

    def allocate(self, nbytes: int, *, device: str = "cpu") -> Region:
        """Memory of UCX's choice, zero-filled on the host; a peer on this host can map it and write with plain stores.

        Args:
            nbytes: length, > 0.
            device: ``"cpu"`` or ``"cuda:N"``.

        Raises:
            RegistrationError: no memory, or UCX cannot register memory of that device.
        """
        self._check_process()
        memory_type = _memory_type(device)
        if nbytes <= 0:
            raise RegistrationError("must be above 0", field="nbytes", value=nbytes)
        return self._checked(self._allocate(nbytes, memory_type, device), device, allocated=True, owner=None)

    def _allocate(self, nbytes: int, memory_type: int, device: str) -> native.Memory:
        if device == "cpu" and nbytes > (available := _available_nbytes()):
            # Asked for more than there is, UCX fills all of /dev/shm before it gives up.
            raise RegistrationError(
                f"must be at most the {available} bytes of memory that are available",
                field="nbytes",
                value=nbytes,
                fix="Make the pool smaller",
            )
        try:
            return native.Memory.allocate(self._bound.handle, nbytes, memory_type, (self._bound.owner,))
        except native.UcxError as error:
            raise RegistrationError(
                f"UCX could not allocate {nbytes} bytes on {device}: {error}",
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
            RegistrationError: UCX refuses, or sees the memory as of another kind than ``device`` says.
        """
        self._check_process()
        memory_type = _memory_type(device)
        if nbytes <= 0 or address <= 0:
            raise RegistrationError("must both be above 0", field="(address, nbytes)", value=(address, nbytes))
        memory = self._map(address, nbytes, memory_type, device, owner)
        return self._checked(memory, device, allocated=False, owner=owner)

    def _map(self, address: int, nbytes: int, memory_type: int, device: str, owner: object) -> native.Memory:
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
        memory_type = _memory_type(device)
        if not region.allocated:
            return self._map(old.address, old.nbytes, memory_type, device, region.owner)
        if mapping_kind(region.seen_address) == "private":
            raise RegistrationError(
                "the memory cannot be replaced in place: UCX allocated it, and not as shared memory",
                field="region",
                value=repr(region),
                fix="Close the pool and make it anew, or make pools that are to be renewed from arrays of your own",
            )
        new = self._allocate(old.nbytes, memory_type, device)
        try:
            new.take_over(old, region.seen_address)
        except (OSError, ValueError) as error:
            new.close()
            raise RegistrationError(
                f"the memory of the region cannot be replaced in place: {error}", field="device", value=device
            ) from error
        return new

    def open_worker(self) -> Worker:
        """A worker with a progress thread of its own, about 10 ms and 4 MiB; close it."""
        self._check_process()
        return Worker(self._bound.open_worker())

    def _checked(self, memory: native.Memory, device: str, *, allocated: bool, owner: object) -> Region:
        if memory.memory_type != _memory_type(device):
            seen = memory.memory_type
            memory.close()
            raise RegistrationError(
                f"UCX sees memory type {seen} where {device} is {_memory_type(device)}: it would not use the device's "
                "lanes",
                field="device",
                value=device,
                fix="Check that UCX was built with CUDA support (`ucx_info -d | grep cuda`)",
            )
        return Region(memory, device=device, context=self, allocated=allocated, owner=owner)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise TransportError(
                f"the UCX context was made in process {self._pid} and cannot be used in its forked child {os.getpid()}",
                fix="Start processes with multiprocessing's 'spawn' method, or make the engine after the fork",
            )


def _memory_domain(handle: int) -> bytes:
    if _SHARED_MEMORY.search(native.context_info(handle)) is None:
        return uuid.uuid4().bytes
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    namespaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("ipc", "pid"))
    return ":".join((boot_id, *map(str, namespaces))).encode()


def _memory_type(device: str) -> int:
    if device == "cpu":
        return native.HOST
    kind, _, index = device.partition(":")
    if kind == "cuda" and index.isdecimal():
        return native.CUDA
    raise ConfigError("must be 'cpu' or 'cuda:N'", field="device", value=device)


def _available_nbytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as meminfo:
        fields = dict(line.split(":", 1) for line in meminfo)
    return int(fields["MemAvailable"].split()[0]) * 1024


_default: Context | None = None
_default_lock = threading.Lock()


def default_context(options: Mapping[str, str] | None = None) -> Context:
    """The context of this process: made by the first call, the same ever after.

    Args:
        options: as of `Context`; None takes whatever there is.

    Raises:
        ConfigError: the context exists already, with other options.
    """
    global _default  # noqa: PLW0603 - the one piece of module state (DESIGN.md, rooms)
    with _default_lock:
        if _default is None:
            _default = Context(options)
        elif options is not None and dict(options) != _default.options:
            raise ConfigError(
                f"the UCX context of this process exists already, with {_default.options}",
                field="options",
                value=dict(options),
                fix="Set UCX options before the first pool or engine is made",
            )
        return _default
