"""Memory as UCX sees it: spans of this process (`Region`) and of a peer (`RemoteRegion`).

Knows addresses, lengths and rkeys; never pages. Mine and theirs are different types, so that one cannot be passed for
the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import RegistrationError
from hurray_rdma.transport.binding import native
from hurray_rdma.transport.envelope import seal

if TYPE_CHECKING:
    from hurray_rdma.transport.context import Context

__all__ = ["Region", "RemoteRegion", "copy_local"]


@dataclass(frozen=True, slots=True)
class RemoteRegion:
    """A peer's region, as it announced it. Whoever holds the rkey can read and write all of it."""

    remote_addr: int
    """First byte, an address in the peer's process."""
    nbytes: int
    """Length in bytes, > 0."""
    rkey: bytes
    """The packed UCX rkey in its envelope (`hurray_rdma.transport.envelope`)."""


class Region:
    """One span of this process's memory, registered with UCX (``ucp_mem_map``).

    Made by `Context.allocate` and `Context.register`. Closing deregisters; host memory that UCX allocated stays mapped
    until the last array over it is gone, so that no view dangles.
    """

    def __init__(self, memory: native.Memory, *, device: str, context: Context, allocated: bool, owner: object) -> None:
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

    @property
    def address(self) -> int:
        """First byte as it is registered, an address in this process; another after `renew`."""
        return self._memory.address

    @property
    def seen_address(self) -> int:
        """First byte as the arrays over it have it: `renew` does not change it."""
        return self._seen.address

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
        """What a peer needs to reach this region (``ucp_rkey_pack``)."""
        return RemoteRegion(remote_addr=self.address, nbytes=self.nbytes, rkey=seal(self.memory.pack_rkey()))

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
        """Registers the same bytes anew: no rkey and no mapping that a peer has reaches them any more.

        Arrays stay where they are and keep their content; nobody may write through them during the call. What a peer
        on this host may still write into memory that UCX did not allocate (``cma``) it may write afterwards, too.

        Raises:
            RegistrationError: the region is closed or in use, or UCX refuses; it is as it was.
        """
        self.check_renewable()
        old = self.memory
        self._memory = self.context.remake(self)
        if not self.allocated:
            self._seen = self._memory
        if old is not self._seen:
            old.close()

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
        """Deregisters (``ucp_mem_unmap``): rkeys of it are void from now on. Idempotent."""
        self._memory.close()
        self._seen.close()

    def __repr__(self) -> str:
        state = " [closed]" if self.closed else ""
        return f"<Region {self.device} {self.address:#x} +{self.nbytes}{state}>"


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
