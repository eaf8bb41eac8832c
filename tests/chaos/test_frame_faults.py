"""Which message a rule strikes, and what then becomes of it and of its neighbours: no socket."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma import ConfigError
from hurray_rdma.control import MessageType
from hurray_rdma.testing.chaos import Action, Direction, FaultLine, Frame, FrameCutter, Rule
from hurray_rdma.testing.chaos.faults import Close, Forward, Later, Pause, Step

TO_SERVER, TO_CLIENT = Direction.TO_SERVER, Direction.TO_CLIENT


def frame(kind: int, payload: bytes = b"", stream_id: int = 1) -> Frame:
    return Frame(kind, stream_id, struct.pack("<III", kind, stream_id, len(payload)) + payload)


A, B, C = frame(MessageType.OFFER, b"aaaa"), frame(MessageType.PING), frame(MessageType.QUIET, b"c")


def rule(action: Action, kind: MessageType = MessageType.OFFER, **settings: object) -> Rule:
    return Rule(action=action, kind=kind, direction=TO_SERVER, **settings)  # type: ignore[arg-type]


def steps(line: FaultLine, *frames: Frame) -> list[Step]:
    return [step for each in frames for step in line.push(each)]


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=40)), max_size=6), st.data())
def test_frames_are_cut_alike_however_the_stream_is_split(
    messages: list[tuple[int, bytes]], data: st.DataObject
) -> None:
    sent = [frame(kind, payload, stream_id=7) for kind, payload in messages]
    stream = b"".join(each.data for each in sent)
    cutter, got, at = FrameCutter(), [], 0
    while at < len(stream):
        step = data.draw(st.integers(1, len(stream) - at))
        got += cutter.feed(stream[at : at + step])
        at += step
    assert got == sent
    assert cutter.rest == b""


def test_rest_is_what_is_not_whole_yet() -> None:
    cutter = FrameCutter()
    assert cutter.feed(A.data + B.data[:5]) == [A]
    assert cutter.rest == B.data[:5]
    assert cutter.feed(B.data[5:]) == [B]


def test_without_rules_everything_passes_in_order() -> None:
    assert steps(FaultLine(TO_SERVER, []), A, B, C) == [Forward(A.data), Forward(B.data), Forward(C.data)]


@pytest.mark.parametrize(
    ("action", "settings", "expected"),
    [
        (Action.DROP, {}, [Forward(B.data)]),
        (Action.DELAY, {"seconds": 0.5}, [Later(0.5, A.data), Forward(B.data)]),
        (Action.DUPLICATE, {}, [Forward(A.data), Forward(A.data), Forward(B.data)]),
        (Action.REORDER, {}, [Forward(B.data), Forward(A.data)]),
        (Action.TRUNCATE, {"keep_nbytes": 13}, [Forward(A.data[:13]), Forward(B.data)]),
        (Action.TRUNCATE, {"keep_nbytes": 999}, [Forward(A.data[:15]), Forward(B.data)]),
        (Action.CUT, {"keep_nbytes": 3}, [Forward(A.data[:3]), Close(), Forward(B.data)]),
        (Action.STALL, {"seconds": 2}, [Pause(2), Forward(A.data), Forward(B.data)]),
    ],
)
def test_what_an_action_does_to_its_message_and_the_next(
    action: Action, settings: dict[str, object], expected: list[Step]
) -> None:
    assert steps(FaultLine(TO_SERVER, [rule(action, **settings)]), A, B) == expected


def test_a_rule_strikes_the_nth_of_its_kind_and_direction_once() -> None:
    drop = rule(Action.DROP, nth=2)
    there, back = FaultLine(TO_SERVER, [drop]), FaultLine(TO_CLIENT, [drop])
    assert steps(there, B, A) == [Forward(B.data), Forward(A.data)]
    assert steps(back, A, A) == [Forward(A.data)] * 2, "another direction"
    assert (drop.num_seen, drop.fired) == (1, False)
    assert steps(there, A) == []
    assert drop.fired
    assert steps(there, A, A) == [Forward(A.data)] * 2, "only once"


def test_a_rule_counts_over_connections() -> None:
    drop = rule(Action.DROP, nth=2)
    rules = [drop]
    assert steps(FaultLine(TO_SERVER, rules), A) == [Forward(A.data)]
    assert steps(FaultLine(TO_SERVER, rules), A) == []


def test_the_first_rule_that_takes_a_message_has_it_and_every_rule_counts_it() -> None:
    first, second = rule(Action.DUPLICATE), rule(Action.DROP, nth=2)
    line = FaultLine(TO_SERVER, [first, second])
    assert steps(line, A) == [Forward(A.data)] * 2
    assert steps(line, A) == [], "the second in line for the second rule"


def test_a_held_message_waits_for_the_next_of_any_kind() -> None:
    line = FaultLine(TO_SERVER, [rule(Action.REORDER), rule(Action.DROP, MessageType.PING)])
    assert steps(line, A) == []
    assert steps(line, B) == [Forward(A.data)], "the next one is dropped, and still is the next"
    assert steps(line, C) == [Forward(C.data)]


@pytest.mark.parametrize("settings", [{"nth": 0}, {"seconds": -1}, {"keep_nbytes": -1}])
def test_a_rule_that_means_nothing_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        rule(Action.DROP, **settings)
