"""Regions on devices and pinned ones, with real memory of the host and a driver that writes down what it is asked."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from hurray_rdma import PagePool, Snapshot
from hurray_rdma.errors import RegistrationError, TransportError
from hurray_rdma.format import MemoryClass
from hurray_rdma.transport import Backing, Context, Region
from hurray_rdma.transport.binding import BoundContext, BoundWorker
from hurray_rdma.transport.cuda import MemoryType, Pointer, Trait
from tests.engine.gpus import SPEC
from tests.engine.pretended import OnGpu
from tests.transport.recorded import RecordedDriver


@pytest.fixture
def driver() -> RecordedDriver:
    return RecordedDriver()


@pytest.fixture
def context(driver: RecordedDriver) -> Context:
    context = Context()
    context.__dict__["driver"] = driver  # in the place of the machine's
    return context


def region_on(device: str, context: Context) -> Region:
    """Host memory that is said to be a device's: for what is decided by the name alone."""
    array = np.zeros(4096, np.uint8)
    host = context.register(array.ctypes.data, array.nbytes, owner=array)
    return Region(host.memory, device=device, context=context, allocated=False, owner=array)


def test_a_pinned_pool_is_pinned_from_its_making_to_its_end_and_anew_when_it_is_renewed(
    driver: RecordedDriver, context: Context
) -> None:
    pool = PagePool.allocate(SPEC, 4, pinned=True, context=context)
    (region,) = pool.regions
    pin, unpin = ("pin", region.seen_address, region.nbytes), ("unpin", region.seen_address)
    assert driver.calls == [pin]
    assert pool.backing is Backing.PINNED
    snapshot = Snapshot.from_block_tables(pool, [[1]], seq_lens=[3])
    assert {each.buffers[0].memory_class for each in snapshot.descriptors()} == {MemoryClass.HOST_PINNED}
    pool.renew()
    assert driver.calls == [pin, unpin, pin], "the pages that were pinned are replaced"
    pool.close()
    pool.close()
    assert driver.calls == [pin, unpin, pin, unpin]


def test_a_pool_that_is_not_pinned_asks_no_driver(driver: RecordedDriver, context: Context) -> None:
    with PagePool.allocate(SPEC, 4, context=context) as pool:
        pool.make_visible()
        pool.renew()
        assert pool.backing is Backing.PLAIN
        snapshot = Snapshot.from_block_tables(pool, [[1]], seq_lens=[3])
        assert snapshot.descriptors()[0].buffers[0].memory_class is MemoryClass.STANDARD
    assert driver.calls == []


def test_remote_writes_are_flushed_in_the_context_of_their_device(driver: RecordedDriver, context: Context) -> None:
    driver.traits = {Trait.WRITES_ORDERING: 0, Trait.FLUSH_OPTIONS: 1}
    region = region_on("cuda:1", context)
    region.make_visible()
    region.make_visible()
    assert driver.calls == [("flush", 100, 1)] * 2
    region.close()


def test_nothing_is_flushed_where_writes_are_in_order(driver: RecordedDriver, context: Context) -> None:
    driver.traits = {Trait.WRITES_ORDERING: 100, Trait.FLUSH_OPTIONS: 1}
    region = region_on("cuda:1", context)
    region.make_visible()
    assert driver.calls == []
    region.close()


def test_the_context_of_a_device_is_current_while_its_region_is_handed_over(
    driver: RecordedDriver, context: Context
) -> None:
    region, host = region_on("cuda:3", context), region_on("cpu", context)
    with region.current():
        assert driver.context == [3]
        with host.current():
            assert driver.context == [3]
    assert driver.context == []
    for each in (region, host):
        each.close()


def test_memory_that_ucx_has_pinned_is_pinned_anew_when_it_is_replaced(
    driver: RecordedDriver, context: Context
) -> None:
    region = context.allocate(1 << 20)
    context.device_kinds = ("cpu", "cuda")
    region.renew()
    assert driver.calls == [], "nobody has pinned it"
    driver.pointers[region.seen_address] = Pointer(MemoryType.HOST, 0)
    region.renew()
    assert driver.calls == [("unpin", region.seen_address), ("pin", region.seen_address, region.nbytes)]
    assert region.backing is Backing.PLAIN
    region.close()


def test_page_locking_has_a_context_in_threads_that_cuda_has_not_seen(driver: RecordedDriver, context: Context) -> None:
    with PagePool.allocate(SPEC, 4, pinned=True, context=context) as pool:
        context._device_index = 3
        thread = threading.Thread(target=pool.renew)
        thread.start()
        thread.join(timeout=10)
        assert pool.backing is Backing.PINNED
    assert driver.context == []


def test_a_key_counts_as_revoked_only_where_another_one_took_its_place(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = np.zeros(4096, np.uint8)
    region = context.register(array.ctypes.data, array.nbytes, owner=array)
    keys = iter((b"old", b"new", b"new", b"new"))
    monkeypatch.setattr(Region, "_packed_key", lambda _: next(keys))
    for revoked in (True, False):
        region.renew()
        assert region.key_revoked is revoked
    region.close()
    allocated = context.allocate(4096)
    monkeypatch.setattr(Region, "_packed_key", lambda _: b"same")
    allocated.renew()
    assert allocated.key_revoked, "its bytes are elsewhere"
    allocated.close()


def test_workers_that_are_open_get_the_context_of_the_first_device(driver: RecordedDriver, context: Context) -> None:
    worker = context.open_worker()
    worker.drain()
    assert driver.calls == []
    asked: list[int] = []
    current = driver.current
    driver.current = lambda index: asked.append(index) or current(index)  # type: ignore[method-assign, func-returns-value]
    context._adopt(2)
    context._adopt(3)
    later = context.open_worker()
    worker.drain()
    endpoint = worker.connect(later.address, timeout_s=10)
    endpoint.close()
    for each in (worker, later):
        each.close()
    assert driver.calls == [("adopt", 2)] * 2
    assert set(asked) == {2}
    worker.restart(lambda: driver.adopt(9))
    assert len(driver.calls) == 2, "it is closed"


def test_memory_of_a_device_is_looked_at_again_when_it_is_registered_anew(
    driver: RecordedDriver, context: Context
) -> None:
    region = region_on("cuda:1", context)
    with pytest.raises(RegistrationError, match="CUDA knows no device memory"):
        region.renew()
    assert region.num_renewals == 0
    assert driver.context == []
    region.close()


def test_zeros_of_a_device_are_made_once_and_anew_only_where_more_are_needed(
    driver: RecordedDriver, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def map_device(context: Context, _: object, *span: int, index: int, owner: object) -> tuple[object, Backing]:
        return context._map(*span, "cpu", owner), Backing.PLAIN

    monkeypatch.setattr(Context, "_map_device", map_device)
    small = context.zeros_on(2, 5000)
    assert (small.device, small.nbytes, small.address) == ("cuda:2", 1 << 20, ctypes.addressof(driver.zeros[0]))
    assert context.zeros_on(2, 1 << 20) is small
    large = context.zeros_on(2, (1 << 20) + 1)
    assert large.nbytes == 1 << 21
    assert context.zeros_on(2, 5000) is large
    other = context.zeros_on(3, 1)
    assert [call for call in driver.calls if call[0] == "zeros"] == [
        ("zeros", 1 << 20, 2),
        ("zeros", 1 << 21, 2),
        ("zeros", 1 << 20, 3),
    ]
    assert not small.closed, "somebody may read them yet"
    for each in (small, large, other):
        each.close()


def test_the_key_of_a_registration_is_asked_for_once(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = 0
    packed = Region._packed_key

    def counted(region: Region) -> bytes:
        nonlocal asked
        asked += 1
        return packed(region)

    monkeypatch.setattr(Region, "_packed_key", counted)
    array = np.zeros(4096, np.uint8)
    region = context.register(array.ctypes.data, array.nbytes, owner=array)
    first = region.remote()
    assert region.remote() == first
    assert asked == 1
    region.renew()
    asked = 0
    region.remote()
    assert asked == 0, "renewing asks for it"
    region.close()
    with pytest.raises(RegistrationError, match="closed"):
        region.remote()


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Between threads."""
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual_s)


@pytest.mark.usefixtures("frequent_switches")
def test_whose_a_region_is_can_be_asked_while_others_are_announced_and_closed(context: Context) -> None:
    first, *others = [context.allocate(4096) for _ in range(100)]
    known, asked = first.remote(), threading.Event()

    def announce() -> None:
        asked.wait(10)
        for _ in range(500):
            with context._announcing:
                context._announced.clear()
            for region in (first, *others):
                region.remote()
        for region in others:
            region.close()

    announcing = threading.Thread(target=announce)
    announcing.start()
    answers = []
    while announcing.is_alive():
        answers.append(context.owns(known))
        asked.set()
    announcing.join()
    assert answers[0] is True
    assert context.owns(known)
    first.close()
    assert not context.owns(known)


@pytest.mark.parametrize("there", [True, False], ids=["a driver", "no driver"])
def test_ucx_begins_in_the_context_of_the_gpu_that_is_used_first(
    there: bool, driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def the_driver() -> RecordedDriver:
        if not there:
            raise TransportError("there is no CUDA driver here")
        return driver

    begun: list[list[int]] = []

    class Noted(BoundContext):
        def __init__(self, options: Mapping[str, str]) -> None:
            begun.append(list(driver.context))
            super().__init__(options)

        def open_worker(self, on_start: Callable[[], None] | None = None) -> BoundWorker:
            begun.append(list(driver.context))
            return super().open_worker(on_start)

    monkeypatch.setattr("hurray_rdma.transport.context.driver", the_driver)
    monkeypatch.setattr("hurray_rdma.transport.context.BoundContext", Noted)
    context = Context(device_index=3)
    assert begun == [[3] * there]
    context._adopt(3)
    if there:
        context.open_worker().close()
        assert begun == [[3], [3]]
        assert driver.calls == [("adopt", 3)]
    Context()
    assert begun[-1] == []
    assert driver.context == []


def test_a_pool_of_a_gpu_begins_ucx_for_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    context = Context()
    monkeypatch.setattr(
        "hurray_rdma.transport.default_context", lambda *, device_index: asked.append(device_index) or context
    )
    shape = (4, *SPEC.page_shape)
    on_gpu = {role: [OnGpu(np.zeros(shape, SPEC.storage_dtype), 5) for _ in range(2)] for role in SPEC.roles}
    with pytest.raises(RegistrationError):
        PagePool.from_arrays(SPEC, on_gpu)
    PagePool.allocate(SPEC, 4).close()
    assert asked == [5, None]


def test_memory_is_pinned_in_the_context_of_a_gpu_that_is_in_use(
    driver: RecordedDriver, context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    monkeypatch.setattr(driver, "pin", lambda *_: seen.append(list(driver.context)))
    driver.active = 2
    context.allocate(4096, pinned=True).close()
    context._adopt(5)
    context.allocate(4096, pinned=True).close()
    assert seen == [[2], [5]]
