"""A peer's region reached over one endpoint: the place that plans are written to, or read from.

A plan here is three arrays of offsets and lengths; the room above decides what they mean. Knows the ways to a remote
region (`Path`), and whether bytes of a plan that failed may still arrive.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import GeometryError, HurrayError, TransportError
from hurray_rdma.transport.bells import Bell
from hurray_rdma.transport.binding import native
from hurray_rdma.transport.keys import open_key
from hurray_rdma.transport.lanes import carried_by
from hurray_rdma.transport.memory import Region, RemoteRegion, hold
from hurray_rdma.transport.page_streams import PageStream
from hurray_rdma.transport.status import deadline_ns, raise_for

if TYPE_CHECKING:
    from hurray_rdma.transport.endpoint import Endpoint

__all__ = ["Moved", "Offsets", "Path", "RemoteMemory", "StopFlag"]

_log = logging.getLogger(__name__)

Offsets = NDArray[np.uint64]
StopFlag = native.StopFlag


class Path(Enum):
    """How bytes reach a remote region."""

    MAPPED = "mapped"
    """This process maps the peer's memory (``ucp_rkey_ptr``), and stores into it or loads from it."""
    PUT = "put"
    """``ucp_put_nbx`` or ``ucp_get_nbx``, and ``ucp_ep_flush_nbx``."""
    STREAM = "stream"
    """A TCP connection of this engine's own (`PageStream`), where UCX has nothing better: host memory only."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What moving a plan did; all of it has reached its destination."""

    num_operations: int
    """Puts posted, or pieces copied through a mapping."""
    nbytes: int
    seconds: float


class RemoteMemory:
    """A peer's region, reachable over one endpoint: the place that plans are written to, or read from.

    Args:
        endpoint: to the peer.
        remote: the region.
        stream: takes the place of the endpoint between host memory and host memory.
        index: of the region, as the peer's end of the stream counts those of its pool.

    Raises:
        HurrayError: as `open_key`.
        TransportError: the endpoint is closed.
    """

    def __init__(
        self, endpoint: Endpoint, remote: RemoteRegion, *, stream: PageStream | None = None, index: int = 0
    ) -> None:
        self._endpoint = endpoint
        self.remote = remote
        self._stream = stream if remote.device == "cpu" else None
        self._index = index
        if endpoint.closed:
            raise TransportError("the endpoint is closed")
        opened = open_key(endpoint, remote)
        self._rkey, self._pointer, self._mapping = opened.key, opened.pointer, opened.kind
        self._lock = threading.Lock()
        self._busy = 0
        self._closing = False
        self._carried: dict[str, tuple[int, str]] = {}
        """By the device of this process's memory: the longest piece of which UCX has said what carries it, and what.
        Where neither side is a device's, the endpoint tells."""

    def path_from(self, device: str) -> Path:
        """How `write` and `read` will move bytes between it and this process's memory on a device."""
        if self._pointer and device == "cpu":
            return Path.MAPPED
        return Path.STREAM if self._stream is not None and device == "cpu" else Path.PUT

    def lane_from(self, device: str) -> str:
        """The transport that carries them: the kind of shared memory when mapped, else the endpoint's RMA lane; as soon
        as something was moved from a device or to it, what UCX took."""
        if self._mapping and device == "cpu":
            return self._mapping
        if self.path_from(device) is Path.STREAM:
            return "tcp"
        if device in self._carried:
            return self._carried[device][1]
        return self._endpoint.lanes.name_between(device, self.remote.device)

    @property
    def path(self) -> Path:
        """`path_from` host memory."""
        return self.path_from("cpu")

    @property
    def lane(self) -> str:
        """`lane_from` host memory."""
        return self.lane_from("cpu")

    def write(
        self,
        src: Region,
        *,
        src_offsets: Offsets,
        dst_offsets: Offsets,
        lengths: Offsets,
        stop: StopFlag,
        timeout_s: float,
        path: Path | None = None,
        transfer_id: int = 0,
    ) -> Moved:
        """Writes a plan and waits until every byte is at the peer. Blocks; releases the GIL.

        Args:
            src: this process's region; must stay registered, its bytes unchanged, until the call returns.
            src_offsets: uint64 ``[num_operations]``, bytes from the start of ``src``.
            dst_offsets: uint64 ``[num_operations]``, bytes from the start of the remote region.
            lengths: uint64 ``[num_operations]``, bytes, each > 0.
            stop: set it from another thread to end the plan early.
            timeout_s: budget for the whole plan.
            path: as of other memory of the same transfer; None is `path_from` the device of ``src``.
            transfer_id: what the peer has permitted it for; only a stream asks.

        Raises:
            GeometryError: a piece lies outside either region; nothing was written.
            DeadlineExceededError: out of time.
            TransferAbortedError: ``stop`` was set.
            RegistrationError: ``src`` is closed; nothing was written.
            PeerLostError, TransportError: the fabric failed.

        Whether bytes of a failed plan may still arrive is told by ``in_doubt`` of the error; whether UCX may still read
        the source by `Endpoint.holds_memory` (it is kept registered, whatever its owner does).
        """
        _check_inside("src", src_offsets, lengths, src.nbytes)
        _check_inside("dst", dst_offsets, lengths, self.remote.nbytes)
        path = path or self.path_from(src.device)
        return self._move(
            src,
            src_offsets,
            dst_offsets,
            lengths,
            path=path,
            get=False,
            stop=stop,
            timeout_s=timeout_s,
            transfer_id=transfer_id,
        )

    def write_rows(
        self,
        src: Region,
        *,
        places: NDArray[np.uint64],
        src_rows: NDArray[np.uint32],
        dst_rows: NDArray[np.uint32],
        stop: StopFlag,
        timeout_s: float,
        bell: Bell | None = None,
    ) -> Moved:
        """As `write`, where the path is ``mapped``: rows that lie alike at several places, without a plan of them.

        Args:
            src: this process's region.
            places: where row 0 is in ``src``, from one row to the next, the same two of the remote region, and the
                length of a row; all in bytes, uint64 ``[num_places, 5]``.
            src_rows, dst_rows: which row goes where, at each place, uint32 ``[num_rows]``.
            stop, timeout_s: as of `write`.
            bell: of the remote region: it rings when all is written.

        Raises:
            GeometryError: a row, or the bell, lies outside either region; nothing was written.
            TransportError: the path is another.
            HurrayError: as `write`.
        """
        return self._copy_rows(src, places, src_rows, dst_rows, get=False, stop=stop, timeout_s=timeout_s, bell=bell)

    def read_rows(
        self,
        dst: Region,
        *,
        places: NDArray[np.uint64],
        src_rows: NDArray[np.uint32],
        dst_rows: NDArray[np.uint32],
        stop: StopFlag,
        timeout_s: float,
    ) -> Moved:
        """As `read`, where the path is ``mapped``: rows that lie alike at several places, without a plan of them.

        Args:
            dst: this process's region.
            places: as of `write_rows`, the remote region being the source, uint64 ``[num_places, 5]``.
            src_rows, dst_rows, stop, timeout_s: as of `write_rows`.

        Raises:
            HurrayError: as of `write_rows`. Whatever it is, nothing is written into ``dst`` any more.
        """
        return self._copy_rows(dst, places, src_rows, dst_rows, get=True, stop=stop, timeout_s=timeout_s)

    def _copy_rows(
        self,
        local: Region,
        places: NDArray[np.uint64],
        src_rows: NDArray[np.uint32],
        dst_rows: NDArray[np.uint32],
        *,
        get: bool,
        stop: StopFlag,
        timeout_s: float,
        bell: Bell | None = None,
    ) -> Moved:
        if self.path_from(local.device) is not Path.MAPPED:
            raise TransportError("the remote region is not mapped: rows cannot be copied through it")
        bell_address, token = 0, 0
        if bell is not None:
            bell_address, token = self._pointer + bell.offset_nbytes, bell.token
            if bell_address % 8 or bell.offset_nbytes + 8 > self.remote.nbytes:
                rule = f"must be a multiple of 8 inside a region of {self.remote.nbytes} bytes"
                raise GeometryError(rule, field="bell.offset_nbytes", value=bell.offset_nbytes)
        memory = local.memory
        here, there = (memory.address, local.nbytes), (self._pointer, self.remote.nbytes)
        (src, src_nbytes), (dst, dst_nbytes) = (there, here) if get else (here, there)
        self._enter()
        started = time.monotonic()
        try:
            hold(memory)
            try:
                posted, _, nbytes, status, _ = native.copy_rows(
                    src,
                    src_nbytes,
                    dst,
                    dst_nbytes,
                    places,
                    src_rows,
                    dst_rows,
                    stop,
                    deadline_ns(timeout_s),
                    bell_address,
                    token,
                )
            except IndexError:
                sides = (
                    ("src", src_rows, places[:, :2], src_nbytes),
                    ("dst", dst_rows, places[:, 2:4], dst_nbytes),
                )
                raise _row_outside(sides, places[:, 4]) from None
            finally:
                memory.release()
        finally:
            self._leave()
        raise_for(status, "get" if get else "put", timeout_s=timeout_s)
        return Moved(posted, nbytes, time.monotonic() - started)

    def read(
        self,
        dst: Region,
        *,
        src_offsets: Offsets,
        dst_offsets: Offsets,
        lengths: Offsets,
        stop: StopFlag,
        timeout_s: float,
        path: Path | None = None,
        transfer_id: int = 0,
    ) -> Moved:
        """Reads a plan and waits until every byte is here. Blocks; releases the GIL.

        Args:
            dst: this process's region; must stay registered until the call returns.
            src_offsets: uint64 ``[num_operations]``, bytes from the start of the remote region.
            dst_offsets: uint64 ``[num_operations]``, bytes from the start of ``dst``.
            lengths, stop, timeout_s, path, transfer_id: as of `write`.

        Raises:
            HurrayError: as `write`; ``in_doubt`` tells whether bytes may still arrive in ``dst``.
        """
        _check_inside("src", src_offsets, lengths, self.remote.nbytes)
        _check_inside("dst", dst_offsets, lengths, dst.nbytes)
        path = path or self.path_from(dst.device)
        return self._move(
            dst,
            dst_offsets,
            src_offsets,
            lengths,
            path=path,
            get=True,
            stop=stop,
            timeout_s=timeout_s,
            transfer_id=transfer_id,
        )

    def _move(
        self,
        local: Region,
        local_offsets: Offsets,
        remote_offsets: Offsets,
        lengths: Offsets,
        *,
        path: Path,
        get: bool,
        stop: StopFlag,
        timeout_s: float,
        transfer_id: int,
    ) -> Moved:
        memory = local.memory
        first_nbytes = int(lengths[0]) if len(lengths) else 0
        ask = path is Path.PUT and self._is_unknown(local.device, first_nbytes)
        self._enter()
        started = time.monotonic()
        try:
            hold(memory)
            try:
                if path is Path.PUT:
                    # Whoever posts progresses the worker, and with it what others have posted from devices.
                    with local.current() if local.device != "cpu" else self._endpoint.current():
                        posted, completed, nbytes, status, settled, description = self._endpoint.post(
                            memory,
                            local_address=memory.address,
                            remote_address=self.remote.remote_addr,
                            rkey=self._rkey,
                            local_offsets=local_offsets,
                            remote_offsets=remote_offsets,
                            lengths=lengths,
                            get=get,
                            stop=stop,
                            timeout_s=timeout_s,
                            describe=ask,
                        )
                    if ask:
                        self._learn(local.device, first_nbytes, description)
                elif path is Path.STREAM:
                    assert self._stream is not None
                    # When it fails it is not in doubt: nothing is written here any more; and there the peer's own
                    # threads write, and no longer than it permits.
                    nbytes = self._stream.move(
                        memory.address,
                        transfer_id=transfer_id,
                        region_index=self._index,
                        local_offsets=local_offsets,
                        remote_offsets=remote_offsets,
                        lengths=lengths,
                        get=get,
                        stop=stop,
                        timeout_s=timeout_s,
                    )
                    posted, completed, status, settled = len(lengths), len(lengths), 0, True
                else:
                    here, there = (memory.address, local_offsets), (self._pointer, remote_offsets)
                    (src, src_offsets), (dst, dst_offsets) = (there, here) if get else (here, there)
                    posted, completed, nbytes, status, settled = native.copy(
                        src, dst, src_offsets, dst_offsets, lengths, stop, deadline_ns(timeout_s)
                    )
            finally:
                memory.release()
        finally:
            self._leave()
        try:
            raise_for(status, "get" if get else "put", timeout_s=timeout_s)
        except HurrayError as error:
            # A get writes here, and no more once UCX has let go of the memory; a put may be on its way.
            error.in_doubt = completed != posted and self._endpoint.holds_memory if get else not settled
            raise
        return Moved(num_operations=posted, nbytes=nbytes, seconds=time.monotonic() - started)

    def _is_unknown(self, device: str, nbytes: int) -> bool:
        """Whether only UCX knows which lane a piece takes: it has several for devices, and chooses by size, too."""
        return (device, self.remote.device) != ("cpu", "cpu") and nbytes > self._carried.get(device, (0, ""))[0]

    def _learn(self, device: str, nbytes: int, description: str) -> None:
        lane, expected = carried_by(description), self.lane_from(device)
        if not lane:
            return  # another plan will tell
        self._carried[device] = nbytes, lane
        if lane.endswith("(staged)") and not expected.endswith("(staged)"):
            _log.warning(
                "pages between %s here and %s of the peer travel over %s, not %s: managed memory, virtual memory that "
                "cannot be exported, or GPUs that cannot reach each other; UCX says %r",
                device,
                self.remote.device,
                lane,
                expected,
                description,
            )

    def _enter(self) -> None:
        with self._lock:
            if self._closing:
                raise TransportError("the remote memory is closed")
            self._busy += 1

    def _leave(self) -> None:
        with self._lock:
            self._busy -= 1
            close_now = self._closing and self._busy == 0
        if close_now:
            self._close_key()

    def _close_key(self) -> None:
        if self._endpoint.holds_memory:
            self._endpoint.keep(self._rkey)
        else:
            with self._endpoint.current():
                self._rkey.close()

    def close(self) -> None:
        """Destroys the key as soon as no `write` uses it. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            close_now = self._busy == 0
        self._endpoint.forget(self)
        if close_now:
            self._close_key()


def _check_inside(side: str, offsets: Offsets, lengths: Offsets, nbytes: int) -> None:
    at = native.first_outside(offsets, lengths, nbytes)
    if at >= 0:
        raise GeometryError(
            f"piece {at} ends at byte {int(offsets[at]) + int(lengths[at])} of a region of {nbytes}",
            field=f"{side}_offsets[{at}]",
            value=int(offsets[at]),
        )


def _row_outside(
    sides: Iterable[tuple[str, NDArray[np.uint32], NDArray[np.uint64], int]], lengths: NDArray[np.uint64]
) -> GeometryError:
    """What there is to say of rows of which native code has found that one lies outside.

    Args:
        sides: the name of each, its rows, its two columns of the places, and how long its region is.
        lengths: the last column.
    """
    for side, rows, places, nbytes in sides:
        at = int(rows.argmax())
        row = int(rows[at])
        starts = zip(places.tolist(), lengths.tolist(), strict=True)
        end = max(start + stride * row + length for (start, stride), length in starts)
        if end > nbytes:
            return GeometryError(f"ends at byte {end} of a region of {nbytes}", field=f"{side}_rows[{at}]", value=row)
    raise AssertionError("all rows lie inside")
