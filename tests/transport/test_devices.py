"""What memory on a device must be, by what the driver says of it; no device is needed."""

from __future__ import annotations

import pytest

from hurray_rdma.errors import ConfigError, RegistrationError
from hurray_rdma.transport.cuda import MemoryType, Pointer, Trait
from hurray_rdma.transport.devices import (
    Backing,
    check_device_memory,
    device_index,
    flushed_by_streams,
    host_backing,
    missing_flush,
    orders_writes,
)
from tests.transport.recorded import RecordedDriver

PLAIN = Pointer(MemoryType.DEVICE, 1)
GPU_DIRECT = {Trait.GPU_DIRECT_RDMA: 1}


def check(first: Pointer | None, last: Pointer | None, traits: dict[Trait, int] | None = None) -> Backing:
    pointers = {address: each for address, each in ((4096, first), (8191, last)) if each is not None}
    driver = RecordedDriver(pointers=pointers, traits=traits or GPU_DIRECT)
    return check_device_memory(driver, 4096, 4096, index=1)


def test_memory_of_the_device_is_taken() -> None:
    assert check(PLAIN, PLAIN) is Backing.PLAIN
    unified = Pointer(MemoryType.UNIFIED, 1)
    assert check(unified, unified) is Backing.PLAIN


@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        (None, PLAIN, "address = '0x1000': CUDA knows no device memory there"),
        (PLAIN, None, "address = '0x1fff': CUDA knows no device memory there"),
        (Pointer(MemoryType.HOST, 1), PLAIN, "CUDA knows no device memory there, but it was said to be on cuda:1"),
        (Pointer(MemoryType.DEVICE, 0), PLAIN, "is on cuda:0, but was said to be on cuda:1"),
        (PLAIN, Pointer(MemoryType.DEVICE, 2), "address = '0x1fff': is on cuda:2"),
        (Pointer(MemoryType.DEVICE, 1, managed=True), PLAIN, r"is managed memory.*cudaMalloc"),
        (
            Pointer(MemoryType.DEVICE, 1, rdma_capable=False, in_context=False),
            PLAIN,
            r"without the flag for GPUDirect RDMA.*expandable_segments",
        ),
        (PLAIN, Pointer(MemoryType.DEVICE, 1, managed=True), "is managed memory"),
        (
            PLAIN,
            Pointer(MemoryType.DEVICE, 1, rdma_capable=False, in_context=False),
            r"address = '0x1fff': was made without the flag",
        ),
    ],
)
def test_other_memory_is_refused_with_the_way_out(first: Pointer | None, last: Pointer | None, text: str) -> None:
    with pytest.raises(RegistrationError, match=text):
        check(first, last)


def test_managed_memory_is_taken_where_devices_read_the_hosts_page_tables() -> None:
    managed = Pointer(MemoryType.DEVICE, 1, managed=True)
    assert check(managed, managed, GPU_DIRECT | {Trait.USES_HOST_PAGE_TABLES: 1}) is Backing.MANAGED


def test_what_gpudirect_could_not_reach_anyway_is_not_asked_for() -> None:
    virtual = Pointer(MemoryType.DEVICE, 1, rdma_capable=False, in_context=False)
    assert check(virtual, virtual, {Trait.GPU_DIRECT_RDMA: 0}) is Backing.PLAIN
    # Drivers have said so of plain memory, too; that it was allocated in a context tells.
    allocated = Pointer(MemoryType.DEVICE, 1, rdma_capable=False)
    assert check(allocated, allocated) is Backing.PLAIN


def test_page_locked_memory_is_told_from_pageable() -> None:
    driver = RecordedDriver(pointers={4096: Pointer(MemoryType.HOST, 0)})
    assert host_backing(driver, 4096) is Backing.PINNED
    assert host_backing(driver, 8192) is Backing.PLAIN


@pytest.mark.parametrize(
    ("traits", "scope", "flushed", "orders"),
    [
        ((0, 1, 0), 100, False, True),
        ((0, 3, 1), 100, True, True),
        ((0, 2, 1), None, True, True),
        ((0, 2, 0), None, False, False),
        ((0, 0, 0), None, False, False),
        ((100, 1, 1), None, False, True),
        ((200, 1, 0), None, False, True),
    ],
)
def test_remote_writes_are_flushed_where_the_device_does_not_order_them(
    traits: tuple[int, int, int], scope: int | None, flushed: bool, orders: bool
) -> None:
    names = (Trait.WRITES_ORDERING, Trait.FLUSH_OPTIONS, Trait.STREAMS_FLUSH)
    driver = RecordedDriver(traits=dict(zip(names, traits, strict=True)))
    assert missing_flush(driver, 0) == scope
    assert flushed_by_streams(driver, 0) is flushed
    assert orders_writes(driver, 0) is orders


def test_devices_have_a_kind_and_a_number() -> None:
    assert device_index("cpu") is None
    assert device_index("cuda:12") == 12
    for wrong in ("cuda", "cuda:", "cuda:x", "gpu:0", "cpu:0", ""):
        with pytest.raises(ConfigError):
            device_index(wrong)
