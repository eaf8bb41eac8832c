"""What an answer must have in common with the request it belongs to and with the pool as it is now.

A client checks with this what it is answered before its engine sees it, a server what it grants ahead. This module
knows which numbers must agree. It knows neither streams nor states.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hurray_rdma.control.checks import Uint32Array
from hurray_rdma.control.codes import StaleGenerationError
from hurray_rdma.control.offers import Grant, Offer, Published, Reserve
from hurray_rdma.control.pools import Pool
from hurray_rdma.errors import GeometryError

__all__ = ["check_grant", "check_published", "check_reserved"]


def check_grant(pools: Mapping[int, Pool], request: Offer | Reserve, grant: Grant) -> None:
    """Hold a grant against what was offered or reserved, and against the pool.

    Raises:
        StaleGenerationError: it is of another generation than was asked for, or than the pool has.
        GeometryError: a page is not in the pool; not just the pages of a reservation were granted; or their bell is no
            word of the pool's first region.
    """
    if request.generation != grant.generation:
        raise StaleGenerationError(
            f"pages were granted at generation {grant.generation} of the pool, but asked for at {request.generation}"
        )
    if isinstance(request, Reserve):
        check_reserved(request, grant)
    _check_pages(pools, request.pool_id, grant.generation, "page_ids", grant.page_ids)
    if grant.bell_token:
        _check_bell(pools[request.pool_id], grant.bell_offset_nbytes)


def check_reserved(reserve: Reserve, grant: Grant) -> None:
    """Hold a grant against the number of pages that were reserved.

    Raises:
        GeometryError: it has more or fewer, or some that need not be written.
    """
    if len(grant.page_ids) != reserve.num_pages:
        rule = f"must be the {reserve.num_pages} of the reservation"
        raise GeometryError(rule, field="len(page_ids)", value=len(grant.page_ids))
    if len(grant.resident):
        rule = "must be 0: no page that is granted ahead holds anything yet"
        raise GeometryError(rule, field="len(resident)", value=len(grant.resident))


def check_published(pools: Mapping[int, Pool], published: Published) -> None:
    """Hold a published snapshot against its pool.

    Raises:
        StaleGenerationError: it is of another generation than the pool has.
        GeometryError: a page is not in the pool.
    """
    _check_pages(pools, published.pool_id, published.generation, "block_table", published.block_table)


def _check_bell(pool: Pool, offset_nbytes: int) -> None:
    nbytes = pool.regions[0].nbytes if pool.regions else 0
    if offset_nbytes % 8 or offset_nbytes + 8 > nbytes:
        rule = f"must be a multiple of 8 inside the {nbytes} bytes of the first region of pool {pool.pool_id}"
        raise GeometryError(rule, field="bell_offset_nbytes", value=offset_nbytes)


def _check_pages(pools: Mapping[int, Pool], pool_id: int, generation: int, name: str, page_ids: Uint32Array) -> None:
    pool = pools.get(pool_id)
    if pool is None or pool.generation != generation:
        now = "is not announced (any more)" if pool is None else f"is at generation {pool.generation}"
        raise StaleGenerationError(f"pages were answered at generation {generation} of pool {pool_id}, which {now}")
    if len(page_ids) and int(np.maximum.reduce(page_ids)) >= pool.num_pages:
        at = int(page_ids.argmax())
        raise GeometryError(
            f"is not below num_pages {pool.num_pages} of pool {pool_id}",
            field=f"{name}[{at}]",
            value=int(page_ids[at]),
        )
