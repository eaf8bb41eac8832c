"""Types of the native module; its docstrings are in native/_indices.pyx."""

import numpy as np
from numpy.typing import NDArray

def check_indices(
    block_table: NDArray[np.uint32],
    seq_ptr: NDArray[np.uint32],
    seq_lens: NDArray[np.uint32],
    *,
    num_pages: int,
    page_size: int,
) -> None: ...
def check_page_ids(page_ids: NDArray[np.uint32], *, num_pages: int, field: str) -> None: ...
def check_distinct(page_ids: NDArray[np.uint32], *, num_pages: int, field: str) -> None: ...
def dedupe(block_table: NDArray[np.uint32], *, num_pages: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]: ...
def valid_pages(
    block_table: NDArray[np.uint32], seq_ptr: NDArray[np.uint32], seq_lens: NDArray[np.uint32], page_size: int
) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]: ...
def narrow(values: NDArray[np.int64]) -> tuple[NDArray[np.uint32], int]: ...
def cut_units(
    places: NDArray[np.uint32], src_ptr: NDArray[np.uint32], dst_ptr: NDArray[np.uint32], per_page: int
) -> NDArray[np.uint64]: ...
def place_pages(
    block_table: NDArray[np.uint32],
    seq_ptr: NDArray[np.uint32],
    seq_lens: NDArray[np.uint32],
    page_ids: NDArray[np.uint32],
    *,
    num_pages: int,
    page_size: int,
) -> tuple[NDArray[np.uint32], NDArray[np.uint32], int]: ...
def starts_of(seq_lens: NDArray[np.uint32], page_size: int) -> NDArray[np.uint32]: ...
def total_of(values: NDArray[np.uint32]) -> int: ...
def valid_tokens(
    entries: NDArray[np.uint32],
    seq_ptr: NDArray[np.uint32],
    seq_lens: NDArray[np.uint32],
    *,
    num_pages: int,
    page_size: int,
) -> NDArray[np.uint32]: ...
