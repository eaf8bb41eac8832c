"""Memory as UCX sees it: spans of this process (`Region`) and of a peer (`RemoteRegion`).

Knows addresses, lengths and rkeys; never pages. Mine and theirs are different types, so that one cannot be passed for
the other.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import RegistrationError, TransportError
from hurray_rdma.transport.binding import native
from hurray_rdma.transport.devices import Backing, device_index, host_backing
from hurray_rdma.transport.envelope import seal

if TYPE_CHECKING:
    from hurray_rdma.transport.context import Context

__all__ = ["Memory", "Region", "RemoteRegion", "copy_local", "hold"]

_log = logging.getLogger(__name__)

Memory = native.Memory


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region, as it announced it. Whoever holds the rkey can read and write all of it."""

    remote_addr: int
    """First byte, an address in the peer's process."""
    nbytes: int
    """Length in bytes, > 0."""
    rkey: bytes
    """The packed UCX rkey in its envelope (`hurray_rdma.transport.envelope`)."""
    device: str = "cpu"
    """Of the peer: ``"cpu"`` or ``"cuda:N"``."""


class Region:
    """One span of this process's memory, registered with UCX (``ucp_mem_map``).

    Made by `Context.allocate`, `Context.register` and `Context.replace`. Closing deregisters; host memory that UCX
    allocated stays mapped until the last array over it is gone, so that no view dangles.
    """

    def __init__(
        self,
        memory: native.Memory,
        *,
        device: str,
        context: Context,
        allocated: bool,
        owner: object,
        backing: Backing = Backing.PLAIN,
        place: int | None = None,
    ) -> None:
        self._memory = memory
        self._seen = memory
        """Where its arrays are: `renew` leaves them in place."""
        self.allocated = allocated
        """Whether UCX allocated it: the only kind that a process on this host may map."""
        self.owner = owner
        """Of the caller's memory."""
        self.context = context
        """Where it is registered; an engine uses regions of its own context only."""
        self.device = device
        """``"cpu"`` or ``"cuda:N"``."""
        self.backing = backing
        """What kind of memory of the device it is."""
        self._place = place
        """Where the caller has it, if it replaced memory of his."""
        self.num_renewals = 0
        """How often `renew` has replaced its registration."""
        self.key_revoked = False
        """Whether the last `renew` made the key that peers had void: a registration cache may hand out the same."""
        self._pinned = False
        """By `pin`, here."""
        self._key: bytes | None = None
        """Packed, of this registration."""

    @property
    def address(self) -> int:
        """First byte as it is registered, an address in this process; another after `renew`."""
        return self._memory.address

    @property
    def seen_address(self) -> int:
        """First byte as the arrays over it have it: `renew` does not change it."""
        return self._seen.address if self._place is None else self._place

    @property
    def replaced(self) -> bool:
        """Whether it stands in the place of the caller's memory (`Context.replace`)."""
        return self._place is not None

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self._memory.nbytes

    @property
    def closed(self) -> bool:
        return self._memory.closed

    @property
    def memory(self) -> native.Memory:
        """The native handle, for posting.

        Raises:
            RegistrationError: the region is closed.
        """
        if self._memory.closed:
            raise RegistrationError("the region is closed", field="region", value=repr(self))
        return self._memory

    def remote(self) -> RemoteRegion:
        """What a peer needs to reach this region (``ucp_rkey_pack``).

        Raises:
            RegistrationError: the region is closed, or CUDA does not let its memory be reached.
        """
        memory = self.memory
        if self._key is None:
            self._key = self._packed_key()
        self.context.announce(self)
        return RemoteRegion(remote_addr=memory.address, nbytes=memory.nbytes, rkey=seal(self._key), device=self.device)

    def _packed_key(self) -> bytes:
        try:
            with self.current():
                return self.memory.pack_rkey()
        except native.UcxError as error:
            raise RegistrationError(f"UCX makes no key of it: {error}", field="device", value=self.device) from error

    @property
    def device_index(self) -> int | None:
        """Number of its CUDA device; None on the host."""
        return device_index(self.device)

    def current(self) -> contextlib.AbstractContextManager[None]:
        """While this thread hands the region to UCX, or to CUDA: its device's context is current."""
        index = self.device_index
        return contextlib.nullcontext() if index is None else self.context.driver.current(index)

    @property
    def needs_flush(self) -> bool:
        """Whether `make_visible` has anything to do."""
        return self.device != "cpu" and self._missing_flush is not None

    @property
    def _missing_flush(self) -> int | None:
        index = self.device_index
        return None if index is None else self.context.missing_flush(index)

    def make_visible(self) -> None:
        """Lets kernels that are launched later see what peers have written: nothing to do on most machines, and else a
        call of CUDA's that may block.

        Raises:
            TransportError: CUDA refuses.
        """
        if (scope := self._missing_flush) is not None:
            with self.current():
                self.context.driver.flush_remote_writes(scope)

    def pin(self) -> None:
        """Page-locks host memory that UCX allocated; `renew` keeps it so, if CUDA lets it.

        Raises:
            TransportError: there is no CUDA driver, or it refuses.
        """
        with self.context.of_any_device():
            self.context.driver.pin(self.seen_address, self.nbytes)
        self._pinned, self.backing = True, Backing.PINNED

    def _page_locked(self) -> bool:
        """Whether devices have the pages at its address: by `pin`, or by UCX, which pins where a context is current."""
        if self._pinned or not self.allocated or "cuda" not in self.context.device_kinds:
            return self._pinned
        with self.context.of_any_device():
            return host_backing(self.context.driver, self.seen_address) is Backing.PINNED

    def _unpin(self) -> None:
        if self._pinned:
            self._pinned, self.backing = False, Backing.PLAIN
            with self.context.of_any_device():
                self.context.driver.unpin(self.seen_address)

    def _pin_again(self, backing: Backing) -> None:
        """Or leaves it as ordinary memory, which works as well, and slower."""
        try:
            self.pin()
            self.backing = backing
        except TransportError as error:
            _log.warning("%r is page-locked no more, and copies to and from GPUs are slower: %s", self, error)

    def array(self) -> NDArray[np.uint8]:
        """The bytes, uint8 ``[nbytes]``, writable, host memory only; keeps the region's memory alive.

        Raises:
            RegistrationError: the region is closed, or not host memory.
        """
        try:
            return np.frombuffer(memoryview(self._seen), dtype=np.uint8)
        except BufferError as error:
            raise RegistrationError(str(error), field="device", value=self.device) from error

    def renew(self) -> None:
        """Registers the same bytes anew: no rkey and no mapping that a peer has reaches them any more (`key_revoked`).

        Arrays stay where they are and keep their content; nobody may write through them during the call. What a peer
        on this host may still write into memory that UCX did not allocate (``cma``) it may write afterwards, too.

        Raises:
            RegistrationError: the region is closed or in use, or UCX refuses; it is as it was.
            TransportError: CUDA does not let go of page-locked memory; it was not renewed.
        """
        self.check_renewable()
        old, backing, pinned = self.memory, self.backing, self._page_locked()
        key = self._packed_key()
        if pinned:  # which holds the pages that are to be replaced: devices would go on to copy those
            self._pinned = True
            self._unpin()
        try:
            self._memory = self.context.remake(self)
            self._key = self._packed_key()
            self.num_renewals += 1
            self.key_revoked = self.allocated or self._key != key
            if not self.allocated or self.replaced:
                self._seen = self._memory
            if old is not self._seen:
                old.close()
        finally:
            if pinned:
                self._pin_again(backing)

    def check_renewable(self) -> None:
        """Raises if `renew` cannot be.

        Raises:
            RegistrationError: the region is closed, or in use.
        """
        if not self.allocated and self.memory.in_use:
            raise RegistrationError(
                "an operation in flight or an array keeps it registered",
                field="region",
                value=repr(self),
                fix="Try again when transfers out of it have ended",
            )

    def close(self) -> None:
        """Deregisters (``ucp_mem_unmap``): rkeys of it are void from now on. Idempotent.

        Raises:
            TransportError: CUDA does not let go of page-locked memory; it is deregistered all the same.
        """
        with contextlib.ExitStack() as steps:  # one that fails keeps none from being taken
            steps.callback(self._seen.close)
            steps.callback(self._memory.close)
            steps.callback(self._unpin)

    def __repr__(self) -> str:
        state = " [closed]" if self.closed else ""
        return f"<Region {self.device} {self.address:#x} +{self.nbytes}{state}>"


def hold(memory: native.Memory) -> None:
    """Keeps it registered until its `release`, whoever closes its region meanwhile.

    Raises:
        RegistrationError: the region is closed: on another thread, if it has just given the handle.
    """
    try:
        memory.hold()
    except ValueError:
        raise RegistrationError("the region is closed", field="address", value=f"{memory.address:#x}") from None


def copy_local(
    src_address: int,
    dst_address: int,
    src_offsets: NDArray[np.uint64],
    dst_offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
) -> None:
    """Copies pieces between two places in this process's host memory; releases the GIL.

    Args:
        src_address, dst_address: first bytes; both memories are alive, and large enough, until it returns.
        src_offsets, dst_offsets, lengths: uint64 ``[num_operations]``, bytes.
    """
    native.memcpy(src_address, dst_address, src_offsets, dst_offsets, lengths)
