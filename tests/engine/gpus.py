"""What tests on a GPU share. Importing it needs none."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, PagePool, Snapshot

SPEC = CacheSpec(num_layers=2, num_heads=16, head_dim=128, page_size=16, dtype="bfloat16")
"""Pages of 64 KiB, which UCX gives to the lanes of GPUs; smaller ones it may move otherwise."""


def cupy_or_skip() -> Any:
    """CuPy, if it is installed and there is a GPU."""
    cupy = pytest.importorskip("cupy")
    count = 0
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
        count = cupy.cuda.runtime.getDeviceCount()
    if count == 0:
        pytest.skip("there is no GPU")
    return cupy


def torch_or_skip() -> Any:
    """torch, if it is installed with CUDA and there is a GPU."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: there is none, or it was built without CUDA")
    return torch


def two_gpus_or_skip() -> Any:
    """CuPy, if there are two GPUs."""
    cupy = cupy_or_skip()
    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"there is {count} GPU, and pages go from one to another here")
    return cupy


SPIN = r"""
extern "C" __global__
void spin_then_fill(unsigned short *pages, long long count, unsigned short value, long long cycles) {
    long long start = clock64();
    while (clock64() - start < cycles) { }
    for (long long i = threadIdx.x; i < count; i += blockDim.x) pages[i] = value;
}
"""
TENTH_OF_A_SECOND = 200_000_000
"""In cycles of a GPU, about."""


def spinning_fill(cupy: Any) -> Callable[..., None]:
    """Fills an array with a value, after so many cycles, on CuPy's current stream. Loaded and compiled already."""
    kernel = cupy.RawKernel(SPIN, "spin_then_fill")

    def fill(array: Any, value: int, *, cycles: int = TENTH_OF_A_SECOND) -> None:
        kernel((1,), (256,), (array, np.int64(array.size), np.uint16(value), np.int64(cycles)))

    fill(cupy.zeros(1, np.uint16), 0, cycles=0)
    cupy.cuda.get_current_stream().synchronize()
    return fill


def to_host(array: Any) -> np.ndarray:
    if hasattr(array, "get"):
        return array.get()
    return array.cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)


def fill(pool: PagePool, seed: int) -> None:
    """Random bits, the same on every device."""
    random = np.random.default_rng(seed)
    for role, layer in pool.spec.tensors:
        pages = pool.pages(role, layer)
        bits = random.integers(0, 2**16, pages.shape, np.uint16)
        if isinstance(pages, np.ndarray):
            pages.view(np.uint16)[...] = bits
        else:
            pages.set(bits)
    if pool.device != "cpu":
        cupy_or_skip().cuda.Device(pool.device_index).synchronize()


def digest(snapshot: Snapshot) -> str:
    """Of every token, in the order of roles, layers, sequences."""
    whole = hashlib.sha256()
    for role, layer in snapshot.pool.spec.tensors:
        for seq in range(snapshot.num_seqs):
            whole.update(np.ascontiguousarray(to_host(snapshot.tokens(role, layer=layer, seq=seq))).tobytes())
    return whole.hexdigest()
