"""Whether the two sides of a transfer say what they must of it, given the fault that struck.

It knows what was said, and asks nobody.
"""

from __future__ import annotations

from hurray_rdma.testing.chaos.schedule import Blow, Episode
from hurray_rdma.testing.chaos.seats import SceneFailedError, SenderSeat
from hurray_rdma.testing.chaos.words import DELIVERED, SENT, TYPED, Send

__all__ = ["judge"]

LATE_S = 8.0
"""A send that is not stopped may be so much later than its budget: time to land and to connect, a busy machine."""


def judge(episode: Episode, send: Send, *, sender: SenderSeat, struck: SenderSeat) -> bool:
    """Takes what was said of one send of an episode out of the seats.

    Returns:
        Whether it was delivered.

    Raises:
        SceneFailedError: a rule of the package's docstring does not hold.
    """
    name, receiver = send.recipe.name, sender.receiver
    heard = receiver.received.pop(name, [])
    for each in heard:
        if each.outcome not in (DELIVERED, TYPED):
            raise SceneFailedError(f"{receiver.name}: arrival {name} ended {each.outcome}: {each.detail}")
    num_delivered = sum(each.outcome == DELIVERED for each in heard)
    if num_delivered > 1:
        raise SceneFailedError(f"{receiver.name}: {name} was delivered {num_delivered} times")
    delivered = num_delivered == 1
    if send.how == "fetch":
        delivered = name in sender.sent and sender.sent[name].outcome == SENT
    sent = sender.sent.pop(name, None)
    if sent is None:  # its process was killed
        return delivered
    if sent.outcome not in (SENT, TYPED):
        raise SceneFailedError(f"{sender.name}: send {name} ended {sent.outcome}: {sent.detail}")
    if sent.seconds > send.timeout_s + LATE_S and episode.blow is None:
        raise SceneFailedError(f"{sender.name}: send {name} took {sent.seconds:.1f} s of {send.timeout_s}")
    if sent.outcome == SENT and not delivered and not (receiver is struck.receiver and _silenced(episode.blow)):
        raise SceneFailedError(f"{name} was sent, but not delivered: {heard}")
    if episode.all_succeed and sent.outcome != SENT:
        raise SceneFailedError(f"{sender.name}: send {name} failed of nothing: {sent.detail}")
    return delivered


def _silenced(blow: Blow | None) -> bool:
    """Whether the receiving application could not tell of what it had."""
    return blow is not None and blow.whom == "receiver" and blow.what in ("kill", "reopen")
