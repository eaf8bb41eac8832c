"""What an offer's descriptors tell is found out once for a cache; that must never let through, or take for something
else, what looking at all of them would not."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.control import Offer
from hurray_rdma.engine import compat
from hurray_rdma.errors import DescriptorError, GeometryError, HurrayError
from hurray_rdma.format import DeviceTag, Dialect, encode

SPEC = CacheSpec(num_layers=3, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16", total_heads=2)
SCALED = CacheSpec(num_layers=2, num_heads=2, head_dim=8, page_size=4, dtype="int8", scale_dtype="float32")
NBYTES = 133
"""Of a descriptor with three buffers: 85 of fields, 16 for each buffer."""


@pytest.fixture(scope="module")
def offers() -> dict[str, Offer]:
    def offer(spec: CacheSpec, dialect: Dialect, tables: list[list[int]], seq_lens: list[int]) -> Offer:
        with PagePool.allocate(spec, 16) as pool:
            snapshot = Snapshot.from_block_tables(pool, tables, seq_lens=seq_lens)
            return Offer(
                key="k",
                pool_id=0,
                generation=1,
                descriptors=snapshot.encode_descriptors(dialect=dialect),
                block_table=snapshot.block_table,
                seq_ptr=snapshot.seq_ptr,
                seq_lens=snapshot.seq_lens,
                total_heads=2,
                deadline_s=1,
            )

    return {
        "one": offer(SPEC, Dialect.ADR_024, [[7]], [3]),
        "two": offer(SPEC, Dialect.ADR_024, [[7, 3, 9], [7, 3, 2]], [10, 12]),
        "none": offer(SPEC, Dialect.ADR_024, [], []),
        "old": offer(SPEC, Dialect.HURRAY_0_2, [[1, 2]], [8]),
        "scaled": offer(SCALED, Dialect.ADR_024, [[1, 2]], [5]),
    }


def changed(offer: Offer, **fields: object) -> Offer:
    facts = {name: getattr(offer, name) for name in type(offer).__dataclass_fields__ if name != "num_descriptors"}
    return Offer(**(facts | fields))


def told(offer: Offer, dest: CacheSpec, dialect: Dialect) -> tuple[object, ...]:
    """What both ways make of an offer: the same, or the quick way leaves it to the other."""
    quick = compat._known_source(offer, dest, dialect)
    try:
        whole: object = compat._source(offer, dest, dialect)
    except HurrayError as error:
        whole = type(error)
    assert quick is None or quick == whole
    return quick, whole


@pytest.mark.parametrize(
    ("name", "dest", "dialect"),
    [("one", SPEC, Dialect.ADR_024), ("two", SPEC, Dialect.ADR_024), ("old", SPEC, Dialect.HURRAY_0_2)],
)
def test_a_sender_of_the_same_cache_is_known(
    offers: dict[str, Offer], name: str, dest: CacheSpec, dialect: Dialect
) -> None:
    quick, whole = told(offers[name], dest, dialect)
    assert quick == whole == compat.Source(SPEC, 16, DeviceTag.CPU)


def test_scales_are_part_of_what_is_known(offers: dict[str, Offer]) -> None:
    quick, whole = told(offers["scaled"], SCALED, Dialect.ADR_024)
    assert quick == whole == compat.Source(SCALED, 16, DeviceTag.CPU)


def test_no_sequence_is_known_too(offers: dict[str, Offer]) -> None:
    quick, whole = told(offers["none"], SPEC, Dialect.ADR_024)
    assert quick == whole == compat.Source(SPEC, 16, DeviceTag.CPU)


def test_the_other_dialect_is_left_to_who_says_what_is_wrong(offers: dict[str, Offer]) -> None:
    assert told(offers["old"], SPEC, Dialect.ADR_024) == (None, DescriptorError)


@pytest.mark.parametrize(
    "fields",
    [
        {"seq_lens": np.array([10, 11], np.uint32)},
        {"block_table": np.array([7, 3, 9, 7, 3], np.uint32), "seq_ptr": np.array([0, 3, 5], np.uint32)},
        {"seq_lens": np.array([22], np.uint32), "seq_ptr": np.array([0, 6], np.uint32)},
    ],
    ids=["total_tokens", "block_table_length", "num_seqs"],
)
def test_tables_that_the_descriptors_do_not_count_are_refused(
    offers: dict[str, Offer], fields: dict[str, object]
) -> None:
    offer = changed(offers["two"], **fields)
    assert told(offer, SPEC, Dialect.ADR_024) == (None, GeometryError)
    with pytest.raises(GeometryError, match="the tables beside the descriptors have"):
        compat.check_snapshot(offer, SPEC, dialect=Dialect.ADR_024, devices={0})


@example(name="one", place=13 + 85 + 8, value=1, everywhere=True)  # the alignment of the page pool: 4096 becomes 4097
@example(name="two", place=77, value=1, everywhere=True)  # uint64 indices
@example(name="one", place=101, value=8, everywhere=False)  # one of six counts another block table
@given(
    name=st.sampled_from(["one", "two", "none", "old", "scaled"]),
    place=st.integers(0, 400),
    value=st.integers(0, 255),
    everywhere=st.booleans(),
)
def test_any_changed_byte_is_seen_by_both_ways_alike(
    offers: dict[str, Offer], name: str, place: int, value: int, everywhere: bool
) -> None:
    offer = offers[name]
    spec = SCALED if name == "scaled" else SPEC
    size = len(offer.descriptors) // len(spec.tensors)
    data = bytearray(offer.descriptors)
    at = place % size
    for start in range(at, len(data), size) if everywhere else [place % len(data)]:
        data[start] = value
    try:
        spoilt = changed(offer, descriptors=bytes(data))
    except HurrayError:
        return  # it is no chain of descriptors any more
    told(spoilt, spec, Dialect.HURRAY_0_2 if name == "old" else Dialect.ADR_024)


def test_bytes_after_a_descriptor_that_begin_like_another_are_left_to_who_says_what_is_wrong() -> None:
    """Two slices of equal length, each a whole descriptor and bytes after it: a chain of two others."""
    spec = CacheSpec(num_layers=1, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16", total_heads=2)
    with PagePool.allocate(spec, 16) as pool:
        snapshot = Snapshot.from_block_tables(pool, [[7]], seq_lens=[3])
        good = snapshot.encode_descriptors(dialect=Dialect.ADR_024)
        size = NBYTES + 30
        assert len(good) == 2 * NBYTES
        more = b"HRRY" + (7).to_bytes(2, "little") + (2 * size - NBYTES).to_bytes(4, "little") + b"\xff" * 20
        offer = Offer(
            key="k",
            pool_id=0,
            generation=1,
            descriptors=good[:NBYTES] + more + good[NBYTES:] + more,
            block_table=snapshot.block_table,
            seq_ptr=snapshot.seq_ptr,
            seq_lens=snapshot.seq_lens,
            total_heads=2,
            deadline_s=1,
        )
        assert offer.num_descriptors == 2
        assert told(offer, spec, Dialect.ADR_024) == (None, DescriptorError)


def test_what_is_remembered_is_bounded(offers: dict[str, Offer]) -> None:
    compat._looked_at.cache_clear()
    descriptor = bytearray(offers["one"].descriptors)
    for num_pages in range(1000, 1200):
        data = bytearray(descriptor)
        for start in range(0, len(data), NBYTES):
            data[start + 56 : start + 64] = num_pages.to_bytes(8, "little")
            data[start + 85 : start + 93] = (num_pages * 4 * 2 * 8 * 2).to_bytes(8, "little")
        quick = compat._known_source(changed(offers["one"], descriptors=bytes(data)), SPEC, Dialect.ADR_024)
        assert quick == compat.Source(SPEC, num_pages, DeviceTag.CPU)
    assert compat._looked_at.cache_info().currsize == 64


def test_encoded_counts_are_those_of_the_descriptors() -> None:
    with PagePool.allocate(SPEC, 16) as pool:
        for tables, seq_lens in (([], []), ([[5]], [1]), ([[7, 3, 9], [7, 3, 2], []], [10, 12, 0])):
            snapshot = Snapshot.from_block_tables(pool, tables, seq_lens=seq_lens)
            for dialect in Dialect:
                one_by_one = b"".join(encode(each, dialect=dialect) for each in snapshot.descriptors())
                assert snapshot.encode_descriptors(dialect=dialect) == one_by_one
