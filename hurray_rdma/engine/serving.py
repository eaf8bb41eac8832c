"""The source's side of pulls in frames: pages of what is published go out over one reader's connection.

All its pulls share the connection in turn, one frame each, and a frame is made only when the connection has room for
it: a reader that does not read costs no more memory than the frames that its connection holds. Runs on the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from hurray_rdma.cache import Snapshot
from hurray_rdma.control import Take
from hurray_rdma.engine.compat import page_map_of
from hurray_rdma.engine.frames import Packer, frame_nbytes
from hurray_rdma.engine.link import Link
from hurray_rdma.errors import GeometryError, HurrayError

__all__ = ["Delivery", "Serving"]

_FRAME_NBYTES = 256 << 10
"""Page bytes of one TENSOR_DATA message. They are copied on the event loop, so that nothing is sent of pages whose
lease ended, or whose pool was closed, meanwhile; so many take it a tenth of a millisecond."""
_MAX_AT_ONCE = 8
"""Pulls of one reader that share its connection; others wait, and so do the plans that they need."""


@dataclass(slots=True, eq=False)
class Delivery:
    """One pull whose pages are sent."""

    transfer_id: int
    snapshot: Snapshot
    take: Take
    sent_nbytes: int = 0
    """Page bytes so far."""
    packer: Packer | None = None
    index: int = 0
    """The descriptor whose bytes are sent now."""
    offset: int = 0


class Serving:
    """The deliveries over one connection.

    Args:
        link: the reader's connection.
        failed: told of a delivery that cannot go on, and why.
    """

    def __init__(self, link: Link, *, failed: Callable[[Delivery, HurrayError], None]) -> None:
        self._link = link
        self._failed = failed
        self._waiting: dict[int, Delivery] = {}
        self._sharing: dict[int, Delivery] = {}
        """Those that take turns, the next one first."""
        self._task: asyncio.Task[None] | None = None

    def add(self, delivery: Delivery) -> None:
        """Begins to send it, or has it wait for its turn."""
        self._waiting[delivery.transfer_id] = delivery
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def drop(self, transfer_id: int) -> None:
        """Its pages are not under lease any more: nothing is sent of them from now on, and nothing kept."""
        self._waiting.pop(transfer_id, None)
        self._sharing.pop(transfer_id, None)

    def stop(self) -> asyncio.Task[None] | None:
        """Sends no more; the task to wait for, if there is one."""
        if self._task is not None:
            self._task.cancel()
        return self._task

    async def _run(self) -> None:
        while self._waiting or self._sharing:
            await self._turn()  # which ends before the wait: what is dropped meanwhile must be held by nobody
            await self._link.flush()
            await asyncio.sleep(0)  # others have their turn, also where the connection takes all

    async def _turn(self) -> None:
        """One frame of the delivery whose turn it is."""
        while self._waiting and len(self._sharing) < _MAX_AT_ONCE:
            first = next(iter(self._waiting))
            self._sharing[first] = self._waiting.pop(first)
        transfer_id, delivery = next(iter(self._sharing.items()))
        try:
            more = await self._step(delivery)
        except HurrayError as error:
            self._fail(delivery, error)
        except Exception as error:
            self._link.log.bind(transfer=transfer_id).error("a delivery broke", exc_info=error)
            self._fail(delivery, HurrayError(f"the pages could not be sent: {type(error).__name__}"))
        else:
            if self._sharing.pop(transfer_id, None) is not None and more:
                self._sharing[transfer_id] = delivery

    def _fail(self, delivery: Delivery, error: HurrayError) -> None:
        if self._sharing.pop(delivery.transfer_id, None) is not None:
            self._failed(delivery, error)

    async def _step(self, delivery: Delivery) -> bool:
        """One frame; False when it was the last, or the delivery was dropped."""
        session, spec = self._link.session, delivery.snapshot.pool.spec
        packer = delivery.packer
        if packer is None:
            packer = delivery.packer = await asyncio.to_thread(_packer_of, delivery)
        if delivery.transfer_id not in self._sharing:
            return False
        index, start = delivery.index, delivery.offset
        if start < packer.nbytes:
            size = frame_nbytes(_FRAME_NBYTES, self._link.peer)
            frame, _ = packer.frame(*spec.tensors[index], start, size, timeout_s=0)
            session.tensor_data(delivery.transfer_id, index, start, frame.data, now=self._link.now)
            delivery.offset = start + len(frame)
            delivery.sent_nbytes += len(frame)
        if delivery.offset < packer.nbytes:
            return True
        session.data_end(delivery.transfer_id, index, now=self._link.now)
        delivery.index, delivery.offset = index + 1, 0
        return delivery.index < len(spec.tensors)


def _packer_of(delivery: Delivery) -> Packer:
    """Plans what the reader has asked for; on any thread.

    Raises:
        GeometryError: it asks for what cannot be.
        DeviceUnavailableError: the pages are not in host memory.
    """
    take, spec = delivery.take, delivery.snapshot.pool.spec
    dest = replace(
        spec,
        page_size=take.page_size,
        head_offset=take.head_offset,
        num_heads=take.num_heads,
        total_heads=spec.heads_of_model,
    )
    page_map = page_map_of(delivery.snapshot, dest)
    if len(take.resident) not in (0, page_map.num_pages):
        raise GeometryError(
            f"must be 0 or the {page_map.num_pages} pages", field="len(resident)", value=len(take.resident)
        )
    resident = take.resident if len(take.resident) else None
    return Packer(delivery.snapshot, dest, page_map, resident=resident, zero_tails=False)
