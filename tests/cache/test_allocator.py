"""Leases, reference counts, quarantine: a state machine against sets of pages, and each rule by itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from hurray_rdma.cache import Lease, LeaseState, PageAllocator
from hurray_rdma.errors import GeometryError, LeaseExpiredError, PoolExhaustedError


def test_a_fresh_pool_gives_consecutive_pages() -> None:
    allocator = PageAllocator(10)
    assert allocator.lease(4).page_ids.tolist() == [0, 1, 2, 3]
    assert allocator.lease(6).page_ids.tolist() == [4, 5, 6, 7, 8, 9]


def test_a_run_is_preferred_to_fragments_and_fragments_to_failure() -> None:
    allocator = PageAllocator(12)
    leases = [allocator.lease(2) for _ in range(6)]
    for index in (0, 2, 3):
        leases[index].release()
    taken = allocator.lease(3)
    assert taken.page_ids.tolist() == [4, 5, 6], "the run of four, not the two pages before it"
    assert sorted(allocator.lease(3).page_ids.tolist()) == [0, 1, 7]


def test_all_or_nothing_and_not_now_differs_from_never() -> None:
    allocator = PageAllocator(8)
    held = allocator.lease(5)
    with pytest.raises(
        PoolExhaustedError, match=r"count = 4: is above the 3 free pages \(5 leased, 0 quarantined, of 8\)"
    ):
        allocator.lease(4)
    with pytest.raises(PoolExhaustedError, match="count = 9: is above the pool's 8 pages: it never fits"):
        allocator.lease(9)
    assert allocator.never_fits(9)
    assert not allocator.never_fits(8)
    assert allocator.accounts().free == 3
    held.release()
    assert len(allocator.lease(8)) == 8


def test_release_empties_the_handle_and_is_harmless_twice() -> None:
    allocator = PageAllocator(4)
    lease = allocator.lease(3)
    lease.release()
    again = allocator.lease(4)
    lease.release()
    assert allocator.accounts().leased == 4
    with pytest.raises(LeaseExpiredError, match=r"Lease\.page_ids: the lease is released"):
        _ = lease.page_ids
    assert again.state is LeaseState.HELD
    assert "released" in repr(lease)


def test_shared_pages_go_back_with_their_last_lease() -> None:
    allocator = PageAllocator(4)
    first = allocator.lease(3)
    second = allocator.retain(first.page_ids[1:])
    first.release()
    assert allocator.accounts().leased == 2
    second.release()
    assert allocator.accounts().free == 4
    assert allocator.accounts().num_free_runs == 1


def test_a_trimmed_lease_keeps_its_first_pages_and_whoever_waits_hears_of_the_others() -> None:
    allocator, freed = PageAllocator(8), []
    allocator.watch(lambda: freed.append(1))
    lease = allocator.lease(6)
    shared = allocator.retain([5])
    lease.trim(6)
    assert freed == []
    lease.trim(2)
    assert lease.page_ids.tolist() == [0, 1]
    assert len(freed) == 1
    assert allocator.accounts().leased == 3, "page 5 is somebody else's, too"
    with pytest.raises(GeometryError, match="count = 3: must be from 0 to 2"):
        lease.trim(3)
    shared.release()
    lease.release()
    lease.trim(1)
    assert allocator.accounts().free == 8
    lease = allocator.lease(4)
    allocator.quarantine(lease, reason="peer lost")
    lease.trim(1)
    assert allocator.accounts().quarantined == 4


def test_only_pages_that_somebody_holds_can_be_retained() -> None:
    allocator = PageAllocator(4)
    lease = allocator.lease(2)
    with pytest.raises(LeaseExpiredError, match=r"page_ids\[1\] = 3: nobody holds the page"):
        allocator.retain([0, 3])
    with pytest.raises(GeometryError, match=r"page_ids\[0\] = 4: is not below num_pages 4"):
        allocator.retain([4])
    with pytest.raises(GeometryError, match="page_ids = 1: must not name a page twice"):
        allocator.retain([1, 0, 1])
    allocator.quarantine(lease, reason="peer lost")
    with pytest.raises(LeaseExpiredError):
        allocator.retain([0])


def test_quarantine_outlives_the_release_and_ends_with_recover() -> None:
    allocator = PageAllocator(4)
    lease = allocator.lease(3)
    with pytest.raises(GeometryError, match="only a quarantined lease"):
        allocator.recover(lease)
    allocator.quarantine(lease, reason="peer lost")
    lease.release()
    with pytest.raises(LeaseExpiredError, match="quarantined: peer lost"):
        _ = lease.page_ids
    with pytest.raises(PoolExhaustedError, match="3 quarantined"):
        allocator.lease(2)
    assert allocator.quarantined() == (lease,)
    allocator.recover(lease)
    allocator.recover(lease)
    assert allocator.accounts().free == 4


def test_a_page_of_a_quarantined_lease_that_another_holds_waits_for_both() -> None:
    allocator = PageAllocator(1)
    suspect = allocator.lease(1)
    other = allocator.retain([0])
    allocator.quarantine(suspect, reason="late write")
    assert (allocator.accounts().leased, allocator.accounts().quarantined) == (1, 0)
    other.release()
    assert (allocator.accounts().leased, allocator.accounts().quarantined) == (0, 1)
    allocator.recover(suspect)
    assert allocator.accounts().free == 1


def test_threads_never_share_a_page() -> None:
    allocator = PageAllocator(64)
    owners = np.zeros(64, np.int64)
    problems: list[str] = []

    def work(name: int) -> None:
        for count in range(1, 200):
            with allocator.lease(count % 8 + 1) as lease:
                if owners[lease.page_ids].any():
                    problems.append(f"{lease.page_ids} has an owner")
                owners[lease.page_ids] = name
                owners[lease.page_ids] = 0

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert allocator.accounts().free == 64
    assert allocator.accounts().num_free_runs == 1


class Allocation(RuleBasedStateMachine):
    """Against a multiset of held pages and a multiset of quarantined ones."""

    leases = Bundle("leases")
    suspects = Bundle("suspects")
    num_pages = 13

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(self.num_pages)
        self.held: list[set[int]] = []
        self.suspected: list[set[int]] = []

    def taken(self) -> set[int]:
        return set().union(*self.held, *self.suspected)

    @rule(target=leases, count=st.integers(0, 15))
    def lease(self, count: int) -> tuple[Lease, set[int]] | None:
        free = self.num_pages - len(self.taken())
        if count > free:
            with pytest.raises(PoolExhaustedError):
                self.allocator.lease(count)
            return None
        lease = self.allocator.lease(count)
        pages = set(lease.page_ids.tolist())
        assert len(pages) == count
        assert not pages & self.taken()
        self.held.append(pages)
        return lease, pages

    @rule(target=leases, pair=leases, data=st.data())
    def retain(self, pair: tuple[Lease, set[int]] | None, data: st.DataObject) -> tuple[Lease, set[int]] | None:
        if pair is None or pair[0].state is not LeaseState.HELD or not pair[1]:
            return None
        pages = data.draw(st.sets(st.sampled_from(sorted(pair[1])), min_size=1))
        lease = self.allocator.retain(sorted(pages))
        self.held.append(pages)
        return lease, pages

    @rule(pair=leases)
    def release(self, pair: tuple[Lease, set[int]] | None) -> None:
        if pair is not None:
            if pair[0].state is LeaseState.HELD:
                self.held.remove(pair[1])
            pair[0].release()

    @rule(target=suspects, pair=leases)
    def quarantine(self, pair: tuple[Lease, set[int]] | None) -> tuple[Lease, set[int]] | None:
        if pair is None or pair[0].state is not LeaseState.HELD:
            return None
        self.allocator.quarantine(pair[0], reason="test")
        self.held.remove(pair[1])
        self.suspected.append(pair[1])
        return pair

    @rule(pair=consumes(suspects))
    def recover(self, pair: tuple[Lease, set[int]] | None) -> None:
        if pair is not None:
            self.allocator.recover(pair[0])
            self.suspected.remove(pair[1])

    @invariant()
    def accounts_balance(self) -> None:
        accounts = self.allocator.accounts()
        leased = set().union(*self.held)
        assert accounts.free == self.num_pages - len(self.taken())
        assert accounts.leased == len(leased)
        assert accounts.quarantined == len(self.taken() - leased)
        assert accounts.free + accounts.leased + accounts.quarantined == accounts.num_pages
        free = sorted(set(range(self.num_pages)) - self.taken())
        runs = sum(1 for i, page in enumerate(free) if i == 0 or free[i - 1] != page - 1)
        assert accounts.num_free_runs == runs


TestAllocation = Allocation.TestCase
