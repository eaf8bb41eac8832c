"""The CUDA driver, as far as moving pages needs it: contexts, what a pointer points at, events, order of remote writes.

Calls ``libcuda.so.1`` itself, so that no GPU library need be installed; it is loaded at first need, and never where all
pages are in host memory. Knows nothing of UCX, regions or pages. What the numbers mean for a transfer is decided in
`devices` and `streams`, which take a `Driver`.

ctypes releases the GIL around each call. Numbers are those of cuda.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

from hurray_rdma.errors import TransportError

__all__ = ["CudaDriver", "Driver", "MemoryType", "Pointer", "Trait", "Words", "driver"]

_INVALID_VALUE, _INVALID_CONTEXT, _NOT_READY = 1, 201, 600
_PINNED_ALREADY, _NOT_PINNED = 712, 713
_DISABLE_TIMING = 2
_NON_BLOCKING = 1
_PORTABLE, _DEVICE_MAP = 1, 2
_FLUSH_CURRENT_CONTEXT = 0
_WAIT_GEQ = 0
_WAIT_FLUSH = 1 << 30
_CAPTURE_THREAD_LOCAL = 1
_LAST_DEFAULT_STREAM = 2
"""CU_STREAM_PER_THREAD; below it are CU_STREAM_LEGACY and NULL."""


class MemoryType(IntEnum):
    """``CUmemorytype``."""

    HOST = 1
    DEVICE = 2
    ARRAY = 3
    UNIFIED = 4


class Trait(IntEnum):
    """What can be asked of a device (``CUdevice_attribute``)."""

    STREAMS_FLUSH = 98
    """CAN_FLUSH_REMOTE_WRITES: a stream that waits for a value can make remote writes visible to what comes after."""
    USES_HOST_PAGE_TABLES = 100
    """PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: managed memory is as reachable for a network card as the host's."""
    GPU_DIRECT_RDMA = 116
    """GPU_DIRECT_RDMA_SUPPORTED."""
    FLUSH_OPTIONS = 117
    """GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: bit 0 ``cuFlushGPUDirectRDMAWrites``, bit 1 by stream operations."""
    WRITES_ORDERING = 118
    """GPU_DIRECT_RDMA_WRITES_ORDERING: who sees remote writes in order: 0 nobody, 100 the device, 200 all devices."""
    DMA_BUF = 124
    """DMA_BUF_SUPPORTED: a network card can register the memory without nvidia-peermem."""


class _PointerTrait(IntEnum):
    """``CUpointer_attribute``."""

    CONTEXT = 1
    MEMORY_TYPE = 2
    IS_MANAGED = 8
    DEVICE_ORDINAL = 9
    IS_GPU_DIRECT_RDMA_CAPABLE = 15


@dataclass(frozen=True, slots=True)
class Pointer:
    """What CUDA knows of an address."""

    memory_type: MemoryType
    device_index: int
    managed: bool = False
    rdma_capable: bool = True
    """Whether GPUDirect RDMA can register it."""
    in_context: bool = True
    """Allocated in a context (``cuMemAlloc``); False for virtual memory (``cuMemMap``) and stream-ordered pools."""


@dataclass(frozen=True, slots=True)
class Words:
    """32-bit words in page-locked host memory that devices read, too. Never freed: a stream may wait on any of them."""

    host: ctypes.Array[c_uint32]
    device_address: int
    """Of the first word, as devices have it."""


class Driver(Protocol):
    """What the logic of this room asks of CUDA. Devices are numbers, streams and events are handles.

    Every call raises `TransportError` where CUDA fails.
    """

    def pointer(self, address: int) -> Pointer | None:
        """What an address points at; None where CUDA does not know it."""

    def trait(self, device_index: int, trait: Trait) -> int:
        """A fact of a device."""

    def current(self, device_index: int) -> contextlib.AbstractContextManager[None]:
        """The device's primary context is this thread's current one meanwhile, and no call of its breaks a capture of a
        graph that another thread has begun."""

    def active_device(self) -> int:
        """A device that is in use in this process, the first if there is none: a context of its own costs memory."""

    def adopt(self, device_index: int) -> None:
        """The same for the rest of this thread's life."""

    def record(self, stream: int) -> int:
        """A new event after what is on the stream of the current context now."""

    def device_of(self, stream: int) -> int | None:
        """The device that a stream is on; None of the default streams, which are the current context's, and where CUDA
        does not tell."""

    def captures(self, stream: int) -> bool:
        """Whether a stream of the current context records a graph, and runs nothing."""

    def passed(self, event: int) -> bool:
        """Whether all that was before the event has run; does not wait."""

    def destroy(self, event: int) -> None:
        """Ends an event, passed or not."""

    def flush_remote_writes(self, scope: int) -> None:
        """Waits until remote writes to the current context's device are visible in a scope (100: to the device)."""

    def make_words(self, count: int) -> Words:
        """New words, all 0."""

    def make_zeros(self, nbytes: int) -> int:
        """Address of new memory of the current context's device, all 0; waits for nothing else that is on it."""

    def wait_word(self, stream: int, address: int, value: int, *, flush: bool) -> None:
        """What comes later on the stream waits until a word, at the device's address, is ``value`` or later.

        With ``flush`` (`Trait.STREAMS_FLUSH`) it sees remote writes that had reached the device by then.
        """

    def pin(self, address: int, nbytes: int) -> None:
        """Page-locks host memory for copies of all devices; UCX may have done so."""

    def unpin(self, address: int) -> None:
        """Ends `pin`; harmless where it is not pinned."""


class CudaDriver:
    """The driver of this machine.

    Raises:
        TransportError: it is not there, or finds no device.
    """

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(
                f"there is no CUDA driver here: {error}",
                fix="Install NVIDIA's driver; in a container, start it with the GPUs (--gpus all)",
            ) from error
        self._contexts: dict[int, c_void_p] = {}
        self._lock = threading.Lock()
        self._call("cuInit", c_uint(0))

    def _call(self, name: str, *arguments: Any, but: int = 0) -> None:
        result = self._result(name, *arguments)
        if result not in (0, but):
            raise TransportError(f"{name}: {self._text(result)}", status=result)

    def _result(self, name: str, *arguments: Any) -> int:
        try:
            call = getattr(self._lib, name)
        except AttributeError as error:
            raise TransportError(f"the CUDA driver has no {name}", fix="Install a newer one (CUDA 11.7)") from error
        return int(call(*arguments))

    def _text(self, result: int) -> str:
        text = c_char_p()
        if self._result("cuGetErrorString", c_int(result), ctypes.byref(text)) != 0 or text.value is None:
            return f"CUDA error {result}"
        return text.value.decode(errors="replace")

    # Devices.

    @property
    def version(self) -> tuple[int, int]:
        """Of CUDA, as the driver has it."""
        number = c_int()
        self._call("cuDriverGetVersion", ctypes.byref(number))
        return number.value // 1000, number.value % 1000 // 10

    @property
    def num_devices(self) -> int:
        count = c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def name(self, device_index: int) -> str:
        """Product name of a device."""
        return self._device_text("cuDeviceGetName", device_index)

    def pci_address(self, device_index: int) -> str:
        """``domain:bus:device.function``, lower-case, as sysfs names it."""
        domain, _, rest = self._device_text("cuDeviceGetPCIBusId", device_index).lower().partition(":")
        return f"{int(domain, 16):04x}:{rest}"

    def can_access(self, device_index: int, other_index: int) -> bool:
        """Whether one device can read and write the other's memory (NVLink, or PCIe peer access)."""
        can = c_int()
        device, other = self._device(device_index), self._device(other_index)
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), device, other)
        return bool(can.value)

    def _device_text(self, call: str, device_index: int) -> str:
        text = ctypes.create_string_buffer(256)
        device = self._device(device_index)
        self._call(call, text, c_int(len(text)), device)
        return text.value.decode(errors="replace")

    def _device(self, device_index: int) -> c_int:
        device = c_int()
        self._call("cuDeviceGet", ctypes.byref(device), c_int(device_index))
        return device

    def trait(self, device_index: int, trait: Trait) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), c_int(trait), self._device(device_index))
        return value.value

    # Contexts.

    def _context(self, device_index: int) -> c_void_p:
        """The primary context, which CuPy and torch use, too; retained until the process ends."""
        if (known := self._contexts.get(device_index)) is not None:
            return known
        with self._lock:  # CUDA takes its time to make one
            if device_index not in self._contexts:
                context = c_void_p()
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device(device_index))
                self._contexts[device_index] = context
            return self._contexts[device_index]

    @contextlib.contextmanager
    def current(self, device_index: int) -> Iterator[None]:
        self._call("cuCtxPushCurrent_v2", self._context(device_index))
        try:
            mode = self._exchange_capture_mode(_CAPTURE_THREAD_LOCAL)
            try:
                yield
            finally:
                self._exchange_capture_mode(mode)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))

    def active_device(self) -> int:
        flags, active = c_uint(), c_int()
        for index in range(self.num_devices):
            device = self._device(index)
            self._call("cuDevicePrimaryCtxGetState", device, ctypes.byref(flags), ctypes.byref(active))
            if active.value:
                return index
        return 0

    def adopt(self, device_index: int) -> None:
        self._call("cuCtxSetCurrent", self._context(device_index))
        self._exchange_capture_mode(_CAPTURE_THREAD_LOCAL)

    def _exchange_capture_mode(self, mode: int) -> int:
        """Of this thread: whose captures its calls may break. Returns what it was."""
        was = c_int(mode)
        self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(was))
        return was.value

    # Memory.

    def pointer(self, address: int) -> Pointer | None:
        memory_type = self._pointer_trait(_PointerTrait.MEMORY_TYPE, address, c_uint())
        if not memory_type:  # 0 is no type of CUDA's
            return None
        return Pointer(
            memory_type=MemoryType(memory_type),
            device_index=self._pointer_trait(_PointerTrait.DEVICE_ORDINAL, address, c_int()) or 0,
            managed=bool(self._pointer_trait(_PointerTrait.IS_MANAGED, address, c_uint())),
            rdma_capable=bool(self._pointer_trait(_PointerTrait.IS_GPU_DIRECT_RDMA_CAPABLE, address, c_uint())),
            in_context=bool(self._pointer_trait(_PointerTrait.CONTEXT, address, c_void_p())),
        )

    def _pointer_trait(self, trait: _PointerTrait, address: int, value: Any) -> int | None:
        result = self._result("cuPointerGetAttribute", ctypes.byref(value), c_int(trait), c_uint64(address))
        if result in (_INVALID_VALUE, _INVALID_CONTEXT):
            return None
        if result != 0:
            raise TransportError(f"cuPointerGetAttribute: {self._text(result)}", status=result)
        return value.value or 0

    def pin(self, address: int, nbytes: int) -> None:
        flags = c_uint(_PORTABLE)
        self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), flags, but=_PINNED_ALREADY)

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", c_void_p(address), but=_NOT_PINNED)

    def make_words(self, count: int) -> Words:
        host, device = c_void_p(), c_uint64()
        nbytes = count * ctypes.sizeof(c_uint32)
        self._call("cuMemHostAlloc", ctypes.byref(host), c_size_t(nbytes), c_uint(_PORTABLE | _DEVICE_MAP))
        self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), host, c_uint(0))
        assert host.value is not None
        ctypes.memset(host.value, 0, nbytes)
        return Words((c_uint32 * count).from_address(host.value), device.value)

    def make_zeros(self, nbytes: int) -> int:
        address, stream = c_uint64(), c_void_p()
        self._call("cuMemAlloc_v2", ctypes.byref(address), c_size_t(nbytes))
        self._call("cuStreamCreate", ctypes.byref(stream), c_uint(_NON_BLOCKING))
        try:
            # Not on the default stream, which waits for others, and is not waited for by a network card.
            self._call("cuMemsetD8Async", address, c_ubyte(0), c_size_t(nbytes), stream)
            self._call("cuStreamSynchronize", stream)
        finally:
            self._call("cuStreamDestroy_v2", stream)
        return address.value

    def flush_remote_writes(self, scope: int) -> None:
        self._call("cuFlushGPUDirectRDMAWrites", c_int(_FLUSH_CURRENT_CONTEXT), c_int(scope))

    # Streams and events.

    def record(self, stream: int) -> int:
        event = c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), c_uint(_DISABLE_TIMING))
        try:
            self._call("cuEventRecord", event, c_void_p(stream))
        except TransportError:
            self.destroy(event.value or 0)
            raise
        return event.value or 0

    def device_of(self, stream: int) -> int | None:
        if stream <= _LAST_DEFAULT_STREAM:
            return None
        context, device = c_void_p(), c_int()
        self._call("cuStreamGetCtx", c_void_p(stream), ctypes.byref(context))
        for index, known in list(self._contexts.items()):
            if known.value == context.value:
                return index
        if self._result("cuCtxPushCurrent_v2", context) != 0:
            return None  # a green context that is current on another thread
        try:
            self._call("cuCtxGetDevice", ctypes.byref(device))
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(c_void_p()))
        return device.value

    def captures(self, stream: int) -> bool:
        status = c_int()
        self._call("cuStreamIsCapturing", c_void_p(stream), ctypes.byref(status))
        return bool(status.value)

    def passed(self, event: int) -> bool:
        result = self._result("cuEventQuery", c_void_p(event))
        if result not in (0, _NOT_READY):
            raise TransportError(f"cuEventQuery: {self._text(result)}", status=result)
        return result == 0

    def destroy(self, event: int) -> None:
        self._call("cuEventDestroy_v2", c_void_p(event))

    def wait_word(self, stream: int, address: int, value: int, *, flush: bool) -> None:
        flags = c_uint(_WAIT_GEQ | (_WAIT_FLUSH if flush else 0))
        self._call("cuStreamWaitValue32_v2", c_void_p(stream), c_uint64(address), c_uint32(value), flags)


@functools.cache
def driver() -> CudaDriver:
    """The driver, loaded by the first call.

    Raises:
        TransportError: as of `CudaDriver`.
    """
    return CudaDriver()
