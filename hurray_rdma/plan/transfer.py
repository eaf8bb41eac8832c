"""From two layouts, a page map and a grant to the exact writes of a whole transfer.

Roles, layers and parts with the same strides on both sides share one program; only their bases differ. Knows layouts,
page IDs and offsets; knows no memory and no peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache import CacheSpec, Part, PoolLayout, Segment, parts_of
from hurray_rdma.cache.indices import check_distinct
from hurray_rdma.errors import GeometryError
from hurray_rdma.plan._offsets import offsets_of
from hurray_rdma.plan.negotiate import check_pair, common_heads
from hurray_rdma.plan.operations import Plan
from hurray_rdma.plan.pagemap import PageMap
from hurray_rdma.plan.pieces import MAX_OPERATIONS, Strides, Tile, make_tile, plans_of

__all__ = ["Move", "MovesTogether", "Program", "TransferPlan", "plan_transfer"]

Uint32 = NDArray[np.uint32]
Offsets = NDArray[np.uint64]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """What to write for one part of every role of every layer with the same strides."""

    num_pages: int
    """Destination pages that are written."""
    nbytes: int
    """Bytes that come from the source's pages."""
    zeros: Plan | None
    """Slots past the valid tokens, to be overwritten with zeros; all source offsets are 0: it reads from a buffer of
    zeros of `TransferPlan.zeros_nbytes`. None where nothing must be zeroed."""
    tiles: tuple[Tile, ...]
    """What comes from the source's pages; places in the order of the page map's units."""
    _plan: tuple[Plan, ...] | None

    @property
    def max_operations(self) -> int:
        """Operations of `plans`; an upper bound where a page is many pieces, some of which may meet."""
        if self._plan is not None:
            return sum(plan.num_operations for plan in self._plan)
        return sum(tile.num_operations for tile in self.tiles)

    def plans(self) -> Iterator[Plan]:
        """What to write, in one plan, or in several of bounded size where a page is many pieces; none when nothing."""
        if self._plan is not None:
            return iter(self._plan)
        return plans_of(self.tiles, num_pages=self.num_pages)


class Move(NamedTuple):
    """A program at its place: ``plans`` offsets count from these bases. A tuple, since one is made for each tensor."""

    part: Part
    src_region_index: int
    src_base_nbytes: int
    """Bytes from the first of the source's region."""
    dst_region_index: int
    dst_base_nbytes: int
    """Bytes from the first of the destination's region."""
    program: Program


class MovesTogether(NamedTuple):
    """One program at several places between the same two regions."""

    program: Program
    src_region_index: int
    dst_region_index: int
    bases_nbytes: list[tuple[int, int]]
    """In the source's region and in the destination's, bytes, one pair for each place."""


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Everything that one side writes into the other for one offer."""

    page_map: PageMap
    num_pages: int
    """Destination pages that are written, of each role of each layer."""
    num_resident: int
    """Destination pages that the receiver has."""
    nbytes: int
    """Bytes that come from the source's pages, of all roles and layers, scales included."""
    zeros_nbytes: int
    """Length of the buffer of zeros that ``zeros`` plans read from; 0 where there are none."""
    heads: tuple[int, int]
    """The model's heads that are written: first, and the one after the last."""
    _spec: CacheSpec
    """Of the source; the following are in the order of its segments."""
    _parts: tuple[Part, ...]
    _programs: tuple[Program, ...]
    _src_segments: tuple[Segment, ...]
    _dst_segments: tuple[Segment, ...]

    def moves(self, role: str, layer: int) -> tuple[Move, ...]:
        """What to write for one role of one layer: pages first, then scales and zero points.

        Raises:
            GeometryError: there is no such role or layer.
        """
        first = self._spec.index(role, layer) * len(self._parts)
        return tuple([self._move(part, index) for index, part in enumerate(self._parts, first)])

    def together(self, tensors: Iterable[int]) -> list[MovesTogether]:
        """The moves of several roles of layers, those that one call can make put together.

        Args:
            tensors: places in the source's ``spec.tensors``; in the destination's too where they are of whole layers,
                whose roles the two sides may order unlike.
        """
        programs, sources, dests, count = self._programs, self._src_segments, self._dst_segments, len(self._parts)
        found: dict[tuple[int, int, int], MovesTogether] = {}
        for tensor in tensors:
            for index in range(tensor * count, (tensor + 1) * count):
                program, src, dst = programs[index], sources[index], dests[index]
                key = id(program), src.region_index, dst.region_index
                same = found.get(key)
                if same is None:
                    same = found[key] = MovesTogether(program, src.region_index, dst.region_index, [])
                same.bases_nbytes.append((src.offset_nbytes, dst.offset_nbytes))
        return list(found.values())

    def _move(self, part: Part, index: int) -> Move:
        src, dst = self._src_segments[index], self._dst_segments[index]
        return Move(
            part, src.region_index, src.offset_nbytes, dst.region_index, dst.offset_nbytes, self._programs[index]
        )

    @property
    def max_operations(self) -> int:
        """Operations of all moves, zeros included; an upper bound as of `Program.max_operations`."""
        return sum(each.max_operations + (each.zeros.num_operations if each.zeros else 0) for each in self._programs)


def plan_transfer(
    source: PoolLayout,
    dest: PoolLayout,
    page_map: PageMap,
    dst_page_ids: ArrayLike,
    *,
    resident: NDArray[np.bool_] | None = None,
    zero_tails: bool = False,
    in_stretches: bool = False,
) -> TransferPlan:
    """Plans all writes of one offer.

    Args:
        source: layout of the pool that holds the pages.
        dest: layout of the pool that receives them; of a peer, so `PoolLayout.check_inside` comes first.
        page_map: of the offer, with the page sizes of the two.
        dst_page_ids: the grant, integers ``[page_map.num_pages]``.
        resident: which of them the receiver has, bool ``[page_map.num_pages]``: these are not written.
        zero_tails: whether slots past the valid tokens of a page arrive as zeros, and nothing of the source's leaves
            there; otherwise they are undefined.
        in_stretches: whether a `Cutter` makes the operations, some at a time; otherwise they are made now, if not many.

    Raises:
        GeometryError: the two cannot exchange pages, or the grant does not fit the offer or the pool.
    """
    check_pair(source.spec, dest.spec)
    sizes = page_map.src_page_size, page_map.dst_page_size
    if sizes != (source.spec.page_size, dest.spec.page_size):
        raise GeometryError(
            f"must be those of the two sides, {source.spec.page_size} and {dest.spec.page_size}",
            field="page_map.page_sizes",
            value=sizes,
        )
    page_ids = page_map.check_grant(dst_page_ids)
    check_distinct(page_ids, num_pages=dest.num_pages, field="dst_page_ids")
    written = None if resident is None else ~np.asarray(resident, np.bool_)
    if written is not None and written.shape != (page_map.num_pages,):
        raise GeometryError(
            f"must be the {page_map.num_pages} pages of the offer", field="len(resident)", value=written.size
        )
    planner = _Planner(source, dest, page_map, page_ids, written, zero_tails=zero_tails, in_stretches=in_stretches)
    programs = planner.programs()
    times = planner.times
    return TransferPlan(
        page_map=page_map,
        num_pages=planner.num_pages,
        num_resident=page_map.num_pages - planner.num_pages,
        nbytes=times * sum(program.nbytes for program in programs),
        zeros_nbytes=max(map(_longest_zeros, set(programs))),
        heads=planner.heads,
        _spec=source.spec,
        _parts=planner.parts,
        _programs=programs * times,
        _src_segments=source.segments,
        _dst_segments=planner.in_order_of_source(dest.segments),
    )


def _longest_zeros(program: Program) -> int:
    return int(program.zeros.lengths.max()) if program.zeros is not None else 0


class _Planner:
    """Finds each program once."""

    def __init__(
        self,
        source: PoolLayout,
        dest: PoolLayout,
        page_map: PageMap,
        page_ids: Uint32,
        written: NDArray[np.bool_] | None,
        *,
        zero_tails: bool,
        in_stretches: bool,
    ) -> None:
        self.heads = common_heads(source.spec, dest.spec)
        self.parts = parts_of(source.spec)
        alike = source.uniform and dest.uniform
        self.times = len(source.spec.tensors) if alike else 1
        """How often all of `programs` follow one another."""
        self._source = source
        self._dest = dest
        self._map = page_map
        self._page_ids = page_ids
        self._written = written
        self._zero_tails = zero_tails
        self._in_stretches = in_stretches
        self.num_pages = page_map.num_pages if written is None else int(np.count_nonzero(written))
        self._units: tuple[Uint32, ...] = (
            page_map.unit_src_pages,
            page_map.unit_src_slots,
            page_map.unit_pages,
            page_map.unit_dst_slots,
        )
        if written is not None and self.num_pages < page_map.num_pages:
            travel = written[page_map.unit_pages].nonzero()[0]
            self._units = tuple([array[travel] for array in self._units])

    def programs(self) -> tuple[Program, ...]:
        """One for each segment of the source, or of its first tensor where all are alike; the same object where part
        and strides are the same on both sides."""
        if self.times > 1:
            return tuple([self._program(part, part) for part in range(len(self.parts))])
        pairs = tuple(zip(self._source.alike, self.in_order_of_source(self._dest.alike), strict=True))
        found = {pair: self._program(*pair) for pair in set(pairs)}
        return tuple(found[pair] for pair in pairs)

    def in_order_of_source(self, values: tuple[_T, ...]) -> tuple[_T, ...]:
        """What is one for each segment of the destination, in the order of the source's segments."""
        if self._source.spec.roles == self._dest.spec.roles:
            return values
        count = len(self.parts)
        places = (self._dest.spec.index(role, layer) * count for role, layer in self._source.spec.tensors)
        return tuple(value for place in places for value in values[place : place + count])

    def _program(self, src_index: int, dst_index: int) -> Program:
        """For the segments of those indices, on their own sides."""
        part = self.parts[src_index % len(self.parts)]
        src = Strides(*self._source.segments[src_index].strides_nbytes)
        dst = Strides(*self._dest.segments[dst_index].strides_nbytes)
        has_heads = part is Part.PAGES
        row_nbytes = self._source.row_nbytes(part)
        first, last = self.heads if has_heads else (0, 1)
        src_head = (first - self._source.spec.head_offset) * src.head_nbytes if has_heads else 0
        dst_head = (first - self._dest.spec.head_offset) * dst.head_nbytes if has_heads else 0
        src_pages, src_slots, pages, dst_slots = self._units
        src_places = _places(src_pages, src_slots, src, src_head)
        dst_places = _places(self._page_ids, dst_slots, dst, dst_head, through=pages)
        tiles = [
            make_tile(
                src_places if units is None else src_places[units],
                dst_places if units is None else dst_places[units],
                num_tokens=num_tokens,
                num_heads=last - first,
                row_nbytes=row_nbytes,
                src=src,
                dst=dst,
            )
            for num_tokens, units in self._by_tokens()
        ]
        at_once = not self._in_stretches and (
            all(len(tile.src_pieces) == 1 for tile in tiles)
            or sum([tile.num_operations for tile in tiles]) <= MAX_OPERATIONS
        )
        return Program(
            num_pages=self.num_pages,
            nbytes=sum([tile.nbytes for tile in tiles]),
            zeros=self._zeros(last - first, row_nbytes, dst, dst_head) if self._zero_tails else None,
            tiles=tuple(tiles),
            _plan=tuple(plans_of(tiles, num_pages=self.num_pages)) if at_once else None,
        )

    def _by_tokens(self) -> Iterator[tuple[int, NDArray[np.int64] | None]]:
        """Units by how many of their tokens travel: all of them (None) but where tails must not."""
        size = self._map.unit_size
        if not self._zero_tails:
            yield size, None
            return
        _, _, pages, dst_slots = self._units
        valid = self._map.valid_tokens[pages].astype(np.int64) - dst_slots
        tokens = np.minimum(valid, size)
        for count in np.unique(tokens).tolist():
            yield count, np.flatnonzero(tokens == count)

    def _zeros(self, num_heads: int, row_nbytes: int, dst: Strides, dst_head: int, /) -> Plan | None:
        size = self._map.dst_page_size
        shorter = self._map.valid_tokens < size
        partial = np.flatnonzero(shorter if self._written is None else shorter & self._written)
        tiles = []
        for count in np.unique(self._map.valid_tokens[partial]).tolist():
            pages = partial[self._map.valid_tokens[partial] == count]
            slots = np.full(len(pages), count, np.uint32)
            dst_places = _places(self._page_ids[pages], slots, dst, dst_head)
            tile = make_tile(
                dst_places,
                dst_places,
                num_tokens=size - count,
                num_heads=num_heads,
                row_nbytes=row_nbytes,
                src=dst,
                dst=dst,
            )
            tiles.append(tile.reading_zeros())
        plans = list(plans_of(tiles, num_pages=len(partial)))
        if not plans:
            return None
        return Plan(
            src_offsets=np.concatenate([plan.src_offsets for plan in plans]),
            dst_offsets=np.concatenate([plan.dst_offsets for plan in plans]),
            lengths=np.concatenate([plan.lengths for plan in plans]),
            num_pages=len(partial),
            nbytes=sum(plan.nbytes for plan in plans),
        )


def _places(
    pages: Uint32, slots: Uint32, strides: Strides, head_nbytes: int, *, through: Uint32 | None = None
) -> Offsets:
    return offsets_of(
        pages,
        slots,
        page_nbytes=strides.page_nbytes,
        token_nbytes=strides.token_nbytes,
        head_nbytes=head_nbytes,
        places=through,
    )
