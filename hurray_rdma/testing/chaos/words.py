"""What the schedule and its processes say to each other: one line of JSON each, over the processes' pipes.

It knows the words and nothing of who says them.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from hurray_rdma.cache import CacheSpec
from hurray_rdma.testing.chaos.recipe import Recipe

__all__ = [
    "COMMANDS",
    "DELIVERED",
    "HANG",
    "KILLED",
    "REPORTS",
    "SENT",
    "SIZES",
    "TYPED",
    "UNTYPED",
    "Command",
    "End",
    "Failed",
    "How",
    "Lane",
    "Plant",
    "Publish",
    "Published",
    "Ready",
    "Received",
    "ReceiverSettings",
    "Reopen",
    "Report",
    "Reregister",
    "Reregistered",
    "Send",
    "SenderSettings",
    "Sent",
    "Settings",
    "Size",
    "Status",
    "Tell",
    "Violation",
]

Lane = Literal["mapped", "cma", "tcp", "frames"]
"""How pages go: into UCX's shared memory, into the caller's arrays, through UCX's TCP, or on the control channel."""

Size = Literal["small", "large"]

SIZES: dict[Size, CacheSpec] = {
    "small": CacheSpec(num_layers=3, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16"),
    "large": CacheSpec(num_layers=3, num_heads=8, head_dim=128, page_size=64, dtype="bfloat16"),
}
"""Pages of 128 bytes, gone before a fault can hit them, and of 128 KiB, which take their time."""

How = Literal[
    "whole",
    "layers",
    "abort before grant",
    "abort between layers",
    "abort after last",
    "cancel",
    "close engine",
    "fetch",
]
"""How the sending application goes about a transfer; with "fetch" it reads what the receiver has published."""

SENT, DELIVERED, KILLED = "sent", "delivered", "killed"
HANG, UNTYPED, TYPED = "hang", "untyped", "typed"
"""How a transfer ended on one side, as that side's application saw it."""


class Send(msgspec.Struct, frozen=True, tag=True):
    """Send it; answered by `Sent`."""

    recipe: Recipe
    how: How = "whole"
    pause_s: float = 0.0
    """Between layers, or before the abort."""
    timeout_s: float = 2.0


class Reopen(msgspec.Struct, frozen=True, tag=True):
    """Close the engine, whatever goes on, and make another on the same pool and address; answered by `Ready`."""


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Publish a recipe's content, under its key, for its ``hold_s``; answered by `Published`."""

    recipe: Recipe


class Reregister(msgspec.Struct, frozen=True, tag=True):
    """Register the receive pool anew, under a new generation; answered by `Reregistered`."""


class Tell(msgspec.Struct, frozen=True, tag=True):
    """Say where the pages are; answered by `Status`."""


class Plant(msgspec.Struct, frozen=True, tag=True):
    """Do wrong on purpose, to see whether it is found."""

    what: Literal["free page", "delivered page", "lease"]


class End(msgspec.Struct, frozen=True, tag=True):
    """Close everything and end."""


Command: TypeAlias = Send | Reopen | Publish | Reregister | Tell | Plant | End


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine runs."""

    address: str = ""
    """Of a receiver."""


class Sent(msgspec.Struct, frozen=True, tag=True):
    """A send ended on the sender's side."""

    name: str
    outcome: str
    """SENT, TYPED, HANG or UNTYPED."""
    detail: str
    seconds: float


class Published(msgspec.Struct, frozen=True, tag=True):
    """It is there, or there was no room for it."""

    name: str


class Received(msgspec.Struct, frozen=True, tag=True):
    """An arrival ended on the receiver's side."""

    name: str
    outcome: str
    """DELIVERED, TYPED, HANG or UNTYPED."""
    detail: str


class Violation(msgspec.Struct, frozen=True, tag=True):
    """A byte is not what it must be."""

    detail: str


class Status(msgspec.Struct, frozen=True, tag=True):
    """Where the pages of the process's pool are."""

    num_pages: int
    free: int
    leased: int
    quarantined: int
    num_busy: int
    """Arrivals or sends that the application still has in hand."""
    num_files: int
    """Open file descriptors."""


class Reregistered(msgspec.Struct, frozen=True, tag=True):
    """The pool has a new generation, or cannot have one."""

    detail: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The process itself failed."""

    trace: str


Report: TypeAlias = Ready | Sent | Received | Published | Violation | Status | Reregistered | Failed

COMMANDS: msgspec.json.Decoder[Command] = msgspec.json.Decoder(Command)
REPORTS: msgspec.json.Decoder[Report] = msgspec.json.Decoder(Report)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Of any process."""

    lane: Lane
    size: Size
    num_pages: int
    lease_s: float
    timeout_s: float
    peer_timeout_s: float
    deadline_s: float
    """It ends by itself when it lives longer than this."""


class ReceiverSettings(Settings, frozen=True, kw_only=True):
    """Of a receiver process."""

    listen: str
    ahead_pages: int = 0
    """As of `Engine`."""


class SenderSettings(Settings, frozen=True, kw_only=True):
    """Of a sender process."""

    address: str
