"""CUDA streams as far as no device is needed: whose handle a stream is, when events are asked, what gates write."""

from __future__ import annotations

import itertools
import queue
import threading

import pytest

from hurray_rdma.errors import ConfigError, HurrayError, TransportError
from hurray_rdma.transport import streams
from hurray_rdma.transport.cuda import Trait
from hurray_rdma.transport.streams import Gate, Gates, StreamWatch, stream_device, stream_handle
from tests.transport.recorded import DEVICE_ADDRESS, RecordedDriver


class Cupy:
    ptr = 11


class Torch:
    cuda_stream = 12


class CudaCore:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 13


def test_streams_of_all_libraries_are_handles() -> None:
    assert [stream_handle(each) for each in (Cupy(), Torch(), CudaCore(), 14, 0)] == [11, 12, 13, 14, 0]
    for wrong in (object(), "stream", -1, True, 1.5):
        with pytest.raises(ConfigError, match="must be a CUDA stream"):
            stream_handle(wrong)


def test_the_per_thread_default_stream_is_refused() -> None:
    with pytest.raises(ConfigError, match="per-thread default stream"):
        stream_handle(2)


def test_a_stream_on_host_memory_tells_its_gpu() -> None:
    stream = Cupy()
    with pytest.raises(ConfigError, match="must tell its GPU"):
        stream_device(stream)
    stream.device_id = 3  # type: ignore[attr-defined]
    assert stream_device(stream) == 3


def told_of(driver: RecordedDriver, count: int = 1) -> list[HurrayError | None]:
    watch, told = StreamWatch(driver), queue.SimpleQueue[HurrayError | None]()
    for number in range(count):
        watch.mark(20 + number, index=3, told=told.put)
    return [told.get(timeout=10) for _ in range(count)]


def test_the_event_is_recorded_at_once_in_the_context_of_the_device() -> None:
    driver = RecordedDriver(passed_after=5)
    assert told_of(driver) == [None]
    assert driver.calls[0] == ("record", 20, 3)
    assert driver.calls[1:] == [("destroy", 101)]
    assert driver.asked == 6
    assert driver.context == []


def test_many_streams_are_watched_together() -> None:
    assert told_of(RecordedDriver(passed_after=20), count=8) == [None] * 8


def test_what_has_passed_is_not_looked_for_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Watched(streams._Watched):
        __hash__ = object.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return self is other

    monkeypatch.setattr(streams, "_Watched", Watched)
    driver, told = RecordedDriver(passed_after=1 << 60), queue.SimpleQueue[HurrayError | None]()
    watch = StreamWatch(driver)
    for number in range(200):
        watch.mark(number + 20, index=3, told=told.put)
    driver.passed_after = 0  # all of them at once
    for _ in range(200):
        assert told.get(timeout=10) is None
    assert compared < 200


def test_failed_kernels_are_told_and_end_the_watch() -> None:
    (error,) = told_of(RecordedDriver(fails=True))
    assert isinstance(error, TransportError)
    assert "illegal memory access" in str(error)


def test_the_thread_ends_with_the_last_event_and_starts_again() -> None:
    driver = RecordedDriver()
    watch, told = StreamWatch(driver), queue.SimpleQueue[HurrayError | None]()
    others = set(threading.enumerate())
    for _ in range(3):
        watch.mark(1, index=0, told=told.put)
        assert told.get(timeout=10) is None
        for thread in set(threading.enumerate()) - others:
            if thread.name == "hurray-streams":
                thread.join(timeout=10)
                assert not thread.is_alive()


def made(gates: Gates, *, index: int) -> Gate:
    while (gate := gates.make()) is None:
        gates.reserve(index=index)
    return gate


def test_a_gate_lets_streams_wait_for_a_word_until_it_is_opened() -> None:
    driver = RecordedDriver()
    gate = made(Gates(driver), index=2)
    gate.wait(7, index=2)
    (call,) = driver.calls
    kind, stream, address, value, context = call
    assert (kind, stream, value, context) == ("wait", 7, 1, 2)
    assert isinstance(address, int)
    place = (address - DEVICE_ADDRESS) // 4
    assert driver.words[0].host[place] == 0
    gate.open()
    gate.open()
    assert driver.words[0].host[place] == 1
    gate.wait(7, index=2)
    assert len(driver.calls) == 1, "nothing to wait for any more"


@pytest.mark.parametrize(("ordering", "can", "flushes"), [(0, 1, 2), (0, 0, 0), (100, 1, 0)])
def test_a_stream_that_waits_flushes_where_its_gpu_can_and_has_to(ordering: int, can: int, flushes: int) -> None:
    driver = RecordedDriver(traits={Trait.WRITES_ORDERING: ordering, Trait.STREAMS_FLUSH: can})
    gates = Gates(driver)
    for _ in range(2):
        made(gates, index=1).wait(7, index=1)
    assert len(driver.calls) == 2
    assert driver.flushed_waits == flushes


def test_words_are_used_again_with_the_next_value() -> None:
    driver, count = RecordedDriver(), streams._WORDS_AT_A_TIME + 500
    gates = Gates(driver)
    values: list[dict[object, object]] = []
    for _ in range(3):
        closed = [made(gates, index=0) for _ in range(count)]
        for gate in closed:
            gate.wait(1, index=0)
        waits = driver.calls[-count:]
        assert len({call[2] for call in waits}) == count, "no two closed gates share a word"
        values.append({call[2]: call[3] for call in waits})
        for gate in closed:
            gate.open()
    assert len(driver.words) == 2
    assert set(values[0].values()) == {1}
    for before, after in itertools.pairwise(values):
        assert all(after[word] == value + 1 for word, value in before.items() if word in after)  # type: ignore[operator]


def test_a_word_that_was_used_four_billion_times_begins_anew() -> None:
    driver = RecordedDriver()
    gates = Gates(driver)
    made(gates, index=0).open()
    place, _ = gates._free.pop()
    gates._free.append((place, 2**32 - 1))
    gate = made(gates, index=0)
    gate.wait(1, index=0)
    assert driver.calls[-1][3] == 0
    gate.open()
    assert driver.words[0].host[place] == 0


class FullQueue(RecordedDriver):
    """Calls on streams block until there is room."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.room = threading.Event(), threading.Event()

    def wait_word(self, stream: int, address: int, value: int, *, flush: bool) -> None:
        self.blocks.set()
        assert self.room.wait(10)
        super().wait_word(stream, address, value, flush=flush)


def test_gates_are_made_and_opened_while_cuda_blocks_on_a_full_stream() -> None:
    driver = FullQueue()
    gates = Gates(driver)
    gate = made(gates, index=0)
    waiting = threading.Thread(target=gate.wait, args=(1,), kwargs={"index": 0})
    waiting.start()
    assert driver.blocks.wait(10)
    made(gates, index=0).open()
    gate.open()
    assert sum(driver.words[0].host) == 2, "both are open"
    driver.room.set()
    waiting.join(timeout=10)
    assert not waiting.is_alive()


def test_a_stream_that_captures_a_graph_is_refused() -> None:
    driver = RecordedDriver(capturing={9})
    with pytest.raises(ConfigError, match="captures a graph"):
        StreamWatch(driver).mark(9, index=0, told=lambda _: None)
    gate = made(Gates(driver), index=0)
    with pytest.raises(ConfigError, match="captures a graph"):
        gate.wait(9, index=0)
    assert driver.calls == []


def test_a_handle_of_a_stream_on_another_gpu_is_refused() -> None:
    driver = RecordedDriver(devices={9: 1})
    with pytest.raises(ConfigError, match="is on cuda:1, its pool on cuda:0"):
        StreamWatch(driver).mark(9, index=0, told=lambda _: None)
    with pytest.raises(ConfigError, match="is on cuda:1, its pool on cuda:0"):
        made(Gates(driver), index=0).wait(9, index=0)
    assert driver.calls == []
    made(Gates(driver), index=1).wait(9, index=1)


def test_nobody_is_told_twice_when_a_watch_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    told = queue.SimpleQueue[tuple[str, HurrayError | None]]()

    def raises(error: HurrayError | None) -> None:
        told.put(("first", error))
        raise OSError("what nobody has thought of")

    driver = RecordedDriver(passed_after=1 << 60)
    watch, raised = StreamWatch(driver), queue.SimpleQueue[object]()
    monkeypatch.setattr(threading, "excepthook", raised.put)
    watch.mark(1, index=0, told=raises)
    watch.mark(3, index=0, told=lambda error: told.put(("second", error)))
    driver.passed_after = 0
    raised.get(timeout=10)
    heard = dict(told.get(timeout=10) for _ in range(2))
    assert set(heard) == {"first", "second"}
    assert heard["first"] is None
    assert heard["second"] is None or "watched no more" in str(heard["second"])
    assert told.empty()


def test_a_watch_that_cannot_go_on_says_so_and_the_next_mark_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(event: int) -> bool:
        raise OSError("what nobody has thought of")

    driver, told = RecordedDriver(), queue.SimpleQueue[HurrayError | None]()
    watch, raised = StreamWatch(driver), queue.SimpleQueue[object]()
    with monkeypatch.context() as worse:
        worse.setattr(threading, "excepthook", raised.put)
        worse.setattr(driver, "passed", broken)
        watch.mark(1, index=0, told=told.put)
        assert "watched no more: what nobody has thought of" in str(told.get(timeout=10))
        assert raised.get(timeout=10), "and the thread ends with it"
    watch.mark(1, index=0, told=told.put)
    assert told.get(timeout=10) is None


def test_a_stream_on_another_gpu_than_its_pool_is_refused() -> None:
    stream = Cupy()
    assert stream_device(stream, expected=2) == 2
    stream.device_id = 3  # type: ignore[attr-defined]
    assert stream_device(stream, expected=3) == 3
    with pytest.raises(ConfigError, match="is on cuda:3, its pool on cuda:2"):
        stream_device(stream, expected=2)
