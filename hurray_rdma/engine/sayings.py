"""What a sender says of a snapshot: OFFER, or PREPARE and COMMIT of one that goes into pages granted ahead.

Knows snapshots and the peer's pool; a snapshot was checked when it was made, and is not looked at again.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import Snapshot
from hurray_rdma.control import Commit, Offer
from hurray_rdma.control.offers import NO_PAGE_KEYS
from hurray_rdma.engine.remote_pool import RemotePool
from hurray_rdma.format import DescriptorForm

__all__ = ["commit_of", "offer_of"]

_C = TypeVar("_C", bound=Commit)


def offer_of(
    snapshot: Snapshot,
    remote: RemotePool,
    key: str,
    *,
    form: DescriptorForm,
    deadline_s: float,
    page_keys: NDArray[np.uint8] | None = None,
) -> Offer:
    """The offer of a snapshot into a peer's pool.

    Args:
        snapshot, key, page_keys: as of `Peer.send`; keys are held to the rules here.
        remote: the pool.
        form: of the descriptors of the snapshot's pool.
        deadline_s: as of `Offer`.

    Raises:
        ConfigError, GeometryError: as of `Offer`, of what the caller says.
    """
    spec, pool = snapshot.pool.spec, remote.pool
    return Offer(
        key=key,
        pool_id=pool.pool_id,
        generation=pool.generation,
        descriptors=form.encode(snapshot.counts()),
        block_table=snapshot.block_table,
        seq_ptr=snapshot.seq_ptr,
        seq_lens=snapshot.seq_lens,
        order=str(spec.order),
        head_offset=spec.head_offset,
        total_heads=spec.heads_of_model,
        page_keys=NO_PAGE_KEYS if page_keys is None else page_keys,
        num_descriptors=len(form.marks) if page_keys is None else 0,
        deadline_s=deadline_s,
        lane=remote.lane,
        path=remote.path,
    )


def commit_of(snapshot: Snapshot, key: str, *, descriptors: bytes, kind: type[_C]) -> _C:
    """What is said of a snapshot that is in pages granted ahead, or about to be; ``descriptors`` as of its
    `encode_descriptors`."""
    spec = snapshot.pool.spec
    return kind(
        key=key,
        descriptors=descriptors,
        block_table=snapshot.block_table,
        seq_ptr=snapshot.seq_ptr,
        seq_lens=snapshot.seq_lens,
        order=str(spec.order),
        head_offset=spec.head_offset,
        total_heads=spec.heads_of_model,
    )
