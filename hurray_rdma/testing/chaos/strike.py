"""What the schedule does to processes, and the wait for a send to end. It judges nothing."""

from __future__ import annotations

import asyncio
import contextlib

from hurray_rdma.control.codes import MessageType
from hurray_rdma.testing.chaos.child import HANG_AFTER_S
from hurray_rdma.testing.chaos.faults import Action, Direction, Rule
from hurray_rdma.testing.chaos.schedule import TIMEOUT_S, Blow
from hurray_rdma.testing.chaos.seats import Seat, SenderSeat
from hurray_rdma.testing.chaos.words import Reopen, Reregister, Send

__all__ = ["sent", "strike"]

_GRANTED_S = 0.5
_REGISTERS_S = TIMEOUT_S + HANG_AFTER_S


async def sent(sender: SenderSeat, send: Send) -> None:
    """Returns when the sender has said how a send ended.

    Raises:
        SceneFailedError: it does not, or its process died.
    """
    name = send.recipe.name
    within_s = send.timeout_s + TIMEOUT_S + 2 * HANG_AFTER_S
    await sender.holds(lambda: name in sender.sent, f"send {name} has ended", within_s=within_s)


async def _granted(sender: SenderSeat) -> None:
    """Returns when a grant passes to the sender, or when that takes too long: a fetch has none."""
    granted = asyncio.Event()
    passing = Rule(action=Action.STALL, kind=MessageType.GRANT, direction=Direction.TO_CLIENT, on_fired=granted.set)
    sender.proxy.arm(passing)  # it stalls for no time at all
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_GRANTED_S):
            await granted.wait()


async def strike(blow: Blow, struck: SenderSeat) -> Seat | None:
    """What happens to a process; the seat whose process was killed."""
    if blow.on_grant:
        await _granted(struck)
    await asyncio.sleep(blow.after_s)
    seat: Seat = struck if blow.whom == "sender" else struck.receiver
    ready = seat.epoch
    match blow.what:
        case "cut":
            struck.proxy.cut()
        case "stop":
            seat.running.stop()
            try:
                await asyncio.sleep(blow.for_s)
            finally:
                seat.running.go_on()
        case "reopen":
            seat.running.tell(Reopen())
            await seat.ready(ready)
        case "reregister":
            receiver, before = struck.receiver, struck.receiver.num_reregistered
            receiver.running.tell(Reregister())
            await receiver.holds(
                lambda: receiver.num_reregistered > before, "its pool is registered anew", within_s=_REGISTERS_S
            )
        case "kill":
            await seat.running.kill()
            await seat.sit()
            return seat
    return None
