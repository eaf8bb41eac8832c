"""Index arrays: the storage invariants, with the place of the first offender, and the lookup built on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.format import DescriptorError, element_index, slot_index, validate_indices

TABLE, PTR, LENS = [7, 3, 9, 7, 3, 2], [0, 3, 6], [40, 45]


def test_a_good_batch_has_no_findings() -> None:
    for dtype in (np.uint32, np.uint64, np.int32, np.int64):
        found = validate_indices(
            np.array(TABLE, dtype),
            np.array(PTR, dtype),
            num_pages=10,
            seq_lens=np.array(LENS, dtype),
            page_size=16,
            total_tokens=85,
        )
        assert found == ()


def test_an_empty_batch() -> None:
    assert validate_indices([], [0], num_pages=5, seq_lens=[], page_size=4, total_tokens=0) == ()
    with pytest.raises(DescriptorError, match="total_tokens is 1"):
        validate_indices([], [0], num_pages=5, seq_lens=[], total_tokens=1)
    assert validate_indices([], [0, 0, 0], num_pages=0, seq_lens=[0, 0], page_size=4, total_tokens=0) == ()


@pytest.mark.parametrize(
    ("table", "ptr", "field", "value"),
    [
        (TABLE, [1, 3, 6], "seq_ptr[0]", 1),
        (TABLE, [0, 7, 6], "seq_ptr[2]", 6),
        (TABLE, [0, 3, 5], "seq_ptr[2]", 5),
        (TABLE, [0, 3, 7], "seq_ptr[2]", 7),
        (TABLE, [], "seq_ptr", 0),
        ([7, 3, 10, 7, 11, 2], PTR, "block_table[2]", 10),
        ([7, -1, 9, 7, 3, 2], PTR, "block_table[1]", -1),
    ],
)
def test_the_first_offender_is_named(table: Any, ptr: Any, field: str, value: int) -> None:
    with pytest.raises(DescriptorError) as caught:
        validate_indices(table, ptr, num_pages=10)
    assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize(
    ("lens", "field", "says"),
    [
        ([40], "seq_lens", "2 sequences"),
        ([49, 36], "seq_lens[0]", "3 pages of sequence 0 hold 16 tokens each, 48 in all"),
        ([40, -1], "seq_lens[1]", "0 tokens or more"),
        ([40, 44], "seq_lens", "total_tokens 85"),
    ],
)
def test_seq_lens_fit_pages_and_total(lens: Any, field: str, says: str) -> None:
    with pytest.raises(DescriptorError, match=says) as caught:
        validate_indices(TABLE, PTR, num_pages=10, seq_lens=lens, page_size=16, total_tokens=85)
    assert caught.value.field == field


def test_pages_allocated_ahead_are_legal() -> None:
    assert validate_indices(TABLE, PTR, num_pages=10, seq_lens=[1, 0], page_size=16, total_tokens=1) == ()


def test_permissive_returns_every_finding_with_its_position() -> None:
    found = validate_indices(
        [99, 3, 98], [1, 0, 5], num_pages=10, seq_lens=[1, 1], page_size=4, total_tokens=3, strict=False
    )
    assert [(each.field, each.position) for each in found] == [
        ("seq_ptr[0]", 0),
        ("seq_ptr[1]", 1),
        ("seq_ptr[2]", 2),
        ("block_table[0]", 0),
        ("seq_lens", None),
    ]


@pytest.mark.parametrize("bad", [[0.0, 1.0], [[0, 1]], ["a"]])
def test_indices_are_rows_of_integers(bad: Any) -> None:
    with pytest.raises(DescriptorError, match=r"integers|one-dimensional"):
        validate_indices(bad, [0, 2], num_pages=5)
    with pytest.raises(DescriptorError, match=r"integers|one-dimensional"):
        validate_indices([0, 1], bad, num_pages=5, strict=False)


def test_numbers_near_the_top_of_uint64_do_not_wrap() -> None:
    top = np.array([2**64 - 1, 2**64 - 1], np.uint64)
    with pytest.raises(DescriptorError, match=str(2**64 - 1)):
        validate_indices(top, [0, 2], num_pages=2**63)
    found = validate_indices([0, 1], [0, 1, 2], num_pages=2, seq_lens=top, total_tokens=2**64 - 2, strict=False)
    assert [each.value for each in found] == [2**65 - 2]
    with pytest.raises(DescriptorError, match="sequence 0"):
        validate_indices([0, 1], [0, 1, 2], num_pages=2, seq_lens=top, page_size=4)


@given(st.data())
def test_one_damaged_page_id_among_many_is_found(data: st.DataObject) -> None:
    num_pages = data.draw(st.integers(1, 2**32 - 1))
    table = np.array(data.draw(st.lists(st.integers(0, num_pages - 1), min_size=1, max_size=50)), np.uint32)
    assert validate_indices(table, [0, len(table)], num_pages=num_pages) == ()
    at = data.draw(st.integers(0, len(table) - 1))
    table[at] = data.draw(st.integers(num_pages, 2**32 - 1))
    (found,) = validate_indices(table, [0, len(table)], num_pages=num_pages, strict=False)
    assert found.position == at


def test_the_lookup_of_the_example_in_the_specification() -> None:
    table, ptr = [0, 1, 0], [0, 2, 3]
    shape = {"page_size": 4, "num_heads": 2, "head_dim": 8}
    # Token 5 of sequence 0 is slot 1 of page 1; token 2 of sequence 1 is slot 2 of page 0.
    assert element_index(table, ptr, seq=0, token=5, head=1, dim=3, **shape) == ((1 * 4 + 1) * 2 + 1) * 8 + 3
    assert element_index(table, ptr, seq=1, token=2, head=0, dim=7, **shape) == ((0 * 4 + 2) * 2 + 0) * 8 + 7
    assert isinstance(element_index(table, ptr, seq=0, token=0, head=0, dim=0, **shape), int)


def test_the_lookup_takes_arrays() -> None:
    seqs, tokens = np.array([0, 0, 1]), np.array([0, 47, 33])
    slots = slot_index(TABLE, PTR, seq=seqs, token=tokens, page_size=16)
    assert np.array_equal(slots, [7 * 16, 9 * 16 + 15, 2 * 16 + 1])
    flat = element_index(
        TABLE, PTR, seq=1, token=np.array([[33]]), head=[0, 1], dim=0, page_size=16, num_heads=2, head_dim=4
    )
    assert np.array_equal(flat, [[(33) * 2 * 4, 33 * 2 * 4 + 4]])


def test_a_page_id_that_no_pool_has_does_not_wrap_around() -> None:
    for table in (np.array([1, 2**62], np.uint64), np.array([1, 2**64 - 1], np.uint64), np.array([1, 2**62])):
        with pytest.raises(DescriptorError) as caught:
            slot_index(table, [0, 2], seq=0, token=[0, 4], page_size=4)
        assert (caught.value.field, caught.value.value) == ("block_table[1]", int(table[1]))


def test_lengths_that_do_not_fit_lead_nowhere() -> None:
    with pytest.raises(DescriptorError, match="number of seq_lens, 1"):
        slot_index([0, 1], [0, 1, 2], seq=1, token=0, page_size=4, seq_lens=[4])
    with pytest.raises(DescriptorError, match="pages hold, 4"):  # token 6 would be one of sequence 1
        slot_index([0, 1], [0, 1, 2], seq=0, token=6, page_size=4, seq_lens=[8, 0])


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"seq": 2}, "seq"),
        ({"seq": -1}, "seq"),
        ({"token": 48}, "token"),
        ({"token": -1}, "token"),
        ({"token": np.array([0, 40]), "seq_lens": LENS}, "token[1]"),
        ({"head": 2}, "head"),
        ({"dim": np.array([3, 4])}, "dim[1]"),
        ({"dim": 0.5}, "dim"),
    ],
)
def test_the_lookup_refuses_what_is_not_there(wrong: dict[str, Any], field: str) -> None:
    place: dict[str, Any] = {"seq": 0, "token": 0, "head": 0, "dim": 0, "page_size": 16, "num_heads": 2, "head_dim": 4}
    with pytest.raises(DescriptorError) as caught:
        element_index(TABLE, PTR, **(place | wrong))
    assert caught.value.field == field
