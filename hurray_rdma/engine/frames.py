"""Pages over the control channel, for peers that UCX cannot be set up with: packed on one side, unpacked on the other.

Copies within this process only; who sends the bytes, and when, is decided elsewhere. Host memory only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.control import DeviceUnavailableError
from hurray_rdma.errors import ProtocolError
from hurray_rdma.plan import Move, PageMap, TransferPlan, pack, packed_nbytes, unpack
from hurray_rdma.transport import copy_local

__all__ = ["FRAMES_LANE", "FRAMES_PATH", "Packer", "Unpacker"]

FRAMES_PATH = "frames"
"""`TransferStats.path` of what travels on the control channel."""
FRAMES_LANE = "control channel"

Uint8 = NDArray[np.uint8]


class Packer:
    """The sender's buffers, made when they are asked for.

    Args:
        snapshot: what is sent.
        dest: the pool that is to receive it.
        page_map: of the offer.
        resident: as of `plan.pack`.
        zero_tails: as of `plan.pack`.

    Raises:
        DeviceUnavailableError: the pages are not in host memory.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        dest: CacheSpec,
        page_map: PageMap,
        *,
        resident: NDArray[np.bool_] | None,
        zero_tails: bool,
    ) -> None:
        _check_host(snapshot.pool)
        self._pool = snapshot.pool
        self.plan: TransferPlan = pack(snapshot.pool.layout, dest, page_map, resident=resident, zero_tails=zero_tails)
        self._nbytes = packed_nbytes(snapshot.pool.spec, dest, self.plan.num_pages)

    def buffer(self, role: str, layer: int) -> tuple[Uint8, int]:
        """All that travels of one role of one layer, uint8 ``[packed_nbytes]``, and the pieces it was copied in."""
        packed = np.zeros(self._nbytes, np.uint8)
        count = 0
        for move in self.plan.moves(role, layer):
            src = self._pool.regions[move.src_region_index]
            count += _copy(src.seen_address + move.src_base_nbytes, packed.ctypes.data + move.dst_base_nbytes, move)
        return packed, count


class Unpacker:
    """The receiver's buffers, filled by frames and emptied into granted pages.

    Args:
        source: the sender's cache.
        pool: the pool that receives.
        page_ids: the granted pages that travel, in the grant's order, uint32 ``[num_pages]``.

    Raises:
        DeviceUnavailableError: the pool is not in host memory.
    """

    def __init__(self, source: CacheSpec, pool: PagePool, page_ids: NDArray[np.uint32]) -> None:
        _check_host(pool)
        self._tensors = source.tensors
        self._pool = pool
        self._plan = unpack(source, pool.layout, page_ids)
        self._nbytes = packed_nbytes(source, pool.spec, len(page_ids))
        self._buffers: dict[int, Uint8] = {}
        self._filled: dict[int, int] = {}

    def feed(self, index: int, offset_nbytes: int, data: memoryview) -> None:
        """Takes the next bytes of descriptor ``index``, which the session has found to follow the ones before.

        Raises:
            ProtocolError: more bytes than the grant has room for.
        """
        end = offset_nbytes + len(data)
        if end > self._nbytes:
            raise ProtocolError(
                f"ends behind the {self._nbytes} bytes that were granted", field="byte_offset_in_buffer", value=end
            )
        buffer = self._buffers.get(index)
        if buffer is None:
            buffer = self._buffers[index] = np.empty(self._nbytes, np.uint8)
        buffer[offset_nbytes:end] = np.frombuffer(data, np.uint8)
        self._filled[index] = end

    def finish(self, index: int) -> None:
        """Puts descriptor ``index`` into its pages.

        Raises:
            ProtocolError: bytes are missing.
        """
        filled = self._filled.pop(index, 0)
        if filled != self._nbytes:
            raise ProtocolError(
                f"descriptor {index} ended, and needs {self._nbytes}", field="bytes of TENSOR_DATA", value=filled
            )
        packed = self._buffers.pop(index, None)
        if packed is None:
            return
        for move in self._plan.moves(*self._tensors[index]):
            dst = self._pool.regions[move.dst_region_index]
            _copy(packed.ctypes.data + move.src_base_nbytes, dst.seen_address + move.dst_base_nbytes, move)


def _copy(src: int, dst: int, move: Move) -> int:
    count = 0
    for plan in move.program.plans():
        copy_local(src, dst, plan.src_offsets, plan.dst_offsets, plan.lengths)
        count += plan.num_operations
    return count


def _check_host(pool: PagePool) -> None:
    if pool.device != "cpu":
        raise DeviceUnavailableError(
            "UCX reaches no lane to this peer, and the control channel carries host memory only",
            field="device",
            value=pool.device,
            fix="Compare UCX_TLS and UCX_NET_DEVICES on the two sides",
        )
