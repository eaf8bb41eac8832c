"""Types of the native module; its docstrings are in native/_offsets.pyx."""

import numpy as np
from numpy.typing import NDArray

def offsets_of(
    page_ids: NDArray[np.uint32],
    slots: NDArray[np.uint32],
    *,
    page_nbytes: int,
    token_nbytes: int,
    head_nbytes: int,
    places: NDArray[np.uint32] | None = None,
) -> NDArray[np.uint64]: ...
def merged(
    src_offsets: NDArray[np.uint64], dst_offsets: NDArray[np.uint64], piece_nbytes: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]: ...
