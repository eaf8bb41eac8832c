"""What happens once: all who wait hear of it, none of them for longer than its time, and a cancelled one is no harm."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from hurray_rdma.engine.moment import Moment

pytestmark = pytest.mark.both_loops


def run(story: Callable[[Moment], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(20):
            await story(Moment())

    asyncio.run(main())


def test_all_who_wait_go_on_and_whoever_comes_later_does_not_wait() -> None:
    async def story(moment: Moment) -> None:
        waiting = [asyncio.create_task(moment.wait(timeout_s)) for timeout_s in (None, 10, 10)]
        await asyncio.sleep(0)
        assert not moment.is_set
        moment.set()
        moment.set()
        assert moment.is_set
        assert await asyncio.gather(*waiting) == [True, True, True]
        assert await moment.wait(0)

    run(story)


@pytest.mark.parametrize("timeout_s", [-1, 0, 0.01])
def test_who_has_waited_long_enough_is_told_so_and_others_wait_on(timeout_s: float) -> None:
    async def story(moment: Moment) -> None:
        patient = asyncio.create_task(moment.wait(10))
        assert not await moment.wait(timeout_s)
        assert not patient.done()
        moment.set()
        assert await patient

    run(story)


def test_one_that_is_cancelled_takes_nobody_along() -> None:
    async def story(moment: Moment) -> None:
        first, second = asyncio.create_task(moment.wait(10)), asyncio.create_task(moment.wait(10))
        await asyncio.sleep(0)
        first.cancel()
        moment.set()  # before it has heard of that
        with pytest.raises(asyncio.CancelledError):
            await first
        assert await second

    run(story)
