"""What the demo writes into pages, and how it is told again: bytes that follow from (seed, tensor, page, place).

Knows numpy arrays of pages. Each 64-bit word is ``key(tensor, page) + block[place]``, both from splitmix64, so no two
pages, no two places within a page and no two tensors hold the same bytes, and checking costs one pass over memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.demo.batch import Batch
from hurray_rdma.errors import HurrayError

__all__ = ["Content", "MismatchError"]

_PAGES_AT_ONCE = 64
"""Keeps the words in work near the processor's caches."""


class MismatchError(HurrayError):
    """The receiving side holds other bytes than the sending side wrote."""


class Content:
    """The bytes of every page that one seed stands for.

    Args:
        seed: any integer, >= 0.
        page_nbytes: bytes of one page of one role of one layer.
        num_pages: pages of the source pool.
    """

    def __init__(self, seed: int, *, page_nbytes: int, num_pages: int) -> None:
        self._page_nbytes = page_nbytes
        self._num_pages = num_pages
        self._key_origin = _mix(np.array([seed], np.uint64))
        self._block = _mix(np.arange(-(-page_nbytes // 8), dtype=np.uint64) ^ _mix(self._key_origin))

    def fill(
        self,
        pages: NDArray[Any],
        *,
        tensor: int,
        page_ids: NDArray[np.uint32],
        places: NDArray[np.uint32] | None = None,
    ) -> None:
        """Writes the pages ``page_ids`` of one tensor.

        Args:
            pages: ``[num_pages, ...]`` of any dtype, C order within a page, written in place.
            tensor: number of the tensor (one role of one layer).
            page_ids: uint32 ``[n]``.
            places: which of ``pages`` get them, uint32 ``[n]``; None is those of the same IDs.
        """
        places = page_ids if places is None else places
        for start in range(0, len(page_ids), _PAGES_AT_ONCE):
            chunk = slice(start, start + _PAGES_AT_ONCE)
            content = self.expected(tensor=tensor, page_ids=page_ids[chunk])
            pages[places[chunk]] = content.view(pages.dtype).reshape(-1, *pages.shape[1:])

    def expected(self, *, tensor: int, page_ids: NDArray[np.uint32]) -> NDArray[np.uint8]:
        """The bytes of some pages of one tensor: uint8 ``[len(page_ids), page_nbytes]``, contiguous."""
        number = np.uint64(tensor) * np.uint64(self._num_pages) + page_ids.astype(np.uint64)
        words = self._block[None, :] + _mix(number ^ self._key_origin)[:, None]
        return np.ascontiguousarray(words.view(np.uint8)[:, : self._page_nbytes])

    def check(self, tokens: NDArray[Any], *, batch: Batch, seq: int, tensor: int, role: str, layer: int) -> None:
        """Compares every byte of one sequence of one tensor.

        Args:
            tokens: as received, ``[seq_len, num_heads, head_dim]``.
            batch: what was sent.
            seq: number of the sequence.
            tensor, role, layer: the tensor, as a number and by name.

        Raises:
            MismatchError: a byte differs; the message says where the first one is.
        """
        got = np.ascontiguousarray(tokens).reshape(-1).view(np.uint8)
        want = self.expected(tensor=tensor, page_ids=batch.block_tables[seq]).reshape(-1)
        num_tokens = int(batch.seq_lens[seq])
        token_nbytes = got.size // num_tokens
        want = want[: num_tokens * token_nbytes]
        if np.array_equal(got, want):
            return
        wrong = np.flatnonzero(got != want) if got.shape == want.shape else np.zeros(1, np.int64)
        at = int(wrong[0])
        raise MismatchError(
            f"sequence {seq}, {role} of layer {layer}: {wrong.size} of {want.size} bytes differ from what was "
            f"sent, the first at token {at // token_nbytes}, byte {at % token_nbytes}",
            field=f"byte {at}",
            value=int(got[at]),
            fix=f"It should be {int(want[at])}: the transfer is broken, please report it with this message",
        )


def _mix(counter: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 of each counter (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014)."""
    z = counter * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
