"""Snapshots: a batch of sequences over a pool, as a block table in CSR form with token counts.

Knows pages, tables and the descriptors that describe them; moves nothing and leases nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.cache.indices import check_indices, narrowed, sibling, total_of
from hurray_rdma.cache.pool import PagePool
from hurray_rdma.cache.spec import CacheSpec, PageOrder
from hurray_rdma.errors import GeometryError
from hurray_rdma.format import (
    Counts,
    Descriptor,
    DescriptorForm,
    DeviceTag,
    Dialect,
    DialectName,
    ElementType,
    KvRole,
    MemoryClass,
    PerBlockAffine,
    dequantize,
    encode,
)

__all__ = ["Snapshot", "descriptor_form", "known_snapshot"]

Uint32 = NDArray[np.uint32]

_ALIGNMENT_NBYTES = 4096
_INT32_MAX = 2**31 - 1
_MEMORY_CLASSES = {
    "PLAIN": MemoryClass.STANDARD,
    "PINNED": MemoryClass.HOST_PINNED,
    "MANAGED": MemoryClass.UNIFIED,
}
"""By the name of a `Backing`."""
_ROLES = {role.wire_name: role for role in KvRole}


class Snapshot:
    """Sequences whose tokens are in pages of ``pool``. The index arrays are copies, and read-only.

    A sequence may own pages beyond its tokens (allocated ahead): they are in the table, and never travel.

    Args:
        pool: where the pages are.
        block_table: page IDs of all sequences, one after the other, integers ``[seq_ptr[-1]]``.
        seq_ptr: where each sequence starts in ``block_table``, counted in pages, integers ``[num_seqs + 1]``.
        seq_lens: tokens of each sequence, integers ``[num_seqs]``.

    Raises:
        GeometryError: a page ID is not below ``pool.num_pages``, or the arrays do not fit together (ADR-024, storage
            invariants); the message has the place and the numbers.
    """

    def __init__(self, pool: PagePool, block_table: ArrayLike, seq_ptr: ArrayLike, seq_lens: ArrayLike) -> None:
        self.pool = pool
        self.block_table = _uint32("block_table", block_table)
        """uint32 ``[seq_ptr[-1]]``."""
        self.seq_ptr = _uint32("seq_ptr", seq_ptr)
        """uint32 ``[num_seqs + 1]``, in pages."""
        self.seq_lens = _uint32("seq_lens", seq_lens)
        """uint32 ``[num_seqs]``, in tokens."""
        check_indices(
            self.block_table,
            self.seq_ptr,
            self.seq_lens,
            num_pages=pool.num_pages,
            page_size=pool.spec.page_size,
        )

    @classmethod
    def from_block_tables(cls, pool: PagePool, tables: Sequence[ArrayLike], *, seq_lens: ArrayLike) -> Snapshot:
        """From one list of page IDs per sequence; sequences that share a prefix name the same pages.

        Raises:
            GeometryError: as of the class.
        """
        rows = [_uint32(f"tables[{seq}]", table) for seq, table in enumerate(tables)]
        seq_ptr = np.array([*accumulate(map(len, rows), initial=0)], np.int64)
        return cls(pool, np.concatenate(rows) if rows else np.empty(0, np.uint32), seq_ptr, seq_lens)

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)

    @property
    def total_tokens(self) -> int:
        """Tokens of all sequences; a token in an aliased page counts once for each sequence."""
        return total_of(self.seq_lens)

    def seq_pages(self, seq: int, /) -> NDArray[np.uint32]:
        """Page IDs of one sequence, those allocated ahead included, read-only.

        Raises:
            GeometryError: there is no such sequence.
        """
        self._check_seq(seq)
        return self.block_table[self.seq_ptr[seq] : self.seq_ptr[seq + 1]]

    def descriptors(self) -> list[Descriptor]:
        """One Hurray descriptor for each {kv_role, layer_index}, in the order of ``pool.spec.tensors``.

        They describe this snapshot's ``block_table`` and ``seq_ptr`` as they are.
        """
        tensors = self.pool.spec.tensors
        return list(self._descriptor(*tensors[0]).for_tensors((KvRole.from_name(role), n) for role, n in tensors))

    def encode_descriptors(self, *, dialect: Dialect | DialectName = Dialect.ADR_024) -> bytes:
        """The bytes of `descriptors`, one after the other, without making each of them."""
        return descriptor_form(self.pool, dialect=dialect).encode(self.counts())

    def counts(self) -> Counts:
        """What the descriptors count."""
        # They fit the pool and one another: the arrays were checked.
        seq_lens = self.seq_lens
        return Counts.of(
            total_tokens=total_of(seq_lens), num_seqs=len(seq_lens), block_table_length=len(self.block_table)
        )

    def tables_like(self, like: Any) -> tuple[Any, Any, Any]:
        """``block_table``, ``seq_ptr`` and ``seq_lens`` as int32 arrays of the library and device of another array.

        So that an attention kernel finds them beside the pages: ``snapshot.tables_like(pool.pages("key", 0))``. They go
        there on the library's current stream, which is not waited for, also where it waits for pages
        (`Arrival.wait_layer`); nothing comes back.

        Args:
            like: a NumPy, CuPy or torch array.

        Raises:
            GeometryError: it is none, or a number is above 2**31 - 1.
        """
        tables = (self.block_table, self.seq_ptr, self.seq_lens)
        for name, table in zip(("block_table", "seq_ptr", "seq_lens"), tables, strict=True):
            if table.size and int(table.max()) > _INT32_MAX:
                raise GeometryError(f"must not be above {_INT32_MAX}", field=f"max({name})", value=int(table.max()))
        first, second, third = (_int32_like(table.view(np.int32), like) for table in tables)
        return first, second, third

    def tokens(self, role: str, *, layer: int, seq: int) -> Any:
        """A gathered copy of one sequence, ``[seq_len, num_heads, row_items]``, whatever the order inside pages.

        Raises:
            GeometryError: there is no such role, layer or sequence.
        """
        spec = self.pool.spec
        pages = self.pool.pages(role, layer)
        num_tokens = int(self.seq_lens[self._check_seq(seq)])
        page_ids = self.seq_pages(seq)[: -(-num_tokens // spec.page_size)]
        index: Any = page_ids.astype(np.int64)
        if hasattr(pages, "__array_function__"):  # CuPy takes no NumPy array as an index; torch does
            index = sibling(pages, index)
        gathered = pages[index]
        if spec.order is PageOrder.HND:
            gathered = gathered.swapaxes(1, 2)
        return gathered.reshape(len(page_ids) * spec.page_size, spec.num_heads, spec.row_items)[:num_tokens]

    def dequantize(self, role: str, *, layer: int, seq: int) -> NDArray[np.float32]:
        """The real values of one sequence, float32 ``[seq_len, num_heads, head_dim]``: ``scale * (q - zero_point)``.

        Scales and zero points come from the page slots (ADR-024 section 6); without them values are only widened. For a
        scheme that applies to the whole cache, per tensor or per channel, see `hurray_rdma.format.dequantize`.

        Raises:
            GeometryError: there is no such role, layer or sequence.
        """
        spec, pool = self.pool.spec, self.pool
        self._check_seq(seq)
        pages = pool.pages(role, layer)
        return dequantize(
            self._descriptor(role, layer),
            pages.swapaxes(1, 2) if spec.order is PageOrder.HND else pages,
            block_table=self.block_table,
            seq_ptr=self.seq_ptr,
            seq_lens=self.seq_lens,
            seq=seq,
            scales=pool.scales(role, layer) if spec.scale_dtype is not None else None,
            zero_points=pool.zero_points(role, layer) if spec.zero_points else None,
        )

    def __repr__(self) -> str:
        return f"<Snapshot of {self.num_seqs} sequences, {self.total_tokens} tokens, {len(self.block_table)} entries>"

    def _descriptor(self, role: str, layer: int) -> Descriptor:
        pool = self.pool
        return _described(
            pool.spec,
            pool.num_pages,
            pool.device,
            pool.backing.name,
            tensor=(role, layer),
            total_tokens=self.total_tokens,
            num_seqs=self.num_seqs,
            block_table_length=len(self.block_table),
        )

    def _check_seq(self, seq: int) -> int:
        if not 0 <= seq < self.num_seqs:
            raise GeometryError(f"must be from 0 to {self.num_seqs - 1}", field="seq", value=seq)
        return seq


def _described(
    spec: CacheSpec,
    num_pages: int,
    device: str,
    backing: str,
    *,
    tensor: tuple[str, int],
    total_tokens: int,
    num_seqs: int,
    block_table_length: int,
) -> Descriptor:
    role, layer = tensor
    return Descriptor.paged(
        element_type=spec.element_type,
        total_tokens=total_tokens,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        page_size=spec.page_size,
        num_pages=num_pages,
        num_seqs=num_seqs,
        block_table_length=block_table_length,
        kv_role=_ROLES[role],
        layer_index=layer,
        device_tag=DeviceTag.of_device(device),
        memory_class=_MEMORY_CLASSES[backing],
        alignment=_ALIGNMENT_NBYTES,
        quantization=_quantization(spec),
    )


def known_snapshot(pool: PagePool, *, block_table: Uint32, seq_ptr: Uint32, seq_lens: Uint32) -> Snapshot:
    """A snapshot of arrays that nobody writes to any more, and that were checked against the pool and one another:
    neither copied nor looked at."""
    snapshot = Snapshot.__new__(Snapshot)
    snapshot.pool = pool
    snapshot.block_table, snapshot.seq_ptr, snapshot.seq_lens = block_table, seq_ptr, seq_lens
    return snapshot


def descriptor_form(pool: PagePool, *, dialect: Dialect | DialectName = Dialect.ADR_024) -> DescriptorForm:
    """What all snapshots of a pool have in common in the bytes of their descriptors."""
    first = _template(pool.spec, pool.num_pages, pool.device, pool.backing.name, Dialect.of(dialect))
    return DescriptorForm(first, pool.spec.tensor_marks)


@lru_cache(maxsize=256)
def _template(spec: CacheSpec, num_pages: int, device: str, backing: str, dialect: Dialect) -> bytes:
    """The bytes of a descriptor of any snapshot of such a pool."""
    counts = {"total_tokens": 1, "num_seqs": 1, "block_table_length": 1}
    descriptor = _described(spec, num_pages, device, backing, tensor=spec.tensors[0], **counts)
    return encode(descriptor, dialect=dialect)


def _int32_like(values: NDArray[np.int32], like: Any) -> Any:
    if hasattr(like, "new_tensor") or hasattr(like, "__array_function__"):  # torch; NumPy, CuPy
        return sibling(like, values)
    raise GeometryError("is no NumPy, CuPy or torch array", field="like", value=type(like).__name__)


def _quantization(spec: CacheSpec) -> PerBlockAffine | None:
    """The scheme of ADR-024 that gives each page slot a scale, with its buffers after the three index buffers."""
    if spec.scale_dtype is None:
        return None
    return PerBlockAffine(
        axis=0,
        block_size=spec.page_size,
        scale_buffer_index=3,
        zero_point_buffer_index=4 if spec.zero_points else None,
        scale_type=ElementType.from_name(spec.scale_dtype),
    )


def _uint32(name: str, values: ArrayLike) -> NDArray[np.uint32]:
    """A read-only copy as uint32."""
    array = narrowed(values, field=name)
    array.setflags(write=False)
    return array
