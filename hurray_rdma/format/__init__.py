"""The Hurray block-paged descriptor: bytes to dataclasses and back, and what the bytes mean (ADR-024).

This room knows the format, whole: tags, element types, buffer tables, quantization, index arrays. It does no I/O and
knows nothing of pools, snapshots, peers or devices; arrays come in as arguments.
"""

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.buffers import BufferEntry
from hurray_rdma.format.codec import decode, descriptor_length, encode, encode_many
from hurray_rdma.format.descriptor import Descriptor
from hurray_rdma.format.elements import ElementType, ExtensionType
from hurray_rdma.format.finding import Finding
from hurray_rdma.format.quantization import (
    MXFP,
    NF4,
    NF4_LEVELS,
    OpaqueScheme,
    PerBlockAffine,
    PerChannelAffine,
    PerTensorAffine,
    Quantization,
    decode_quantization,
    encode_quantization,
)
from hurray_rdma.format.rules import check_transferable
from hurray_rdma.format.sections import Statistics
from hurray_rdma.format.tags import (
    DeviceTag,
    Dialect,
    DialectName,
    IndexType,
    KvRole,
    MemberRole,
    MemoryClass,
    SyncMode,
)

__all__ = [
    "MXFP",
    "NF4",
    "NF4_LEVELS",
    "BufferEntry",
    "Descriptor",
    "DescriptorError",
    "DeviceTag",
    "Dialect",
    "DialectName",
    "ElementType",
    "ExtensionType",
    "Finding",
    "IndexType",
    "KvRole",
    "MemberRole",
    "MemoryClass",
    "OpaqueScheme",
    "PerBlockAffine",
    "PerChannelAffine",
    "PerTensorAffine",
    "Quantization",
    "Statistics",
    "SyncMode",
    "check_transferable",
    "decode",
    "decode_quantization",
    "descriptor_length",
    "encode",
    "encode_many",
    "encode_quantization",
]
