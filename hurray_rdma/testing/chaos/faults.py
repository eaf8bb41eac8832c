"""What can be done to messages on their way, decided frame by frame: no socket, no clock.

A `Rule` names one message (kind, direction, the how-manieth) and what becomes of it. A `FaultLine` is one direction of
one connection: frames in, steps out, and the proxy does what the steps say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from hurray_rdma.control.codes import MessageType
from hurray_rdma.errors import ConfigError
from hurray_rdma.testing.chaos.frames import Frame

__all__ = ["Action", "Close", "Direction", "FaultLine", "Forward", "Later", "Pause", "Rule", "Step"]


class Direction(Enum):
    """Where a message goes: the server is the receiving engine."""

    TO_SERVER = "to receiver"
    TO_CLIENT = "to sender"


class Action(Enum):
    """What becomes of the message."""

    DROP = "drop"
    DELAY = "delay"
    """It comes later; those after it overtake it."""
    DUPLICATE = "duplicate"
    REORDER = "reorder"
    """It comes after the next one."""
    TRUNCATE = "truncate"
    """Only its first bytes come; the stream goes on, and is no stream of frames any more."""
    CUT = "cut"
    """Its first bytes come, then the connection ends."""
    STALL = "stall"
    """It and all that follow in its direction wait."""


@dataclass(slots=True, eq=False, kw_only=True)
class Rule:
    """Spoils one message, once.

    Raises:
        ConfigError: ``nth`` is below 1, or a number is negative.
    """

    action: Action
    kind: MessageType
    direction: Direction
    nth: int = 1
    """The how-manieth of its kind and direction from now on, over all connections; 1 is the next."""
    seconds: float = 0.0
    """For DELAY and STALL."""
    keep_nbytes: int = 0
    """For TRUNCATE and CUT: bytes of the message that still come; it always loses one at least."""
    on_fired: Callable[[], None] | None = None
    """Called when its message comes by."""
    num_seen: int = field(default=0, init=False)
    """Messages of the kind and direction so far."""

    def __post_init__(self) -> None:
        for name, least in (("nth", 1), ("seconds", 0), ("keep_nbytes", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"must be {least} or more", field=name, value=getattr(self, name))

    @property
    def fired(self) -> bool:
        """Whether its message has come by."""
        return self.num_seen >= self.nth

    def takes(self, direction: Direction, frame: Frame) -> bool:
        """Counts the frame; True if this is the one."""
        if self.fired or direction is not self.direction or frame.kind != self.kind:
            return False
        self.num_seen += 1
        if self.num_seen < self.nth:
            return False
        if self.on_fired is not None:
            self.on_fired()
        return True


@dataclass(frozen=True, slots=True)
class Forward:
    """Send these bytes now."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Later:
    """Send these bytes after so many seconds, and go on meanwhile."""

    seconds: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Pause:
    """Do nothing in this direction for so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Close:
    """Cut the connection, both directions."""


Step: TypeAlias = Forward | Later | Pause | Close


class FaultLine:
    """One direction of one connection.

    Args:
        direction: which.
        rules: those in force, shared with other lines, which may grow and shrink; the first that takes a frame has it.
    """

    def __init__(self, direction: Direction, rules: list[Rule]) -> None:
        self.direction = direction
        self._rules = rules
        self._held: list[bytes] = []

    def push(self, frame: Frame) -> list[Step]:
        """What is to be done now that this frame has come."""
        taking = [rule for rule in self._rules if rule.takes(self.direction, frame)]
        if taking and taking[0].action is Action.REORDER:
            self._held.append(frame.data)
            return []
        steps: list[Step] = _steps(taking[0], frame.data) if taking else [Forward(frame.data)]
        steps += [Forward(data) for data in self._held]
        self._held.clear()
        return steps


def _steps(rule: Rule, data: bytes) -> list[Step]:
    kept = Forward(data[: min(rule.keep_nbytes, len(data) - 1)])
    match rule.action:
        case Action.DROP:
            return []
        case Action.DELAY:
            return [Later(rule.seconds, data)]
        case Action.DUPLICATE:
            return [Forward(data), Forward(data)]
        case Action.TRUNCATE:
            return [kept]
        case Action.CUT:
            return [kept, Close()]
        case Action.STALL:
            return [Pause(rule.seconds), Forward(data)]
        case Action.REORDER:
            raise AssertionError("a held frame has no steps")
