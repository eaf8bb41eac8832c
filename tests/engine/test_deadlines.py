"""One timer for many waits: each is told once when its time is over, in whatever order they begin and end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from hurray_rdma.engine.deadlines import Deadlines
from tests.hazards.scenes import eventually

pytestmark = pytest.mark.both_loops

FAR_S = 3600.0


def run(story: Callable[[Deadlines, list[str]], Awaitable[None]]) -> list[str]:
    told: list[str] = []

    async def main() -> None:
        async with asyncio.timeout(20):
            await story(Deadlines(), told)

    asyncio.run(main())
    return told


async def hear_of(told: list[str], name: str) -> None:
    await eventually(lambda: name in told)


def test_waits_are_told_in_the_order_of_their_deadlines() -> None:
    async def story(deadlines: Deadlines, told: list[str]) -> None:
        now = time.monotonic()
        for name, after_s in (("far", FAR_S), ("third", 0.03), ("first", 0.01), ("second", 0.02)):
            deadlines.begin(name, now + after_s, partial(told.append, name))
        await hear_of(told, "third")

    assert run(story) == ["first", "second", "third"]


def test_a_wait_that_has_ended_is_told_nothing() -> None:
    async def story(deadlines: Deadlines, told: list[str]) -> None:
        now = time.monotonic()
        deadlines.begin("ended", now - 1, partial(told.append, "ended"))  # late already, but told from the loop
        deadlines.begin("late", now + 0.01, partial(told.append, "late"))
        deadlines.end("ended")
        deadlines.end("ended")
        deadlines.end("never begun")
        await hear_of(told, "late")

    assert run(story) == ["late"]


def test_a_wait_that_begins_anew_has_the_later_deadline_only() -> None:
    async def story(deadlines: Deadlines, told: list[str]) -> None:
        now = time.monotonic()
        deadlines.begin("anew", now + 0.01, partial(told.append, "before"))
        deadlines.begin("anew", now + 0.03, partial(told.append, "anew"))
        deadlines.begin("between", now + 0.02, partial(told.append, "between"))
        await hear_of(told, "anew")

    assert run(story) == ["between", "anew"]


def test_one_that_is_told_may_begin_again() -> None:
    async def story(deadlines: Deadlines, told: list[str]) -> None:
        def late() -> None:
            told.append(f"time {len(told)}")
            if len(told) < 3:
                deadlines.begin("again", time.monotonic() + 0.005, late)

        deadlines.begin("again", time.monotonic() - 1, late)
        await hear_of(told, "time 2")

    assert run(story) == ["time 0", "time 1", "time 2"]


def test_what_one_raises_harms_no_other() -> None:
    errors: list[dict[str, Any]] = []

    def fail() -> None:
        raise RuntimeError("of its own")

    async def story(deadlines: Deadlines, told: list[str]) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        now = time.monotonic()
        deadlines.begin("fails", now - 2, fail)
        deadlines.begin("late", now - 1, partial(told.append, "late"))
        deadlines.begin("later", now + 0.01, partial(told.append, "later"))
        await hear_of(told, "later")

    assert run(story) == ["late", "later"]
    assert [str(context["exception"]) for context in errors] == ["of its own"]


@pytest.mark.parametrize("count", [1, 500])
def test_all_of_many_are_told(count: int) -> None:
    async def story(deadlines: Deadlines, told: list[str]) -> None:
        now = time.monotonic()
        for index in range(count):
            deadlines.begin(index, now + (index % 7) / 1000, partial(told.append, str(index)))
        for index in range(count):
            await hear_of(told, str(index))

    assert sorted(map(int, run(story))) == list(range(count))
