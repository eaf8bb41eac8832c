"""A CUDA driver that says what it was told to say, and writes down what it was asked: for the logic above it."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from hurray_rdma.errors import TransportError
from hurray_rdma.transport.cuda import Pointer, Trait, Words

DEVICE_ADDRESS = 0x7000_0000
"""Of the words, as a device has them."""


@dataclass
class RecordedDriver:
    pointers: dict[int, Pointer] = field(default_factory=dict)
    traits: dict[Trait, int] = field(default_factory=dict)
    passed_after: int = 0
    """How often an event is asked before it has passed."""
    fails: bool = False
    """Whether kernels have failed: every event tells."""
    refuses: set[str] = field(default_factory=set)
    """Calls that fail: "pin", "unpin"."""
    calls: list[tuple[object, ...]] = field(default_factory=list)
    words: list[Words] = field(default_factory=list)
    contexts: threading.local = field(default_factory=threading.local)
    zeros: list[ctypes.Array[ctypes.c_ubyte]] = field(default_factory=list)
    """Memory of the host, in the place of a device's."""
    active: int = 0
    """A device that the process uses already."""
    asked: int = 0
    flushed_waits: int = 0
    """Waits after which remote writes are visible to the stream."""
    capturing: set[int] = field(default_factory=set)
    """Streams that record a graph."""
    devices: dict[int, int] = field(default_factory=dict)
    """Of streams; others do not tell."""

    @property
    def context(self) -> list[int]:
        """Devices whose contexts this thread has pushed, the current one last."""
        if not hasattr(self.contexts, "pushed"):
            self.contexts.pushed = []
        pushed: list[int] = self.contexts.pushed
        return pushed

    def pointer(self, address: int) -> Pointer | None:
        return self.pointers.get(address)

    def trait(self, device_index: int, trait: Trait) -> int:
        return self.traits.get(trait, 0)

    @contextlib.contextmanager
    def current(self, device_index: int) -> Iterator[None]:
        self.context.append(device_index)
        try:
            yield
        finally:
            self.context.pop()

    def active_device(self) -> int:
        return self.active

    def adopt(self, device_index: int) -> None:
        self.calls.append(("adopt", device_index))

    def record(self, stream: int) -> int:
        self.calls.append(("record", stream, self.context[-1]))
        return 100 + len(self.calls)

    def device_of(self, stream: int) -> int | None:
        return self.devices.get(stream)

    def captures(self, stream: int) -> bool:
        return stream in self.capturing

    def passed(self, event: int) -> bool:
        if self.fails:
            raise TransportError("cuEventQuery: an illegal memory access was encountered", status=700)
        assert self.context, "it would break the captures of others"
        self.asked += 1
        return self.asked > self.passed_after

    def destroy(self, event: int) -> None:
        self.calls.append(("destroy", event))

    def flush_remote_writes(self, scope: int) -> None:
        self.calls.append(("flush", scope, self.context[-1]))

    def make_words(self, count: int) -> Words:
        self.words.append(Words((ctypes.c_uint32 * count)(), DEVICE_ADDRESS + len(self.words) * 0x10_0000))
        return self.words[-1]

    def make_zeros(self, nbytes: int) -> int:
        self.calls.append(("zeros", nbytes, self.context[-1]))
        self.zeros.append((ctypes.c_ubyte * nbytes)())
        return ctypes.addressof(self.zeros[-1])

    def wait_word(self, stream: int, address: int, value: int, *, flush: bool) -> None:
        self.calls.append(("wait", stream, address, value, self.context[-1]))
        self.flushed_waits += flush

    def pin(self, address: int, nbytes: int) -> None:
        if not self.context:
            raise TransportError("pin: invalid device context", status=201)
        self.calls.append(("pin", address, nbytes))
        self._may("pin")

    def unpin(self, address: int) -> None:
        self.calls.append(("unpin", address))
        self._may("unpin")

    def _may(self, call: str) -> None:
        if call in self.refuses:
            raise TransportError(f"{call}: out of memory", status=2)
