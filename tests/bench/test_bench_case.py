"""The pages that a case moves: as many as it says, each once, and lying as its pattern says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.bench.case import Case, Pattern, cache_spec, fragment, source_pages
from hurray_rdma.cache import PageAllocator
from hurray_rdma.errors import ConfigError


def num_runs(page_ids: np.ndarray) -> int:
    """Stretches in which each page follows the one before."""
    return 1 + int((np.diff(page_ids.astype(np.int64)) != 1).sum())


@given(
    pattern=st.sampled_from(Pattern),
    eights=st.integers(1, 100),
    spare=st.integers(0, 100),
    seed=st.integers(0, 2**63 - 1),
)
def test_pages_are_distinct_and_inside_both_pools(pattern: Pattern, eights: int, spare: int, seed: int) -> None:
    num_pages = 8 * eights
    case = Case(
        page_nbytes=64, num_pages=num_pages, pattern=pattern, seed=seed, pool_pages=2 * num_pages + 16 * (spare + 1)
    )
    sent = source_pages(case)
    assert sent.dtype == np.uint32
    assert len(sent) == len(set(sent.tolist())) == num_pages
    assert sent.max() < case.pool_pages
    assert np.array_equal(sent, source_pages(case))

    allocator = PageAllocator(case.pool_pages)
    fragment(allocator, case)
    granted = allocator.lease(num_pages).page_ids
    assert len(set(granted.tolist())) == num_pages
    if pattern is Pattern.FRAGMENTED:
        assert num_runs(sent) == eights
        assert num_runs(np.sort(granted)) == eights
    if pattern is Pattern.CONTIGUOUS:
        assert num_runs(sent) == num_runs(granted) == 1
    if pattern is Pattern.GATHER:
        assert num_runs(granted) == 1


def test_random_pages_are_single_ones_on_both_sides() -> None:
    case = Case(page_nbytes=64, num_pages=4096, pattern=Pattern.RANDOM, seed=3)
    assert case.pool_pages == 8192
    assert num_runs(source_pages(case)) > 4000
    allocator = PageAllocator(case.pool_pages)
    fragment(allocator, case)
    assert allocator.accounts().free == 4096
    # Half of the pages free, at random: a run of free pages has two pages on average.
    assert 1800 < allocator.accounts().num_free_runs < 2300


def test_the_spec_has_pages_of_the_asked_size() -> None:
    for page_nbytes in (1, 64, 1024, 4096, 32768, 262144):
        spec = cache_spec(page_nbytes)
        assert spec.page_nbytes == page_nbytes
        assert spec.layer_indices == (page_nbytes,)
        assert len(spec.tensors) == 1
    assert cache_spec(4096, num_layers=3).layer_indices == (0, 1, 2)
    with pytest.raises(ConfigError, match="page_nbytes = 4100: must be above 0, and a multiple of 16"):
        cache_spec(4100)
