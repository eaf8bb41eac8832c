"""The drawn batch: ragged, scattered, shared where it says so, and the same for everybody who draws it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.demo.batch import draw_batch
from hurray_rdma.demo.config import BatchConfig, load_config


@st.composite
def batch_configs(draw: st.DrawFn) -> BatchConfig:
    num_sequences = draw(st.integers(1, 20))
    tokens_min = draw(st.integers(1, 70))
    return BatchConfig(
        num_sequences=num_sequences,
        tokens_min=tokens_min,
        tokens_max=tokens_min + draw(st.integers(0, 60)),
        num_sharing=draw(st.integers(0, num_sequences)),
        shared_prefix_tokens=draw(st.integers(0, tokens_min)),
        seed=draw(st.integers(0, 2**63 - 1)),
    )


@given(config=batch_configs(), page_size=st.integers(1, 32))
@settings(max_examples=150, deadline=None)
def test_every_drawn_batch_is_what_its_settings_say(config: BatchConfig, page_size: int) -> None:
    batch = draw_batch(config, page_size=page_size)
    again = draw_batch(config, page_size=page_size)
    assert all(np.array_equal(a, b) for a, b in zip(batch.block_tables, again.block_tables, strict=True))

    assert len(batch.seq_lens) == len(batch.block_tables) == config.num_sequences
    assert batch.seq_lens.min() >= config.tokens_min
    assert batch.seq_lens.max() <= config.tokens_max
    uses: dict[int, int] = {}
    for table, num_tokens in zip(batch.block_tables, batch.seq_lens.tolist(), strict=True):
        assert len(table) == (num_tokens + page_size - 1) // page_size
        assert len(set(table.tolist())) == len(table)
        for page_id in table.tolist():
            assert page_id < batch.pool_pages
            uses[page_id] = uses.get(page_id, 0) + 1
    assert sorted(uses) == sorted(batch.page_ids.tolist())

    shared_pages = config.shared_prefix_tokens // page_size
    if config.num_sharing > 1:
        assert sorted(uses.values(), reverse=True)[:shared_pages] == [config.num_sharing] * shared_pages
        assert sum(count > 1 for count in uses.values()) == shared_pages
    else:
        assert set(uses.values()) == {1}


def test_the_default_batch_is_ragged_and_its_pages_are_scattered() -> None:
    batch = draw_batch(load_config().batch, page_size=16)
    assert len(set(batch.seq_lens.tolist())) >= 8
    assert any(int(n) % 16 for n in batch.seq_lens)
    neighbours = np.concatenate([np.diff(table.astype(np.int64)) for table in batch.block_tables])
    assert (neighbours == 1).mean() < 0.05
