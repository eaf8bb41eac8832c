"""The block-paged tensor descriptor as a value: one `{kv_role, layer_index}` of a snapshot (ADR-024 section 4).

It knows its geometry and its rules. It does not know bytes; ``codec`` turns it into them and back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import InitVar, dataclass, field
from operator import index

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.buffers import DEVICE_ALIGNMENT, BufferEntry
from hurray_rdma.format.elements import ElementType, ExtensionType
from hurray_rdma.format.finding import Finding, is_integer, settle
from hurray_rdma.format.quantization import PerBlockAffine, PerChannelAffine, Quantization
from hurray_rdma.format.rules import violations
from hurray_rdma.format.sections import Statistics
from hurray_rdma.format.tags import DeviceTag, Dialect, IndexType, KvRole, MemberRole, MemoryClass, SyncMode

__all__ = ["Descriptor"]


@dataclass(frozen=True, slots=True)
class Descriptor:
    """One block-paged tensor: page pool, block table and seq_ptr of a batch, for one role of one layer.

    Attributes:
        element_type: storage type of the pool's elements.
        total_tokens: tokens of all sequences together, shape[0].
        num_heads: KV heads, shape[1].
        head_dim: elements per head, shape[2].
        page_size: tokens per page, >= 1.
        num_pages: pages in the pool.
        num_seqs: sequences in the batch; 0 is an empty batch.
        kv_role: key, value or fused.
        layer_index: transformer layer; None when the tensor is not layer-scoped.
        block_table_index_type: entry type of block_table and seq_ptr.
        buffers: page_pool, block_table, seq_ptr, then quantization parameters.
        quantization: the scheme, None when the pool holds plain values.
        statistics: advisory statistics, if the writer gave any.
        composite_member: the tensor's role in an overlay composite, if it has one.
        paged_axis: always 0 but in what a permissive reader lets pass.
        dialect: the dialect it was read in; None for one made here. Not part of equality.
        findings: rules it breaks that a permissive reader tolerates. Not part of equality.

    Args:
        permissive: keep tolerable violations in ``findings`` instead of raising the first.

    Raises:
        DescriptorError: a rule of ADR-024 or of the format is broken; ``offset`` is where the field would travel.
    """

    element_type: ElementType | ExtensionType
    total_tokens: int
    num_heads: int
    head_dim: int
    page_size: int
    num_pages: int
    num_seqs: int
    kv_role: KvRole
    layer_index: int | None
    block_table_index_type: IndexType
    buffers: tuple[BufferEntry, ...]
    quantization: Quantization | None = None
    statistics: Statistics | None = None
    composite_member: MemberRole | None = None
    paged_axis: int = 0
    dialect: Dialect | None = field(default=None, compare=False)
    findings: tuple[Finding, ...] = field(default=(), compare=False, repr=False)
    permissive: InitVar[bool] = False

    def __post_init__(self, permissive: bool) -> None:
        object.__setattr__(self, "findings", settle(violations(self), strict=not permissive))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Logical shape ``(total_tokens, num_heads, head_dim)``."""
        return (self.total_tokens, self.num_heads, self.head_dim)

    @property
    def block_table_length(self) -> int:
        """Entries of block_table, which is seq_ptr[num_seqs]."""
        return self.buffers[1].byte_size // self.block_table_index_type.itemsize

    @property
    def device_tag(self) -> DeviceTag | int:
        """The device that all buffers share."""
        return self.buffers[0].device_tag

    @property
    def memory_class(self) -> MemoryClass | int:
        """The memory class that all buffers share."""
        return self.buffers[0].memory_class

    @classmethod
    def paged(
        cls,
        *,
        element_type: ElementType | ExtensionType | str,
        total_tokens: int,
        num_heads: int,
        head_dim: int,
        page_size: int,
        num_pages: int,
        num_seqs: int,
        block_table_length: int,
        kv_role: KvRole | str = KvRole.FUSED,
        layer_index: int | None = None,
        index_type: IndexType = IndexType.UINT32,
        device_tag: DeviceTag | int = DeviceTag.CPU,
        memory_class: MemoryClass | int = MemoryClass.STANDARD,
        sync_mode: SyncMode = SyncMode.PRODUCER_SYNCED,
        alignment: int = DEVICE_ALIGNMENT,
        quantization: Quantization | None = None,
        statistics: Statistics | None = None,
    ) -> Descriptor:
        """The descriptor of a geometry, its buffer table computed (block-paged, Buffer Table).

        Args:
            element_type: storage type, or its name such as ``bfloat16``.
            block_table_length: entries of the block table, seq_ptr[num_seqs].
            alignment: of every buffer, in bytes.
            quantization: a scheme whose parameter buffers are numbered from 3 without a hole.

        Raises:
            DescriptorError: the geometry breaks a rule.
        """
        if isinstance(element_type, str):
            element_type = ElementType.from_name(element_type)
        if isinstance(kv_role, str):
            kv_role = KvRole.from_name(kv_role)
        total_tokens, num_heads = _count("total_tokens", total_tokens), _count("num_heads", num_heads)
        head_dim, page_size = _count("head_dim", head_dim), _count("page_size", page_size)
        num_pages, num_seqs = _count("num_pages", num_pages), _count("num_seqs", num_seqs)
        entries = _count("block_table_length", block_table_length)
        width = index_type.itemsize
        elements = num_pages * page_size * num_heads * head_dim
        nbytes = [element_type.nbytes(elements), entries * width, (num_seqs + 1) * width]
        nbytes += _parameter_nbytes(quantization, (num_pages * page_size, num_heads, head_dim))
        return cls(
            element_type=element_type,
            total_tokens=total_tokens,
            num_heads=num_heads,
            head_dim=head_dim,
            page_size=page_size,
            num_pages=num_pages,
            num_seqs=num_seqs,
            kv_role=kv_role,
            layer_index=None if layer_index is None else _count("layer_index", layer_index),
            block_table_index_type=index_type,
            buffers=tuple(BufferEntry(each, alignment, device_tag, sync_mode, memory_class) for each in nbytes),
            quantization=quantization,
            statistics=statistics,
        )

    def for_tensor(self, *, kv_role: KvRole, layer_index: int | None) -> Descriptor:
        """This descriptor for another role and layer of the same snapshot; nothing else is checked again.

        Raises:
            DescriptorError: the role or the layer is out of range.
        """
        check_tensor(kv_role, layer_index)
        other = object.__new__(type(self))
        put = object.__setattr__
        for name in _COPIED:
            put(other, name, getattr(self, name))
        put(other, "kv_role", kv_role)
        put(other, "layer_index", layer_index)
        return other

    def for_tensors(self, tensors: Iterable[tuple[KvRole, int | None]]) -> tuple[Descriptor, ...]:
        """`for_tensor` for each (role, layer) of a snapshot, in order."""
        return tuple(self.for_tensor(kv_role=role, layer_index=layer) for role, layer in tensors)


_COPIED = tuple(name for name in Descriptor.__slots__ if name not in ("kv_role", "layer_index"))


def check_tensor(kv_role: object, layer_index: int | None) -> None:
    """Raises DescriptorError unless a descriptor may have this role and layer."""
    if not isinstance(kv_role, KvRole):
        raise DescriptorError("must be a KvRole", field="kv_role", value=kv_role, offset=72)
    if layer_index is not None and (not is_integer(layer_index) or not 0 <= layer_index < 0xFFFFFFFF):
        rule = "must be an integer in 0..4294967294; None is not layer-scoped"
        raise DescriptorError(rule, field="layer_index", value=layer_index, offset=73)


def _count(name: str, value: int) -> int:
    try:
        count = index(value)
    except TypeError:
        raise DescriptorError("must be an integer", field=name, value=value) from None
    if count < 0:
        raise DescriptorError("must not be negative", field=name, value=value)
    return count


def _parameter_nbytes(scheme: Quantization | None, counts: tuple[int, int, int]) -> list[int]:
    """Sizes of the parameter buffers that an affine scheme needs, in the order of their indices.

    ``counts`` are the entries along each axis: page slots, heads, head_dim.
    """
    if not isinstance(scheme, PerChannelAffine | PerBlockAffine) or scheme.axis > 2:
        return []
    entries = counts[scheme.axis]
    nbytes = {scheme.scale_buffer_index: entries * scheme.scale_type.bits // 8}
    if scheme.zero_point_buffer_index is not None:
        nbytes[scheme.zero_point_buffer_index] = nbytes.get(scheme.zero_point_buffer_index, 0) + entries * 4
    return [nbytes[each] for each in sorted(nbytes)]
