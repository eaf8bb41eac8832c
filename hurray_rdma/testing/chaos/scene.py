"""Plays one scene: starts its processes, strikes with one fault after another, judges each, and looks at what is left.

The rules that are judged are those in the package's docstring. A scene ends at the first rule that does not hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from hurray_rdma.testing.chaos.faults import Rule
from hurray_rdma.testing.chaos.judge import judge
from hurray_rdma.testing.chaos.leftovers import leftovers
from hurray_rdma.testing.chaos.proxy import ChaosProxy
from hurray_rdma.testing.chaos.recipe import Recipe
from hurray_rdma.testing.chaos.results import EpisodeResult, SceneResult
from hurray_rdma.testing.chaos.schedule import LEASE_S, PEER_S, SEND_S, TIMEOUT_S, Episode, ScenePlan
from hurray_rdma.testing.chaos.seats import ReceiverSeat, SceneFailedError, Seat, SenderSeat, together
from hurray_rdma.testing.chaos.strike import sent, strike
from hurray_rdma.testing.chaos.words import (
    SENT,
    Plant,
    Publish,
    ReceiverSettings,
    Send,
    SenderSettings,
    Sent,
    Settings,
)
from hurray_rdma.testing.shared_memory import SharedMemory

__all__ = ["play_scene"]

_S = TypeVar("_S", bound=Settings)

_SETTLES_S = 8.0
_PROBES_S = 15.0


async def play_scene(
    plan: ScenePlan,
    *,
    on_episode: Callable[[EpisodeResult], None],
    go_on: Callable[[], bool] = lambda: True,
    plant: Plant | None = None,
) -> SceneResult:
    """Plays it; returns with all its processes reaped.

    Args:
        plan: what happens.
        on_episode: called after each fault.
        go_on: asked before each fault; False ends the scene as if it had no more of them.
        plant: a wrong to be done by the first receiver before the first fault: it must be found.
    """
    result = SceneResult(plan)
    with tempfile.TemporaryDirectory(prefix="hurray-chaos-") as folder:
        async with contextlib.AsyncExitStack() as stack:
            scene = _Scene(plan, Path(folder), result.log)
            stack.push_async_callback(scene.reap)
            try:
                await scene.begin(stack)
                if plant is not None:
                    scene.receivers[0].running.tell(plant)
                for episode in plan.episodes:
                    if not go_on():
                        break
                    outcome = await scene.play(episode)
                    result.episodes.append(outcome)
                    on_episode(outcome)
                    if outcome.problem is not None:
                        result.problem = outcome.problem
                        return result
                await scene.end()
            except SceneFailedError as error:
                result.problem = str(error)
                return result
        try:
            await scene.check_left()
        except SceneFailedError as error:
            result.problem = str(error)
    return result


class _Scene:
    """A scene under way."""

    def __init__(self, plan: ScenePlan, folder: Path, log: list[str]) -> None:
        self._plan = plan
        self._folder = folder
        self._lines = log
        self._started = time.monotonic()
        self._num_probes = 0
        self._ports: list[str] = []
        self._memory = SharedMemory()
        self.receivers: list[ReceiverSeat] = []
        self.senders: list[SenderSeat] = []

    @property
    def _seats(self) -> list[Seat]:
        return [*self.senders, *self.receivers]

    def _log(self, line: str) -> None:
        self._lines.append(f"{time.monotonic() - self._started:9.3f} {line}")

    async def begin(self, stack: contextlib.AsyncExitStack) -> None:
        """Starts everybody; proxies end with ``stack``."""
        cast = self._plan.cast
        for number in range(cast.num_receivers):
            receiving = self._settings(
                ReceiverSettings,
                num_pages=cast.receiver_pages,
                listen="127.0.0.1:0",
                ahead_pages=cast.ahead_pages,
            )
            self.receivers.append(ReceiverSeat(f"receiver{number}", self._folder, self._log, receiving))
        await together(*(seat.sit() for seat in self.receivers))
        for number in range(cast.num_senders):
            receiver = self.receivers[number % cast.num_receivers]
            host, _, port = receiver.address.rpartition(":")
            proxy = await stack.enter_async_context(ChaosProxy(host, int(port)))
            self._ports += [receiver.address, proxy.address]
            sending = self._settings(SenderSettings, num_pages=cast.sender_pages, address=proxy.address)
            self.senders.append(
                SenderSeat(f"sender{number}", self._folder, self._log, sending, receiver=receiver, proxy=proxy)
            )
        await together(*(seat.sit() for seat in self.senders))
        await self._probe_all()

    def _settings(self, kind: type[_S], **own: object) -> _S:
        everybody: dict[str, object] = {
            "lane": self._plan.cast.lane,
            "size": self._plan.cast.size,
            "lease_s": LEASE_S,
            "timeout_s": TIMEOUT_S,
            "peer_timeout_s": PEER_S,
            "deadline_s": 120.0 + 20.0 * len(self._plan.episodes),
        }
        return msgspec.convert(everybody | own, kind)

    async def play(self, episode: Episode) -> EpisodeResult:
        """One fault, and what must hold after it."""
        self._log(f"-- {episode}")
        started, problem, reached, delivered = time.monotonic(), None, True, list[bool]()
        try:
            reached = await self._strike(episode)
            await self._probe_all()
            await self._settle()
            delivered = [
                judge(episode, send, sender=self.senders[sender], struck=self.senders[episode.struck])
                for sender, send in episode.sends
            ]
        except SceneFailedError as error:
            problem = str(error)
        for seat in self._seats:
            problem = problem or next(iter(seat.problems), None)
        if problem is not None:
            self._log(f"!! {problem}")
        return EpisodeResult(
            kind=episode.kind,
            reached=reached,
            problem=problem,
            seconds=time.monotonic() - started,
            num_delivered=sum(delivered),
            num_failed=len(delivered) - sum(delivered),
        )

    async def end(self) -> None:
        """The senders go; every page must come back; the receivers go.

        Raises:
            SceneFailedError: something does not hold.
        """
        for sender in self.senders:
            await sender.settled(
                lambda status: status.free == status.num_pages and not status.num_busy,
                "all its pages are free",
                within_s=_SETTLES_S,
            )
            await self._end(sender)
        for receiver in self.receivers:
            await self._all_free(receiver)
            await self._end(receiver)

    async def check_left(self) -> None:
        """Nothing of the scene is left: processes, sockets, shared memory, files.

        Raises:
            SceneFailedError: something is.
        """
        pids = [pid for seat in self._seats for pid in seat.pids]
        self._memory.look(pids)
        deadline = time.monotonic() + _SETTLES_S
        while left := leftovers(pids, self._ports, self._folder, memory=self._memory):
            if time.monotonic() > deadline:
                raise SceneFailedError(f"left behind: {', '.join(left)}")
            await asyncio.sleep(0.05)

    async def reap(self) -> None:
        """Kills whoever still lives."""
        for seat in self._seats:
            if seat.process is not None:
                await seat.process.kill()

    async def _end(self, seat: Seat) -> None:
        self._memory.look([seat.running.pid])
        wrong = await seat.running.end()
        if wrong is not None:
            raise SceneFailedError(f"{seat.name}: {wrong}")
        if seat.problems:
            raise SceneFailedError(f"{seat.name}: {seat.problems[0]}")

    # One fault.

    async def _strike(self, episode: Episode) -> bool:
        """Sends, and has the fault happen to it; returns when all sends have ended: whether it came about."""
        struck, rule = self.senders[episode.struck], None
        await together(*(self._published(sender, send) for sender, send in episode.sends if send.how == "fetch"))
        if episode.ahead:
            await self._probe_all()
        if episode.spoil is not None:
            spoil = episode.spoil
            rule = struck.proxy.arm(
                Rule(
                    action=spoil.action,
                    kind=spoil.kind,
                    direction=spoil.direction,
                    nth=spoil.nth,
                    seconds=spoil.seconds,
                    keep_nbytes=spoil.keep_nbytes,
                )
            )
        if episode.cut_before:
            struck.proxy.cut()
            await self._try(struck)  # it may find the connection lost, or make another
        for sender, send in episode.sends:
            self.senders[sender].running.tell(send)
        killed: Seat | None = None
        if episode.blow is not None:
            killed = await strike(episode.blow, struck)
        all_sent = ((self.senders[sender], send) for sender, send in episode.sends)
        await together(*(sent(sender, send) for sender, send in all_sent if sender is not killed))
        struck.proxy.disarm()
        return rule is None or rule.fired

    async def _published(self, sender: int, send: Send) -> None:
        receiver, name = self.senders[sender].receiver, send.recipe.name
        receiver.running.tell(Publish(send.recipe))
        await receiver.holds(lambda: name in receiver.published, f"{name} is published", within_s=_SETTLES_S)

    async def _probe_all(self) -> None:
        """Every sender sends again, and is heard: a fault that is over costs nothing any more."""
        await together(*(self._probe(sender) for sender in self.senders))

    async def _probe(self, sender: SenderSeat) -> None:
        deadline = time.monotonic() + _PROBES_S
        while (sent := await self._try(sender)).outcome != SENT:
            if time.monotonic() > deadline:
                raise SceneFailedError(f"{sender.name}: sends fail {_PROBES_S} s after the fault: {sent.detail}")
            await asyncio.sleep(0.1)

    async def _try(self, sender: SenderSeat) -> Sent:
        """One small send, and how it ended."""
        self._num_probes += 1
        send = Send(Recipe(f"p{self._num_probes}", self._num_probes, 1), timeout_s=SEND_S)
        sender.running.tell(send)
        await sent(sender, send)
        return sender.sent.pop(send.recipe.name)

    async def _settle(self) -> None:
        """Arrivals end and pages are free or quarantined; too many of these are brought back."""
        for receiver in self.receivers:
            status = await receiver.settled(
                lambda status: (
                    status.leased == 0 and status.num_busy == 0 and status.free + status.quarantined == status.num_pages
                ),
                "no arrival and no lease is left",
                within_s=_SETTLES_S,
            )
            if status.quarantined:
                self._log(f"{receiver.name}: {status}")
            if status.quarantined > status.num_pages // 4:
                await self._relieve(receiver)

    async def _relieve(self, receiver: ReceiverSeat) -> None:
        """The receiver's senders are ended, which brings back what they left in quarantine; others take their seats."""
        senders = [sender for sender in self.senders if sender.receiver is receiver]
        for sender in senders:
            await self._end(sender)
        await self._all_free(receiver)
        await together(*(sender.sit() for sender in senders))

    async def _all_free(self, receiver: ReceiverSeat) -> None:
        await receiver.settled(
            lambda status: status.free == status.num_pages and not status.num_busy,
            "all pages are free once every sender is gone",
            within_s=_SETTLES_S,
        )
