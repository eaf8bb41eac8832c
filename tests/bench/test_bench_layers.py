"""What is lost to a transfer beside computing, by the times of many runs; and the copy that it is held against."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from hurray_rdma.bench.case import cache_spec
from hurray_rdma.bench.layers import lost_seconds
from hurray_rdma.bench.messages import RanLayers
from hurray_rdma.bench.yardsticks import LayerCopy
from hurray_rdma.cache import PagePool
from hurray_rdma.transport import Context


def _ran(*layers_ms: float, tail_ms: float = 0.0, pace: float = 1.0) -> RanLayers:
    ends = 7_000_000 + np.cumsum(np.array(layers_ms) * pace * 1e6).astype(np.int64)
    computed = np.stack([ends - 1000, ends], axis=1)
    return RanLayers(7_000_000, int(ends[-1] + tail_ms * 1e6), computed, np.zeros_like(computed))


def test_what_follows_the_last_layer_and_what_holds_a_layer_up_is_lost() -> None:
    together = [_ran(10, 11, 10, tail_ms=2)]
    assert lost_seconds(together, [(_ran(10, 10, 10),) * 2]) == pytest.approx(3e-3)


def test_a_machine_that_changes_its_pace_loses_nothing() -> None:
    paces = np.linspace(1.0, 2.0, 9)
    alone = [*pairwise(_ran(10, 20, pace=pace) for pace in paces[::2])]
    together = [_ran(10, 20, tail_ms=1, pace=pace) for pace in paces[1::2]]
    assert lost_seconds(together, alone) == pytest.approx(1e-3)


def test_a_run_that_was_interrupted_does_not_count() -> None:
    alone = [(_ran(10, 10),) * 2] * 10
    together = [_ran(10, 10, tail_ms=1)] * 9 + [_ran(70, 10, tail_ms=1)]
    assert lost_seconds(together, alone) == pytest.approx(1e-3)


def test_what_holds_up_another_layer_in_each_run_is_lost() -> None:
    stalled = [[10 + 5 * (layer == at) for layer in range(4)] for at in range(4)]
    assert lost_seconds([_ran(*layers) for layers in stalled], [(_ran(10, 10, 10, 10),) * 2] * 4) == pytest.approx(5e-3)


def test_a_layer_is_copied_whole_and_nothing_else() -> None:
    spec = cache_spec(2048, num_layers=3)
    with PagePool.allocate(spec, 16, context=Context()) as pool:
        layers = [pool.pages(role, layer).view(np.uint8).reshape(16, -1) for role, layer in spec.tensors]
        rng = np.random.default_rng(7)
        for layer in layers:
            layer[:] = rng.integers(0, 256, layer.shape)
        page_ids = rng.permutation(16)[:9].astype(np.uint32)
        copy = LayerCopy(pool, page_ids, huge_pages=False)
        copied = copy.copied.copy()
        copy(1)
        copied[1] = layers[1][page_ids]
        assert np.array_equal(copy.copied, copied)
