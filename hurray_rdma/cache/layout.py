"""Where the bytes of a pool are, as plain numbers: what one side tells the other, and what plans are made from.

Knows offsets and strides within numbered regions; knows no memory. Values only, so that they can travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from hurray_rdma.cache.spec import CacheSpec
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import ElementType

__all__ = ["Part", "PoolLayout", "Segment", "parts_of"]

_UINT64_MAX = 2**64 - 1


class Part(StrEnum):
    """What one role of one layer consists of."""

    PAGES = "pages"
    """The keys or values themselves."""
    SCALES = "scales"
    """One scale for each page slot (ADR-024, per-block affine)."""
    ZERO_POINTS = "zero_points"
    """One int32 for each page slot."""


def parts_of(spec: CacheSpec) -> tuple[Part, ...]:
    """The parts that each role of each layer of ``spec`` has, in the order of their buffers in a descriptor."""
    scales = (Part.SCALES,) if spec.scale_dtype is not None else ()
    return (Part.PAGES, *scales, *((Part.ZERO_POINTS,) if spec.zero_points else ()))


def row_nbytes_of(spec: CacheSpec, part: Part) -> int:
    """Bytes of one token of one head of a part; of one token of a scale or zero point."""
    match part:
        case Part.PAGES:
            return spec.row_nbytes
        case Part.SCALES:
            return ElementType.from_name(str(spec.scale_dtype)).nbytes(1)
        case Part.ZERO_POINTS:
            return ElementType.INT32.nbytes(1)


def page_nbytes_of(spec: CacheSpec, part: Part) -> int:
    """Bytes of one page of a part of one role of one layer."""
    return spec.page_size * (spec.num_heads if part is Part.PAGES else 1) * row_nbytes_of(spec, part)


@dataclass(frozen=True, slots=True)
class Segment:
    """Where one part of one role of one layer is.

    Token t, head h (of the pool's own heads, from 0) of page p starts ``offset_nbytes + p * page_stride_nbytes +
    t * token_stride_nbytes + h * head_stride_nbytes`` bytes into region ``region_index``.
    """

    region_index: int
    """Into the pool's regions."""
    offset_nbytes: int
    """Of page 0, from the first byte of the region."""
    page_stride_nbytes: int
    """From one page to the next; `CacheSpec.page_nbytes` when nothing lies between them."""
    token_stride_nbytes: int
    head_stride_nbytes: int
    """0 in scales and zero points: a slot has one, whatever its heads."""

    @property
    def strides_nbytes(self) -> tuple[int, int, int]:
        """Of pages, tokens and heads."""
        return self.page_stride_nbytes, self.token_stride_nbytes, self.head_stride_nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """The geometry of a pool and the place of everything in it.

    Raises:
        GeometryError: there is not one segment for each part of each role of each layer, or a number is negative.
    """

    spec: CacheSpec
    num_pages: int
    """Pages of each role of each layer."""
    segments: tuple[Segment, ...]
    """In the order of ``spec.tensors``, for each of them the `parts_of` the spec."""
    alike: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """For each segment the index of the first one of the same part with the same strides."""
    uniform: bool = field(init=False, repr=False, compare=False)
    """Whether all segments of one part have the same strides."""

    def __post_init__(self) -> None:
        num_parts = len(parts_of(self.spec))
        expected = len(self.spec.tensors) * num_parts
        if len(self.segments) != expected:
            raise GeometryError(
                f"must be {expected}: {parts_of(self.spec)} of {len(self.spec.tensors)} roles of layers",
                field="len(segments)",
                value=len(self.segments),
            )
        if not 1 <= self.num_pages < 2**32:
            raise GeometryError("must be from 1 to 2**32 - 1", field="num_pages", value=self.num_pages)
        for index, segment in enumerate(self.segments):
            for name in Segment.__slots__:
                if not 0 <= getattr(segment, name) <= _UINT64_MAX:
                    raise GeometryError(
                        "must be from 0 to 2**64 - 1",
                        field=f"segments[{index}].{name}",
                        value=getattr(segment, name),
                    )
        first: dict[tuple[int, ...], int] = {}
        alike = (
            first.setdefault((index % num_parts, *segment.strides_nbytes), index)
            for index, segment in enumerate(self.segments)
        )
        object.__setattr__(self, "alike", tuple(alike))
        object.__setattr__(self, "uniform", len(first) == num_parts)

    def segment(self, role: str, layer: int, *, part: Part = Part.PAGES) -> Segment:
        """Where one part of one role of one layer is.

        Raises:
            GeometryError: there is no such role, layer or part.
        """
        parts = parts_of(self.spec)
        if part not in parts:
            raise GeometryError(f"must be one of {tuple(map(str, parts))}", field="part", value=str(part))
        return self.segments[self.spec.index(role, layer) * len(parts) + parts.index(part)]

    def row_nbytes(self, part: Part, /) -> int:
        """Bytes of one token of one head of a part; of one token of a scale or zero point."""
        return row_nbytes_of(self.spec, part)

    def extent_nbytes(self, index: int, /) -> int:
        """Bytes from the first to the last of a page, in the segment of that index."""
        spec, segment, part = self.spec, self.segments[index], self._part(index)
        heads = spec.num_heads if part is Part.PAGES else 1
        return (
            (spec.page_size - 1) * segment.token_stride_nbytes
            + (heads - 1) * segment.head_stride_nbytes
            + self.row_nbytes(part)
        )

    def page_nbytes(self, index: int, /) -> int:
        """`page_nbytes_of` what is in the segment of that index: what lies between its bytes is left out."""
        return page_nbytes_of(self.spec, self._part(index))

    def _part(self, index: int) -> Part:
        parts = parts_of(self.spec)
        return parts[index % len(parts)]

    def check_inside(self, regions_nbytes: Sequence[int], /) -> None:
        """Checks that every slot lies in its region: needed of a layout that a peer has sent.

        Args:
            regions_nbytes: length of each region in bytes.

        Raises:
            GeometryError: a segment names no region, or goes beyond its end.
        """
        for index, segment in enumerate(self.segments):
            if segment.region_index >= len(regions_nbytes):
                raise GeometryError(
                    f"is not below the number of regions {len(regions_nbytes)}",
                    field=f"segments[{index}].region_index",
                    value=segment.region_index,
                )
            last_page = segment.offset_nbytes + (self.num_pages - 1) * segment.page_stride_nbytes
            end = last_page + self.extent_nbytes(index)
            if end > regions_nbytes[segment.region_index]:
                raise GeometryError(
                    f"ends at byte {end} of region {segment.region_index}, which has "
                    f"{regions_nbytes[segment.region_index]}",
                    field=f"segments[{index}].offset_nbytes",
                    value=segment.offset_nbytes,
                )
