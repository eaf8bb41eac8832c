"""What identifies the content of the receiver's pages, from the sender's keys of its own.

Keys are chained: that of a page stands for all tokens from the start of its sequence to the page's end. So a full
destination page is identified by the key of the source page that holds its last token, and by that token's slot. Knows
bytes and tables; how keys are made is the sender's business, what is resident the receiver's.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import GeometryError
from hurray_rdma.plan.pagemap import PageMap

__all__ = ["map_keys"]

_SUFFIX = np.dtype("<u4")


def map_keys(
    page_map: PageMap, keys: NDArray[np.uint8], src_seq_ptr: NDArray[np.uint32]
) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Keys of the destination pages of an offer.

    Args:
        page_map: of the offer.
        keys: one for each entry of the offered block table, uint8 ``[src_seq_ptr[-1], key_nbytes]``. A row of zeros is
            no key; pages that are not full have none.
        src_seq_ptr: the offered one, uint32 ``[num_seqs + 1]``, pages allocated ahead included.

    Returns:
        Keys, uint8 ``[page_map.num_pages, key_nbytes + 8]``, and which of them are keys, bool ``[page_map.num_pages]``.
        The last eight bytes are the source's page size and the slot, little-endian uint32 each.

    Raises:
        GeometryError: ``keys`` has not one row for each entry, or gives one page two keys.
    """
    num_entries = int(src_seq_ptr[-1])
    if keys.ndim != 2 or keys.dtype != np.uint8 or len(keys) != num_entries:
        raise GeometryError(
            f"must be uint8 with one row for each of the {num_entries} table entries",
            field="page_keys",
            value=f"{keys.dtype} {keys.shape}",
        )
    starts = page_map.seq_ptr.astype(np.int64)
    counts = starts[1:] - starts[:-1]
    ordinal = np.arange(starts[-1]) - np.repeat(starts[:-1], counts)
    end_token = (ordinal + 1) * page_map.dst_page_size
    full = end_token <= np.repeat(page_map.seq_lens.astype(np.int64), counts)
    src_ordinal, src_slot = np.divmod(end_token[full] - 1, page_map.src_page_size)
    src_entry = np.repeat(src_seq_ptr[:-1].astype(np.int64), counts)[full] + src_ordinal
    suffix = np.empty((len(src_entry), 2), _SUFFIX)
    suffix[:, 0] = page_map.src_page_size
    suffix[:, 1] = src_slot
    given = np.concatenate([keys[src_entry], suffix.view(np.uint8)], axis=1)
    given[~keys[src_entry].any(axis=1)] = 0
    page_keys = np.zeros((page_map.num_pages, given.shape[1]), np.uint8)
    places = page_map.entries[full]
    page_keys[places] = given
    wrong = (page_keys[places] != given).any(axis=1)
    if wrong.any():
        at = int(src_entry[int(wrong.argmax())])
        raise GeometryError(
            "another entry of the same page has another key", field=f"page_keys[{at}]", value=keys[at].tobytes()
        )
    return page_keys, np.asarray(page_keys.any(axis=1))
