"""A push that its receiver waits for by its key, from the pages that are chosen for it to the end of all that lands."""

from __future__ import annotations

import asyncio

from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.receiver import Receiver
from hurray_rdma.errors import DeadlineExceededError

__all__ = ["receive"]


async def receive(receiver: Receiver, key: str, placement: Placement, *, timeout_s: float) -> Arrival:
    """As `Engine.receive`."""
    come: asyncio.Future[Arrival] = asyncio.get_running_loop().create_future()
    receiver.expect(key, placement, take=come.set_result)
    arrival: Arrival | None = None
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.wait((come,))  # which leaves the future alone, whatever becomes of the wait
            arrival = come.result()
            await arrival.settled()
            return arrival
    except BaseException as error:
        receiver.unexpect(key)
        if come.done():
            await _ended(come.result(), f"the receiver gave up: {type(error).__name__}")
        if isinstance(error, TimeoutError):
            rule = f"the pages of {key!r} did not arrive in time" if come.done() else f"nobody offered {key!r} in time"
            raise DeadlineExceededError(rule, field="timeout_s", value=timeout_s) from None
        raise


async def _ended(arrival: Arrival, reason: str) -> None:
    """Returns when nothing can be written any more; pages are in use, so that a cancellation waits, too."""
    arrival.abort(reason)
    arrival.release()  # where it had just become complete
    settling = asyncio.create_task(arrival.settled())
    cancelled = None
    while not settling.done():
        try:
            await asyncio.wait((settling,))
        except asyncio.CancelledError as error:
            cancelled = error
    settling.exception()  # why it was aborted is known
    if cancelled is not None:
        raise cancelled
