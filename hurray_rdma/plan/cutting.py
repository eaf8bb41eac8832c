"""Stretches of a buffer: which pieces of a program, and which parts of them, lie between two of its bytes.

Buffers of pages travel in frames of any length. Pieces are made when their stretch is asked for, and not before: all of
a large snapshot are millions. Knows offsets only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.plan._offsets import merged
from hurray_rdma.plan.pieces import Tile
from hurray_rdma.plan.transfer import Program

__all__ = ["Cutter", "Pieces"]

Offsets = NDArray[np.uint64]


class Pieces(NamedTuple):
    """What is to be copied: as the arrays of a `Plan`."""

    src_offsets: Offsets
    dst_offsets: Offsets
    lengths: Offsets


class Cutter:
    """Finds the pieces of one program by where they lie in the buffer.

    Args:
        program: of `pack` or `unpack`: each place of a tile begins behind the bytes of the one before in the buffer.
        from_buffer: whether the buffer is where the bytes come from; else they go there.
    """

    def __init__(self, program: Program, *, from_buffer: bool) -> None:
        self._from_buffer = from_buffer
        self._tiles = [self._in_order(tile) for tile in program.tiles]

    def cut(self, begin: int, end: int) -> Pieces:
        """What lies in the buffer's bytes from ``begin`` to before ``end``, counted as the program counts them."""
        begin, end = max(0, begin), max(0, end)
        cut = [self._cut(tile, begin, end) for tile in self._tiles]
        if len(cut) == 1:
            return cut[0]
        src, dst, lengths = (
            np.concatenate([np.empty(0, np.uint64), *[pieces[axis] for pieces in cut]]) for axis in range(3)
        )
        return Pieces(src, dst, lengths)

    def _in_order(self, tile: Tile) -> Tile:
        order = np.argsort(tile.src_pieces if self._from_buffer else tile.dst_pieces)
        return replace(tile, src_pieces=tile.src_pieces[order], dst_pieces=tile.dst_pieces[order])

    def _cut(self, tile: Tile, begin: int, end: int) -> Pieces:
        first = max(0, self._before(tile, begin + 1) - 1)
        index = np.arange(first, max(first, self._before(tile, end)))
        place, piece = np.divmod(index, len(tile.src_pieces))
        src, dst, lengths = merged(
            tile.src_places[place] + tile.src_pieces[piece],
            tile.dst_places[place] + tile.dst_pieces[piece],
            tile.piece_nbytes,
        )
        if not len(lengths):
            return Pieces(src, dst, lengths)
        # The last may end behind the end, and the first begin, and even end, before the beginning.
        begins = src if self._from_buffer else dst
        lengths[-1] = min(int(lengths[-1]), end - int(begins[-1]))
        skipped = np.uint64(min(max(0, begin - int(begins[0])), int(lengths[0])))
        src[0] += skipped
        dst[0] += skipped
        lengths[0] -= skipped
        gone = int(not lengths[0])
        return Pieces(src[gone:], dst[gone:], lengths[gone:])

    def _before(self, tile: Tile, end: int) -> int:
        """How many pieces of a tile begin in the buffer's bytes before ``end``."""
        places = tile.src_places if self._from_buffer else tile.dst_places
        pieces = tile.src_pieces if self._from_buffer else tile.dst_pieces
        place = int(np.searchsorted(places, np.uint64(end))) - 1
        if place < 0:
            return 0
        return place * len(pieces) + int(np.searchsorted(pieces, np.uint64(end) - places[place]))
