"""Stored elements to real values: one sequence read through the block table, float32 (block-paged, Element Lookup).

It takes the arrays of the buffers, host memory only, and knows neither pools nor snapshots. It reads the slots of
valid tokens and nothing else: slots past a sequence's tokens are undefined. Source: quantization/* (formulas) and
ADR-024 section 6 (parameters paged through the same block table, so an aliased page carries its own).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hurray_rdma.errors import DescriptorError
from hurray_rdma.format.descriptor import Descriptor
from hurray_rdma.format.dtypes import numpy_dtype
from hurray_rdma.format.elements import ElementType
from hurray_rdma.format.lookup import slot_index
from hurray_rdma.format.packing import unpack_codes
from hurray_rdma.format.quantization import PerBlockAffine, PerChannelAffine, PerTensorAffine

__all__ = ["dequantize"]


def dequantize(
    descriptor: Descriptor,
    page_pool: NDArray[Any],
    *,
    block_table: ArrayLike,
    seq_ptr: ArrayLike,
    seq_lens: ArrayLike,
    seq: int,
    scales: NDArray[Any] | None = None,
    zero_points: NDArray[Any] | None = None,
) -> NDArray[np.float32]:
    """The real values of one sequence.

    Args:
        descriptor: geometry, element type and scheme; without a scheme the values are only widened.
        page_pool: buffer 0 in host memory: either [num_pages, page_size, ...] with any strides, whose slots hold
            [num_heads, head_dim] elements in `storage_dtype`, or any array whose bytes, in C order, are the buffer's.
        block_table, seq_ptr: buffers 1 and 2, integers.
        seq_lens: tokens per sequence, integers [num_seqs].
        seq: the sequence.
        scales: the scale buffer of the scheme, if it has one, in the type that the scheme names; of a buffer that
            holds scales and zero points one after the other, the first part.
        zero_points: the zero-point buffer, int32, if the scheme is not symmetric.

    Returns:
        float32 [seq_lens[seq], num_heads, head_dim]: ``scale * (q - zero_point)``.

    Raises:
        DescriptorError: a buffer is missing or of the wrong size, an index or parameter is out of range, or the
            scheme has no paging rule.
        GeometryError: numpy has no such element type (float128).
    """
    d = descriptor
    if d.findings:
        raise d.findings[0].error()
    lengths = np.asarray(seq_lens)
    if not 0 <= seq < len(lengths):
        raise DescriptorError(
            f"must be 0 or more and below the number of sequences, {len(lengths)}", field="seq", value=seq
        )
    num_tokens = int(lengths[seq])
    if num_tokens:  # the last one first, so that a wrong length is refused before anything of its size is made
        slot_index(block_table, seq_ptr, seq=seq, token=num_tokens - 1, page_size=d.page_size)
    tokens = np.arange(num_tokens, dtype=np.int64)
    slots = np.asarray(slot_index(block_table, seq_ptr, seq=seq, token=tokens, page_size=d.page_size))
    _need_slots(slots, d.num_pages * d.page_size)
    stored = _gather(d, page_pool, slots)
    scheme = d.quantization
    if scheme is None:
        return stored.astype(np.float32)
    if isinstance(scheme, PerTensorAffine):
        return _affine(stored, np.float32(scheme.scale), np.int64(scheme.zero_point))
    if isinstance(scheme, PerChannelAffine):
        count, shape = d.shape[scheme.axis], (1, -1, 1) if scheme.axis == 1 else (1, 1, -1)
        rows: Any = slice(None)
    elif isinstance(scheme, PerBlockAffine):
        count, rows, shape = d.num_pages * d.page_size, slots, (-1, 1, 1)
    else:
        raise DescriptorError("has no paging rule", field="quantization", value=scheme.wire_name)
    scale = _parameters("scales", scales, scheme.scale_type, count)[rows].astype(np.float32)
    bad = ~(np.isfinite(scale) & (scale != 0))
    if bad.any():
        first = int(bad.argmax())
        raise DescriptorError(
            "a scale must be finite and not zero", field=f"scales[{first}]", value=float(scale[first])
        )
    zero_point: NDArray[np.int64] | np.int64 = np.int64(0)
    if scheme.zero_point_buffer_index is not None:
        picked = _parameters("zero_points", zero_points, ElementType.INT32, count)[rows].astype(np.int64)
        _need_range(d, picked)
        zero_point = picked.reshape(shape)
    return _affine(stored, scale.reshape(shape), zero_point)


def _affine(
    stored: NDArray[Any], scale: NDArray[np.float32] | np.float32, zero_point: NDArray[np.int64] | np.int64
) -> NDArray[np.float32]:
    return (stored.astype(np.int64) - zero_point).astype(np.float32) * scale


def _gather(d: Descriptor, page_pool: NDArray[Any], slots: NDArray[np.int64]) -> NDArray[Any]:
    """The stored elements of some slots, one array element each: [len(slots), num_heads, head_dim]."""
    if not isinstance(d.element_type, ElementType):
        raise DescriptorError("values of private types are not interpreted", field="type_tag", value=d.element_type.tag)
    elements, bits = d.num_heads * d.head_dim, d.element_type.bits
    shape = (len(slots), d.num_heads, d.head_dim)
    if page_pool.shape[:2] == (d.num_pages, d.page_size) and elements * bits % 8 == 0:
        slot_nbytes = math.prod(page_pool.shape[2:]) * page_pool.itemsize
        if slot_nbytes != elements * bits // 8:
            rule = f"a slot has {elements * bits // 8} bytes: {elements} elements of {d.element_type.wire_name}"
            raise DescriptorError(rule, field="page_pool", value=f"{page_pool.dtype}{list(page_pool.shape)}")
        picked = np.ascontiguousarray(page_pool[slots // d.page_size, slots % d.page_size])
        rows = picked.reshape(-1).view(np.uint8).reshape(len(slots), slot_nbytes)
        return _elements(rows, d.element_type, elements).reshape(shape)
    raw = np.ascontiguousarray(page_pool).reshape(-1).view(np.uint8)
    if raw.nbytes != d.buffers[0].byte_size:
        rule = f"must have the {d.buffers[0].byte_size} bytes of buffer 0"
        raise DescriptorError(rule, field="page_pool.nbytes", value=raw.nbytes)
    if not elements:
        return np.zeros(shape, dtype=np.int8)
    if elements * bits % 8 == 0:
        return _elements(raw.reshape(-1, elements * bits // 8)[slots], d.element_type, elements).reshape(shape)
    every = _elements(raw, d.element_type, d.num_pages * d.page_size * elements)
    return every.reshape(-1, elements)[slots].reshape(shape)


def _elements(rows: NDArray[np.uint8], element_type: ElementType, count: int) -> NDArray[Any]:
    """The elements in each row of bytes, unpacked."""
    if not element_type.is_packed:
        return rows.reshape(-1).view(numpy_dtype(element_type))
    return _from_codes(unpack_codes(rows, bits=element_type.bits, num_elements=count), element_type)


def _from_codes(codes: NDArray[np.uint8], element_type: ElementType) -> NDArray[Any]:
    limits = element_type.integer_range
    if limits is None:
        return codes if element_type is ElementType.BOOL else codes.view(numpy_dtype(element_type))
    if limits[0] == 0:
        return codes
    shift = np.uint8(8 - element_type.bits)
    return (codes << shift).view(np.int8) >> np.int8(shift)


def _parameters(name: str, array: NDArray[Any] | None, element_type: ElementType, count: int) -> NDArray[Any]:
    if array is None:
        raise DescriptorError("the scheme needs this buffer", field=name, value=None)
    dtype = numpy_dtype(element_type)
    values = np.ascontiguousarray(array).reshape(-1)
    if values.dtype == np.uint8:
        values = values.view(dtype)
    if values.dtype != dtype or len(values) != count:
        rule = f"must hold {count} entries of {element_type.wire_name}, not {len(values)} of {values.dtype}"
        raise DescriptorError(rule, field=name, value=str(values.dtype))
    return values


def _need_slots(slots: NDArray[np.int64], num_slots: int) -> None:
    outside = (slots < 0) | (slots >= num_slots)
    if outside.any():
        first = int(outside.argmax())
        rule = f"lies outside the pool of {num_slots} slots; check the block table with validate_indices"
        raise DescriptorError(rule, field=f"slot of token {first}", value=int(slots[first]))


def _need_range(d: Descriptor, zero_points: NDArray[np.int64]) -> None:
    low, high = d.element_type.integer_range or (0, 0)
    outside = (zero_points < low) | (zero_points > high)
    if outside.any():
        first = int(outside.argmax())
        rule = f"must lie in {low}..{high}, the range of {d.element_type.wire_name}"
        raise DescriptorError(rule, field=f"zero_points[{first}]", value=int(zero_points[first]))
