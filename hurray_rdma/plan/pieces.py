"""Rectangles of tokens and heads as the largest contiguous pieces, and pieces as operations.

A *tile* is one shape of rectangle (so many tokens, so many heads) and all places where it is to be moved. Its pieces
are the same everywhere, so they are found once, from the strides of the two sides; operations are the product of places
and pieces, made in batches, so that memory does not grow with the pieces of a page. Knows strides and offsets only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.plan._offsets import merged
from hurray_rdma.plan.operations import Plan

__all__ = ["MAX_OPERATIONS", "Strides", "Tile", "make_tile", "plans_of"]

Offsets = NDArray[np.uint64]

MAX_OPERATIONS = 1 << 18
"""Operations after which a `Plan` ends where a page is more than one piece; none has twice as many (12 MiB)."""


class Strides(NamedTuple):
    """Bytes from one page, token or head to the next, on one side. A tuple, since a plan of one page is short work."""

    page_nbytes: int
    token_nbytes: int
    head_nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Pieces of ``piece_nbytes`` at every sum of a place and a piece offset."""

    src_places: Offsets
    """Bytes from the place of page 0 to each rectangle, uint64 ``[num_places]``."""
    dst_places: Offsets
    src_pieces: Offsets
    """Bytes from the start of a rectangle to each of its pieces, uint64 ``[pieces_per_place]``."""
    dst_pieces: Offsets
    piece_nbytes: int
    by_piece: bool
    """Whether operations go through all places for each piece, because neighbouring places meet there."""

    @property
    def num_operations(self) -> int:
        """Pieces, before neighbours are merged."""
        return len(self.src_places) * len(self.src_pieces)

    @property
    def nbytes(self) -> int:
        return self.num_operations * self.piece_nbytes

    def reading_zeros(self) -> Tile:
        """The same destination, every piece from source offset 0: the start of a buffer of zeros."""
        return replace(self, src_places=np.zeros_like(self.src_places), src_pieces=np.zeros_like(self.src_pieces))


def make_tile(
    src_places: Offsets,
    dst_places: Offsets,
    *,
    num_tokens: int,
    num_heads: int,
    row_nbytes: int,
    src: Strides,
    dst: Strides,
) -> Tile:
    """A rectangle of ``num_tokens`` tokens of ``num_heads`` heads, ``row_nbytes`` each, at the given places."""
    axes = [(dst.token_nbytes, src.token_nbytes, num_tokens), (dst.head_nbytes, src.head_nbytes, num_heads)]
    axes = sorted([axis for axis in axes if axis[2] > 1])
    piece_nbytes = row_nbytes
    while axes and axes[0][0] == axes[0][1] == piece_nbytes:
        piece_nbytes *= axes.pop(0)[2]
    src_pieces = np.zeros(1, np.uint64)
    dst_pieces = np.zeros(1, np.uint64)
    for dst_step, src_step, count in axes:  # the axis with the larger step ends up outermost
        steps = np.arange(count, dtype=np.uint64)[:, None]
        src_pieces = (steps * np.uint64(src_step) + src_pieces).reshape(-1)
        dst_pieces = (steps * np.uint64(dst_step) + dst_pieces).reshape(-1)
    return Tile(
        src_places=src_places,
        dst_places=dst_places,
        src_pieces=src_pieces,
        dst_pieces=dst_pieces,
        piece_nbytes=piece_nbytes,
        by_piece=src.page_nbytes == dst.page_nbytes == piece_nbytes,
    )


def plans_of(tiles: Sequence[Tile], *, num_pages: int) -> Iterator[Plan]:
    """The operations of the tiles, neighbours that meet on both sides merged; nothing when there are none.

    Args:
        tiles: rectangles that touch no byte of the destination twice.
        num_pages: pages they are of, for the reports of the plans; all of them count in the first plan.
    """
    pending: list[_Batch] = []
    count = 0
    for batch in _batches(tiles):
        pending.append(batch)
        count += len(batch[2])
        if count >= MAX_OPERATIONS:
            yield _plan(pending, num_pages)
            pending, count, num_pages = [], 0, 0
    if pending:
        yield _plan(pending, num_pages)


_Batch = tuple[Offsets, Offsets, Offsets, int]
"""Source offsets, destination offsets, lengths, and their sum."""


def _batches(tiles: Sequence[Tile]) -> Iterator[_Batch]:
    for tile in tiles:
        num_places, num_pieces = len(tile.src_places), len(tile.src_pieces)
        if num_pieces == 1 and num_places:
            yield *merged(tile.src_places, tile.dst_places, tile.piece_nbytes), tile.nbytes
            continue
        for start in range(0, tile.num_operations, MAX_OPERATIONS):
            index = np.arange(start, min(start + MAX_OPERATIONS, tile.num_operations))
            if tile.by_piece:
                piece, place = np.divmod(index, num_places)
            else:
                place, piece = np.divmod(index, num_pieces)
            src = tile.src_places[place] + tile.src_pieces[piece]
            dst = tile.dst_places[place] + tile.dst_pieces[piece]
            yield *merged(src, dst, tile.piece_nbytes), len(index) * tile.piece_nbytes


def _plan(batches: Sequence[_Batch], num_pages: int) -> Plan:
    src, dst, lengths, nbytes = batches[0]
    if len(batches) > 1:
        src, dst, lengths = (np.concatenate([batch[axis] for batch in batches]) for axis in range(3))
        nbytes = sum([batch[3] for batch in batches])
    return Plan(src_offsets=src, dst_offsets=dst, lengths=lengths, num_pages=num_pages, nbytes=nbytes)
