"""Other ways to move a case's pages out of the sending process: each a call that returns when the bytes are there.

Knows pools, addresses, offsets and the transport room; nothing of engines.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.bench.memory import private_memory, write_into
from hurray_rdma.bench.messages import Opened, Party
from hurray_rdma.bench.sockets import SocketSender
from hurray_rdma.cache import PagePool
from hurray_rdma.errors import HurrayError
from hurray_rdma.transport import Context, Path, Region, RemoteRegion, StopFlag
from hurray_rdma.transport.binding import native

__all__ = ["LayerCopy", "PageLists", "open_yardstick"]

_TIMEOUT_S = 60.0
_FAR_FUTURE_NS = 2**63 - 1

Offsets = NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class PageLists:
    """One transfer as offsets, uint64 ``[num_pages]`` each."""

    src_offsets: Offsets
    """In the source region, bytes."""
    dst_offsets: Offsets
    lengths: Offsets

    @classmethod
    def of(cls, src: NDArray[np.uint32], dst: NDArray[np.uint32], *, page_nbytes: int) -> PageLists:
        """From page IDs on both sides."""
        size = np.uint64(page_nbytes)
        return cls(src.astype(np.uint64) * size, dst.astype(np.uint64) * size, np.full(len(src), size))


class LayerCopy:
    """A copy past the cache, within this process, of the pages of one layer; releases the GIL.

    Args:
        pool: where they are, of one role.
        src_pages: their IDs, uint32 ``[num_pages]``.
        huge_pages: as of the case.
    """

    def __init__(self, pool: PagePool, src_pages: NDArray[np.uint32], *, huge_pages: bool) -> None:
        tensors = pool.spec.tensors
        self._layers = [pool.pages(role, layer).view(np.uint8).reshape(pool.num_pages, -1) for role, layer in tensors]
        page_nbytes, num_pages = self._layers[0].shape[1], len(src_pages)
        self._lists = PageLists.of(src_pages, np.arange(num_pages, dtype=np.uint32), page_nbytes=page_nbytes)
        self._stop = StopFlag()
        memory = private_memory(len(tensors) * num_pages * page_nbytes, huge_pages=huge_pages)
        self.copied = memory.reshape(len(tensors), num_pages, page_nbytes)
        """Where they go, one after the other."""

    def __call__(self, layer: int) -> None:
        """Copies those of the layer of that number."""
        bases = self._layers[layer].ctypes.data, self.copied[layer].ctypes.data
        lists = self._lists
        native.copy(*bases, lists.src_offsets, lists.dst_offsets, lists.lengths, self._stop, _FAR_FUTURE_NS)


class _Reached(TypedDict):
    worker_address: bytes
    context: Context
    closing: contextlib.ExitStack


def open_yardstick(
    party: Party,
    *,
    source: Region,
    lists: PageLists,
    src_pages: NDArray[np.uint32],
    page_nbytes: int,
    opened: Opened,
    context: Context,
    pool_nbytes: int,
    huge_pages: bool,
    closing: contextlib.ExitStack,
) -> Callable[[], None]:
    """Makes all that a yardstick needs and tries it once; what it returns moves every page once.

    Args:
        party: which.
        source: memory of the source pages.
        lists, src_pages, page_nbytes: what to move.
        opened: where the receiving process is.
        context: of this process.
        pool_nbytes: size of a destination within this process.
        huge_pages: as of the case.
        closing: gets what must be closed.

    Raises:
        OSError, HurrayError: it cannot run here.
    """
    reached: _Reached = {"worker_address": opened.worker_address, "context": context, "closing": closing}
    if party in (Party.MEMCPY, Party.STREAM):
        memory = private_memory(pool_nbytes, huge_pages=huge_pages)
        move = _within(party, source, memory, lists)
    elif party is Party.CMA:
        move = _cma(source, lists, opened)
    elif party is Party.UCX_PUT:
        move = _written(source, lists, region=opened.caller_region, path=Path.PUT, **reached)
    elif party is Party.MAPPED:
        move = _written(source, lists, region=opened.region, path=Path.MAPPED, **reached)
    else:
        sender = SocketSender(opened.socket_port, source.array(), src_pages, page_nbytes)
        closing.callback(sender.close)
        return sender.run
    move()
    return move


def _within(party: Party, source: Region, memory: NDArray[np.uint8], lists: PageLists) -> Callable[[], None]:
    stop = StopFlag()

    def copy() -> None:
        places = (source.address, memory.ctypes.data, lists.src_offsets, lists.dst_offsets, lists.lengths)
        if party is Party.MEMCPY:
            native.memcpy(*places)
        else:
            native.copy(*places, stop, _FAR_FUTURE_NS)

    return copy


def _cma(source: Region, lists: PageLists, opened: Opened) -> Callable[[], None]:
    assert opened.caller_region is not None, "the receiving process was told of this party"
    src = lists.src_offsets + np.uint64(source.address)
    dst = lists.dst_offsets + np.uint64(opened.caller_region.remote_addr)
    return lambda: write_into(opened.pid, src=src, dst=dst, lengths=lists.lengths)


def _written(
    source: Region,
    lists: PageLists,
    *,
    region: RemoteRegion | None,
    path: Path,
    worker_address: bytes,
    context: Context,
    closing: contextlib.ExitStack,
) -> Callable[[], None]:
    assert region is not None, "the receiving process was told of this party"
    worker = context.open_worker()
    closing.callback(worker.close)
    endpoint = worker.connect(worker_address, timeout_s=_TIMEOUT_S)
    closing.callback(endpoint.close)
    remote = endpoint.open_region(region)
    stop = StopFlag()
    if remote.path is not path:
        raise HurrayError(f"must be {path.value} for this", field="path", value=remote.path.value)

    def write() -> None:
        remote.write(
            source,
            src_offsets=lists.src_offsets,
            dst_offsets=lists.dst_offsets,
            lengths=lists.lengths,
            stop=stop,
            timeout_s=_TIMEOUT_S,
        )

    return write
