"""Both sides of a session under random calls and a network that loses, repeats, swaps and delays messages.

The engines are models: the server's holds pages while a client may write to or read from them, the client's does so
from Granted or PublishedHeard until it ends all descriptors, or its read, or commits, or calls quiet. What must hold is
checked after each step, and at the end that nothing stays open.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hurray_rdma.control import (
    AbortRequested,
    Acknowledged,
    AllEnded,
    Committed,
    DescriptorsEnded,
    Event,
    Fetch,
    Fetched,
    Grant,
    Granted,
    Message,
    Offer,
    Offered,
    Pool,
    PoolRegion,
    PoolSegment,
    Published,
    PublishedHeard,
    Quiesced,
    Refused,
    Reserve,
    Reserved,
    SessionConfig,
    Take,
    Taken,
    TensorData,
    TransferFailed,
)
from hurray_rdma.control.codes import ErrorCode
from hurray_rdma.errors import PoolExhaustedError
from hurray_rdma.testing.pair import ConnectionPair, Side, commit_like

NUM_DESCRIPTORS = 3
DESCRIPTOR = b"HRRY\x01\x00" + (20).to_bytes(4, "little") + bytes(10)
POOL = Pool(
    pool_id=1,
    generation=1,
    num_pages=8,
    layers=(0,),
    total_heads=1,
    num_heads=1,
    head_dim=1,
    page_size=1,
    dtype="int8",
    roles=("key",),
    regions=(PoolRegion(remote_addr=0, nbytes=8, rkey=b""),),
    segments=(PoolSegment(0, 0, 1, 1, 1),),
)


REQUESTS = Offered | Fetched | Reserved
SNAPSHOT = {
    "pool_id": 1,
    "generation": 1,
    "descriptors": DESCRIPTOR * NUM_DESCRIPTORS,
    "block_table": np.ones(1, np.uint32),
    "seq_ptr": np.array([0, 1]),
    "seq_lens": np.ones(1, np.uint32),
}


@dataclass
class Sent:
    """The client engine's view of a transfer."""

    request: type[Event]
    """What the server hears of it."""
    may_touch: bool = False
    """It may have writes or reads in flight."""
    ended: bool = False
    taken: bool = False
    """Its pages come in frames."""
    num_came: int = 0
    """Descriptors whose end came."""
    to_end: set[int] = field(default_factory=lambda: set(range(NUM_DESCRIPTORS)))
    """Descriptors of a push whose end was not said."""
    quiet_owed: bool = False
    outcome: str | None = None


@dataclass
class Received:
    """The server engine's view of a transfer."""

    request: type[Event]
    holds_pages: bool = False
    waiting: bool = False
    num_sent: int | None = None
    """Descriptors that were sent in frames, once somebody takes them."""
    ended: set[int] = field(default_factory=set)
    """Descriptors of a push whose end was heard."""
    outcome: str | None = None


class SessionMachine(RuleBasedStateMachine):
    orders: ClassVar = st.permutations(range(NUM_DESCRIPTORS))
    spoilt: ClassVar = st.lists(st.sampled_from(["pass", "pass", "pass", "drop", "twice", "swap", "late"]), max_size=6)

    def __init__(self) -> None:
        super().__init__()
        config = {"host_id": b"", "worker_address": b""}
        self.pair = ConnectionPair(
            SessionConfig(engine_name="c", **config),  # type: ignore[arg-type]
            SessionConfig(engine_name="s", **config),  # type: ignore[arg-type]
        )
        self.pair.settle()
        self.pair.server.announce(POOL, now=0)
        self.pair.settle()
        self.pair.take("client")
        self.pair.take("server")
        self.sent: dict[int, Sent] = {}
        self.received: dict[int, Received] = {}
        self.faults: list[str] = []
        self.late: dict[Side, list[tuple[int, Message]]] = {"client": [], "server": []}
        self.pair.spoil = self.spoil

    # The network.

    def spoil(self, side: Side, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        arriving, self.late[side] = self.late[side], []
        held: list[tuple[int, Message]] = []
        for frame in messages:
            fault = self.faults.pop() if self.faults and frame[0] != 1 else "pass"
            if fault in ("swap", "late"):
                (held if fault == "swap" else self.late[side]).append(frame)
                continue
            if fault != "drop":
                arriving += [frame] * (2 if fault == "twice" else 1)
                arriving += held
                held = []
        return arriving + held

    @rule(side=st.sampled_from(["client", "server"]), faults=spoilt)
    def carry(self, side: Side, faults: list[str]) -> None:
        self.faults = list(faults)
        self.pair.carry(side)
        self.faults = []
        self.react()

    @rule()
    def settle(self) -> None:
        self.pair.settle()
        self.react()

    @rule(seconds=st.sampled_from([0.1, 0.3, 0.7]), faults=spoilt)
    def wait(self, seconds: float, faults: list[str]) -> None:
        self.faults = list(faults)
        self.pair.advance(seconds)
        self.faults = []
        self.react()

    # The engines.

    def react(self) -> None:
        for event in self.pair.take("client"):
            assert not isinstance(event, REQUESTS | Taken | Quiesced | Committed)
            sent = self.sent[event.transfer_id]  # type: ignore[union-attr]
            match event:
                case Granted() | PublishedHeard():
                    assert isinstance(event, PublishedHeard) == (sent.request is Fetched)
                    assert not sent.may_touch
                    assert sent.outcome is None
                    sent.may_touch = True
                case TensorData() | DescriptorsEnded() | AllEnded():
                    assert sent.taken
                    assert sent.may_touch
                    sent.num_came += len(event.descriptor_indices) if isinstance(event, DescriptorsEnded) else 0
                    assert isinstance(event, AllEnded) <= (sent.num_came == NUM_DESCRIPTORS)
                case Refused():
                    assert not sent.may_touch
                    self.conclude(sent, "refused")
                case Acknowledged():
                    assert sent.ended
                    assert self.received[event.transfer_id].outcome == "delivered"
                    self.conclude(sent, "acknowledged")
                case AbortRequested():
                    sent.quiet_owed = True
                case TransferFailed():
                    assert event.granted == (sent.may_touch or sent.ended)
                    if event.granted:
                        sent.quiet_owed = True
                    else:
                        self.conclude(sent, "failed")
        for event in self.pair.take("server"):
            if isinstance(event, REQUESTS):
                assert event.transfer_id not in self.received
                assert self.sent[event.transfer_id].request is type(event)
                self.received[event.transfer_id] = Received(type(event), waiting=True)
                continue
            received = self.received[event.transfer_id]  # type: ignore[union-attr]
            match event:
                case DescriptorsEnded(transfer_id, indices):
                    assert received.request is Offered
                    assert len(set(indices)) == len(indices) > 0
                    assert received.ended.isdisjoint(indices), "each ends once"
                    assert self.sent[transfer_id].to_end.isdisjoint(indices)
                    received.ended.update(indices)
                case Taken(transfer_id):
                    assert received.holds_pages
                    assert received.num_sent is None
                    assert self.sent[transfer_id].taken
                    received.num_sent = 0
                case AllEnded(transfer_id) | Committed(transfer_id):
                    assert isinstance(event, Committed) == (received.request is Reserved)
                    assert self.sent[transfer_id].ended
                    assert len(received.ended) == (NUM_DESCRIPTORS if received.request is Offered else 0)
                    if self.pair.server.acknowledge(transfer_id, now=self.pair.now):
                        received.holds_pages = False
                        self.conclude(received, "delivered")
                case AbortRequested():
                    received.waiting = False
                case Quiesced():
                    received.holds_pages = False
                    self.conclude(received, "stopped")
                case TransferFailed():
                    received.waiting = False
                    if not event.granted:
                        self.conclude(received, "failed")

    @staticmethod
    def conclude(view: Sent | Received, outcome: str) -> None:
        assert view.outcome is None, "a transfer ends once"
        view.outcome = outcome

    def pick(self, ids: list[int], which: int) -> int:
        return ids[which % len(ids)]

    @precondition(lambda self: len(self.sent) < 12)
    @rule(timeout_s=st.sampled_from([0.5, 5.0]))
    def offer(self, timeout_s: float) -> None:
        offer = Offer(key="k", deadline_s=timeout_s, **SNAPSHOT)  # type: ignore[arg-type]
        self.sent[self.pair.client.offer(offer, now=self.pair.now, timeout_s=timeout_s)] = Sent(Offered)

    @precondition(lambda self: len(self.sent) < 12)
    @rule(timeout_s=st.sampled_from([0.5, 5.0]))
    def fetch(self, timeout_s: float) -> None:
        fetch = Fetch(key="k", deadline_s=timeout_s, num_streams=NUM_DESCRIPTORS)
        transfer_id = self.pair.client.fetch(fetch, now=self.pair.now, timeout_s=timeout_s)
        self.sent[transfer_id] = Sent(Fetched)

    @precondition(lambda self: len(self.sent) < 12)
    @rule(timeout_s=st.sampled_from([0.5, 5.0]))
    def reserve(self, timeout_s: float) -> None:
        reserve = Reserve(pool_id=1, generation=1, num_pages=1, deadline_s=timeout_s)
        self.sent[self.pair.client.reserve(reserve, now=self.pair.now, timeout_s=timeout_s)] = Sent(Reserved)

    @precondition(lambda self: any(r.waiting for r in self.received.values()))
    @rule(which=st.integers(0, 11), accept=st.booleans())
    def answer(self, which: int, accept: bool) -> None:
        transfer_id = self.pick([i for i, r in self.received.items() if r.waiting], which)
        received = self.received[transfer_id]
        received.waiting = False
        if accept and received.request is Fetched:
            published = Published(lease_s=1, **SNAPSHOT)  # type: ignore[arg-type]
            received.holds_pages = self.pair.server.publish(transfer_id, published, now=self.pair.now)
        elif accept:
            page = Grant(generation=1, page_ids=np.array([transfer_id % 8]), lease_s=1)
            received.holds_pages = self.pair.server.grant(transfer_id, page, now=self.pair.now)
        elif self.pair.server.refuse(transfer_id, PoolExhaustedError("full"), now=self.pair.now):
            self.conclude(received, "refused")

    @precondition(lambda self: any(s.may_touch and s.request is Fetched and not s.taken for s in self.sent.values()))
    @rule(which=st.integers(0, 11))
    def take(self, which: int) -> None:
        pulls = [i for i, s in self.sent.items() if s.may_touch and s.request is Fetched and not s.taken]
        transfer_id = self.pick(pulls, which)
        take = Take(page_size=1, head_offset=0, num_heads=1)
        taken = self.pair.client.take(transfer_id, take, now=self.pair.now)
        assert taken == (not self.sent[transfer_id].quiet_owed)
        self.sent[transfer_id].taken = taken

    @precondition(lambda self: any(r.num_sent is not None and r.holds_pages for r in self.received.values()))
    @rule(which=st.integers(0, 11), count=st.integers(1, NUM_DESCRIPTORS))
    def send_frames(self, which: int, count: int) -> None:
        taken = [i for i, r in self.received.items() if r.num_sent is not None and r.holds_pages]
        transfer_id = self.pick(taken, which)
        received, server, now = self.received[transfer_id], self.pair.server, self.pair.now
        assert received.num_sent is not None
        for index in range(received.num_sent, min(received.num_sent + count, NUM_DESCRIPTORS)):
            if server.tensor_data(transfer_id, index, 0, b"page", now=now):
                assert server.data_end(transfer_id, index, now=now)
                received.num_sent = index + 1

    @staticmethod
    def may_end(sent: Sent) -> bool:
        """Whether its client may say that it has written, or read, all there is."""
        return sent.may_touch and (not sent.taken or sent.quiet_owed or sent.num_came == NUM_DESCRIPTORS)

    @precondition(lambda self: any(s.may_touch and s.request is Offered for s in self.sent.values()))
    @rule(which=st.integers(0, 11), some=st.sets(st.integers(0, NUM_DESCRIPTORS - 1), min_size=1), order=orders)
    def end_some(self, which: int, some: set[int], order: Sequence[int]) -> None:
        """Some of a push, together, but never the last that is left."""
        transfer_id = self.pick([i for i, s in self.sent.items() if s.may_touch and s.request is Offered], which)
        to_end = self.sent[transfer_id].to_end
        ending = [index for index in order if index in some & to_end]
        if ending and len(ending) < len(to_end):
            self.say_ends(transfer_id, ending)

    def say_ends(self, transfer_id: int, indices: Sequence[int]) -> None:
        sent = self.sent[transfer_id]
        assert self.pair.client.data_end(transfer_id, *indices, now=self.pair.now) == (not sent.quiet_owed)
        if not sent.quiet_owed:
            sent.to_end.difference_update(indices)

    @precondition(lambda self: any(map(self.may_end, self.sent.values())))
    @rule(which=st.integers(0, 11), order=orders, together=st.integers(1, NUM_DESCRIPTORS))
    def touch_all(self, which: int, order: Sequence[int] = range(NUM_DESCRIPTORS), together: int = 2) -> None:
        transfer_id = self.pick([i for i, s in self.sent.items() if self.may_end(s)], which)
        sent = self.sent[transfer_id]
        client, now = self.pair.client, self.pair.now
        if sent.request is Fetched:
            assert client.read_end(transfer_id, now=now) == (not sent.quiet_owed)
        elif sent.request is Reserved:
            commit = commit_like(Offer(key="k", deadline_s=1, **SNAPSHOT))  # type: ignore[arg-type]
            assert client.commit(transfer_id, commit, now=now) == (not sent.quiet_owed)
        else:
            ending = [index for index in order if index in sent.to_end]
            for start in range(0, len(ending), together):
                self.say_ends(transfer_id, ending[start : start + together])
        if not sent.quiet_owed:
            sent.ended, sent.may_touch = True, False

    @precondition(lambda self: any(s.outcome is None for s in self.sent.values()))
    @rule(which=st.integers(0, 11))
    def client_aborts(self, which: int) -> None:
        transfer_id = self.pick([i for i, s in self.sent.items() if s.outcome is None], which)
        if self.pair.client.abort(transfer_id, ErrorCode.ABORTED, "c", now=self.pair.now):
            self.sent[transfer_id].quiet_owed = True

    @precondition(lambda self: any(r.outcome is None for r in self.received.values()))
    @rule(which=st.integers(0, 11))
    def server_aborts(self, which: int) -> None:
        transfer_id = self.pick([i for i, r in self.received.items() if r.outcome is None], which)
        self.pair.server.abort(transfer_id, ErrorCode.ABORTED, "s", now=self.pair.now)
        self.received[transfer_id].waiting = False

    @precondition(lambda self: any(s.quiet_owed for s in self.sent.values()))
    @rule(which=st.integers(0, 11))
    def client_is_quiet(self, which: int) -> None:
        transfer_id = self.pick([i for i, s in self.sent.items() if s.quiet_owed], which)
        sent = self.sent[transfer_id]
        sent.quiet_owed = sent.may_touch = False  # In flight until here; only then the session is told.
        assert self.pair.client.quiet(transfer_id, now=self.pair.now)
        self.conclude(sent, "stopped")

    @precondition(lambda self: len(self.sent) < 12)
    @rule(
        kind=st.sampled_from(["offer", "fetch", "take", "reserve"]),
        faults=spoilt,
        stop_after=st.integers(1, 4),
        delay_s=st.sampled_from([0.0, 0.6]),
    )
    def go_far(self, kind: str, faults: list[str], stop_after: int, delay_s: float) -> None:
        """Much of a transfer in one rule, so that the later states are reached often, faults and all."""
        takes = kind == "take"
        getattr(self, "fetch" if takes else kind)(timeout_s=5.0)
        transfer_id = max(self.sent)
        self.faults = list(faults)
        for step in range(stop_after):
            self.pair.settle()
            self.react()
            self.pair.advance(delay_s)
            self.react()
            if step == 0 and transfer_id in self.received and self.received[transfer_id].waiting:
                self.answer([i for i, r in self.received.items() if r.waiting].index(transfer_id), True)
            sent, received = self.sent[transfer_id], self.received.get(transfer_id)
            if takes and step == 1 and sent.may_touch and not sent.quiet_owed:
                pulls = [i for i, s in self.sent.items() if s.may_touch and s.request is Fetched and not s.taken]
                self.take(pulls.index(transfer_id))
            elif takes and step == 2 and received is not None and received.num_sent is not None:
                taken = [i for i, r in self.received.items() if r.num_sent is not None and r.holds_pages]
                if transfer_id in taken:
                    self.send_frames(taken.index(transfer_id), NUM_DESCRIPTORS)
            elif step == (3 if takes else 1) and self.may_end(sent):
                self.touch_all([i for i, s in self.sent.items() if self.may_end(s)].index(transfer_id))
        self.faults = []

    # What must hold.

    @invariant()
    def pages_that_may_be_touched_are_held(self) -> None:
        for transfer_id, sent in self.sent.items():
            if sent.may_touch:
                assert self.received[transfer_id].holds_pages, "the server gave back pages the client may touch"

    @invariant()
    def both_sessions_live(self) -> None:
        assert self.pair.client.is_open
        assert self.pair.server.is_open

    def teardown(self) -> None:
        if not (self.pair.client.is_open and self.pair.server.is_open):
            return
        for _ in range(4):
            self.pair.advance(6.0)
            self.react()
            for transfer_id, received in self.received.items():
                if received.holds_pages:  # The lease is over: ABORT and QUIET of the client may both be lost.
                    self.pair.server.abort(transfer_id, ErrorCode.LEASE_EXPIRED, "lease", now=self.pair.now)
            for transfer_id, received in self.received.items():
                if received.waiting:
                    received.waiting = False
                    if self.pair.server.refuse(transfer_id, PoolExhaustedError("full"), now=self.pair.now):
                        self.conclude(received, "refused")
            for transfer_id, sent in self.sent.items():
                if sent.may_touch and not sent.quiet_owed:
                    sent.quiet_owed = self.pair.client.abort(transfer_id, ErrorCode.ABORTED, "end", now=self.pair.now)
                if sent.quiet_owed:
                    sent.quiet_owed = sent.may_touch = False
                    assert self.pair.client.quiet(transfer_id, now=self.pair.now)
                    self.conclude(sent, "stopped")
        self.pair.advance(6.0)
        self.react()
        assert self.pair.num_open("client") == 0
        assert self.pair.num_open("server") == 0
        assert all(sent.outcome for sent in self.sent.values())
        assert all(received.outcome for received in self.received.values())
        assert not any(received.holds_pages for received in self.received.values())


SessionMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSessionMachine = SessionMachine.TestCase
