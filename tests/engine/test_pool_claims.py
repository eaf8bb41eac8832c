"""A pool belongs to one receiver at a time, and the next one takes over only what is safe."""

from __future__ import annotations

import pytest

from hurray_rdma import ConfigError, Engine
from hurray_rdma.control import Granted
from hurray_rdma.engine.processes import process_id
from tests.engine.hands import shaken
from tests.hazards.scenes import SPEC, connected, counts, digest, fill, make_pool, run, settled, snapshot_of


async def takes_a_snapshot(engine: Engine, name: str | None = None) -> None:
    """Two grants of one page by two receivers of one pool would be one page."""
    with make_pool(SPEC, 8, context=engine.pool.regions[0].context) as source:  # type: ignore[union-attr]
        fill(source, 3)
        async with connected(source, engine.address, timeout_s=10) as peer:
            await peer.send(snapshot_of(source, [1, 2]), pool=name)
            arrival = await anext(engine.arrivals())
            assert digest(await arrival.snapshot()) == digest(snapshot_of(source, [1, 2]))
            arrival.release()


def test_no_pool_is_received_into_twice_by_one_engine() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as own, make_pool(SPEC, 8) as other:
            async with Engine(own, listen="127.0.0.1:0", timeout_s=10) as engine:
                with pytest.raises(ConfigError, match="receives into it already"):
                    engine.add_pool(own, name="again")
                engine.add_pool(other, name="other")
                with pytest.raises(ConfigError, match="receives into it already"):
                    engine.add_pool(other, name="again")
                assert set(engine.stats().generations) == {"default", "other"}
                engine.remove_pool("other")
                engine.add_pool(other, name="again")
                await takes_a_snapshot(engine, "again")
                assert set(engine.stats().generations) == {"default", "again"}

    run(job())


def test_a_token_that_came_with_a_refused_pool_is_not_taken() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as own, make_pool(SPEC, 8) as other:
            async with Engine(own, listen="127.0.0.1:0", timeout_s=10) as engine:
                with pytest.raises(ConfigError, match="receives into it already"):
                    engine.add_pool(own, name="theirs", token="secret")
                engine.add_pool(other, name="theirs", token="secret")

    run(job())


def test_no_pool_is_received_into_by_two_engines_at_once_but_by_one_after_the_other() -> None:
    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as first:
                for _ in range(2):
                    with pytest.raises(ConfigError, match="receives into it already"):
                        await Engine(pool, listen="127.0.0.1:0").start()
                async with Engine(pool):
                    pass  # one that only sends
                await takes_a_snapshot(first)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as second:
                await takes_a_snapshot(second)
            assert counts(pool) == (8, 0, 0)

    run(job())


def test_the_next_engine_on_a_pool_takes_back_only_what_registering_anew_makes_safe() -> None:
    """Two senders fell silent: one wrote through a mapping, which is void now; the other writes by address."""

    async def job() -> None:
        with make_pool(SPEC, 8) as pool:
            domain = pool.regions[0].context.memory_domain
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                for path, lane, pages in (("mapped", "sysv", [1, 2, 3]), ("put", "cma", [4, 5])):
                    async with shaken(
                        engine.address, says_quiet=False, host_id=domain, process_id=process_id()
                    ) as hand:
                        hand.offer(snapshot_of(pool, pages), path=path, lane=lane)
                        granted = await hand.expect(Granted)
                        assert hand.channel is not None
                        hand.channel.abort()
                        if path == "put":
                            by_address = granted.grant.page_ids.tolist()
                await settled(pool, 3, 0, 5)
            assert counts(pool) == (3, 0, 5)
            async with Engine(pool, listen="127.0.0.1:0", timeout_s=10) as engine:
                assert counts(pool) == (6, 0, 2)
                (left,) = pool.allocator.quarantined()
                assert not left.revocable
                assert engine.stats().num_recovered == 3
                await engine.reregister()
                assert counts(pool) == (6, 0, 2)
                with pool.allocator.lease(6) as rest:
                    assert not set(rest.page_ids.tolist()) & set(by_address)

    run(job())
