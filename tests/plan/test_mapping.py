"""Page maps: which pages a receiver must find, for equal, smaller and larger ones, against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan import PageMap, map_pages


def mapped(src: int, dst: int, rows: list[list[int]], seq_lens: list[int], num_pages: int = 12) -> PageMap:
    return map_pages(
        np.array([page for row in rows for page in row], np.uint32),
        np.cumsum([0] + [len(row) for row in rows]).astype(np.uint32),
        np.array(seq_lens, np.uint32),
        num_pages=num_pages,
        src_page_size=src,
        dst_page_size=dst,
    )


def tables(page_map: PageMap) -> list[list[int]]:
    ptr = page_map.seq_ptr
    return [page_map.entries[ptr[s] : ptr[s + 1]].tolist() for s in range(len(page_map.seq_lens))]


def test_equal_pages_are_listed_once_each_ascending() -> None:
    page_map = mapped(4, 4, [[9, 3, 5], [9, 3, 2, 7]], [11, 13])
    assert page_map.src_page_ids.tolist() == [2, 3, 5, 7, 9]
    assert tables(page_map) == [[4, 1, 2], [4, 1, 0, 3]]
    assert page_map.valid_tokens.tolist() == [4, 4, 3, 1, 4]


def test_a_prefix_that_ends_inside_a_larger_page_is_not_shared() -> None:
    page_map = mapped(2, 4, [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3]], [8, 8, 6])
    assert page_map.num_pages == 4
    first, second, third = tables(page_map)
    assert first[0] == second[0] == third[0]
    assert len({first[1], second[1], third[1]}) == 3


def test_a_large_page_is_cut_where_tokens_end() -> None:
    page_map = mapped(6, 2, [[3, 1]], [9])
    assert tables(page_map) == [[2, 3, 4, 0, 1]]
    assert (page_map.unit_src_pages.tolist(), page_map.unit_src_slots.tolist()) == ([1, 1, 3, 3, 3], [0, 2, 0, 2, 4])
    assert page_map.valid_tokens.tolist() == [2, 1, 2, 2, 2]


def test_pages_of_more_parts_than_there_are_page_ids_are_cut_too() -> None:
    page_map = mapped(2**31, 1, [[3, 1], [1]], [2, 3])
    assert tables(page_map) == [[3, 4], [0, 1, 2]]
    assert page_map.unit_src_pages.tolist() == [1, 1, 1, 3, 3]
    assert page_map.unit_src_slots.tolist() == [0, 1, 2, 0, 1]


def test_a_page_is_as_full_as_the_longest_that_shares_it() -> None:
    assert mapped(4, 4, [[1], [1], [1]], [1, 3, 2]).valid_tokens.tolist() == [3]
    assert mapped(4, 4, [[1], [1, 2]], [1, 5]).valid_tokens.tolist() == [4, 1]


@pytest.mark.parametrize(
    ("src", "dst", "rows", "seq_lens", "rule"),
    [
        (2**30, 1, [[0]], [2**30], "16777216 pieces"),
        (1, 256, [[page] for page in range(2**16 + 1)], [1] * (2**16 + 1), "16777216 pieces"),
        (1, 2**24, [[0]], [1], "256 times"),
    ],
)
def test_a_small_offer_does_not_become_tables_of_gigabytes(
    src: int, dst: int, rows: list[list[int]], seq_lens: list[int], rule: str
) -> None:
    with pytest.raises(GeometryError, match=rule):
        mapped(src, dst, rows, seq_lens, num_pages=2**17)


def test_page_sizes_without_a_common_measure_are_refused() -> None:
    with pytest.raises(GeometryError, match="page_size = 6: must divide the destination's 4, or be a multiple of it"):
        mapped(6, 4, [[1]], [6])
    with pytest.raises(GeometryError, match=r"block_table\[0\] = 12: is not below num_pages 12"):
        mapped(4, 4, [[12]], [4])


@given(
    st.sampled_from([(2, 2), (1, 3), (3, 1), (2, 4), (4, 2), (8, 2)]),
    st.lists(st.lists(st.integers(0, 5), max_size=6), max_size=5),
    st.data(),
)
def test_pages_are_shared_exactly_where_their_slots_are(
    sizes: tuple[int, int], rows: list[list[int]], data: st.DataObject
) -> None:
    src, dst = sizes
    seq_lens = [data.draw(st.integers(0, len(row) * src)) for row in rows]
    page_map = mapped(src, dst, rows, seq_lens)
    unit = min(src, dst)
    contents: dict[int, tuple[tuple[int, int], ...]] = {}
    for row, tokens, table in zip(rows, seq_lens, tables(page_map), strict=True):
        assert len(table) == -(-tokens // dst)
        for ordinal, place in enumerate(table):
            starts = range(ordinal * dst, min((ordinal + 1) * dst, tokens), unit)
            content = tuple((row[start // src], start % src) for start in starts)
            assert contents.setdefault(place, content) == content
    assert len(set(contents.values())) == len(contents) == page_map.num_pages
    assert sorted(contents) == list(range(page_map.num_pages))
    units = zip(
        page_map.unit_pages.tolist(),
        page_map.unit_dst_slots.tolist(),
        page_map.unit_src_pages.tolist(),
        page_map.unit_src_slots.tolist(),
        strict=True,
    )
    expected = [
        (place, index * unit, *where) for place, content in contents.items() for index, where in enumerate(content)
    ]
    assert sorted(units) == sorted(expected)


def test_several_senders_fill_the_pages_of_the_first() -> None:
    first, second = mapped(4, 4, [[9, 3], [9, 5]], [8, 7]), mapped(4, 4, [[1, 2], [1, 0]], [8, 7])
    table = first.block_table([10, 11, 12])
    assert table.tolist() == [12, 10, 12, 11]
    assert second.block_table(second.pages_for(table)).tolist() == table.tolist()
    with pytest.raises(GeometryError, match=r"block_table\[1\] = 10: the snapshot shares pages here"):
        mapped(4, 4, [[1, 1], [1, 0]], [8, 7]).pages_for(table)
    with pytest.raises(GeometryError, match=r"len\(block_table\) = 4: must be the 2 entries"):
        mapped(4, 4, [[1, 1]], [8]).pages_for(table)
    with pytest.raises(GeometryError, match=r"len\(dst_page_ids\) = 2: must be the 3 pages"):
        first.block_table([1, 2])
