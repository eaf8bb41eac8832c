"""Packing and laying out: each prompt is there whole, what all begin with once, and nobody sees another's tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.demo.llm_batch import lay_out, pack


def test_prompts_that_begin_alike_are_packed_as_written_by_hand() -> None:
    packed = pack([[1, 2, 3, 4, 5], [1, 2, 3, 9], [1, 2, 3, 4, 7, 8]], page_size=2)  # alike: 1 2 3, of it one page
    assert packed.prefix_tokens == 2
    assert packed.token_ids.tolist() == [1, 2, 3, 4, 5, 3, 9, 3, 4, 7, 8]
    assert packed.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 2, 3, 4, 5]
    assert packed.owners.tolist() == [-1, -1, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert packed.seq_lens.tolist() == [5, 4, 6]
    assert packed.last.tolist() == [4, 6, 10]
    assert packed.places(1).tolist() == [0, 1, 5, 6]
    attended = packed.attended()
    assert np.flatnonzero(attended[6]).tolist() == [0, 1, 5, 6]
    assert np.flatnonzero(attended[9]).tolist() == [0, 1, 7, 8, 9]
    assert np.flatnonzero(attended[1]).tolist() == [0, 1]


def test_a_prompt_keeps_its_last_token_and_one_alone_shares_nothing() -> None:
    assert pack([[1, 2, 3, 4], [1, 2, 3, 4]], page_size=2).prefix_tokens == 2
    assert pack([[1, 2, 3, 4]], page_size=2).prefix_tokens == 0
    assert pack([[1], [1, 2]], page_size=1).prefix_tokens == 0
    assert pack([[1, 2, 3], [9, 2, 3]], page_size=1).prefix_tokens == 0


@given(
    prefix=st.lists(st.integers(0, 5), max_size=20),
    rests=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=15), min_size=1, max_size=5),
    page_size=st.integers(1, 8),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_every_token_is_in_the_page_that_its_table_names(
    prefix: list[int], rests: list[list[int]], page_size: int, seed: int
) -> None:
    prompts = [prefix + rest for rest in rests]
    packed = pack(prompts, page_size=page_size)
    pages = lay_out(packed, page_size=page_size, seed=seed)
    shared = packed.prefix_tokens // page_size
    assert packed.prefix_tokens % page_size == 0
    uses: dict[int, int] = {}
    for seq, prompt in enumerate(prompts):
        places = packed.places(seq)
        assert packed.token_ids[places].tolist() == prompt
        assert packed.positions[places].tolist() == list(range(len(prompt)))
        assert packed.last[seq] == places[-1]
        table = pages.tables[seq].tolist()
        assert len(table) == (len(prompt) + page_size - 1) // page_size
        assert pages.page_ids[places].tolist() == [table[token // page_size] for token in range(len(prompt))]
        assert pages.offsets[places].tolist() == [token % page_size for token in range(len(prompt))]
        for page_id in table:
            assert page_id < pages.pool_pages
            uses[page_id] = uses.get(page_id, 0) + 1
    assert sorted(uses.values(), reverse=True)[:shared] == [len(prompts)] * shared
    if len(prompts) > 1:
        assert sum(count > 1 for count in uses.values()) == shared
