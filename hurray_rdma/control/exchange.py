"""The private messages (0xF0..0xF5) as values: who speaks, pools, offers, grants, aborts; checked when made.

This module knows what these messages may say: ranges, sizes, which number must equal which. It knows neither bytes nor
order. Rules are checked in the constructors, so that one check serves what is to be sent and what was received.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from hurray_rdma.errors import ConfigError, DescriptorError, GeometryError

__all__ = [
    "Abort",
    "Grant",
    "Offer",
    "Pool",
    "PoolRegion",
    "PoolSegment",
    "Quiet",
    "SessionMessage",
    "Uint32Array",
]

Uint32Array: TypeAlias = npt.NDArray[np.uint32]
Uint8Array: TypeAlias = npt.NDArray[np.uint8]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
_MAX_NAME_CHARS = 256
_MAX_KEY_CHARS = 1024
_MAX_LANE_CHARS = 64
_PATHS = ("mapped", "put", "frames")
_MAX_TOKEN_CHARS = 4096
_MAX_HOST_ID_NBYTES = 256
_MAX_PROCESS_ID_NBYTES = 128
_MAX_ADDRESS_NBYTES = 32 * 1024
_MAX_RKEY_NBYTES = 64 * 1024
_MAX_REASON_CHARS = 4096
_MAX_PAGE_KEY_NBYTES = 256
_MAX_DAYS_S = 7 * 86400.0
_DESCRIPTOR_HEADER_NBYTES = 20


def _between(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"must be {low} to {high}", field=name, value=value)


def _seconds(name: str, value: float) -> None:
    if not (math.isfinite(value) and 0 < value <= _MAX_DAYS_S):
        raise ConfigError(f"must be a number of seconds above 0 and at most {_MAX_DAYS_S:.0f}", field=name, value=value)


def _at_most(name: str, value: str | bytes, limit: int) -> None:
    if len(value) > limit:
        unit = "characters" if isinstance(value, str) else "bytes"
        raise ConfigError(f"{name} has {len(value)} {unit}; at most {limit} are allowed")


def _uint32(name: str, values: npt.ArrayLike) -> Uint32Array:
    array = np.asarray(values)
    if array.ndim != 1:
        raise GeometryError("must have one axis", field=f"{name}.shape", value=array.shape)
    if array.dtype != np.uint32:
        if array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0 or int(array.max()) > _U32_MAX):
            raise GeometryError(f"{name} ({array.dtype}) must hold integers from 0 to {_U32_MAX}")
        array = array.astype(np.uint32)
    return np.ascontiguousarray(array)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionMessage:
    """SESSION (0xF0): who speaks. ``token`` is set by the client only, and never shown by ``repr``."""

    engine_name: str
    token: str = field(default="", repr=False)
    host_id: bytes
    process_id: bytes = b""
    worker_address: bytes
    """UCX worker address; opaque here."""
    heartbeat_s: float

    def __post_init__(self) -> None:
        _at_most("engine_name", self.engine_name, _MAX_NAME_CHARS)
        _at_most("token", self.token, _MAX_TOKEN_CHARS)
        _at_most("host_id", self.host_id, _MAX_HOST_ID_NBYTES)
        _at_most("process_id", self.process_id, _MAX_PROCESS_ID_NBYTES)
        _at_most("worker_address", self.worker_address, _MAX_ADDRESS_NBYTES)
        _seconds("heartbeat_s", self.heartbeat_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRegion:
    """One registered span of the announcing side: address and length in bytes there, and its packed rkey."""

    remote_addr: int
    nbytes: int
    rkey: bytes = field(repr=False)

    def __post_init__(self) -> None:
        _between("remote_addr", self.remote_addr, 0, _U64_MAX)
        _between("nbytes", self.nbytes, 1, _U64_MAX - self.remote_addr)
        _at_most("rkey", self.rkey, _MAX_RKEY_NBYTES)


@dataclass(frozen=True, slots=True)
class PoolSegment:
    """Where one part (pages, scales, zero points) of one role of one layer is; bytes, from the start of a region."""

    region_index: int
    offset_nbytes: int
    page_stride_nbytes: int
    token_stride_nbytes: int
    head_stride_nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """POOL (0xF1): a receive pool, in place of any older generation; or, with ``removed``, the end of one.

    What the fields of the geometry mean together is the engine's to check, and whether every page lies inside its
    region; here each number is held to its own range.

    Raises:
        ConfigError, GeometryError: a number is out of range, or a segment is not in its region.
    """

    pool_id: int
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
    regions: tuple[PoolRegion, ...] = ()
    segments: tuple[PoolSegment, ...] = ()
    """For each layer, for each role, for each part, in this order."""

    def __post_init__(self) -> None:
        _between("pool_id", self.pool_id, 0, _U32_MAX)
        _between("generation", self.generation, 0, _U64_MAX)
        _at_most("name", self.name, _MAX_NAME_CHARS)
        if self.removed:
            return
        for name in ("num_pages", "num_heads", "head_dim", "page_size", "total_heads"):
            value = getattr(self, name)
            if not 1 <= value <= _U32_MAX:
                raise GeometryError(f"must be 1 to {_U32_MAX}", field=name, value=value)
        if not 0 <= self.head_offset <= _U32_MAX:
            raise GeometryError(f"must be 0 to {_U32_MAX}", field="head_offset", value=self.head_offset)
        for name in ("layers", "roles", "segments"):
            if not getattr(self, name):
                raise GeometryError("must name at least one", field=name, value=())
        for index, segment in enumerate(self.segments):
            self._check_segment(index, segment)

    def _check_segment(self, index: int, segment: PoolSegment) -> None:
        if not 0 <= segment.region_index < len(self.regions):
            raise GeometryError(
                f"is not below the number of regions {len(self.regions)}",
                field=f"segments[{index}].region_index",
                value=segment.region_index,
            )
        for name in ("offset_nbytes", "page_stride_nbytes", "token_stride_nbytes", "head_stride_nbytes"):
            if not 0 <= getattr(segment, name) <= _U64_MAX:
                raise GeometryError(
                    f"must be 0 to {_U64_MAX}", field=f"segments[{index}].{name}", value=getattr(segment, name)
                )
        last = segment.offset_nbytes + (self.num_pages - 1) * segment.page_stride_nbytes
        region = self.regions[segment.region_index]
        if last >= region.nbytes:
            raise GeometryError(
                f"segments[{index}] has its last page at byte {last} of region {segment.region_index}, "
                f"which has {region.nbytes}"
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer:
    """OFFER (0xF2): a snapshot the client wants to write into a pool of the server.

    Index arrays are kept as contiguous uint32; ``seq_ptr`` counts pages, ``seq_lens`` tokens.

    Raises:
        ConfigError: key, order or deadline are out of range.
        DescriptorError: ``descriptors`` is not a chain of whole descriptors.
        GeometryError: the index arrays do not fit together.
    """

    key: str
    pool_id: int
    generation: int
    descriptors: bytes = field(repr=False)
    """Encoded descriptors, one after the other; descriptor i owns stream T + 1 + i."""
    block_table: Uint32Array = field(repr=False)
    """Page IDs of the client, [seq_ptr[-1]]."""
    seq_ptr: Uint32Array = field(repr=False)
    """[num_seqs + 1]."""
    seq_lens: Uint32Array = field(repr=False)
    """[num_seqs]."""
    order: str = "NHD"
    """Order of the axes inside the client's pages: no descriptor has it."""
    head_offset: int = 0
    """The model's index of the first head that the client's pages hold."""
    total_heads: int = 0
    """Heads of the model; 0 is all that there are in the pages."""
    page_keys: Uint8Array = field(default_factory=lambda: np.empty((0, 0), np.uint8), repr=False)
    """A key of its content for each table entry, uint8 [seq_ptr[-1], key_nbytes]; key_nbytes 0 is none."""
    deadline_s: float
    """How long the client will wait for an answer, seconds from now on."""
    lane: str = ""
    """The UCX transport that will carry the pages, as the client knows it; "" is unknown."""
    path: str = "put"
    """How the client will write: ``mapped`` (stores into mapped memory), ``put`` (UCX) or ``frames`` (TENSOR_DATA)."""
    num_descriptors: int = field(init=False)

    def __post_init__(self) -> None:
        _at_most("key", self.key, _MAX_KEY_CHARS)
        _between("pool_id", self.pool_id, 0, _U32_MAX)
        _between("generation", self.generation, 0, _U64_MAX)
        _at_most("order", self.order, 32)
        _between("head_offset", self.head_offset, 0, _U32_MAX)
        _between("total_heads", self.total_heads, 0, _U32_MAX)
        _seconds("deadline_s", self.deadline_s)
        _at_most("lane", self.lane, _MAX_LANE_CHARS)
        if self.path not in _PATHS:
            raise ConfigError(f"must be one of {', '.join(_PATHS)}", field="path", value=self.path[:40])
        for name in ("block_table", "seq_ptr", "seq_lens"):
            object.__setattr__(self, name, _uint32(name, getattr(self, name)))
        if len(self.seq_ptr) != len(self.seq_lens) + 1:
            raise GeometryError(
                f"seq_ptr has {len(self.seq_ptr)} entries, but {len(self.seq_lens)} sequences (seq_lens) need one more"
            )
        if int(self.seq_ptr[0]) != 0 or int(self.seq_ptr[-1]) != len(self.block_table):
            raise GeometryError(
                f"seq_ptr runs from {self.seq_ptr[0]} to {self.seq_ptr[-1]}, not from 0 to the "
                f"{len(self.block_table)} entries of block_table"
            )
        steps_down = np.flatnonzero(self.seq_ptr[1:] < self.seq_ptr[:-1])
        if len(steps_down):
            at = int(steps_down[0]) + 1
            rule = f"is below seq_ptr[{at - 1}] = {self.seq_ptr[at - 1]}"
            raise GeometryError(rule, field=f"seq_ptr[{at}]", value=int(self.seq_ptr[at]))
        self._check_page_keys()
        object.__setattr__(self, "num_descriptors", sum(1 for _ in _walk_descriptors(self.descriptors)))
        if not self.num_descriptors:
            raise DescriptorError("an offer needs at least one descriptor", field="descriptors", value=b"")

    def _check_page_keys(self) -> None:
        keys = self.page_keys
        if keys.ndim != 2 or keys.dtype != np.uint8 or keys.shape[1] > _MAX_PAGE_KEY_NBYTES:
            raise GeometryError(
                f"must be uint8 of two axes, with keys of at most {_MAX_PAGE_KEY_NBYTES} bytes",
                field="page_keys",
                value=f"{keys.dtype} {keys.shape}",
            )
        if keys.shape[1] and len(keys) != len(self.block_table):
            raise GeometryError(
                f"must be one for each of the {len(self.block_table)} entries of block_table",
                field="len(page_keys)",
                value=len(keys),
            )


def _walk_descriptors(data: bytes) -> Iterator[int]:
    """Start of each descriptor of a chain, by the length each declares (WIRE.md, fixed header)."""
    at = 0
    while at < len(data):
        left = len(data) - at
        length = int.from_bytes(data[at + 6 : at + 10], "little")
        if data[at : at + 4] != b"HRRY":
            raise DescriptorError("must be b'HRRY'", field="magic", value=data[at : at + 4], offset=at)
        if not _DESCRIPTOR_HEADER_NBYTES <= length <= left:
            raise DescriptorError(
                f"must be {_DESCRIPTOR_HEADER_NBYTES} to the {left} bytes at hand",
                field="descriptor_length",
                value=length,
                offset=at + 6,
            )
        yield at
        at += length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grant:
    """GRANT (0xF3): the server's pages for an offer, in the order both sides derive from the offered table.

    Raises:
        ConfigError: the lease is not a time.
        GeometryError: a page is granted twice.
    """

    generation: int
    page_ids: Uint32Array = field(repr=False)
    resident: BoolArray = field(default_factory=lambda: np.empty(0, np.bool_), repr=False)
    """Which of them the server has already, and must not be sent, bool [len(page_ids)]; empty is none."""
    lease_s: float
    """How long the pages are held if nothing more is heard of the transfer."""

    def __post_init__(self) -> None:
        _between("generation", self.generation, 0, _U64_MAX)
        _seconds("lease_s", self.lease_s)
        page_ids = _uint32("page_ids", self.page_ids)
        object.__setattr__(self, "page_ids", page_ids)
        if len(self.resident) not in (0, len(page_ids)):
            raise GeometryError(
                f"must be 0 or the {len(page_ids)} of page_ids", field="len(resident)", value=len(self.resident)
            )
        in_order = np.sort(page_ids)
        repeated = np.flatnonzero(in_order[1:] == in_order[:-1])
        if len(repeated):
            raise GeometryError("a page may be granted once", field="page_ids", value=int(in_order[repeated[0]]))


@dataclass(frozen=True, slots=True)
class Abort:
    """ABORT (0xF4), either way: the transfer is to end; the client answers with QUIET."""

    code: int
    reason: str

    def __post_init__(self) -> None:
        _between("code", self.code, 0, _U32_MAX)
        _at_most("reason", self.reason, _MAX_REASON_CHARS)


@dataclass(frozen=True, slots=True)
class Quiet:
    """QUIET (0xF5), from the client: nothing of this transfer is in flight any more, nor will be."""
