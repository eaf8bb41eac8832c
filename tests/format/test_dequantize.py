"""Real values through the block table, against straightforward arithmetic, element by element."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hurray_rdma.errors import GeometryError
from hurray_rdma.format import (
    NF4,
    BufferEntry,
    Descriptor,
    DescriptorError,
    ElementType,
    ExtensionType,
    PerBlockAffine,
    PerChannelAffine,
    PerTensorAffine,
    Quantization,
    decode,
    dequantize,
    element_index,
    encode,
    numpy_dtype,
    pack_codes,
    unpack_codes,
)

# Sequences 0 and 1 share page 5, sequence 2 is empty, the last page of each is partial.
TABLE, PTR, LENS = np.array([5, 2, 5, 0, 1], np.uint32), np.array([0, 2, 4, 5], np.uint32), [7, 6, 0]
PAGE_SIZE, NUM_PAGES, HEADS, DIM = 4, 6, 2, 3


def described(element_type: Any, scheme: Quantization | None, **changes: Any) -> Descriptor:
    geometry: dict[str, Any] = {
        "total_tokens": 13,
        "num_heads": HEADS,
        "head_dim": DIM,
        "page_size": PAGE_SIZE,
        "num_pages": NUM_PAGES,
        "num_seqs": 3,
        "block_table_length": 5,
    }
    return Descriptor.paged(element_type=element_type, quantization=scheme, **(geometry | changes))


def reference(stored: np.ndarray, seq: int, scale: Any, zero: Any) -> np.ndarray:
    """``scale(slot, h, d) * (q - zero(slot, h, d))``, one element after another."""
    heads, dim = stored.shape[1:]
    out = np.zeros((LENS[seq], heads, dim), np.float32)
    for t in range(LENS[seq]):
        page = int(TABLE[PTR[seq] + t // PAGE_SIZE])
        slot = page * PAGE_SIZE + t % PAGE_SIZE
        for h in range(heads):
            for d in range(dim):
                q = int(stored[slot, h, d])
                out[t, h, d] = np.float32(scale(slot, h, d)) * np.float32(q - zero(slot, h, d))
    return out


def make_stored(element_type: ElementType, heads: int = HEADS, dim: int = DIM) -> np.ndarray:
    assert element_type.integer_range is not None
    low, high = element_type.integer_range
    rng = np.random.default_rng(7)
    return rng.integers(low, high + 1, (NUM_PAGES * PAGE_SIZE, heads, dim))


def as_pool(stored: np.ndarray, element_type: ElementType) -> np.ndarray:
    if element_type.is_packed:
        return pack_codes(stored.reshape(-1), bits=element_type.bits)
    return stored.astype(numpy_dtype(element_type)).reshape(NUM_PAGES, PAGE_SIZE, *stored.shape[1:])


def run(descriptor: Descriptor, pool: np.ndarray, seq: int, **parameters: Any) -> np.ndarray:
    travelled = decode(encode(descriptor))
    return dequantize(travelled, pool, block_table=TABLE, seq_ptr=PTR, seq_lens=LENS, seq=seq, **parameters)


NARROW = ["int8", "uint8", "int4", "uint4", "int2", "uint2"]


@pytest.mark.parametrize("name", [*NARROW, "int16", "uint16", "int32", "uint32"])
def test_per_tensor(name: str) -> None:
    element_type = ElementType.from_name(name)
    stored = make_stored(element_type)
    descriptor = described(name, PerTensorAffine(0.37, 1))
    for seq in range(3):
        got = run(descriptor, as_pool(stored, element_type), seq)
        assert got.dtype == np.float32
        assert np.array_equal(got, reference(stored, seq, lambda s, h, d: np.float32(0.37), lambda s, h, d: 1))


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("symmetric", [True, False])
def test_per_channel(name: str, axis: int, symmetric: bool) -> None:
    element_type = ElementType.from_name(name)
    stored = make_stored(element_type)
    count = (HEADS, DIM)[axis - 1]
    scales = np.linspace(-1, 2, count, dtype=np.float32) + np.float32(0.1)
    zeros = np.arange(count, dtype=np.int32) % 2
    descriptor = described(name, PerChannelAffine(axis, 3, None if symmetric else 4))
    got = run(descriptor, as_pool(stored, element_type), 1, scales=scales, zero_points=None if symmetric else zeros)
    want = reference(
        stored,
        1,
        lambda s, h, d: scales[(h, d)[axis - 1]],
        lambda s, h, d: 0 if symmetric else int(zeros[(h, d)[axis - 1]]),
    )
    assert np.array_equal(got, want)


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("scale_type", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_per_page_slot_with_aliased_pages(name: str, scale_type: str, symmetric: bool) -> None:
    element_type = ElementType.from_name(name)
    stored = make_stored(element_type)
    count = NUM_PAGES * PAGE_SIZE
    scales = (np.arange(count) + 1).astype(numpy_dtype(scale_type)) / numpy_dtype(scale_type).type(8)
    zeros = np.arange(count, dtype=np.int32) % 2
    scheme = PerBlockAffine(0, PAGE_SIZE, 3, None if symmetric else 4, ElementType.from_name(scale_type))
    descriptor = described(name, scheme)
    pool, parameters = as_pool(stored, element_type), {"scales": scales, "zero_points": None if symmetric else zeros}
    seen = [run(descriptor, pool, seq, **parameters) for seq in range(3)]
    for seq in range(3):
        want = reference(
            stored, seq, lambda s, h, d: float(scales[s]), lambda s, h, d: 0 if symmetric else int(zeros[s])
        )
        assert np.array_equal(seen[seq], want)
    # Page 5 is the first of both sequences: the alias sees the same values, with the page's own scales.
    assert np.array_equal(seen[0][:PAGE_SIZE], seen[1][:PAGE_SIZE])


@pytest.mark.parametrize(
    "name", ["bfloat16", "float16", "float32", "float64", "float8_e4m3", "float8_e5m2", "float4_e2m1", "float6_e3m2"]
)
def test_without_a_scheme_values_are_widened(name: str) -> None:
    element_type = ElementType.from_name(name)
    dtype = numpy_dtype(name)
    stored = (np.arange(NUM_PAGES * PAGE_SIZE * HEADS * DIM) % 5 - 2).astype(np.float32).astype(dtype)
    pool = pack_codes(stored.view(np.uint8), bits=element_type.bits) if element_type.is_packed else stored
    got = run(described(name, None), pool, 0)
    for t, h, d in np.ndindex(*got.shape):
        at = element_index(
            TABLE, PTR, seq=0, token=int(t), head=int(h), dim=int(d), page_size=4, num_heads=HEADS, head_dim=DIM
        )
        assert got[t, h, d] == np.float32(stored[at])


@pytest.mark.parametrize("name", ["int8", "int4", "uint2"])
def test_pools_with_strides_and_raw_bytes_give_the_same(name: str) -> None:
    element_type, dim = ElementType.from_name(name), 4
    stored = make_stored(element_type, dim=dim)
    descriptor = described(name, PerTensorAffine(0.5), head_dim=dim)
    flat = as_pool(stored, element_type).reshape(-1).view(np.uint8)
    want = run(descriptor, flat, 0)
    slotted = flat.reshape(NUM_PAGES, PAGE_SIZE, HEADS, -1)
    heads_first = np.ascontiguousarray(slotted.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    wide = np.zeros((2 * NUM_PAGES, *slotted.shape[1:]), np.uint8)[::2]
    wide[:] = slotted
    for pool in (slotted, heads_first, wide):
        assert np.array_equal(run(descriptor, pool, 0), want)


def test_float4_values_of_the_specification() -> None:
    codes = np.arange(16, dtype=np.uint8)
    values = unpack_codes(pack_codes(codes, bits=4), bits=4, num_elements=16).view(ml_dtypes.float4_e2m1fn)
    assert list(values[:8].astype(np.float32)) == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    assert list(values[8:].astype(np.float32)) == [0, -0.5, -1, -1.5, -2, -3, -4, -6]


def test_slots_past_the_valid_tokens_are_never_read() -> None:
    stored = make_stored(ElementType.INT8)
    scales = np.full(NUM_PAGES * PAGE_SIZE, np.nan, np.float32)
    touched = [int(TABLE[t // PAGE_SIZE]) * PAGE_SIZE + t % PAGE_SIZE for t in range(LENS[0])]
    scales[touched] = 1.0
    descriptor = described("int8", PerBlockAffine(0, PAGE_SIZE, 3))
    pool = as_pool(stored, ElementType.INT8)
    got = run(descriptor, pool, 0, scales=scales)
    assert np.array_equal(got, stored[touched].astype(np.float32))
    with pytest.raises(DescriptorError, match="finite and not zero"):
        run(descriptor, pool, 1, scales=scales)


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        ({}, "scales = None"),
        ({"scales": np.ones(24, np.float32)}, "zero_points = None"),
        ({"scales": np.ones(23, np.float32), "zero_points": np.zeros(24, np.int32)}, "24 entries of float32, not 23"),
        ({"scales": np.ones(24, np.float16), "zero_points": np.zeros(24, np.int32)}, "not 24 of float16"),
        ({"scales": np.zeros(24, np.float32), "zero_points": np.zeros(24, np.int32)}, "not zero"),
        ({"scales": np.ones(24, np.float32), "zero_points": np.full(24, 128, np.int32)}, "-128..127"),
    ],
)
def test_wrong_parameters_are_named(parameters: dict[str, Any], says: str) -> None:
    descriptor = described("int8", PerBlockAffine(0, PAGE_SIZE, 3, 4))
    with pytest.raises(DescriptorError, match=says):
        run(descriptor, np.zeros((NUM_PAGES, PAGE_SIZE, HEADS, DIM), np.int8), 0, **parameters)


def test_parameters_may_come_as_the_buffers_bytes() -> None:
    descriptor = described("int8", PerBlockAffine(0, PAGE_SIZE, 3))
    pool = np.ones((NUM_PAGES, PAGE_SIZE, HEADS, DIM), np.int8)
    scales = np.arange(1, 25, dtype=np.float32)
    assert np.array_equal(
        run(descriptor, pool, 0, scales=scales.view(np.uint8)), run(descriptor, pool, 0, scales=scales)
    )


@pytest.mark.parametrize(
    "shape", [(NUM_PAGES, PAGE_SIZE, HEADS, DIM + 1), (NUM_PAGES - 1, PAGE_SIZE, HEADS, DIM), (7,)]
)
def test_a_pool_of_the_wrong_size(shape: tuple[int, ...]) -> None:
    with pytest.raises(DescriptorError, match="page_pool"):
        run(described("int8", PerTensorAffine(1.0)), np.zeros(shape, np.int8), 0)


def test_indices_out_of_range() -> None:
    descriptor, pool = described("int8", None), np.zeros((NUM_PAGES, PAGE_SIZE, HEADS, DIM), np.int8)
    for seq in (-1, 3):
        with pytest.raises(DescriptorError, match="number of sequences, 3"):
            run(descriptor, pool, seq)
    with pytest.raises(DescriptorError, match="outside the pool of 24 slots"):
        dequantize(descriptor, pool, block_table=TABLE + 1, seq_ptr=PTR, seq_lens=LENS, seq=0)
    with pytest.raises(DescriptorError, match=r"block_table\[0\]"):  # times page_size it would be slot 0 in 64 bits
        far = np.array([2**62, 2, 5, 0, 1], np.uint64)
        dequantize(descriptor, pool, block_table=far, seq_ptr=PTR, seq_lens=LENS, seq=0)
    with pytest.raises(DescriptorError, match="hold, 8"):
        dequantize(descriptor, pool, block_table=TABLE, seq_ptr=PTR, seq_lens=[9, 6, 0], seq=0)
    with pytest.raises(DescriptorError, match="hold, 8"):
        dequantize(descriptor, pool, block_table=TABLE, seq_ptr=PTR, seq_lens=[2**40, 6, 0], seq=0)
    with pytest.raises(DescriptorError, match="length of block_table, 1"):
        dequantize(descriptor, pool, block_table=TABLE[:1], seq_ptr=PTR, seq_lens=LENS, seq=0)


def test_what_has_no_values() -> None:
    with pytest.raises(GeometryError, match="float128"):
        run(described("float128", None), np.zeros(144 * 16, np.uint8), 0)
    private = described(ExtensionType(0xF0, 8), None)
    with pytest.raises(DescriptorError, match="private types"):
        run(private, np.zeros(144, np.uint8), 0)
    lax = described("uint4", None, head_dim=64)
    nf4 = replace(lax, quantization=NF4(2, 64, 3), buffers=(*lax.buffers, BufferEntry(4)), permissive=True)
    with pytest.raises(DescriptorError, match="no paging rule"):
        dequantize(nf4, np.zeros(1, np.uint8), block_table=TABLE, seq_ptr=PTR, seq_lens=LENS, seq=0)


def test_empty_heads() -> None:
    descriptor = described("int8", PerTensorAffine(1.0), num_heads=0)
    assert run(descriptor, np.zeros(0, np.int8), 0).shape == (7, 0, DIM)
