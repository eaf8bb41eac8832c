"""The prefix cache of a decode worker: who is given up first, and who never."""

from __future__ import annotations

from hurray_rdma.cache import PageAllocator
from hurray_rdma.replay.kept import KeptPages


def serve(allocator: PageAllocator, kept: KeptPages, count: int) -> list[int]:
    """One request with pages of its own, from its grant to its end."""
    lease = allocator.lease(count)
    page_ids: list[int] = lease.page_ids.tolist()
    kept.use(page_ids)
    kept.done(page_ids)
    lease.release()
    return page_ids


def held(allocator: PageAllocator, page_ids: list[int]) -> list[int]:
    """Which of the pages somebody holds."""
    with allocator.retain_held(page_ids) as lease:
        return [int(page_id) for page_id in lease.page_ids]


def test_the_page_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    allocator = PageAllocator(10)
    kept = KeptPages(allocator, headroom=4)
    old, new = serve(allocator, kept, 4), serve(allocator, kept, 4)
    assert (len(kept), allocator.accounts().free) == (8, 2)
    kept.make_room()
    assert kept.num_evicted == 2
    assert allocator.accounts().free == 4
    assert sorted(held(allocator, old + new)) == sorted(old[:2] + new)


def test_pages_in_use_stay_and_what_is_used_again_becomes_young() -> None:
    allocator = PageAllocator(6)
    kept = KeptPages(allocator, headroom=6)
    old, new = serve(allocator, kept, 3), serve(allocator, kept, 3)
    kept.use(old[:2])
    kept.make_room()
    assert len(kept) == 0
    assert allocator.accounts().free == 4
    assert sorted(held(allocator, old + new)) == sorted(old[:2])
    kept.done(old[:2])
    assert len(kept) == 2
    kept.make_room()
    assert (allocator.accounts().free, allocator.accounts().num_leases) == (6, 0)


def test_two_users_of_a_page_keep_it_until_both_are_done() -> None:
    allocator = PageAllocator(4)
    kept = KeptPages(allocator, headroom=4)
    (page,) = serve(allocator, kept, 1)
    kept.use([page])
    kept.use([page])
    kept.done([page])
    kept.make_room()
    assert held(allocator, [page]) == [page]
    kept.done([page])
    kept.make_room()
    assert allocator.accounts().free == 4


def test_a_request_that_failed_keeps_only_what_was_kept_before() -> None:
    allocator = PageAllocator(4)
    kept = KeptPages(allocator, headroom=1)
    old = serve(allocator, kept, 2)
    fresh = allocator.lease(1)
    kept.use([*old, *fresh.page_ids.tolist()])
    kept.forget([*old, *fresh.page_ids.tolist()])
    fresh.release()
    assert (len(kept), allocator.accounts().free) == (2, 2)
    kept.use(old)
    kept.clear()
    assert allocator.accounts().num_leases == 0
