"""The comparison must be able to fail: for every kind of damage that a transfer could do."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from hurray_rdma.demo.batch import Batch
from hurray_rdma.demo.content import Content, MismatchError

PAGE_SIZE, HEADS, DIM = 4, 2, 6
BATCH = Batch(
    block_tables=(np.array([7, 3, 9], np.uint32), np.array([7, 3], np.uint32)),
    seq_lens=np.array([10, 8], np.uint32),
    page_ids=np.array([7, 3, 9], np.uint32),
    pool_pages=12,
)


def filled(content: Content, tensor: int, dtype: type = np.uint16) -> NDArray[np.uint16]:
    pages = np.zeros((12, PAGE_SIZE, HEADS, DIM), dtype)
    content.fill(pages, tensor=tensor, page_ids=BATCH.page_ids)
    return pages


def content(seed: int = 5) -> Content:
    return Content(seed, page_nbytes=PAGE_SIZE * HEADS * DIM * 2, num_pages=12)


def tokens_of(pages: NDArray[np.uint16], seq: int) -> NDArray[np.uint16]:
    """The sequence's tokens, gathered by plain indexing."""
    num_tokens = int(BATCH.seq_lens[seq])
    return pages[BATCH.block_tables[seq]].reshape(-1, HEADS, DIM)[:num_tokens]


def check(tokens: NDArray[np.uint16], *, seq: int = 0, tensor: int = 4) -> None:
    content().check(tokens, batch=BATCH, seq=seq, tensor=tensor, role="key", layer=2)


@pytest.mark.parametrize("dtype", [np.uint16, ml_dtypes.bfloat16])
def test_what_was_filled_is_equal(dtype: type) -> None:
    pages = filled(content(), 4, dtype)
    check(tokens_of(pages, 0), seq=0)
    check(tokens_of(pages, 1), seq=1)
    assert not pages[[0, 1, 2, 4, 5, 6, 8, 10, 11]].view(np.uint16).any()


def test_one_changed_byte_is_found_and_placed() -> None:
    tokens = tokens_of(filled(content(), 4), 0).copy()
    tokens[9, 1, 5] ^= 0x0100
    with pytest.raises(MismatchError, match=r"sequence 0, key of layer 2: 1 of 240 bytes .* token 9, byte 23"):
        check(tokens)


def test_other_pages_tensors_seeds_and_orders_are_told_apart() -> None:
    pages = filled(content(), 4)
    good = tokens_of(pages, 0)
    with pytest.raises(MismatchError):
        check(good, tensor=5)
    with pytest.raises(MismatchError):
        check(tokens_of(filled(content(seed=6), 4), 0))
    with pytest.raises(MismatchError):
        check(good[::-1])
    with pytest.raises(MismatchError):
        check(good[:, ::-1])
    swapped = pages.copy()
    swapped[[3, 9]] = swapped[[9, 3]]
    with pytest.raises(MismatchError):
        check(tokens_of(swapped, 0))
    with pytest.raises(MismatchError):
        check(good[:8])


def test_no_two_words_of_a_tensor_are_equal() -> None:
    big = Content(1, page_nbytes=4096, num_pages=256)
    words = big.expected(tensor=63, page_ids=np.arange(256, dtype=np.uint32)).view(np.uint64)
    assert len(np.unique(words)) == words.size


def test_pages_that_are_no_whole_words_are_filled_to_the_last_byte() -> None:
    odd = Content(1, page_nbytes=13, num_pages=100)
    got = odd.expected(tensor=0, page_ids=np.arange(100, dtype=np.uint32))
    assert got.shape == (100, 13)
    assert len(np.unique(got[:, 12])) > 50
