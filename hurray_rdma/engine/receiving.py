"""A push that its receiver waits for by its key, from the pages that are chosen for it to the end of all that lands."""

from __future__ import annotations

import asyncio

from hurray_rdma.engine.arrival import Arrival
from hurray_rdma.engine.placement import Placement
from hurray_rdma.engine.receiver import Receiver
from hurray_rdma.errors import DeadlineExceededError

__all__ = ["receive"]


async def receive(
    receiver: Receiver, key: str, placement: Placement, *, timeout_s: float, wait_s: float | None
) -> Arrival:
    """As `Engine.receive`."""
    loop = asyncio.get_running_loop()
    come: asyncio.Future[Arrival] = loop.create_future()
    receiver.expect(key, placement, take=come.set_result)
    arrival: Arrival | None = None
    try:
        async with asyncio.timeout(timeout_s if wait_s is None else wait_s) as limit:
            await asyncio.wait((come,))  # which leaves the future alone, whatever becomes of the wait
            if wait_s is not None:
                limit.reschedule(loop.time() + timeout_s)
            arrival = come.result()
            await arrival.settled()
            return arrival
    except BaseException as error:
        receiver.unexpect(key)
        if come.done():
            await _ended(come.result(), f"the receiver gave up: {type(error).__name__}")
        if isinstance(error, TimeoutError):
            if come.done() or wait_s is None:
                field, limit_s = "timeout_s", timeout_s
            else:
                field, limit_s = "wait_s", wait_s
            rule = f"the pages of {key!r} did not arrive in time" if come.done() else f"nobody offered {key!r} in time"
            raise DeadlineExceededError(rule, field=field, value=limit_s) from None
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
