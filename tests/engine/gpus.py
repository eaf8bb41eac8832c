"""What tests on a GPU share. Importing it needs none."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import numpy as np
import pytest

from hurray_rdma import CacheSpec, PagePool, Snapshot

SPEC = CacheSpec(num_layers=2, num_heads=2, head_dim=64, page_size=16, dtype="bfloat16")


def cupy_or_skip() -> Any:
    """CuPy, if it is installed and there is a GPU."""
    cupy = pytest.importorskip("cupy")
    count = 0
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
        count = cupy.cuda.runtime.getDeviceCount()
    if count == 0:
        pytest.skip("there is no GPU")
    return cupy


def to_host(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else np.asarray(array)


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


def digest(snapshot: Snapshot) -> str:
    """Of every token, in the order of roles, layers, sequences."""
    whole = hashlib.sha256()
    for role, layer in snapshot.pool.spec.tensors:
        for seq in range(snapshot.num_seqs):
            whole.update(np.ascontiguousarray(to_host(snapshot.tokens(role, layer=layer, seq=seq))).tobytes())
    return whole.hexdigest()
