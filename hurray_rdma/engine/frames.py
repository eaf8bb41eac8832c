"""Pages over the control channel, for peers that UCX cannot be set up with: packed on one side, unpacked on the other.

Frame by frame, so that neither side holds more than one of them. Copies within this process only; who sends the bytes,
and when, is decided elsewhere. Host memory only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.control import DeviceUnavailableError, PeerInfo
from hurray_rdma.errors import ProtocolError
from hurray_rdma.plan import Cutter, Move, PageMap, Pieces, Program, TransferPlan, pack, packed_nbytes, unpack
from hurray_rdma.transport import copy_local

__all__ = ["FRAMES_LANE", "FRAMES_PATH", "Packer", "Unpacker", "frame_nbytes"]

FRAMES_PATH = "frames"
"""`TransferStats.path` of what travels on the control channel."""
FRAMES_LANE = "control channel"

_OFFSET_NBYTES = 8
"""What TENSOR_DATA says before the bytes."""

Uint8 = NDArray[np.uint8]


def frame_nbytes(wanted: int, peer: PeerInfo) -> int:
    """Page bytes of one TENSOR_DATA message to a peer, at most ``wanted``."""
    return min(wanted, peer.max_message_nbytes - _OFFSET_NBYTES)


class Packer:
    """The source's frames, made when they are asked for.

    Args:
        snapshot: what is sent.
        dest: the pool that is to receive it.
        page_map: of the offer, or of what was published.
        resident: as of `plan.pack`.
        zero_tails: as of `plan.pack`.

    Raises:
        GeometryError: as of `plan.pack`.
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
        self.nbytes = packed_nbytes(snapshot.pool.spec, dest, self.plan.num_pages)
        """All that travels of one role of one layer."""
        self._cutters = _Cutters(from_buffer=False)

    def frame(self, role: str, layer: int, start: int, nbytes: int, *, timeout_s: float) -> tuple[Uint8, int]:
        """Bytes of one role of one layer from ``start`` on, uint8 ``[at most nbytes]``, and the pieces they were
        copied in.

        Raises:
            DeadlineExceededError: the pool was being registered anew all the time.
        """
        end = min(start + nbytes, self.nbytes)
        frame = np.zeros(end - start, np.uint8)
        count = 0
        with self._pool.gate.moving(timeout_s=timeout_s):
            for move in self.plan.moves(role, layer):
                pieces = self._cutters.cut(move, start, end)
                src = self._pool.regions[move.src_region_index].seen_address + move.src_base_nbytes
                copy_local(src, frame.ctypes.data - start + move.dst_base_nbytes, *pieces)
                count += len(pieces.lengths)
        return frame, count


class Unpacker:
    """The reader's or receiver's side: puts frames into pages as they come.

    Args:
        source: the sender's cache.
        pool: the pool that receives.
        page_ids: the pages that travel, in the order that both sides derive, uint32 ``[num_pages]``.

    Raises:
        DeviceUnavailableError: the pool is not in host memory.
    """

    def __init__(self, source: CacheSpec, pool: PagePool, page_ids: NDArray[np.uint32]) -> None:
        _check_host(pool)
        self._tensors = source.tensors
        self._pool = pool
        self._plan = unpack(source, pool.layout, page_ids)
        self._nbytes = packed_nbytes(source, pool.spec, len(page_ids))
        self._filled: dict[int, int] = {}
        self._cutters = _Cutters(from_buffer=True)

    def feed(self, index: int, offset_nbytes: int, data: memoryview) -> int:
        """Takes the next bytes of descriptor ``index``, which the session has found to follow the ones before.

        Returns:
            Pieces that they were copied in.

        Raises:
            ProtocolError: more bytes than the pages have room for.
        """
        end = offset_nbytes + len(data)
        if end > self._nbytes:
            raise ProtocolError(
                f"ends behind the {self._nbytes} bytes that the pages take", field="byte_offset_in_buffer", value=end
            )
        frame, count = np.frombuffer(data, np.uint8), 0
        for move in self._plan.moves(*self._tensors[index]):
            pieces = self._cutters.cut(move, offset_nbytes, end)
            dst = self._pool.regions[move.dst_region_index].seen_address + move.dst_base_nbytes
            copy_local(frame.ctypes.data - offset_nbytes + move.src_base_nbytes, dst, *pieces)
            count += len(pieces.lengths)
        self._filled[index] = end
        return count

    def finish(self, index: int) -> None:
        """Nothing more comes of descriptor ``index``.

        Raises:
            ProtocolError: bytes are missing.
        """
        filled = self._filled.pop(index, 0)
        if filled != self._nbytes:
            raise ProtocolError(
                f"descriptor {index} ended, and needs {self._nbytes}", field="bytes of TENSOR_DATA", value=filled
            )


class _Cutters:
    """One for each program, made when it is first needed."""

    def __init__(self, *, from_buffer: bool) -> None:
        self._from_buffer = from_buffer
        self._of: dict[Program, Cutter] = {}

    def cut(self, move: Move, start: int, end: int) -> Pieces:
        """What of a move lies in the buffer's bytes from ``start`` to before ``end``."""
        cutter = self._of.get(move.program)
        if cutter is None:
            cutter = self._of[move.program] = Cutter(move.program, from_buffer=self._from_buffer)
        base = move.src_base_nbytes if self._from_buffer else move.dst_base_nbytes
        return cutter.cut(start - base, end - base)


def _check_host(pool: PagePool) -> None:
    if pool.device != "cpu":
        raise DeviceUnavailableError(
            "UCX reaches no lane to this peer, and the control channel carries host memory only",
            field="device",
            value=pool.device,
            fix="Compare UCX_TLS and UCX_NET_DEVICES on the two sides",
        )
