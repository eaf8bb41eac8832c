"""A short seeded run of the chaos harness, and three runs in which a wrong is planted that must be found."""

from __future__ import annotations

import asyncio

import pytest

from hurray_rdma.testing.chaos.results import SceneResult
from hurray_rdma.testing.chaos.scene import play_scene
from hurray_rdma.testing.chaos.schedule import draw_scene
from hurray_rdma.testing.chaos.words import Plant

SEED = 4249
NUM_SCENES = 2
NUM_FAULTS = 10
"""Of each scene."""


@pytest.fixture(scope="module")
def results() -> list[SceneResult]:
    """Two scenes in which all is well but the faults, then one for each planted wrong; all side by side."""

    async def job() -> list[SceneResult]:
        well = [
            play_scene(draw_scene(SEED, index, num_episodes=NUM_FAULTS), on_episode=lambda _: None)
            for index in range(NUM_SCENES)
        ]
        planted = [
            play_scene(draw_scene(SEED, 0, num_episodes=1), on_episode=lambda _: None, plant=Plant(what))
            for what in ("free page", "delivered page", "lease")
        ]
        return await asyncio.gather(*well, *planted)

    return asyncio.run(job())


@pytest.mark.parametrize("index", range(NUM_SCENES))
def test_faults_are_survived_and_nothing_is_left(results: list[SceneResult], index: int) -> None:
    result = results[index]
    assert result.problem is None, "\n".join([*result.log[-60:], f"seed {SEED}, scene {index}: {result.problem}"])
    assert len(result.episodes) == NUM_FAULTS
    assert any(episode.num_delivered for episode in result.episodes)


@pytest.mark.parametrize(
    ("which", "found"), list(enumerate(["free page", "when it was delivered", "no arrival and no lease is left"]))
)
def test_a_planted_wrong_is_found(results: list[SceneResult], which: int, found: str) -> None:
    problem = results[NUM_SCENES + which].problem
    assert problem is not None
    assert found in problem
