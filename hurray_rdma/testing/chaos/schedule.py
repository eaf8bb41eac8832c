"""Draws scenes from a seed: who plays, and which fault strikes when. The same seed draws the same scenes.

A scene is drawn whole before it is played, so that what happens in it cannot change what comes. It knows nothing of
processes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from hurray_rdma.control.codes import MessageType
from hurray_rdma.testing.chaos.faults import Action, Direction
from hurray_rdma.testing.chaos.kinds import BLOWS, IN_FRAMES, MESSAGES, NEVER_IN_FRAMES, ONLY_AHEAD, ONLY_IN_FRAMES
from hurray_rdma.testing.chaos.recipe import Receipt, Recipe
from hurray_rdma.testing.chaos.words import SIZES, How, Lane, Send, Size

__all__ = ["LEASE_S", "PEER_S", "SEND_S", "TIMEOUT_S", "Blow", "Cast", "Episode", "ScenePlan", "Spoil", "draw_scene"]

LEASE_S = 1.5
"""Leases of every engine in a scene."""
PEER_S = 2.5
"""Silence after which a peer is lost."""
TIMEOUT_S = 3.0
"""Budget of an engine's connects and waits."""
SEND_S = 2.0
"""Budget of each send."""

_SPOILED_SHARE = 0.6
_ASKED_PAGES = 8
"""What the engine asks for ahead, after a send of no more pages."""


@dataclass(frozen=True, slots=True)
class Cast:
    """Who plays a scene."""

    lane: Lane
    size: Size
    num_receivers: int
    num_senders: int
    """Sender i sends to receiver ``i % num_receivers``."""
    receiver_pages: int
    usual_pages: int
    """Those that are not there to be granted ahead to all; a send has half as many at most."""
    sender_pages: int
    ahead_pages: int
    """What each receiver grants ahead."""
    ahead_for_all: bool
    """That is enough for each of its senders."""


@dataclass(frozen=True, slots=True)
class Spoil:
    """One message of the struck sender's connection is spoiled."""

    action: Action
    kind: MessageType
    direction: Direction
    nth: int
    seconds: float
    keep_nbytes: int


@dataclass(frozen=True, slots=True)
class Blow:
    """What happens to a process, ``after_s`` seconds after the sends began, or after the struck sender has a grant."""

    what: Literal["kill", "stop", "reopen", "reregister", "cut"]
    whom: Literal["sender", "receiver"]
    after_s: float
    for_s: float = 0.0
    on_grant: bool = False


@dataclass(frozen=True, slots=True)
class Episode:
    """One fault, and the transfers it strikes."""

    kind: str
    """One of `KINDS`."""
    struck: int
    """Sender that it is about."""
    sends: tuple[tuple[int, Send], ...]
    """(sender, what it sends), all at once."""
    spoil: Spoil | None = None
    blow: Blow | None = None
    cut_before: bool = False
    """The connection is cut first, so that a handshake comes by."""
    ahead: bool = False
    """Every sender has sent before, so that it holds pages granted ahead, if it was granted any."""
    all_succeed: bool = False
    """The fault is one that no send may fail of."""


@dataclass(frozen=True, slots=True)
class ScenePlan:
    """One scene."""

    seed: int
    index: int
    cast: Cast
    episodes: tuple[Episode, ...]


def draw_scene(seed: int, index: int, *, num_episodes: int) -> ScenePlan:
    """Scene ``index`` of a seed; its first episodes are the same whatever their number.

    Args:
        seed: any integer.
        index: scenes are independent of each other.
        num_episodes: how many faults.
    """
    dice = random.Random(f"{seed}/{index}")
    num_receivers = dice.choice((1, 1, 2))
    num_senders = dice.randint(num_receivers, 4 - num_receivers)
    usual_pages = dice.randint(8, 20)
    lane: Lane = dice.choices(("mapped", "cma", "tcp", "frames"), (4, 3, 2, 1))[0]
    size: Size = dice.choice(("small", "large"))
    # None are granted ahead, or some that not all senders get and that others need, or so many that all get some.
    ahead_for_all = lane != "frames" and dice.random() < 0.5
    ahead_pages = 2 * _ASKED_PAGES * num_senders if ahead_for_all else dice.choice((0, usual_pages // 2))
    receiver_pages = usual_pages + (ahead_pages if ahead_for_all else 0)
    cast = Cast(
        lane=lane,
        size="small" if lane == "frames" else size,  # a busy machine is too slow for large ones
        num_receivers=num_receivers,
        num_senders=num_senders,
        receiver_pages=receiver_pages,
        usual_pages=usual_pages,
        sender_pages=max(6 * usual_pages, usual_pages + 2 * receiver_pages),
        ahead_pages=ahead_pages,
        ahead_for_all=ahead_for_all,
    )
    drawer = _Drawer(dice, cast)
    return ScenePlan(seed, index, cast, tuple(drawer.episode(number) for number in range(num_episodes)))


class _Drawer:
    """Draws the episodes of one scene."""

    def __init__(self, dice: random.Random, cast: Cast) -> None:
        self._dice = dice
        self._cast = cast

    def episode(self, number: int) -> Episode:
        dice = self._dice
        struck = dice.randrange(self._cast.num_senders)
        self._name, self._count = f"e{number}", 0
        if dice.random() < _SPOILED_SHARE:
            return self._spoiled(struck)
        kind = dice.choices(tuple(BLOWS), tuple(BLOWS.values()))[0]
        return self._blown(kind, struck)

    def _send(
        self,
        how: How = "whole",
        *,
        pause_s: float = 0.0,
        receipt: Receipt = "take",
        hold_s: float = 0.0,
        num_pages: int | None = None,
        timeout_s: float = SEND_S,
    ) -> Send:
        self._count += 1
        count = self._dice.randint(1, self._cast.usual_pages // 2) if num_pages is None else num_pages
        recipe = Recipe(f"{self._name}.{self._count}", self._dice.getrandbits(32), count, receipt, hold_s)
        return Send(recipe, how, pause_s, timeout_s)

    def _fetch(self) -> Send:
        return self._send("fetch", hold_s=round(self._dice.uniform(0.3, 1.0), 3), num_pages=self._dice.randint(1, 3))

    def _spoiled(self, struck: int) -> Episode:
        dice, spec, frames = self._dice, SIZES[self._cast.size], self._cast.lane == "frames"
        never = set(NEVER_IN_FRAMES if frames else ONLY_IN_FRAMES)
        if not self._cast.ahead_for_all:
            never |= ONLY_AHEAD
        passing = [each for each in MESSAGES if each not in never]
        direction, kind = dice.choice(passing)
        carrier = (IN_FRAMES if frames else {}).get((direction, kind), MESSAGES[direction, kind])
        action = dice.choice(tuple(Action))
        most = 1  # of the kind pass, for sure
        if kind is MessageType.ENDED:
            most = spec.num_layers
        elif frames and kind in (MessageType.TENSOR_DATA, MessageType.TENSOR_DATA_END):
            most = len(spec.tensors)
        spoil = Spoil(
            action=action,
            kind=kind,
            direction=direction,
            nth=dice.randint(1, most),
            seconds=round(dice.choice((dice.uniform(0.01, 0.3), dice.uniform(0.3, 1.0), dice.uniform(1.0, 2.5))), 3),
            keep_nbytes=dice.choice((0, dice.randint(1, 11), 12, dice.randint(13, 200))),
        )
        pause_s = 0.25 if carrier == "slow" else dice.choice((0.0, 0.0, 0.01))
        match carrier:
            case "sender aborts":
                send = self._send("abort between layers", pause_s=pause_s)
            case "receiver aborts":
                send = self._send("layers", pause_s=0.02, receipt="abort after a layer")
            case "too large":
                send = self._send(num_pages=2 * self._cast.receiver_pages)
            case "fetch":
                send = self._fetch()
            case "ahead":
                send = self._send(num_pages=dice.randint(1, _ASKED_PAGES))
            case "whole":
                send = self._send()
            case "slow":
                send = self._send("layers", pause_s=pause_s)
            case _:
                hows: tuple[How, ...] = ("whole", "layers")
                if kind is MessageType.ENDED and spoil.nth > 1:
                    hows = ("layers",)  # else all end together
                send = self._send(dice.choice(hows), pause_s=pause_s)
        label = f"{action.value} {kind.name} {direction.value}"
        return Episode(
            label,
            struck,
            ((struck, send),),
            spoil=spoil,
            cut_before=carrier == "connect",
            ahead=carrier == "ahead",
        )

    def _blown(self, kind: str, struck: int) -> Episode:
        dice = self._dice
        whom: Literal["sender", "receiver"] = "receiver" if "receiver" in kind else "sender"
        sends: list[tuple[int, Send]] = []
        blow, all_succeed = None, False
        if kind.startswith("SIG") or "closes" in kind or "cut" in kind:
            what = {"SIGKILL": "kill", "SIGSTOP": "stop"}.get(kind.split(maxsplit=1)[0], "reopen")
            for_s = (
                2 * LEASE_S + PEER_S
                if "session" in kind
                else round(
                    dice.uniform(LEASE_S + 0.2, 2 * LEASE_S + 0.5) if "beyond" in kind else dice.uniform(0, 0.4), 3
                )
            )
            on_grant = dice.random() < 0.6
            after_s = round(dice.uniform(0, 0.005) if on_grant else dice.choice((0.0, dice.uniform(0, 0.05))), 5)
            blow = Blow(
                "cut" if "cut" in kind else what,  # type: ignore[arg-type]
                whom,
                after_s,
                for_s if what == "stop" else 0.0,
                on_grant,
            )
            for sender in range(self._cast.num_senders):
                how: How = dice.choice(("whole", "layers", "layers", "fetch"))
                pause_s = dice.choice((0.0, 0.002, 0.02))
                sends.append((sender, self._fetch() if how == "fetch" else self._send(how, pause_s=pause_s)))
        elif kind == "more senders than pages":
            all_succeed = True
            # Large ones take a busy machine long to make, and their leases run meanwhile; so do many at once.
            roomy = self._cast.ahead_for_all
            fewest, most = (6, 10) if self._cast.size == "small" and not roomy else (3, 4)
            num_pages = self._cast.receiver_pages // 3 if roomy else None
            for sender in range(self._cast.num_senders):
                count = dice.randint(fewest, most)
                some = [self._send(hold_s=0.005, num_pages=num_pages, timeout_s=10.0) for _ in range(count)]
                sends += [(sender, send) for send in some]
        elif kind == "the pool is registered anew":
            all_succeed = True
            blow = Blow("reregister", "receiver", round(dice.uniform(0, 0.01), 5))
            for sender in range(self._cast.num_senders):
                sends += [(sender, self._send("layers", pause_s=0.002, timeout_s=10.0)) for _ in range(4)]
        elif kind == "late release":
            all_succeed = True
            hold_s = round(dice.uniform(0.1, 1.5), 3)
            sends = [(struck, self._send(hold_s=hold_s, timeout_s=10.0)) for _ in range(3)]
        elif kind == "an offer that never fits":
            sends = [(struck, self._send(num_pages=self._cast.receiver_pages + 1)), (struck, self._send())]
        else:
            sends = [(struck, self._aborted(kind))]
        ahead = self._cast.ahead_pages > 0 and dice.random() < 0.5
        return Episode(kind, struck, tuple(sends), blow=blow, ahead=ahead, all_succeed=all_succeed)

    def _aborted(self, kind: str) -> Send:
        short_s = round(self._dice.choice((0.0, self._dice.uniform(0, 0.003))), 5)
        match kind:
            case "abort by the sender before the grant":
                return self._send("abort before grant", pause_s=short_s)
            case "abort by the sender between layers":
                return self._send("abort between layers", pause_s=short_s)
            case "abort by the sender after the last layer":
                return self._send("abort after last")
            case "a send is cancelled":
                return self._send("cancel", pause_s=short_s)
            case "abort by the receiver at once":
                return self._send("layers", pause_s=short_s, receipt="abort at once")
            case _:
                return self._send("layers", pause_s=short_s, receipt="abort after a layer")
