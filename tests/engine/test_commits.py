"""What is remembered of a sender's commits must let nothing through that looking at all of one would not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.control import Commit, Offer, Reserve
from hurray_rdma.engine import sayings
from hurray_rdma.engine.commits import Commits
from hurray_rdma.engine.compat import check_snapshot
from hurray_rdma.errors import DescriptorError, GeometryError, HurrayError
from hurray_rdma.format import Dialect
from hurray_rdma.plan import PlacedTables

SPEC = CacheSpec(num_layers=1, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16", total_heads=2)
RESERVE = Reserve(pool_id=0, generation=1, num_pages=8, deadline_s=1)
NUM_PAGES = 16
GRANTED = np.arange(40, 48, dtype=np.uint32)


def commits() -> Commits:
    return Commits(SPEC, dialect=Dialect.ADR_024, devices={0})


def commit_of(
    tables: list[list[int]], seq_lens: list[int], spec: CacheSpec = SPEC, dialect: Dialect = Dialect.ADR_024
) -> Commit:
    with PagePool.allocate(spec, NUM_PAGES) as pool:
        snapshot = Snapshot.from_block_tables(pool, tables, seq_lens=seq_lens)
        return sayings.commit_of(snapshot, "k", descriptors=snapshot.encode_descriptors(dialect=dialect), kind=Commit)


@pytest.fixture(scope="module")
def first() -> Commit:
    return commit_of([[1]], [4])


@pytest.fixture(scope="module")
def good() -> Commit:
    return commit_of([[7, 3, 9], [7, 3, 2]], [10, 12])


def changed(commit: Commit, **fields: object) -> Commit:
    facts = {name: getattr(commit, name) for name in Commit.__dataclass_fields__}
    return Commit(**(facts | fields))


def both_ways(first: Commit, commit: Commit) -> PlacedTables | type[HurrayError]:
    """What is made of a commit by who has checked another one, and by who has not: the same."""
    knowing, outcomes = commits(), []
    knowing.check(first, RESERVE, GRANTED)
    for each in (knowing, commits()):
        try:
            outcomes.append(each.check(commit, RESERVE, GRANTED))
        except HurrayError as error:
            outcomes.append(type(error))
    one, other = outcomes
    if isinstance(one, PlacedTables) and isinstance(other, PlacedTables):
        for name in PlacedTables._fields:
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    else:
        assert one is other
    return one


def test_the_next_commit_of_a_cache_is_what_its_tables_say(first: Commit, good: Commit) -> None:
    tables = both_ways(first, good)
    assert isinstance(tables, PlacedTables)
    assert tables.block_table.tolist() == [42, 41, 43, 42, 41, 40]  # 2, 3, 7, 9 in order
    assert tables.seq_ptr.tolist() == [0, 3, 6]
    assert tables.seq_lens.tolist() == [10, 12]
    assert tables.num_pages == 4


def test_too_few_pages_are_told(first: Commit, good: Commit) -> None:
    larger = CacheSpec(num_layers=1, num_heads=2, head_dim=8, page_size=8, dtype="bfloat16", total_heads=2)
    for commit, count in ((good, 4), (commit_of([[1, 5]], [16], larger), 4)):
        checking = commits()
        checking.check(first, RESERVE, GRANTED)
        assert checking.check(commit, RESERVE, GRANTED[:count]).num_pages == count
        with pytest.raises(GeometryError, match="num_pages"):
            checking.check(commit, RESERVE, GRANTED[: count - 1])


def u32(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


@pytest.mark.parametrize(
    "fields",
    [
        {"seq_ptr": u32()},
        {"seq_ptr": u32(0, 3)},
        {"seq_ptr": u32(1, 3, 6)},
        {"seq_ptr": u32(0, 7, 6)},
        {"seq_ptr": u32(0, 3, 5)},
        {"seq_lens": u32(21, 1)},
        {"seq_lens": u32(2**32 - 1, 23)},
        {"seq_lens": u32(22)},
        {"block_table": u32(7, 3, 16, 7, 3, 2)},
        {"block_table": u32(7, 3, 9, 7, 3)},
        {"total_heads": 4},
        {"head_offset": 1},
        {"order": "HND"},
        {"order": "N" * 33},
        {"descriptors": b""},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_breaks_a_rule_is_refused_all_the_same(first: Commit, good: Commit, fields: dict[str, object]) -> None:
    outcome = both_ways(first, changed(good, **fields))
    assert not isinstance(outcome, PlacedTables) or fields == {"order": "HND"}  # which pages may be in, too


def offer_of(commit: Commit, **fields: object) -> Offer:
    facts = {name: getattr(commit, name) for name in Commit.__dataclass_fields__}
    return Offer(pool_id=0, generation=1, deadline_s=1, **(facts | fields))


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"block_table": u32(7, 3, 16, 7, 3, 2)},
        {"seq_lens": u32(21, 1)},
        {"seq_lens": u32(12, 13)},
        {"total_heads": 4},
        {"head_offset": 1},
        {"order": "HND"},
        {"order": "none"},
    ],
    ids=str,
)
def test_offers_are_held_to_what_is_known_and_to_the_same_rules(
    first: Commit, good: Commit, fields: dict[str, object]
) -> None:
    offer, knowing, outcomes = offer_of(good, **fields), commits(), []
    knowing.check(first, RESERVE, GRANTED)
    for each in (knowing.check_offer, lambda told: check_snapshot(told, SPEC, dialect=Dialect.ADR_024, devices={0})):
        try:
            spec, *_, page_map = each(offer)
        except HurrayError as error:
            outcomes.append(type(error))
        else:
            outcomes.append((spec, page_map.num_pages, page_map.entries.tolist()))
    assert outcomes[0] == outcomes[1]
    assert (outcomes[0] == (SPEC, 4, [2, 1, 3, 2, 1, 0])) is (fields == {})


def test_offers_of_some_heads_are_known_as_such_and_commits_of_them_refused() -> None:
    half = CacheSpec(num_layers=1, num_heads=1, head_dim=8, page_size=4, dtype="bfloat16", head_offset=1, total_heads=2)
    slices, checking = commit_of([[1, 5]], [8], half), commits()
    for _ in range(2):
        spec, heads, page_map = checking.check_offer(offer_of(slices))
        assert (spec, heads, page_map.num_pages) == (half, (1, 2), 2)
        with pytest.raises(GeometryError, match="pages granted ahead are for"):
            checking.check(slices, RESERVE, GRANTED)


def test_another_cache_is_looked_at_anew_and_the_first_one_again(first: Commit, good: Commit) -> None:
    other = CacheSpec(num_layers=1, num_heads=2, head_dim=8, page_size=8, dtype="bfloat16", total_heads=2)
    turned = CacheSpec(
        num_layers=1,
        num_heads=2,
        head_dim=8,
        page_size=4,
        dtype="bfloat16",
        total_heads=2,
        roles=("value", "key"),
    )
    checking = commits()
    for spec, num_pages in ((SPEC, 2), (other, 4), (SPEC, 2), (turned, 2), (SPEC, 2)):
        commit = commit_of([[1, 5]], [2 * spec.page_size], spec)
        assert checking.check(commit, RESERVE, GRANTED).num_pages == num_pages
    for spec, dialect, kind in (
        (CacheSpec(num_layers=1, num_heads=2, head_dim=16, page_size=4, dtype="bfloat16"), "adr-024", GeometryError),
        (CacheSpec(num_layers=2, num_heads=2, head_dim=8, page_size=4, dtype="bfloat16"), "adr-024", GeometryError),
        (SPEC, "hurray-0.2", DescriptorError),
    ):
        with pytest.raises(kind):
            checking.check(commit_of([[1, 5]], [8], spec, Dialect.of(dialect)), RESERVE, GRANTED)  # type: ignore[arg-type]
        assert checking.check(good, RESERVE, GRANTED).num_pages == 4


def test_descriptors_inside_others_are_looked_at_each_time(first: Commit) -> None:
    """The first goes on, as in a later minor version, with what the second is: the halves of all bytes are alike."""

    def nested(of_first: Commit, of_second: Commit) -> bytes:
        nbytes = len(first.descriptors) // 2
        keys, values = of_first.descriptors[:nbytes], of_first.descriptors[nbytes:]
        version_and_length = b"\x01" + (3 * nbytes).to_bytes(4, "little")
        second = of_second.descriptors[nbytes:]
        return b"".join(each[:5] + version_and_length + each[10:] + second for each in (keys, values))

    two = commit_of([[1, 2]], [8])
    honest, stale = changed(first, descriptors=nested(first, first)), changed(two, descriptors=nested(two, first))
    assert isinstance(both_ways(honest, honest), PlacedTables)
    assert not isinstance(both_ways(honest, stale), PlacedTables)


@given(
    name=st.sampled_from(["block_table", "seq_ptr", "seq_lens", "descriptors"]),
    place=st.integers(0, 400),
    value=st.integers(0, 255),
    cut=st.booleans(),
)
def test_any_changed_byte_is_seen_by_both_ways_alike(
    first: Commit, good: Commit, *, name: str, place: int, value: int, cut: bool
) -> None:
    was = getattr(good, name)
    data = bytearray(was if isinstance(was, bytes) else was.tobytes())
    data[place % len(data)] = value
    if cut:
        del data[-4:]
    both_ways(first, changed(good, **{name: bytes(data) if isinstance(was, bytes) else np.frombuffer(data, "<u4")}))
