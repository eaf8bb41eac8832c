"""Plays scene after scene of a seed, some side by side, and counts faults tried and survived.

Scenes wait most of the time, for deadlines and leases: several share the cores well. It knows scenes, and no processes.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from hurray_rdma.testing.chaos.kinds import KINDS
from hurray_rdma.testing.chaos.results import EpisodeResult, SceneResult
from hurray_rdma.testing.chaos.scene import play_scene
from hurray_rdma.testing.chaos.schedule import draw_scene

__all__ = ["ChaosReport", "Tally", "run_chaos"]

EPISODES_OF_A_SCENE = 80


@dataclass(slots=True)
class Tally:
    """Of one kind of fault."""

    tried: int = 0
    """Faults that came about."""
    survived: int = 0
    """Of those, faults after which everything held that must."""
    missed: int = 0
    """Faults that did not come about: their message never came by."""


@dataclass(slots=True)
class ChaosReport:
    """What a run found."""

    seed: int
    tallies: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})
    """By kind, as of `KINDS`."""
    num_scenes: int = 0
    num_delivered: int = 0
    """Transfers under fault that were delivered, every byte compared."""
    num_failed: int = 0
    """Transfers under fault that ended in a typed error."""
    seconds: float = 0.0
    failures: list[SceneResult] = field(default_factory=list)
    """Scenes in which something did not hold."""

    @property
    def num_tried(self) -> int:
        return sum(tally.tried for tally in self.tallies.values())

    @property
    def num_survived(self) -> int:
        return sum(tally.survived for tally in self.tallies.values())

    def count(self, episode: EpisodeResult) -> None:
        """Takes one fault into account."""
        tally = self.tallies[episode.kind]
        tally.tried += episode.reached
        tally.missed += not episode.reached
        tally.survived += episode.reached and episode.problem is None
        self.num_delivered += episode.num_delivered
        self.num_failed += episode.num_failed


async def run_chaos(
    seed: int,
    *,
    num_faults: int,
    budget_s: float | None = None,
    scene: int | None = None,
    on_episode: Callable[[EpisodeResult], None] = lambda _: None,
) -> ChaosReport:
    """Runs.

    Args:
        seed: of everything that is drawn.
        num_faults: how many to try; a scene that fails takes those with it that it had left.
        budget_s: no further fault begins after so many seconds; None is no limit.
        scene: only this one.
        on_episode: called after each fault.
    """
    report, started = ChaosReport(seed), time.monotonic()
    num_beside = 4 * (os.cpu_count() or 1)
    length = min(EPISODES_OF_A_SCENE, -(-num_faults // num_beside))
    lengths = [length] * (num_faults // length) + ([num_faults % length] if num_faults % length else [])
    one = [] if scene is None else [(scene, min(num_faults, EPISODES_OF_A_SCENE))]
    waiting = iter(one or list(enumerate(lengths)))

    def go_on() -> bool:
        return budget_s is None or time.monotonic() - started < budget_s

    def heard(episode: EpisodeResult) -> None:
        report.count(episode)
        on_episode(episode)

    async def player() -> None:
        for index, num_episodes in waiting:
            if not go_on():
                return
            result = await play_scene(draw_scene(seed, index, num_episodes=num_episodes), on_episode=heard, go_on=go_on)
            report.num_scenes += 1
            if result.problem is not None:
                report.failures.append(result)

    async with asyncio.TaskGroup() as players:
        for _ in itertools.repeat(None, num_beside):
            players.create_task(player())
    report.seconds = time.monotonic() - started
    return report
