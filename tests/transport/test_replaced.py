"""Memory of the caller that is replaced, in place, by such as peers on this host can map."""

from __future__ import annotations

import ctypes
import mmap
import tempfile

import numpy as np
import pytest

from hurray_rdma.cache import CacheSpec, PagePool
from hurray_rdma.errors import ConfigError, RegistrationError
from hurray_rdma.transport import Context, default_context
from hurray_rdma.transport.context import mapping_kind

SKIP, NBYTES, REST = 100, (65 << 20) + 5, 77
"""Neither end is that of a page; more than is replaced at once."""


def private_memory(nbytes: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


def test_content_and_addresses_stay_and_what_is_written_is_seen_on_both_sides() -> None:
    memory = private_memory(SKIP + NBYTES + REST)
    memory[...] = np.resize(np.arange(251, dtype=np.uint8), len(memory))
    before = memory.copy()
    inside = memory[SKIP : SKIP + NBYTES]
    region = default_context().replace(inside.ctypes.data, NBYTES, owner=inside)
    assert (region.allocated, region.replaced, region.nbytes) == (True, True, NBYTES)
    assert region.seen_address == inside.ctypes.data
    assert region.remote().remote_addr == region.address != region.seen_address
    assert mapping_kind(inside.ctypes.data) == mapping_kind(region.address) != "private"
    np.testing.assert_array_equal(memory, before, "what is beside it, too")
    peer = region.array()  # where a peer writes
    np.testing.assert_array_equal(peer, inside)
    peer[::4096] = 7
    inside[1::4096] = 9
    np.testing.assert_array_equal(peer, inside)
    before[SKIP : SKIP + NBYTES : 4096], before[SKIP + 1 : SKIP + NBYTES : 4096] = 7, 9
    del peer
    region.close()
    np.testing.assert_array_equal(memory, before)
    memory[...] = 1  # its owner uses it on
    assert mapping_kind(inside.ctypes.data) != "private", "nor does it become ordinary memory again"


def test_renewed_it_is_where_it_was_and_the_former_pages_are_not() -> None:
    memory = private_memory(SKIP + 9000)
    inside = memory[SKIP:]
    inside[...] = 5
    region = default_context().replace(inside.ctypes.data, inside.nbytes, owner=inside)
    former = region.array()
    region.renew()
    assert region.key_revoked
    former[:10] = 6
    np.testing.assert_array_equal(inside, 5, "a former mapping reaches it")
    region.array()[:10] = 8
    np.testing.assert_array_equal(inside[:12], [8] * 10 + [5, 5])
    del former
    region.close()


def test_memory_that_is_not_private_stays_as_it_is() -> None:
    with tempfile.TemporaryFile() as file:
        file.write(bytes(8192))
        file.flush()
        of_a_file = np.frombuffer(mmap.mmap(file.fileno(), 8192, flags=mmap.MAP_PRIVATE), np.uint8)
        shared = np.frombuffer(mmap.mmap(-1, 8192), np.uint8)
        for memory in (of_a_file, shared):
            with pytest.raises(RegistrationError, match="is not private memory"):
                default_context().replace(memory.ctypes.data, memory.nbytes, owner=memory)
            assert not memory.any()
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    with pytest.raises(RegistrationError, match="is not private memory"):  # of the heap
        default_context().replace(libc.sbrk(0) - 16, 16, owner=None)


def test_without_shared_memory_of_ucx_it_stays_as_it_is() -> None:
    memory = private_memory(8192)
    memory[...] = 3
    with pytest.raises(RegistrationError, match="UCX allocates none"):
        Context({"TLS": "tcp"}).replace(memory.ctypes.data, memory.nbytes, owner=memory)
    assert mapping_kind(memory.ctypes.data) == "private"
    np.testing.assert_array_equal(memory, 3)


def test_a_mappable_pool_is_over_the_callers_arrays() -> None:
    spec = CacheSpec(num_layers=2, num_heads=3, head_dim=8, page_size=4, dtype="float16", roles=("fused",))
    whole = private_memory(2 * 50 * 4 * 3 * 8 * 2 + 64)
    layers = whole[32:-32].view(np.float16).reshape(2, 50, 4, 3, 8)  # of one allocation, as vLLM's are
    layers[...] = np.arange(50, dtype=np.float16)[:, None, None, None]
    with PagePool.from_arrays(spec, {"fused": list(layers)}, mappable=True) as pool:
        (region,) = pool.regions
        assert region.allocated
        assert (layers[1, 7] == 7).all()
        layers[1, 7] = 70
        segment = pool.segment("fused", 1)
        start = segment.offset_nbytes + 7 * segment.page_stride_nbytes
        seen = region.array()[start : start + 4 * 3 * 8 * 2].view(np.float16)
        assert (seen == 70).all()
        del seen


def test_what_is_on_a_gpu_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CacheSpec(num_layers=1, num_heads=1, head_dim=8, page_size=4, dtype="float16", roles=("fused",))
    checked = PagePool.from_arrays.__globals__["checked_views"]

    def on_a_gpu(*arguments: object) -> object:
        from dataclasses import replace

        return tuple(replace(view, device="cuda:0") for view in checked(*arguments))

    monkeypatch.setitem(PagePool.from_arrays.__globals__, "checked_views", on_a_gpu)
    with pytest.raises(ConfigError, match="host memory"):
        PagePool.from_arrays(spec, {"fused": [np.zeros((2, 4, 1, 8), np.float16)]}, mappable=True)
