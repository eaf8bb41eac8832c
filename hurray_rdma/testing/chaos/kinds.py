"""Every kind of fault there is: what can happen to each message, and what can happen besides."""

from __future__ import annotations

from typing import Literal

from hurray_rdma.control.codes import MessageType
from hurray_rdma.testing.chaos.faults import Action, Direction

__all__ = ["BLOWS", "IN_FRAMES", "KINDS", "MESSAGES", "NEVER_IN_FRAMES", "ONLY_AHEAD", "ONLY_IN_FRAMES"]

Carrier = Literal["send", "whole", "ahead", "fetch", "slow", "sender aborts", "receiver aborts", "too large", "connect"]
"""What makes a message of some kind come by."""

_C, _S = Direction.TO_CLIENT, Direction.TO_SERVER
MESSAGES: dict[tuple[Direction, MessageType], Carrier] = {
    (_S, MessageType.CLIENT_HELLO): "connect",
    (_C, MessageType.SERVER_HELLO): "connect",
    (_S, MessageType.SESSION): "connect",
    (_C, MessageType.SESSION): "connect",
    (_C, MessageType.POOL): "connect",
    (_S, MessageType.OFFER): "send",
    (_C, MessageType.GRANT): "send",
    (_S, MessageType.TENSOR_DATA): "send",
    (_S, MessageType.TENSOR_DATA_END): "fetch",
    (_S, MessageType.ENDED): "send",
    (_C, MessageType.TENSOR_PUT_ACK): "send",
    (_S, MessageType.RESERVE): "whole",
    (_S, MessageType.PREPARE): "ahead",
    (_S, MessageType.COMMIT): "ahead",
    (_S, MessageType.ABORT): "sender aborts",
    (_C, MessageType.ABORT): "receiver aborts",
    (_S, MessageType.QUIET): "sender aborts",
    (_C, MessageType.ERROR): "too large",
    (_S, MessageType.FETCH): "fetch",
    (_C, MessageType.PUBLISHED): "fetch",
    (_S, MessageType.RENEW): "slow",
    (_S, MessageType.TAKE): "fetch",
    (_C, MessageType.TENSOR_DATA): "fetch",
    (_C, MessageType.TENSOR_DATA_END): "fetch",
    (_S, MessageType.PING): "slow",
    (_C, MessageType.PING): "slow",
    (_S, MessageType.PONG): "slow",
    (_C, MessageType.PONG): "slow",
}
"""Every message that passes in a session, and what brings it about."""

IN_FRAMES: dict[tuple[Direction, MessageType], Carrier] = {(_S, MessageType.TENSOR_DATA_END): "send"}
"""What does so where pages travel on the control channel: there each descriptor of a send ends by itself."""

ONLY_IN_FRAMES = {
    (_S, MessageType.TENSOR_DATA),
    (_S, MessageType.TAKE),
    (_C, MessageType.TENSOR_DATA),
    (_C, MessageType.TENSOR_DATA_END),
}
"""Pass where pages travel on the control channel."""

NEVER_IN_FRAMES = {(_S, MessageType.ENDED)}
"""Passes where pages are written, those of a layer together; in frames only as ends that are said again."""

ONLY_AHEAD = {(_S, MessageType.RESERVE), (_S, MessageType.PREPARE), (_S, MessageType.COMMIT)}
"""Pass where the receiver grants pages ahead to all of its senders."""

BLOWS: dict[str, float] = {
    "SIGKILL of a sender": 0.5,
    "SIGKILL of a receiver": 0.5,
    "SIGSTOP of a sender, short": 2,
    "SIGSTOP of a sender, beyond its lease": 1,
    "SIGSTOP of a receiver, short": 2,
    "SIGSTOP of a receiver, beyond leases": 1,
    "SIGSTOP of a sender, beyond the session": 0.2,
    "SIGSTOP of a receiver, beyond the session": 0.2,
    "a sender's engine closes": 2,
    "a receiver's engine closes": 1,
    "abort by the sender before the grant": 2,
    "abort by the sender between layers": 2,
    "abort by the sender after the last layer": 2,
    "a send is cancelled": 2,
    "abort by the receiver at once": 2,
    "abort by the receiver after a layer": 2,
    "more senders than pages": 3,
    "late release": 2,
    "the pool is registered anew": 2,
    "an offer that never fits": 1,
    "the connection is cut": 2,
}
"""Faults that are not of one message, and how often each is drawn."""

KINDS: tuple[str, ...] = (
    *(f"{action.value} {kind.name} {direction.value}" for direction, kind in MESSAGES for action in Action),
    *BLOWS,
)
"""Every kind of fault."""
