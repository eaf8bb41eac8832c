"""Registration of device memory, pinned pools, and look-ups on the device. Needs a GPU with CuPy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, PagePool, RegistrationError, Snapshot
from hurray_rdma.bench.gpus import check_gpus
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import MemoryClass
from hurray_rdma.plan import check_table, entries_among, rewrite
from hurray_rdma.transport import Backing, Context, default_context
from hurray_rdma.transport.cuda import MemoryType, Trait, driver
from tests.engine.gpus import SPEC, cupy_or_skip, to_host, torch_or_skip

pytestmark = pytest.mark.gpu
BITS = CacheSpec(num_layers=1, num_heads=2, head_dim=64, page_size=16, dtype="bfloat16", roles=("fused",))
SHAPE = (8, 16, 2, 64)


@pytest.fixture
def cupy() -> Any:
    return cupy_or_skip()


def over(cupy: Any, memory: Any) -> Any:
    return cupy.ndarray(SHAPE, np.uint16, memory)


NBYTES = int(np.prod(SHAPE)) * 2


def test_the_driver_says_what_memory_is(cupy: Any) -> None:
    array, host = cupy.zeros(1024, np.uint8), np.zeros(1024, np.uint8)
    pointer = driver().pointer(array.data.ptr)
    assert pointer is not None
    assert (pointer.memory_type, pointer.device_index, pointer.managed) == (MemoryType.DEVICE, 0, False)
    assert driver().pointer(host.ctypes.data) is None
    assert driver().trait(0, Trait.WRITES_ORDERING) in (0, 100, 200)
    assert driver().num_devices >= 1
    assert driver().version >= (12, 0)
    assert driver().pci_address(0).count(":") == 2


def test_ucx_moves_the_memory_of_gpus() -> None:
    cupy_or_skip()
    assert default_context().device_kinds == ("cpu", "cuda")


def test_cupy_arrays_are_pools_in_place(cupy: Any) -> None:
    array = cupy.zeros(SHAPE, np.uint16)
    with PagePool.from_arrays(BITS, {"fused": [array]}) as pool:
        assert (pool.device, pool.backing) == ("cuda:0", Backing.PLAIN)
        assert pool.pages("fused", 0) is array
        assert pool.regions[0].address == array.data.ptr
        pool.make_visible()


def test_torch_tensors_are_pools_in_place(cupy: Any) -> None:
    torch = torch_or_skip()
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16, device="cuda:0")
    with PagePool.from_arrays(BITS, {"fused": [tensor]}) as pool:
        assert (pool.device, pool.regions[0].address) == ("cuda:0", tensor.data_ptr())


def test_registration_needs_no_context_of_the_callers(cupy: Any) -> None:
    array, made = cupy.zeros(SHAPE, np.uint16), []
    thread = threading.Thread(target=lambda: made.append(PagePool.from_arrays(BITS, {"fused": [array]})))
    thread.start()
    thread.join()
    (pool,) = made
    pool.renew()
    pool.close()


def test_managed_memory_is_named_where_gpudirect_cannot_register_it(cupy: Any) -> None:
    array = over(cupy, cupy.cuda.malloc_managed(NBYTES))
    if driver().trait(0, Trait.USES_HOST_PAGE_TABLES):
        with PagePool.from_arrays(BITS, {"fused": [array]}) as pool:
            snapshot = Snapshot.from_block_tables(pool, [[1]], seq_lens=[3])
            assert snapshot.descriptors()[0].buffers[0].memory_class is MemoryClass.UNIFIED
        return
    with pytest.raises(RegistrationError, match="is managed memory"):
        PagePool.from_arrays(BITS, {"fused": [array]})


def test_stream_ordered_pools_are_named(cupy: Any) -> None:
    array = over(cupy, cupy.cuda.malloc_async(NBYTES))
    cupy.cuda.get_current_stream().synchronize()
    with pytest.raises(RegistrationError, match=r"GPUDirect RDMA|stream-ordered pools"):
        PagePool.from_arrays(BITS, {"fused": [array]})


def test_host_memory_is_not_taken_for_a_gpus(cupy: Any) -> None:
    array = np.zeros(4096, np.uint8)
    with pytest.raises(RegistrationError, match="CUDA knows no device memory"):
        Context().register(array.ctypes.data, array.nbytes, owner=array, device="cuda:0")


def test_a_pinned_pool_stays_pinned_when_it_is_renewed(cupy: Any) -> None:
    with PagePool.allocate(SPEC, 16, pinned=True) as pool:
        assert pool.backing is Backing.PINNED
        view = pool.pages("key", 0)
        view[...] = 3
        for _ in range(2):
            pointer = driver().pointer(pool.regions[0].seen_address)
            assert pointer is not None
            assert pointer.memory_type is MemoryType.HOST
            pool.renew()
        assert (view == 3).all()
        snapshot = Snapshot.from_block_tables(pool, [[1]], seq_lens=[3])
        assert snapshot.descriptors()[0].buffers[0].memory_class is MemoryClass.HOST_PINNED


def test_tables_are_checked_and_rewritten_on_the_device_as_on_the_host(cupy: Any) -> None:
    random = np.random.default_rng(1)
    table = random.integers(0, 10_000, (64, 300)).astype(np.int32)
    src, dst = np.arange(10_000, dtype=np.uint32), random.permutation(10_000).astype(np.uint32)
    there = cupy.asarray(table)
    check_table(there, num_pages=10_000)
    result = rewrite(there, src, dst, num_pages=10_000)
    assert result.dtype == table.dtype
    assert (to_host(result) == rewrite(table, src, dst, num_pages=10_000)).all()
    some = np.unique(table)[::3].astype(np.uint32)
    found = entries_among(there, some, num_pages=10_000)
    assert (to_host(found) == entries_among(table, some, num_pages=10_000)).all()
    table[5, 7] = 10_000
    for each in (table, cupy.asarray(table)):
        with pytest.raises(GeometryError, match=r"block_table\[1507\] = 10000"):
            check_table(each, num_pages=10_000)


def test_tables_of_torch_are_checked_and_rewritten_on_the_device_as_on_the_host(cupy: Any) -> None:
    torch = torch_or_skip()
    random = np.random.default_rng(3)
    table = random.integers(0, 1000, (8, 50)).astype(np.int32)
    src, dst = np.arange(1000, dtype=np.uint32), random.permutation(1000).astype(np.uint32)
    there = torch.from_numpy(table).to("cuda:0")
    check_table(there, num_pages=1000)
    result = rewrite(there, src, dst, num_pages=1000)
    assert (result.device.type, result.dtype) == ("cuda", torch.int32)
    assert (to_host(result) == rewrite(table, src, dst, num_pages=1000)).all()
    some = np.unique(table)[::2].astype(np.uint32)
    found = entries_among(there, some, num_pages=1000)
    assert (to_host(found) == entries_among(table, some, num_pages=1000)).all()


def test_the_doctor_has_a_finding_for_each_gpu(cupy: Any) -> None:
    findings = check_gpus({"cuda_copy", "cuda_ipc", "tcp"})
    assert [each.what for each in findings] == [f"GPU {index}" for index in range(driver().num_devices)]
