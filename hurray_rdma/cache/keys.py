"""Keys of pages: chained hashes of the tokens that their content depends on.

The key of a page stands for all tokens of its sequence from the first to the page's last, so equal keys are equal
content, wherever the page is. Knows token IDs and hashes; senders with keys of their own do not need it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache.snapshot import Snapshot
from hurray_rdma.errors import GeometryError

__all__ = ["KEY_NBYTES", "page_keys", "snapshot_keys"]

KEY_NBYTES = 32
"""Bytes of a key: SHA-256."""


def page_keys(token_ids: ArrayLike, *, page_size: int, root: bytes = b"") -> NDArray[np.uint8]:
    """Keys of the full pages of one sequence, uint8 ``[len(token_ids) // page_size, 32]``.

    A chain is one hash after the other: about a microsecond a page. An engine that has hashed its blocks already should
    pass its own hashes on instead.

    Args:
        token_ids: integers ``[num_tokens]``, each below 2**64.
        page_size: tokens per page.
        root: what else the content depends on: model, adapter, cache salt. Keys of another root never match.

    Raises:
        GeometryError: ``token_ids`` are no integers in one axis, or ``page_size`` is below 1.
    """
    tokens = np.asarray(token_ids)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise GeometryError("must be integers in one axis", field="token_ids", value=f"{tokens.dtype} {tokens.shape}")
    if page_size < 1:
        raise GeometryError("must be 1 or more", field="page_size", value=page_size)
    num_pages = len(tokens) // page_size
    blocks = tokens[: num_pages * page_size].astype("<u8").tobytes()
    step = 8 * page_size
    key = hashlib.sha256(root).digest()
    chain = []
    for start in range(0, len(blocks), step):
        key = hashlib.sha256(key + blocks[start : start + step]).digest()
        chain.append(key)
    return np.frombuffer(b"".join(chain), np.uint8).reshape(num_pages, KEY_NBYTES)


def snapshot_keys(snapshot: Snapshot, token_ids: Sequence[ArrayLike], *, root: bytes = b"") -> NDArray[np.uint8]:
    """Keys of a whole block table, uint8 ``[len(snapshot.block_table), 32]``; zeros where a page is not full.

    Args:
        snapshot: its sequences in the order of ``token_ids``.
        token_ids: of each sequence, integers ``[seq_len]``.
        root: as of `page_keys`.

    Raises:
        GeometryError: not one list for each sequence, or not one token ID for each token.
    """
    if len(token_ids) != snapshot.num_seqs:
        raise GeometryError(
            f"must be the {snapshot.num_seqs} sequences of the snapshot", field="len(token_ids)", value=len(token_ids)
        )
    keys = np.zeros((len(snapshot.block_table), KEY_NBYTES), np.uint8)
    for seq, (tokens, start) in enumerate(zip(token_ids, snapshot.seq_ptr.tolist(), strict=False)):
        count = np.size(tokens)
        if count != snapshot.seq_lens[seq]:
            raise GeometryError(
                f"must be seq_lens[{seq}] = {snapshot.seq_lens[seq]}", field=f"len(token_ids[{seq}])", value=count
            )
        of_seq = page_keys(tokens, page_size=snapshot.pool.spec.page_size, root=root)
        keys[start : start + len(of_seq)] = of_seq
    return keys
