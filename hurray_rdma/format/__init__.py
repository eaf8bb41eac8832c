"""The Hurray block-paged descriptor: bytes to dataclasses and back, and what the bytes mean (ADR-024).

This room knows the format, whole: tags, element types, buffer tables, quantization, index arrays. It does no I/O and
knows nothing of pools, snapshots, peers or devices; arrays come in as arguments.
"""

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.annotate import AnnotatedField, Annotation
from hurray_rdma.format.annotate_messages import annotate
from hurray_rdma.format.buffers import BufferEntry
from hurray_rdma.format.codec import (
    decode,
    descriptor_length,
    encode,
    encode_many,
    encode_tensors,
    mark_tensors,
)
from hurray_rdma.format.counts import Counts, DescriptorForm, counts_of, mark_bytes, with_counts
from hurray_rdma.format.dequantize import dequantize
from hurray_rdma.format.descriptor import Descriptor
from hurray_rdma.format.dtypes import (
    cupy_dtype,
    dlpack_type,
    element_type_of,
    numpy_dtype,
    storage_dtype,
    torch_dtype,
)
from hurray_rdma.format.elements import ElementType, ExtensionType
from hurray_rdma.format.finding import Finding
from hurray_rdma.format.indices import validate_indices
from hurray_rdma.format.lookup import element_index, slot_index
from hurray_rdma.format.packing import pack_codes, unpack_codes
from hurray_rdma.format.quantization import (
    MXFP,
    NF4,
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
from hurray_rdma.format.stream import MAX_DESCRIPTOR_NBYTES, DescriptorReader, iter_descriptors
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
    "MAX_DESCRIPTOR_NBYTES",
    "MXFP",
    "NF4",
    "AnnotatedField",
    "Annotation",
    "BufferEntry",
    "Counts",
    "Descriptor",
    "DescriptorError",
    "DescriptorForm",
    "DescriptorReader",
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
    "annotate",
    "check_transferable",
    "counts_of",
    "cupy_dtype",
    "decode",
    "decode_quantization",
    "dequantize",
    "descriptor_length",
    "dlpack_type",
    "element_index",
    "element_type_of",
    "encode",
    "encode_many",
    "encode_quantization",
    "encode_tensors",
    "iter_descriptors",
    "mark_bytes",
    "mark_tensors",
    "numpy_dtype",
    "pack_codes",
    "slot_index",
    "storage_dtype",
    "torch_dtype",
    "unpack_codes",
    "validate_indices",
    "with_counts",
]
