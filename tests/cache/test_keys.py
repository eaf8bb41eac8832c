"""Keys of pages: the chain, by hand with hashlib."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot, page_keys, snapshot_keys
from hurray_rdma.errors import GeometryError


def test_a_key_is_the_hash_of_the_key_before_and_the_tokens() -> None:
    start = hashlib.sha256(b"model").digest()
    first = hashlib.sha256(start + struct.pack("<2Q", 5, 6)).digest()
    second = hashlib.sha256(first + struct.pack("<2Q", 7, 8)).digest()
    keys = page_keys([5, 6, 7, 8, 9], page_size=2, root=b"model")
    assert [row.tobytes() for row in keys] == [first, second]


def test_equal_prefixes_have_equal_keys_and_nothing_else_has() -> None:
    a, b = page_keys(range(8), page_size=2), page_keys([0, 1, 2, 9, 4, 5, 6, 7], page_size=2)
    assert (a == b).all(axis=1).tolist() == [True, False, False, False]
    assert not (page_keys(range(8), page_size=2, root=b"other") == a).all(axis=1).any()
    assert (page_keys(np.arange(8, dtype=np.int32), page_size=2) == a).all()


def test_keys_of_a_table_are_zeros_where_a_page_is_not_full() -> None:
    spec = CacheSpec(num_layers=1, num_heads=1, head_dim=1, page_size=2, dtype="int8")
    with PagePool.allocate(spec, 8) as pool:
        snapshot = Snapshot.from_block_tables(pool, [[1, 2, 3], [4, 5]], seq_lens=[3, 4])
        keys = snapshot_keys(snapshot, [[7, 8, 9], [7, 8, 9, 9]])
        assert keys.any(axis=1).tolist() == [True, False, False, True, True]
        assert (keys[0] == keys[3]).all()
        with pytest.raises(GeometryError, match=r"len\(token_ids\[1\]\) = 3: must be seq_lens\[1\] = 4"):
            snapshot_keys(snapshot, [[7, 8, 9], [7, 8, 9]])
        with pytest.raises(GeometryError, match=r"len\(token_ids\) = 1"):
            snapshot_keys(snapshot, [[7, 8, 9]])


def test_no_tokens_have_no_keys_and_no_integers_are_refused() -> None:
    assert page_keys([], page_size=2).shape == (0, 32)
    with pytest.raises(GeometryError, match="token_ids = 'float64"):
        page_keys([1.5], page_size=1)
    with pytest.raises(GeometryError, match="page_size = 0"):
        page_keys([1], page_size=0)
