"""Keys of the receiver's pages: which page each key stands for when the page sizes differ."""

from __future__ import annotations

import numpy as np
import pytest

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import PageMap, map_keys, map_pages


def mapped(src: int, dst: int, rows: list[list[int]], seq_lens: list[int]) -> tuple[PageMap, np.ndarray]:
    seq_ptr = np.cumsum([0] + [len(row) for row in rows]).astype(np.uint32)
    table = np.array([page for row in rows for page in row], np.uint32)
    lens = np.array(seq_lens, np.uint32)
    return map_pages(table, seq_ptr, lens, num_pages=99, src_page_size=src, dst_page_size=dst), seq_ptr


def keys(*names: int) -> np.ndarray:
    """One two-byte key for each name; 0 is no key."""
    return np.array([[name, 7 * bool(name)] for name in names], np.uint8)


def named(page_map: PageMap, found: tuple[np.ndarray, np.ndarray]) -> list[tuple[int, int, int] | None]:
    """Per destination table entry: the name, the source's page size, the slot."""
    rows, are_keys = found
    result: list[tuple[int, int, int] | None] = []
    for place in page_map.entries:
        size, slot = np.frombuffer(rows[place, 2:].tobytes(), "<u4").tolist()
        result.append((int(rows[place, 0]), size, slot) if are_keys[place] else None)
    return result


def test_equal_pages_keep_their_keys_and_partial_ones_have_none() -> None:
    page_map, seq_ptr = mapped(4, 4, [[5, 6, 7], [5, 8]], [9, 8])
    found = map_keys(page_map, keys(1, 2, 0, 1, 3), seq_ptr)
    assert named(page_map, found) == [(1, 4, 3), (2, 4, 3), None, (1, 4, 3), (3, 4, 3)]


def test_a_larger_page_has_the_key_of_its_last_part() -> None:
    page_map, seq_ptr = mapped(2, 4, [[5, 6, 7, 8], [5, 6, 9]], [8, 6])
    found = map_keys(page_map, keys(1, 2, 3, 4, 1, 2, 5), seq_ptr)
    assert named(page_map, found) == [(2, 2, 1), (4, 2, 1), (2, 2, 1), None]


def test_parts_of_a_page_share_its_key_and_differ_by_slot() -> None:
    page_map, seq_ptr = mapped(4, 2, [[5, 6]], [6])
    assert named(page_map, map_keys(page_map, keys(1, 2), seq_ptr)) == [(1, 4, 1), (1, 4, 3), (2, 4, 1)]
    assert named(page_map, map_keys(page_map, keys(1, 0), seq_ptr)) == [(1, 4, 1), (1, 4, 3), None]


def test_pages_allocated_ahead_are_counted_over() -> None:
    page_map, seq_ptr = mapped(4, 4, [[5, 6, 7], [8]], [4, 4])
    assert named(page_map, map_keys(page_map, keys(1, 0, 0, 9), seq_ptr)) == [(1, 4, 3), (9, 4, 3)]


def test_two_keys_for_one_page_are_refused() -> None:
    page_map, seq_ptr = mapped(4, 4, [[5], [5]], [4, 4])
    with pytest.raises(GeometryError, match=r"page_keys\[0\] = .*: another entry of the same page has another key"):
        map_keys(page_map, keys(1, 2), seq_ptr)


def test_a_row_for_each_entry() -> None:
    page_map, seq_ptr = mapped(4, 4, [[5], [5]], [4, 4])
    with pytest.raises(GeometryError, match=r"page_keys = 'uint8 \(1, 2\)': .* each of the 2 table entries"):
        map_keys(page_map, keys(1), seq_ptr)
