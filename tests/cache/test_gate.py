"""The gate of a pool's memory: any number of moves at once, or one renewal, and nobody waits longer than was said."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import pytest

from hurray_rdma import DeadlineExceededError
from hurray_rdma.cache.gate import MemoryGate


@contextmanager
def inside(enter: Callable[[], AbstractContextManager[None]]) -> Iterator[threading.Event]:
    """A thread that stays inside until told to leave; the event tells that it is in."""
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with enter():
            entered.set()
            assert leave.wait(10)

    thread = threading.Thread(target=stay)
    thread.start()
    try:
        yield entered
    finally:
        leave.set()
        thread.join(10)
        assert not thread.is_alive()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_many_move_at_once_and_a_renewal_waits_for_the_last_of_them() -> None:
    gate = MemoryGate()
    with inside(lambda: gate.moving(timeout_s=5)) as one:
        assert one.wait(5)
        with inside(lambda: gate.moving(timeout_s=5)) as other:
            assert other.wait(5), "the second waited for the first"
            with pytest.raises(DeadlineExceededError, match="2 moves"), gate.renewal(timeout_s=0.02):
                pytest.fail("both are moving")
        with pytest.raises(DeadlineExceededError, match="1 moves"), gate.renewal(timeout_s=0.02):
            pytest.fail("one is moving")
    with gate.renewal(timeout_s=0):
        assert gate.renewing
    assert not gate.renewing


def test_a_renewal_that_waits_begins_when_the_last_move_ends_and_lets_none_begin_before_it() -> None:
    gate = MemoryGate()
    with inside(lambda: gate.moving(timeout_s=5)) as moving:
        assert moving.wait(5)
        renewing = inside(lambda: gate.renewal(timeout_s=5))
        renewed = renewing.__enter__()
        until(lambda: gate.renewing)
        with pytest.raises(DeadlineExceededError, match="registered anew"), gate.moving(timeout_s=0.02):
            pytest.fail("a renewal is waiting: further moves could keep it waiting for ever")
        assert not renewed.is_set()
    assert renewed.wait(5)
    with pytest.raises(DeadlineExceededError, match="registered anew"), gate.moving(timeout_s=0.02):
        pytest.fail("the memory is being replaced")
    with inside(lambda: gate.moving(timeout_s=5)) as late:
        assert not late.wait(0.03)
        renewing.__exit__(None, None, None)
        assert late.wait(5)


def test_who_must_not_wait_is_told_at_once_and_is_a_move_like_any_other() -> None:
    gate = MemoryGate()
    moving = gate.try_moving()
    assert moving is not None
    with pytest.raises(DeadlineExceededError, match="1 moves"), gate.renewal(timeout_s=0.02):
        pytest.fail("it has begun before its context is entered")
    with moving, pytest.raises(DeadlineExceededError, match="1 moves"), gate.renewal(timeout_s=0.02):
        pytest.fail("one is moving")
    with inside(lambda: gate.renewal(timeout_s=5)) as renewed:
        assert renewed.wait(5)
        assert gate.try_moving() is None
    with gate.renewal(timeout_s=0):
        pass


def test_a_renewal_that_waits_for_a_move_keeps_its_thread_from_no_further_one() -> None:
    """Which would wait for the renewal, and the renewal for it."""
    gate = MemoryGate()
    with contextlib.ExitStack() as stack:
        moving = gate.try_moving()
        assert moving is not None
        with moving:
            renewed = stack.enter_context(inside(lambda: gate.renewal(timeout_s=5)))
            until(lambda: gate.renewing)
            with gate.moving(timeout_s=0), gate.moving(timeout_s=0):
                assert not renewed.is_set()
            further = gate.try_moving()
            assert further is not None
            with further, ThreadPoolExecutor(1) as other:
                assert other.submit(gate.try_moving).result(5) is None, "one without a move lets the renewal go first"
            assert not renewed.is_set()
        assert renewed.wait(5)
        with pytest.raises(DeadlineExceededError, match="registered anew"), gate.moving(timeout_s=0):
            pytest.fail("all of them are over")


def test_one_renewal_at_a_time() -> None:
    gate = MemoryGate()
    with inside(lambda: gate.renewal(timeout_s=5)) as first:
        assert first.wait(5)
        with pytest.raises(DeadlineExceededError, match="renewed already"), gate.renewal(timeout_s=0.02):
            pytest.fail("another is under way")
        assert gate.renewing, "who came second has not ended the first"
    with gate.renewal(timeout_s=0):
        pass


def test_a_renewal_that_gave_up_keeps_nobody_out() -> None:
    gate = MemoryGate()
    with inside(lambda: gate.moving(timeout_s=5)) as moving:
        assert moving.wait(5)
        with pytest.raises(DeadlineExceededError), gate.renewal(timeout_s=0.05):
            pytest.fail("a move is under way")
        assert not gate.renewing
        with gate.moving(timeout_s=0):
            pass


def test_moves_and_renewals_that_fail_are_over() -> None:
    gate = MemoryGate()
    for enter in (gate.moving, gate.renewal):
        with pytest.raises(ZeroDivisionError), enter(timeout_s=0):
            raise ZeroDivisionError
    with gate.renewal(timeout_s=0):
        pass
    with gate.moving(timeout_s=0):
        pass


def test_no_move_ever_overlaps_a_renewal() -> None:
    gate = MemoryGate()
    lock = threading.Lock()
    moving, most_moving, renewals, wrong = 0, 0, 0, 0
    end = time.monotonic() + 0.3

    def move() -> None:
        nonlocal moving, most_moving
        while time.monotonic() < end:
            with gate.moving(timeout_s=5):
                with lock:
                    moving += 1
                    most_moving = max(most_moving, moving)
                time.sleep(0.0005)
                with lock:
                    moving -= 1

    def renew() -> None:
        nonlocal renewals, wrong
        while time.monotonic() < end:
            with gate.renewal(timeout_s=5):
                before = moving
                time.sleep(0.0005)
                wrong += before or moving
                renewals += 1

    threads = [threading.Thread(target=work) for work in (move, move, move, renew, renew)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert wrong == 0
    assert most_moving > 1
    assert renewals > 1
