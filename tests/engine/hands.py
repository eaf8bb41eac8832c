"""A sender that is driven by hand: it says what its test wants it to say."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from hurray_rdma import Snapshot
from hurray_rdma.control import AbortRequested, Channel, ClientSession, Event, Offer, SessionConfig, open_channel
from hurray_rdma.format import Dialect


class Hand:
    """A session of the connecting side, its events, and its answer to ABORT."""

    def __init__(self, *, says_quiet: bool) -> None:
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.channel: Channel | None = None
        self._says_quiet = says_quiet

    @property
    def session(self) -> ClientSession:
        assert self.channel is not None
        assert isinstance(self.channel.session, ClientSession)
        return self.channel.session

    def hear(self, event: Event) -> None:
        self.events.put_nowait(event)
        if isinstance(event, AbortRequested) and self._says_quiet:
            self.session.quiet(event.transfer_id, now=asyncio.get_running_loop().time())

    async def expect(self, kind: type[Event]) -> Any:
        async with asyncio.timeout(10):
            while not isinstance(event := await self.events.get(), kind):
                pass
        return event

    def do(self, name: str, *args: Any, **more: Any) -> Any:
        assert self.channel is not None
        result = getattr(self.session, name)(*args, now=self.channel.now, **more)
        self.channel.notify()
        return result

    def offer(
        self,
        snapshot: Snapshot,
        *,
        path: str = "frames",
        lane: str = "tcp",
        pool_id: int = 0,
        generation: int = 1,
        key: str = "by hand",
        deadline_s: float = 10,
        **more: Any,
    ) -> int:
        offer = Offer(
            key=key,
            pool_id=pool_id,
            generation=generation,
            descriptors=snapshot.encode_descriptors(dialect=Dialect.ADR_024),
            block_table=snapshot.block_table,
            seq_ptr=snapshot.seq_ptr,
            seq_lens=snapshot.seq_lens,
            total_heads=snapshot.pool.spec.heads_of_model,
            deadline_s=deadline_s,
            lane=lane,
            path=path,
            **more,
        )
        return int(self.do("offer", offer, timeout_s=deadline_s))


@contextlib.asynccontextmanager
async def shaken(address: str, *, says_quiet: bool = True, **settings: Any) -> AsyncIterator[Hand]:
    """Connected to an engine, as one on another host."""
    host, port = address.rsplit(":", 1)
    hand = Hand(says_quiet=says_quiet)
    config = SessionConfig(**{"engine_name": "hand", "host_id": b"elsewhere", "worker_address": b""} | settings)
    hand.channel = await open_channel(host, int(port), config, timeout_s=5, on_event=hand.hear)
    try:
        yield hand
    finally:
        await hand.channel.close()
