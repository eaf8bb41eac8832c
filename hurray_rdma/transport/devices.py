"""What must hold of memory on a device before it is registered, and before kernels may read what peers wrote into it.

Decides, and asks a `Driver` for the facts; calls neither CUDA nor UCX itself. Source: CUDA driver API
(CU_POINTER_ATTRIBUTE_*, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_*, cuFlushGPUDirectRDMAWrites).
"""

from __future__ import annotations

from enum import Enum, auto

from hurray_rdma.errors import ConfigError, RegistrationError
from hurray_rdma.transport.cuda import Driver, MemoryType, Trait

__all__ = [
    "Backing",
    "check_device_memory",
    "device_index",
    "flushed_by_streams",
    "host_backing",
    "missing_flush",
    "orders_writes",
]

_ORDERED_FOR_OWNER = 100
_CAN_FLUSH = 1


class Backing(Enum):
    """What kind of memory of its device a region is."""

    PLAIN = auto()
    """Pageable, or memory of a device."""
    PINNED = auto()
    """Page-locked host memory that devices copy from and to at full speed."""
    MANAGED = auto()
    """Memory of a device that moves between it and the host (``cuMemAllocManaged``)."""


def device_index(device: str) -> int | None:
    """The number of a CUDA device: 3 of ``"cuda:3"``; None for ``"cpu"``.

    Raises:
        ConfigError: it is neither.
    """
    if device == "cpu":
        return None
    kind, _, index = device.partition(":")
    if kind == "cuda" and index.isdecimal():
        return int(index)
    raise ConfigError("must be 'cpu' or 'cuda:N'", field="device", value=device)


def check_device_memory(driver: Driver, address: int, nbytes: int, *, index: int) -> Backing:
    """Raises unless a span is memory of that device which peers can reach at full speed.

    Args:
        driver: asked for the facts.
        address: first byte.
        nbytes: length, > 0.
        index: of the device.

    Raises:
        RegistrationError: it is not, and how it is to be made instead.
    """
    first, last = driver.pointer(address), driver.pointer(address + nbytes - 1)
    for where, pointer in ((address, first), (address + nbytes - 1, last)):
        if pointer is None or pointer.memory_type is MemoryType.HOST:
            raise RegistrationError(
                f"CUDA knows no device memory there, but it was said to be on cuda:{index}", **_at(where)
            )
        if pointer.device_index != index:
            raise RegistrationError(
                f"is on cuda:{pointer.device_index}, but was said to be on cuda:{index}", **_at(where)
            )
    assert first is not None  # looked at above
    assert last is not None
    if first.managed or last.managed:
        if not driver.trait(index, Trait.USES_HOST_PAGE_TABLES):
            raise RegistrationError(
                "is managed memory, which GPUDirect cannot register on this machine",
                fix="Allocate the arrays as plain device memory (cudaMalloc), or use PagePool.allocate",
                **_at(address),
            )
        return Backing.MANAGED
    for where, pointer in ((address, first), (address + nbytes - 1, last)):
        if not pointer.in_context and not pointer.rdma_capable and driver.trait(index, Trait.GPU_DIRECT_RDMA):
            raise RegistrationError(
                "was made without the flag for GPUDirect RDMA: virtual memory, or a stream-ordered pool",
                fix="Allocate it without expandable_segments and backend:cudaMallocAsync (PYTORCH_CUDA_ALLOC_CONF), or "
                "outside cupy.cuda.MemoryAsyncPool, or use PagePool.allocate",
                **_at(where),
            )
    return Backing.PLAIN


def host_backing(driver: Driver, address: int) -> Backing:
    """Whether host memory is page-locked for devices."""
    pointer = driver.pointer(address)
    return Backing.PINNED if pointer is not None and pointer.memory_type is MemoryType.HOST else Backing.PLAIN


def missing_flush(driver: Driver, index: int) -> int | None:
    """The scope to flush remote writes to before kernels of the device may read them; None where they are in order.

    A device that is neither in order nor flushed from the host (before CUDA 11.3) orders them at the launch of a
    kernel: what is queued before they arrive may miss them (`orders_writes`).
    """
    if _in_order(driver, index):
        return None
    return _ORDERED_FOR_OWNER if driver.trait(index, Trait.FLUSH_OPTIONS) & _CAN_FLUSH else None


def flushed_by_streams(driver: Driver, index: int) -> bool:
    """Whether a stream that waits for remote writes has to flush them itself, and can."""
    return not _in_order(driver, index) and bool(driver.trait(index, Trait.STREAMS_FLUSH))


def orders_writes(driver: Driver, index: int) -> bool:
    """Whether kernels that were queued before remote writes arrived see them: in order, or flushed from the host or by
    their stream."""
    if _in_order(driver, index):
        return True
    return missing_flush(driver, index) is not None or flushed_by_streams(driver, index)


def _in_order(driver: Driver, index: int) -> bool:
    return driver.trait(index, Trait.WRITES_ORDERING) >= _ORDERED_FOR_OWNER


def _at(address: int) -> dict[str, str]:
    return {"field": "address", "value": f"{address:#x}"}
