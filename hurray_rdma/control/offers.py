"""The messages that make a transfer as values, checked when made: OFFER, FETCH, RESERVE, their answers, TAKE, COMMIT.

This module knows what these messages may say: ranges, sizes, which number must equal which. It knows neither bytes nor
order. Rules are checked in the constructors, so that one check serves what is to be sent and what was received.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from hurray_rdma.control.checks import (
    U32_MAX,
    U64_MAX,
    BoolArray,
    Uint8Array,
    Uint32Array,
    at_most,
    between,
    seconds,
    uint32,
)
from hurray_rdma.control.exchange import MAX_DESCRIPTORS
from hurray_rdma.errors import ConfigError, DescriptorError, GeometryError

__all__ = [
    "MAX_GRANTED_PAGES",
    "NONE_RESIDENT",
    "NO_PAGE_KEYS",
    "Commit",
    "Fetch",
    "Grant",
    "Offer",
    "Prepare",
    "Published",
    "Request",
    "Reserve",
    "SnapshotFields",
    "Take",
]

MAX_GRANTED_PAGES = 4 * 1024 * 1024
"""Of one transfer. That no page is granted twice is found by sorting them, on the event loop."""

_MAX_KEY_CHARS = 1024
_MAX_LANE_CHARS = 64
_ONE_SIDED_PATHS = ("mapped", "put", "stream")
_PATHS = (*_ONE_SIDED_PATHS, "frames")
_MAX_PAGE_KEY_NBYTES = 256
_MAX_ORDER_CHARS = 32
_FEW = 64
"""Numbers that are sooner compared one by one than by NumPy."""
_DESCRIPTOR_HEADER_NBYTES = 20
_DESCRIPTOR_BEGIN = struct.Struct("<4s2xI")

NO_PAGE_KEYS: Uint8Array = np.empty((0, 0), np.uint8)
"""Of a snapshot that says nothing of what its pages hold."""
NONE_RESIDENT: BoolArray = np.empty(0, np.bool_)
"""Where all pages are to be sent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SnapshotFields:
    """What describes a snapshot on the wire, whoever has it.

    Index arrays are kept as contiguous uint32; ``seq_ptr`` counts pages, ``seq_lens`` tokens.

    Raises:
        ConfigError: a number or a text is out of range.
        DescriptorError: ``descriptors`` is not a chain of 1 to 4096 whole descriptors.
        GeometryError: the index arrays do not fit together.
    """

    pool_id: int
    """The server's pool: where an offered snapshot is to go, or where a published one is."""
    generation: int
    """Of that pool."""
    descriptors: bytes = field(repr=False)
    """Encoded descriptors, one after the other."""
    block_table: Uint32Array = field(repr=False)
    """Page IDs of the side that has the snapshot, [seq_ptr[-1]]."""
    seq_ptr: Uint32Array = field(repr=False)
    """[num_seqs + 1]."""
    seq_lens: Uint32Array = field(repr=False)
    """[num_seqs]."""
    order: str = "NHD"
    """Order of the axes inside the snapshot's pages: no descriptor has it."""
    head_offset: int = 0
    """The model's index of the first head that the pages hold."""
    total_heads: int = 0
    """Heads of the model; 0 is all that there are in the pages."""
    page_keys: Uint8Array = field(default_factory=lambda: NO_PAGE_KEYS, repr=False)
    """A key of its content for each table entry, uint8 [seq_ptr[-1], key_nbytes]; key_nbytes 0 is none."""
    num_descriptors: int = 0
    """How many these are. Whoever has made them and the tables, and checked them, says it, and they are not looked at
    here; else it is found out."""

    def __post_init__(self) -> None:
        if self.num_descriptors:
            return
        beyond_u32 = (self.pool_id | self.head_offset | self.total_heads) >> 32
        if beyond_u32 or self.generation >> 64 or len(self.order) > _MAX_ORDER_CHARS:
            self._check_numbers()
        for name in ("block_table", "seq_ptr", "seq_lens"):
            given = getattr(self, name)
            if (values := uint32(name, given)) is not given:
                object.__setattr__(self, name, values)
        if len(self.seq_ptr) != len(self.seq_lens) + 1:
            raise GeometryError(
                f"seq_ptr has {len(self.seq_ptr)} entries, but {len(self.seq_lens)} sequences (seq_lens) need one more"
            )
        if self.seq_ptr.item(0) != 0 or self.seq_ptr.item(-1) != len(self.block_table):
            raise GeometryError(
                f"seq_ptr runs from {self.seq_ptr[0]} to {self.seq_ptr[-1]}, not from 0 to the "
                f"{len(self.block_table)} entries of block_table"
            )
        if len(self.seq_lens) > 1:
            steps_down = self.seq_ptr[1:] < self.seq_ptr[:-1]
            if np.count_nonzero(steps_down):
                at = int(steps_down.argmax()) + 1
                rule = f"is below seq_ptr[{at - 1}] = {self.seq_ptr[at - 1]}"
                raise GeometryError(rule, field=f"seq_ptr[{at}]", value=int(self.seq_ptr[at]))
        if self.page_keys is not NO_PAGE_KEYS:
            self._check_page_keys()
        object.__setattr__(self, "num_descriptors", _count_descriptors(self.descriptors))
        if not self.num_descriptors:
            raise DescriptorError("a snapshot needs at least one descriptor", field="descriptors", value=b"")

    @property
    def nbytes(self) -> int:
        """What its tables and descriptors take."""
        tables = self.block_table.nbytes + self.seq_ptr.nbytes + self.seq_lens.nbytes + self.page_keys.nbytes
        return len(self.descriptors) + tables

    def _check_numbers(self) -> None:
        between("pool_id", self.pool_id, 0, U32_MAX)
        between("generation", self.generation, 0, U64_MAX)
        at_most("order", self.order, _MAX_ORDER_CHARS)
        between("head_offset", self.head_offset, 0, U32_MAX)
        between("total_heads", self.total_heads, 0, U32_MAX)

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


def _check_request(request: Request, paths: tuple[str, ...] = _PATHS) -> None:
    seconds("deadline_s", request.deadline_s)
    if len(request.lane) > _MAX_LANE_CHARS:
        at_most("lane", request.lane, _MAX_LANE_CHARS)
    if request.path not in paths:
        raise ConfigError(f"must be one of {', '.join(paths)}", field="path", value=request.path[:40])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Offer(SnapshotFields):
    """OFFER (0xF2): a snapshot the client wants to write into a pool of the server. Descriptor i owns stream T + 1 + i.

    Raises:
        ConfigError, DescriptorError, GeometryError: as of :class:`SnapshotFields`.
    """

    key: str
    deadline_s: float
    """How long the client gives the push, seconds from now on: for the answer, and to renew its lease."""
    lane: str = ""
    """The UCX transport that will carry the pages, as the client knows it; "" is unknown."""
    path: str = "put"
    """How the client will write: ``mapped`` (stores into mapped memory), ``put`` (UCX), ``stream`` (a page stream) or
    ``frames`` (TENSOR_DATA)."""

    def __post_init__(self) -> None:
        at_most("key", self.key, _MAX_KEY_CHARS)
        _check_request(self)
        SnapshotFields.__post_init__(self)  # super() does not know the class that slots=True makes anew.


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """FETCH (0xF6): the client wants to read the snapshot that the server published as ``key``. It owns stream T, and
    ``num_streams`` after it: T + 1 for the end of the reading, T + 1 + i for descriptor i if pages come in frames.

    Raises:
        ConfigError: a field is out of range.
    """

    key: str
    deadline_s: float
    """How long the client gives the pull, seconds from now on: for the answer, and to read and renew its lease."""
    lane: str = ""
    """The UCX transport that will carry the pages, as the client knows it; "" is unknown."""
    path: str = "put"
    """How the client expects to read: ``mapped`` (loads from mapped memory), ``put`` (UCX, by get), ``stream`` or
    ``frames``. It knows only once it has heard in which pool the snapshot is; frames come if it says TAKE."""
    num_streams: int = 1
    """1 to 4096: as many as the descriptors that it can take in frames, or 1."""

    def __post_init__(self) -> None:
        at_most("key", self.key, _MAX_KEY_CHARS)
        between("num_streams", self.num_streams, 1, MAX_DESCRIPTORS)
        _check_request(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Published(SnapshotFields):
    """PUBLISHED (0xF7): what the server has for a fetch, and for how long; the mirror of OFFER.

    Raises:
        ConfigError, DescriptorError, GeometryError: as of :class:`SnapshotFields`.
    """

    lease_s: float
    """How long the pages stay as they are if nothing more is heard of the transfer."""

    def __post_init__(self) -> None:
        seconds("lease_s", self.lease_s)
        SnapshotFields.__post_init__(self)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Take:
    """TAKE (0xFB): the client has room for what was published, and reaches no memory of the server: the pages are to
    come as TENSOR_DATA, in pages and heads like its own.

    Raises:
        ConfigError: a number is out of range.
    """

    page_size: int
    """Tokens of the client's pages."""
    head_offset: int
    """The model's index of the first head that they hold."""
    num_heads: int
    """How many they hold."""
    resident: BoolArray = field(default_factory=lambda: NONE_RESIDENT, repr=False)
    """Which pages the client has already, in the order both sides derive from the table, bool [pages]; empty: none."""

    def __post_init__(self) -> None:
        between("page_size", self.page_size, 1, U32_MAX)
        between("head_offset", self.head_offset, 0, U32_MAX)
        between("num_heads", self.num_heads, 1, U32_MAX)


def _count_descriptors(data: bytes) -> int:
    """How many there are in a chain, by the length each declares (WIRE.md, fixed header)."""
    if len(data) >= _DESCRIPTOR_BEGIN.size:
        # Those of one snapshot begin alike, so one comparison does for all of them.
        magic, length = _DESCRIPTOR_BEGIN.unpack_from(data)
        count, rest = divmod(len(data), max(length, _DESCRIPTOR_HEADER_NBYTES))
        if magic == b"HRRY" and rest == 0 and count <= MAX_DESCRIPTORS and count * length == len(data):
            begin = data[: _DESCRIPTOR_BEGIN.size]
            if count <= _FEW:
                begins = b"".join([data[at : at + _DESCRIPTOR_BEGIN.size] for at in range(0, len(data), length)])
            else:
                begins = np.frombuffer(data, np.uint8).reshape(count, length)[:, : _DESCRIPTOR_BEGIN.size].tobytes()
            if begins == begin * count:
                return int(count)
    at = count = 0
    while at < len(data):
        if count == MAX_DESCRIPTORS:
            raise DescriptorError(
                f"a snapshot may have {MAX_DESCRIPTORS} descriptors, and {len(data) - at} bytes follow them",
                field="num_descriptors",
                value=f"over {MAX_DESCRIPTORS}",
                offset=at,
            )
        left = len(data) - at
        magic, length = _DESCRIPTOR_BEGIN.unpack_from(data, at) if left >= _DESCRIPTOR_BEGIN.size else (data[at:], 0)
        if magic != b"HRRY":
            raise DescriptorError("must be b'HRRY'", field="magic", value=magic, offset=at)
        if not _DESCRIPTOR_HEADER_NBYTES <= length <= left:
            raise DescriptorError(
                f"must be {_DESCRIPTOR_HEADER_NBYTES} to the {left} bytes at hand",
                field="descriptor_length",
                value=length,
                offset=at + 6,
            )
        at += length
        count += 1
    return count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grant:
    """GRANT (0xF3): the server's pages, in the order both sides derive from the table of the offer or of the commit.

    Raises:
        ConfigError: the lease is not a time, or there are more than 4194304 pages.
        GeometryError: a page is granted twice.
    """

    generation: int
    page_ids: Uint32Array = field(repr=False)
    resident: BoolArray = field(default_factory=lambda: NONE_RESIDENT, repr=False)
    """Which of them the server has already, and must not be sent, bool [len(page_ids)]; empty is none."""
    lease_s: float
    """How long the pages are held if nothing more is heard of the transfer."""
    bell_offset_nbytes: int = 0
    """Of the word in the pool's first region at which the client may store ``bell_token`` when all pages are copied."""
    bell_token: int = 0
    """0 where there is no such word."""

    def __post_init__(self) -> None:
        if (self.generation | self.bell_offset_nbytes | self.bell_token) >> 64:
            for name in ("generation", "bell_offset_nbytes", "bell_token"):
                between(name, getattr(self, name), 0, U64_MAX)
        seconds("lease_s", self.lease_s)
        if (page_ids := uint32("page_ids", self.page_ids)) is not self.page_ids:
            object.__setattr__(self, "page_ids", page_ids)
        num_pages, num_told = len(page_ids), len(self.resident)
        if num_pages > MAX_GRANTED_PAGES:
            between("len(page_ids)", num_pages, 0, MAX_GRANTED_PAGES)
        if num_told and num_told != num_pages:
            raise GeometryError(f"must be 0 or the {num_pages} of page_ids", field="len(resident)", value=num_told)
        if num_pages > _FEW or len(set(page_ids.tolist())) < num_pages:
            in_order = page_ids.copy()
            in_order.sort()
            repeated = in_order[1:] == in_order[:-1]
            if np.count_nonzero(repeated):
                page_id = int(in_order[repeated.argmax()])
                raise GeometryError("a page may be granted once", field="page_ids", value=page_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """RESERVE (0xF8): the client wants pages granted ahead, for a snapshot it does not name yet. Owns stream T only.

    The answer is a GRANT of exactly ``num_pages`` pages, none of them resident.

    Raises:
        ConfigError: a field is out of range.
    """

    pool_id: int
    """The server's pool."""
    generation: int
    """Of that pool."""
    num_pages: int
    """How many of the server's pages; 1 to 4194304."""
    deadline_s: float
    """How long the client will wait for an answer, seconds from now on."""
    lane: str = ""
    """The UCX transport that will carry the pages, as the client knows it; "" is unknown."""
    path: str = "put"
    """How the client will write: ``mapped``, ``put`` or ``stream``; nothing can be sent in frames before it is
    offered."""

    def __post_init__(self) -> None:
        between("pool_id", self.pool_id, 0, U32_MAX)
        between("generation", self.generation, 0, U64_MAX)
        between("num_pages", self.num_pages, 1, MAX_GRANTED_PAGES)
        _check_request(self, _ONE_SIDED_PATHS)


Request: TypeAlias = Offer | Fetch | Reserve
"""What opens a transfer."""


@dataclass(slots=True, kw_only=True, eq=False)
class Commit:
    """COMMIT (0xF9): the pages granted ahead, the first ones in the order both sides derive from the table, hold this
    whole snapshot; the rest are the server's again. Pool, generation, lane and path are those of the RESERVE.

    What a small transfer waits for is how long this takes: so it is not frozen, and only its key is looked at. Its
    arrays must be contiguous; `of_pool` holds it to all rules, for who cannot tell by other means that it keeps them.

    Raises:
        ConfigError: ``key`` is too long.
    """

    key: str
    descriptors: bytes = field(repr=False)
    """As of :class:`SnapshotFields`, and so all that follow."""
    block_table: Uint32Array = field(repr=False)
    seq_ptr: Uint32Array = field(repr=False)
    seq_lens: Uint32Array = field(repr=False)
    order: str = "NHD"
    head_offset: int = 0
    total_heads: int = 0

    def __post_init__(self) -> None:
        if len(self.key) > _MAX_KEY_CHARS:  # a call less for what is waited for
            at_most("key", self.key, _MAX_KEY_CHARS)

    def of_pool(self, pool_id: int, generation: int) -> SnapshotFields:
        """What it says, checked.

        Raises:
            ConfigError, DescriptorError, GeometryError: as of :class:`SnapshotFields`.
        """
        return SnapshotFields(
            pool_id=pool_id,
            generation=generation,
            descriptors=self.descriptors,
            block_table=self.block_table,
            seq_ptr=self.seq_ptr,
            seq_lens=self.seq_lens,
            order=self.order,
            head_offset=self.head_offset,
            total_heads=self.total_heads,
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Prepare(Commit):
    """PREPARE (0xFD): what the COMMIT is going to say, told while the pages are being copied, so that the server can
    make ready for it. Nothing follows from it unless the bell of the grant rings: that says what the COMMIT will.

    Raises:
        ConfigError: as of :class:`Commit`.
    """
