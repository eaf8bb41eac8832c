"""The POOL message as a value: the memory of a pool that the server announces, checked when made.

This module knows the ranges of its numbers, and that each segment begins and has its last page inside its region. What
the geometry means is the engine's to know. It knows neither bytes nor order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter

from hurray_rdma.control.checks import MAX_NAME_CHARS, U32_MAX, U64_MAX, at_most, between
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import DeviceTag

__all__ = [
    "MAX_LAYERS",
    "MAX_REGIONS",
    "MAX_ROLES",
    "MAX_SEGMENTS",
    "Pool",
    "PoolRegion",
    "PoolSegment",
    "segment_values",
]

MAX_LAYERS = 4096
MAX_ROLES = 16
MAX_SEGMENTS = MAX_REGIONS = 3 * 4096
"""Pages, scales and zero points of as many tensors as a snapshot may have descriptors, each in a region of its own."""

_LIMITS = {"layers": MAX_LAYERS, "roles": MAX_ROLES, "regions": MAX_REGIONS, "segments": MAX_SEGMENTS}
_MAX_RKEY_NBYTES = 64 * 1024
# Measured, and rounded up: what an announcement takes once it is decoded, and the layout that is made of it.
_POOL_NBYTES = 16 * 1024
_LAYER_NBYTES = 64
_REGION_NBYTES = 256
_SEGMENT_NBYTES = 384


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRegion:
    """One registered span of the announcing side: address and length in bytes there, and its packed rkey."""

    remote_addr: int
    nbytes: int
    rkey: bytes = field(repr=False)

    def __post_init__(self) -> None:
        between("remote_addr", self.remote_addr, 0, U64_MAX)
        between("nbytes", self.nbytes, 1, U64_MAX - self.remote_addr)
        at_most("rkey", self.rkey, _MAX_RKEY_NBYTES)


@dataclass(frozen=True, slots=True)
class PoolSegment:
    """Where one part (pages, scales, zero points) of one role of one layer is; bytes, from the start of a region."""

    region_index: int
    offset_nbytes: int
    page_stride_nbytes: int
    token_stride_nbytes: int
    head_stride_nbytes: int


segment_values = attrgetter(*PoolSegment.__slots__)
"""The fields of a `PoolSegment`, or of what has fields of the same names; `dataclasses.astuple` copies each deeply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """POOL (0xF1): a pool to write into or read from, in place of an older generation; or, with ``removed``, its end.

    What the fields of the geometry mean together is the engine's to check, and whether every page lies inside its
    region; here each number is held to its own range.

    Raises:
        ConfigError, GeometryError: a number is out of range, a segment is not in its region, or there are more than
            4096 layers, 16 roles, 12288 regions or 12288 segments, or a name has more than 256 characters.
        DescriptorError: ``device`` names none.
    """

    pool_id: int
    """Its number: they rise, and no other pool of the session is given one again."""
    generation: int
    name: str = ""
    """What the announcing engine calls it, such as a cache group or a tenant's pool."""
    removed: bool = False
    num_pages: int = 0
    layers: tuple[int, ...] = ()
    """The model's index of each layer, ascending."""
    num_heads: int = 0
    head_dim: int = 0
    page_size: int = 0
    """Tokens per page."""
    dtype: str = ""
    roles: tuple[str, ...] = ()
    order: str = "NHD"
    """Order of the axes inside a page."""
    head_offset: int = 0
    """The model's index of the first head."""
    total_heads: int = 0
    """Heads of the model."""
    scale_dtype: str | None = None
    """Element type of the scales, one for each page slot; None is unquantised."""
    zero_points: bool = False
    device: str = "cpu"
    """Where all its regions are: ``"cpu"``, or a device of the announcing side such as ``"cuda:0"``."""
    regions: tuple[PoolRegion, ...] = ()
    segments: tuple[PoolSegment, ...] = ()
    """For each layer, for each role, for each part, in this order."""

    def __post_init__(self) -> None:
        between("pool_id", self.pool_id, 0, U32_MAX)
        between("generation", self.generation, 0, U64_MAX)
        at_most("name", self.name, MAX_NAME_CHARS)
        if self.removed:
            return
        for name in ("dtype", "order", "scale_dtype", "device"):
            at_most(name, getattr(self, name) or "", MAX_NAME_CHARS)
        for name in ("num_pages", "num_heads", "head_dim", "page_size", "total_heads"):
            value = getattr(self, name)
            if not 1 <= value <= U32_MAX:
                raise GeometryError(f"must be 1 to {U32_MAX}", field=name, value=value)
        if not 0 <= self.head_offset <= U32_MAX:
            raise GeometryError(f"must be 0 to {U32_MAX}", field="head_offset", value=self.head_offset)
        for name in ("layers", "roles", "segments"):
            if not getattr(self, name):
                raise GeometryError("must name at least one", field=name, value=())
        for name, limit in _LIMITS.items():
            if len(getattr(self, name)) > limit:
                raise GeometryError(f"must be at most {limit}", field=f"len({name})", value=len(getattr(self, name)))
        for role in self.roles:
            at_most("role", role, MAX_NAME_CHARS)
        DeviceTag.of_device(self.device)
        for index, segment in enumerate(self.segments):
            self._check_segment(index, segment)

    @property
    def memory_nbytes(self) -> int:
        """What it takes, about, to know it."""
        keys = sum(len(region.rkey) for region in self.regions)
        parts = _REGION_NBYTES * len(self.regions) + _SEGMENT_NBYTES * len(self.segments)
        return _POOL_NBYTES + _LAYER_NBYTES * len(self.layers) + keys + parts

    def _check_segment(self, index: int, segment: PoolSegment) -> None:
        if not 0 <= segment.region_index < len(self.regions):
            raise GeometryError(
                f"is not below the number of regions {len(self.regions)}",
                field=f"segments[{index}].region_index",
                value=segment.region_index,
            )
        for name in ("offset_nbytes", "page_stride_nbytes", "token_stride_nbytes", "head_stride_nbytes"):
            if not 0 <= getattr(segment, name) <= U64_MAX:
                raise GeometryError(
                    f"must be 0 to {U64_MAX}", field=f"segments[{index}].{name}", value=getattr(segment, name)
                )
        last = segment.offset_nbytes + (self.num_pages - 1) * segment.page_stride_nbytes
        region = self.regions[segment.region_index]
        if last >= region.nbytes:
            raise GeometryError(
                f"segments[{index}] has its last page at byte {last} of region {segment.region_index}, "
                f"which has {region.nbytes}"
            )
