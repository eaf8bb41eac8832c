"""Each kind of message, lost, repeated, late or swapped with the next: success or a typed error on both sides.

The engines are models that do what the events ask of them, and nothing by a clock of their own but end a lease and
refuse what waited too long. Whatever happens to one message: each transfer ends once on each side, pages are given back
once and never while the client may touch them, both sides agree, and nothing stays open.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    AllEnded,
    Committed,
    Event,
    Fetch,
    Fetched,
    Grant,
    Granted,
    Message,
    Offer,
    Offered,
    Pool,
    PoolAnnounced,
    PoolsAnnounced,
    Published,
    PublishedHeard,
    Quiesced,
    Refused,
    Reserve,
    Reserved,
    SessionClosed,
    SessionConfig,
    SessionOpened,
    Take,
    Taken,
    TensorData,
    TransferFailed,
)
from hurray_rdma.control.codes import ErrorCode
from hurray_rdma.control.exchange import Abort, Ended, Quiet, SessionMessage
from hurray_rdma.control.messages import (
    ClientHello,
    ErrorMessage,
    Ping,
    Pong,
    ServerHello,
    TensorDataEndMessage,
    TensorDataMessage,
    TensorPutAck,
)
from hurray_rdma.control.offers import Commit
from hurray_rdma.errors import GeometryError, HurrayError
from hurray_rdma.testing.pair import ConnectionPair, Side, commit_like

NUM_DESCRIPTORS = 4
LATE_S = 0.7
"""Longer than a heartbeat and than the retry of an end or abort (0.5 s), shorter than any deadline here."""
LEASE_S = 3.0
TICK_S = 0.05
DATA = b"page bytes of one descriptor"
GROUPS = {"whole": ((0, 1, 2, 3),), "layers": ((0, 1), (2, 3)), "backwards": ((3,), (2, 0), (1,))}
"""Descriptors that end together, in these stories; in all others each ends by itself."""


class Fault:
    """Spoils the first message of one kind from one side: "lost", "twice", "late", "swapped" with what comes next."""

    def __init__(self, pair: ConnectionPair, sender: Side, kind: type[Message], how: str) -> None:
        self._pair, self._sender, self._kind, self._how = pair, sender, kind, how
        self._held: list[tuple[float, tuple[int, Message]]] = []
        self.struck = False
        pair.spoil = self

    def __call__(self, side: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        if side != self._sender:
            return messages
        arriving: list[tuple[int, Message]] = []
        for frame in messages:
            if not self.struck and isinstance(frame[1], self._kind):
                self.struck = True
                if self._how == "twice":
                    arriving += [frame, frame]
                elif self._how != "lost":
                    self._held.append((self._pair.now + (LATE_S if self._how == "late" else 0), frame))
                continue
            arriving.append(frame)
            arriving += self._released()
        return arriving + (self._released() if self._how == "late" else [])

    def _released(self) -> list[tuple[int, Message]]:
        due = [frame for when, frame in self._held if when <= self._pair.now]
        self._held = [(when, frame) for when, frame in self._held if when > self._pair.now]
        return due


@dataclass
class Engines:
    """Model engines of both sides of one pair, for one transfer."""

    pair: ConnectionPair
    story: str
    way: str
    offer: Offer
    grant: Grant
    published: Published
    touching: bool = False
    """Client: writes or reads may be in flight."""
    held_since: float | None = None
    """Server: pages are granted or under lease."""
    asked_at: float | None = None
    num_returns: int = 0
    num_data_nbytes: int = 0
    client: list[object] = field(default_factory=list)
    server: list[object] = field(default_factory=list)
    """Outcomes: "done" or an error. At most one each."""

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.pair.advance(TICK_S)
            for _ in range(6):  # What an event makes an engine say is carried at once.
                for event in self.pair.take("client"):
                    self.hear_client(event)
                for event in self.pair.take("server"):
                    self.hear_server(event)
                self.pair.settle()
            self.hold_leases()
            if self.touching:
                assert self.held_since is not None, "pages went back while the client may touch them"

    def hear_client(self, event: Event) -> None:
        client, now = self.pair.client, self.pair.now
        match event:
            case Granted(transfer_id=transfer_id) | PublishedHeard(transfer_id=transfer_id):
                assert not self.touching
                assert not self.client
                self.touching = True
                if self.story == "client aborts":
                    assert client.abort(transfer_id, ErrorCode.ABORTED, "c", now=now)
                    self.quiet(transfer_id, "aborted here")
                elif self.story != "server aborts":
                    self.move(transfer_id)
            case TensorData(data=data):
                self.num_data_nbytes += len(data)
            case AllEnded(transfer_id=transfer_id):
                assert self.story == "take"
                self.touching = False
                if self.num_data_nbytes != NUM_DESCRIPTORS * len(DATA):
                    assert client.abort(transfer_id, ErrorCode.INVALID_MESSAGE, "bytes are missing", now=now)
                    self.quiet(transfer_id, GeometryError("bytes are missing"))
                else:
                    assert client.read_end(transfer_id, now=now)
            case Acknowledged():
                assert not self.touching
                self.client.append("done")
            case AbortRequested(transfer_id=transfer_id):
                self.quiet(transfer_id, event.error)
            case TransferFailed(transfer_id=transfer_id, error=error, granted=granted):
                if granted:
                    self.quiet(transfer_id, error)
                else:
                    self.client.append(error)
            case Refused(error=error):
                assert not self.touching
                self.client.append(error)

    def move(self, transfer_id: int) -> None:
        client, now = self.pair.client, self.pair.now
        if self.story == "fetch":
            self.touching = False
            assert client.read_end(transfer_id, now=now)
            return
        if self.story == "take":
            assert client.take(transfer_id, Take(page_size=4, head_offset=0, num_heads=2), now=now)
            return
        if self.way == "ahead":
            self.touching = False
            assert client.commit(transfer_id, commit_like(self.offer), now=now)
            return
        groups = GROUPS.get(self.story, tuple((index,) for index in range(NUM_DESCRIPTORS)))
        for group in groups:
            for index in group if self.story == "frames" else ():
                half = len(DATA) // 2
                assert client.tensor_data(transfer_id, index, 0, DATA[:half], now=now)
                assert client.tensor_data(transfer_id, index, half, DATA[half:], now=now)
            if group == groups[-1]:
                self.touching = False
            assert client.data_end(transfer_id, *group, now=now)

    def quiet(self, transfer_id: int, outcome: object) -> None:
        self.touching = False
        self.pair.client.quiet(transfer_id, now=self.pair.now)
        self.client.append(outcome)

    def hear_server(self, event: Event) -> None:
        server, now = self.pair.server, self.pair.now
        match event:
            case Offered(transfer_id) | Fetched(transfer_id) | Reserved(transfer_id):
                assert self.asked_at is None
                self.asked_at = now
                if self.story == "refused":
                    error = GeometryError("no")
                    assert server.refuse(transfer_id, error, now=now)
                    self.server.append(error)
                    return
                if not isinstance(event, Fetched):
                    assert server.grant(transfer_id, self.grant, now=now)
                else:
                    assert server.publish(transfer_id, self.published, now=now)
                self.held_since = now
                if self.story == "server aborts":
                    assert server.abort(transfer_id, ErrorCode.ABORTED, "s", now=now)
            case Taken(transfer_id=transfer_id):
                half = len(DATA) // 2
                for index in range(NUM_DESCRIPTORS):
                    assert server.tensor_data(transfer_id, index, 0, DATA[:half], now=now)
                    assert server.tensor_data(transfer_id, index, half, DATA[half:], now=now)
                    assert server.data_end(transfer_id, index, now=now)
            case TensorData(data=data):
                self.num_data_nbytes += len(data)
            case AllEnded(transfer_id=transfer_id):
                if self.story == "frames" and self.num_data_nbytes != NUM_DESCRIPTORS * len(DATA):
                    server.abort(transfer_id, ErrorCode.INVALID_MESSAGE, "bytes are missing", now=now)
                elif server.acknowledge(transfer_id, now=now):
                    self.give_back("done")
            case Committed(transfer_id=transfer_id):
                if self.story == "commit refused":
                    assert server.abort(transfer_id, ErrorCode.GEOMETRY, "more pages than granted", now=now)
                elif server.acknowledge(transfer_id, now=now):
                    self.give_back("done")
            case Quiesced():
                self.give_back("quiet")
            case TransferFailed(error=error, granted=granted) if not granted:
                self.server.append(error)

    def give_back(self, outcome: str) -> None:
        if self.held_since is not None:
            self.held_since = None
            self.num_returns += 1
        self.server.append(outcome)

    def hold_leases(self) -> None:
        if self.held_since is not None and self.pair.now >= self.held_since + LEASE_S:
            self.pair.server.abort(TRANSFER_ID, ErrorCode.LEASE_EXPIRED, "lease", now=self.pair.now)


TRANSFER_ID = 2
PUSH_KINDS: list[tuple[Side, type[Message]]] = [
    ("client", Offer),
    ("server", Grant),
    ("client", TensorDataEndMessage),
    ("server", TensorPutAck),
]
ENDED_KINDS: list[tuple[Side, type[Message]]] = [
    ("client", Offer),
    ("server", Grant),
    ("client", Ended),
    ("server", TensorPutAck),
]
PULL_KINDS: list[tuple[Side, type[Message]]] = [
    ("client", Fetch),
    ("server", Published),
    ("client", TensorDataEndMessage),
    ("server", TensorPutAck),
]
TAKE_KINDS: list[tuple[Side, type[Message]]] = [
    *PULL_KINDS,
    ("client", Take),
    ("server", TensorDataMessage),
    ("server", TensorDataEndMessage),
]
AHEAD_KINDS: list[tuple[Side, type[Message]]] = [
    ("client", Reserve),
    ("server", Grant),
    ("client", Commit),
    ("server", TensorPutAck),
]
REFUSAL: tuple[Side, type[Message]] = ("server", ErrorMessage)
CLIENT_ABORT: list[tuple[Side, type[Message]]] = [("client", Abort), ("client", Quiet)]
SERVER_ABORT: list[tuple[Side, type[Message]]] = [("server", Abort), ("client", Quiet)]
WAYS = {"push": PUSH_KINDS, "pull": PULL_KINDS, "ahead": AHEAD_KINDS}
STORIES: dict[str, dict[str, list[tuple[Side, type[Message]]]]] = {
    "push": {"push": PUSH_KINDS},
    "whole": {"push": ENDED_KINDS},
    "layers": {"push": ENDED_KINDS},
    "backwards": {"push": [*ENDED_KINDS, ("client", TensorDataEndMessage)]},
    "frames": {"push": [*PUSH_KINDS, ("client", TensorDataMessage)]},
    "fetch": {"pull": PULL_KINDS},
    "take": {"pull": TAKE_KINDS},
    "commit": {"ahead": AHEAD_KINDS},
    "refused": {way: [kinds[0], REFUSAL] for way, kinds in WAYS.items()},
    "commit refused": {"ahead": AHEAD_KINDS[:3] + SERVER_ABORT},
    "client aborts": {way: kinds[:2] + CLIENT_ABORT for way, kinds in WAYS.items()},
    "server aborts": {way: kinds[:2] + SERVER_ABORT for way, kinds in WAYS.items()},
}
CASES = [
    pytest.param(story, way, sender, kind, how, id=f"{story}-{way}-{kind.__name__}-{how}")
    for story, ways in STORIES.items()
    for way, kinds in ways.items()
    for sender, kind in kinds
    for how in ("lost", "twice", "late", "swapped")
]


@pytest.mark.parametrize(("story", "way", "sender", "kind", "how"), CASES)
def test_one_spoilt_message_of_a_transfer(  # noqa: PLR0917 - the case, and what to make it of
    story: str,
    way: str,
    sender: Side,
    kind: type[Message],
    how: str,
    pair: ConnectionPair,
    make_offer: Callable[..., Offer],
    make_published: Callable[..., Published],
    grant: Grant,
) -> None:
    fault = Fault(pair, sender, kind, how)
    offer = make_offer(deadline_s=2)
    engines = Engines(pair, story, way, offer, grant, make_published())
    if way == "pull":
        fetch = Fetch(key="k", deadline_s=2, num_streams=NUM_DESCRIPTORS)
        transfer_id = pair.client.fetch(fetch, now=pair.now, timeout_s=2)
    elif way == "push":
        transfer_id = pair.client.offer(offer, now=pair.now, timeout_s=2)
    else:
        reserve = Reserve(pool_id=7, generation=3, num_pages=3, deadline_s=2)
        transfer_id = pair.client.reserve(reserve, now=pair.now, timeout_s=2)
    assert transfer_id == TRANSFER_ID
    engines.run(12)

    assert fault.struck
    assert pair.client.is_open
    assert pair.server.is_open
    assert pair.num_open("client") == pair.num_open("server") == 0
    assert len(engines.client) == 1
    assert engines.held_since is None
    assert engines.num_returns <= 1
    # A server that never heard of the transfer has nothing to end.
    assert len(engines.server) == (0 if engines.asked_at is None else 1)
    if story in ("push", "whole", "layers", "backwards", "frames", "fetch", "take", "commit"):
        # An end or a commit is said until it is acknowledged, a question and its answer once; page bytes come in order.
        said_again = (Ended, TensorDataEndMessage, Commit, TensorPutAck)
        fatal: dict[type[Message], tuple[str, ...]] = dict.fromkeys(said_again, ())
        fatal[TensorDataMessage] = ("lost", "late", "swapped")
        assert (engines.client[0] == "done") == (how not in fatal.get(kind, ("lost",))), engines.client
    else:
        assert engines.client[0] != "done"
    if engines.client[0] == "done":
        assert engines.server == ["done"]
    else:
        assert isinstance(engines.client[0], HurrayError) or story == "client aborts"
        assert engines.server != ["done"]


class AnnouncingPair(ConnectionPair):
    """Its server's engine announces a pool as soon as it hears that the session is open, as a channel lets it."""

    def __init__(self, client: SessionConfig, server: SessionConfig, pool: Pool) -> None:
        super().__init__(client, server)
        self._pool: Pool | None = pool

    def settle(self) -> None:
        moving = 1
        while moving:
            moving = self.carry("client")
            if self._pool is not None and any(isinstance(event, SessionOpened) for event in self.server_events):
                self.server.announce(self._pool, now=self.now)
                self._pool = None
            moving += self.carry("server")


HANDSHAKE: list[tuple[Side, type[Message]]] = [
    ("client", ClientHello),
    ("server", ServerHello),
    ("client", SessionMessage),
    ("server", SessionMessage),
    ("server", Pool),
    ("client", Ping),
    ("server", Pong),
]


@pytest.mark.parametrize("how", ["lost", "twice", "late", "swapped"])
@pytest.mark.parametrize(("sender", "kind"), HANDSHAKE, ids=lambda v: getattr(v, "__name__", v))
def test_one_spoilt_message_of_the_session(
    sender: Side,
    kind: type[Message],
    how: str,
    make_config: Callable[..., SessionConfig],
    make_pool: Callable[..., Pool],
) -> None:
    pair = AnnouncingPair(make_config("prefill", token="s"), make_config("decode", token="s"), make_pool())
    fault = Fault(pair, sender, kind, how)
    heard: dict[Side, list[Event]] = {"client": [], "server": []}
    for _ in range(160):
        pair.advance(TICK_S)
        heard["server"] += pair.take("server")
        heard["client"] += pair.take("client")
        for session, side in ((pair.client, "client"), (pair.server, "server")):
            if session.is_closed:  # What a channel does once the last words are sent.
                other = pair.server if side == "client" else pair.client
                events = other.connection_lost(pair.now)
                heard["server" if side == "client" else "client"] += events
    assert fault.struck
    assert pair.client.is_closed == pair.server.is_closed
    for events in heard.values():
        closed = [event for event in events if isinstance(event, SessionClosed)]
        assert len(closed) == int(pair.client.is_closed)
        assert all(isinstance(event.error, HurrayError) for event in closed)
        assert sum(isinstance(event, SessionOpened) for event in events) <= 1
    if kind in (Pool, Ping, Pong):
        assert pair.client.is_open
        assert heard["client"].count(PoolsAnnounced()) == 1
        assert (PoolAnnounced(make_pool()) in heard["client"]) == (kind is not Pool or how != "lost")
    if how == "lost" and kind in (ClientHello, ServerHello, SessionMessage):
        assert pair.client.is_closed
