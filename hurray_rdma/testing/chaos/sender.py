"""The sending process: makes the content that a key stands for, sends it as it is told to, and says how that ended.

As soon as a send has ended its source pages are overwritten: a write that comes later brings bytes nobody expects.
Run as ``python -m hurray_rdma.testing.chaos.sender SETTINGS``, by `handle`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import numpy as np

from hurray_rdma.cache import PagePool, Snapshot
from hurray_rdma.demo.child import die_with
from hurray_rdma.engine import Engine, Peer
from hurray_rdma.errors import (
    HurrayError,
    PeerLostError,
    TransferAbortedError,
)
from hurray_rdma.testing.chaos.child import HANG_AFTER_S, ChaosChild, make_pool, run_child
from hurray_rdma.testing.chaos.recipe import mismatch, paint, raw, shape_of
from hurray_rdma.testing.chaos.words import (
    HANG,
    SENT,
    TYPED,
    UNTYPED,
    Command,
    Ready,
    Reopen,
    Send,
    SenderSettings,
    Sent,
    Violation,
)

__all__ = ["SenderChild"]

_SCRIBBLE = 0x5A


class SenderChild(ChaosChild):
    """See the module."""

    def __init__(self, pool: PagePool, settings: SenderSettings) -> None:
        super().__init__(pool)
        self._settings = settings
        self._engine: Engine | None = None
        self._peer: Peer | None = None
        self._connecting = asyncio.Lock()
        self._num_busy = 0
        self._random = np.random.default_rng(settings.num_pages)

    @property
    def num_busy(self) -> int:
        return self._num_busy

    async def open(self) -> None:
        settings = self._settings
        self._engine = Engine(
            self.pool,
            lease_s=settings.lease_s,
            timeout_s=settings.timeout_s,
            peer_timeout_s=settings.peer_timeout_s,
        )
        await self._engine.start()
        self.say(Ready())

    async def close(self) -> None:
        self._peer = None
        if self._engine is not None:
            await self._engine.close()

    async def do(self, command: Command) -> None:
        match command:
            case Send():
                self._num_busy += 1
                await (self._fetch(command) if command.how == "fetch" else self._send(command))
                self._num_busy -= 1
            case Reopen():
                await self.close()
                await self.open()
            case _:
                raise ValueError(f"no word for a sender: {command!r}")

    async def _send(self, command: Send) -> None:
        recipe, shape = command.recipe, shape_of(command.recipe, self.pool.spec)
        with self.pool.allocator.lease(recipe.num_pages) as lease:
            page_ids = self._random.permutation(lease.page_ids)
            paint(recipe, self.pool, page_ids)
            tables = [page_ids[table] for table in shape.tables]
            snapshot = Snapshot.from_block_tables(self.pool, tables, seq_lens=shape.seq_lens)
            report = await self._report(command, self._go(command, snapshot))
            for tensor in self.pool.spec.tensors:
                raw(self.pool, *tensor)[page_ids] = _SCRIBBLE
        self.say(report)

    async def _fetch(self, command: Send) -> None:
        async def fetch() -> None:
            peer = await self._connected()
            fetched = await peer.fetch(command.recipe.key, timeout_s=command.timeout_s)
            wrong = mismatch(command.recipe, fetched)
            fetched.release()
            if wrong is not None:
                self.say(Violation(f"{command.recipe.name} when it was fetched: {wrong}"))

        self.say(await self._report(command, fetch()))

    async def _report(self, command: Send, work: Coroutine[Any, Any, None]) -> Sent:
        """Does it, and says how that ended."""
        started, outcome, detail = time.monotonic(), SENT, ""
        try:
            async with asyncio.timeout(command.timeout_s + HANG_AFTER_S):
                await work
        except HurrayError as error:
            outcome, detail = TYPED, f"{type(error).__name__}: {error}"
        except TimeoutError:
            outcome, detail = HANG, f"over {command.timeout_s + HANG_AFTER_S} s"
        except (Exception, asyncio.CancelledError) as error:  # nobody cancels this task
            outcome, detail = UNTYPED, repr(error)
        return Sent(command.recipe.name, outcome, detail, time.monotonic() - started)

    async def _connected(self) -> Peer:
        async with self._connecting:
            if self._peer is None:
                if self._engine is None:
                    raise PeerLostError("the engine is being made anew")
                peer = self._engine.connect(self._settings.address)
                await peer.open()
                self._peer = peer
            return self._peer

    async def _go(self, command: Send, snapshot: Snapshot) -> None:
        peer, key, timeout_s = await self._connected(), command.recipe.key, command.timeout_s
        match command.how:
            case "whole":
                await peer.send(snapshot, key=key, timeout_s=timeout_s)
            case "cancel":
                await self._cancel(asyncio.create_task(peer.send(snapshot, key=key, timeout_s=timeout_s)), command)
            case "abort before grant":
                transfer = peer.begin(snapshot, key=key, timeout_s=timeout_s)

                async def whole() -> None:
                    async with transfer:
                        await transfer.send_rest()

                sending = asyncio.create_task(whole())
                await asyncio.sleep(command.pause_s)
                await transfer.abort("second thoughts")
                await sending
            case "close engine":
                sending = asyncio.create_task(self._layers(peer, snapshot, command))
                await asyncio.sleep(command.pause_s)
                await self.close()
                await self.open()
                await sending
            case _:
                await self._layers(peer, snapshot, command)

    async def _layers(self, peer: Peer, snapshot: Snapshot, command: Send) -> None:
        async with peer.begin(snapshot, key=command.recipe.key, timeout_s=command.timeout_s) as transfer:
            for layer in self.pool.spec.layer_indices:
                await transfer.send_layer(layer)
                await asyncio.sleep(command.pause_s)
                if command.how == "abort between layers":
                    await transfer.abort("second thoughts")
                    return
            if command.how == "abort after last":
                await transfer.abort("second thoughts")

    @staticmethod
    async def _cancel(sending: asyncio.Task[object], command: Send) -> None:
        await asyncio.sleep(command.pause_s)
        sending.cancel()
        await asyncio.wait({sending})
        if sending.cancelled():
            raise TransferAbortedError("the application cancelled its send")
        sending.result()


def main() -> None:
    """The process."""
    die_with(int(sys.argv[2]))
    settings = msgspec.json.decode(sys.argv[1], type=SenderSettings)
    pool = make_pool(settings.lane, settings.size, settings.num_pages)
    run_child(SenderChild, settings.deadline_s, pool, settings)


if __name__ == "__main__":
    main()
