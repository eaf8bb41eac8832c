"""Pools of GPUs that are not there: memory of the host that is said to be a device's, everywhere but to UCX.

What an engine does for devices then runs as a whole, between real engines over real UCX; what CUDA and its transports
would do is not tested by it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, PagePool
from hurray_rdma.transport import Backing, Context
from tests.transport.recorded import RecordedDriver


class Device:
    """As of CuPy's arrays."""

    def __init__(self, index: int) -> None:
        self.id = index


class OnGpu:
    """An array of a library for GPUs."""

    def __init__(self, host: np.ndarray, index: int) -> None:
        self.host = host
        self.device = Device(index)
        self.dtype = host.dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        bits = self.host.view(np.uint16)
        return {"data": (bits.ctypes.data, False), "shape": bits.shape, "typestr": "<u2", "version": 3}


def pretended(driver: RecordedDriver, monkeypatch: pytest.MonkeyPatch, **options: str) -> Context:
    """A context to which memory of devices is the host's."""
    context = Context(options)
    context.__dict__["driver"] = driver  # in the place of the machine's
    context.device_kinds = ("cpu", "cuda")

    def map_device(context: Context, _: object, *span: int, index: int, owner: object) -> tuple[Any, Backing]:
        with driver.current(index):
            return context._map(*span, "cpu", owner), Backing.PLAIN

    monkeypatch.setattr(Context, "_map_device", map_device)
    return context


def gpu_pool(spec: CacheSpec, num_pages: int, index: int, context: Context) -> PagePool:
    """A pool on such a GPU, of 16-bit items."""
    shape, layers = (num_pages, *spec.page_shape), range(spec.num_layers)
    arrays = {role: [OnGpu(np.zeros(shape, spec.storage_dtype), index) for _ in layers] for role in spec.roles}
    return PagePool.from_arrays(spec, arrays, context=context)


def bits(pool: PagePool, role: str, layer: int) -> np.ndarray:
    """All pages, uint16 ``[num_pages, page_size, num_heads, head_dim]``, wherever they are."""
    pages = pool.pages(role, layer)
    host: np.ndarray = pages.host if isinstance(pages, OnGpu) else pages
    return host.view(np.uint16)
