"""How faults and scenes went, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from hurray_rdma.testing.chaos.schedule import ScenePlan

__all__ = ["EpisodeResult", "SceneResult"]


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """How one fault went."""

    kind: str
    reached: bool
    """Whether the fault came about: the message that it was for may not have come by."""
    problem: str | None
    """What does not hold; None if it was survived."""
    seconds: float
    num_delivered: int
    num_failed: int
    """Transfers that failed, by a typed error on each side that knew of them."""


@dataclass(slots=True)
class SceneResult:
    """How one scene went."""

    plan: ScenePlan
    episodes: list[EpisodeResult] = field(default_factory=list)
    problem: str | None = None
    """The first thing that does not hold, in an episode or at the end."""
    log: list[str] = field(default_factory=list)
