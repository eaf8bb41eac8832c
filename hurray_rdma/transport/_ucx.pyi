"""Types of the native module; its docstrings are in native/_ucx.pyx."""

from typing import final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

HOST: int
CUDA: int
CUDA_MANAGED: int
UNKNOWN: int

class UcxError(Exception):
    call: str
    status: int
    def __init__(self, call: str, status: int) -> None: ...

def status_text(status: int) -> str: ...
def first_outside(offsets: NDArray[np.uint64], lengths: NDArray[np.uint64], nbytes: int) -> int: ...

@final
class StopFlag:
    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    @property
    def address(self) -> int: ...

@final
class Memory:
    address: int
    nbytes: int
    memory_type: int
    @staticmethod
    def map(context: int, address: int, nbytes: int, memory_type: int, owners: object) -> Memory: ...
    @staticmethod
    def allocate(context: int, nbytes: int, memory_type: int, owners: object) -> Memory: ...
    def pack_rkey(self) -> bytes: ...
    def take_over(self, old: Memory, seen_address: int) -> None: ...
    def replace(self, start: int, skip: int, nbytes: int) -> None: ...
    @property
    def in_use(self) -> bool: ...
    def hold(self) -> None: ...
    def release(self) -> None: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Endpoint:
    def __init__(self, worker: int, address: Buffer, error_handling: bool, owner: object) -> None: ...
    @property
    def handle(self) -> int: ...
    def close(self, deadline_ns: int) -> bool: ...
    def info(self) -> str: ...

def context_info(context: int) -> str: ...
def memory_types(context: int) -> frozenset[int]: ...
def drain(worker: int) -> None: ...

@final
class RemoteKey:
    def __init__(self, endpoint: Endpoint, packed: Buffer) -> None: ...
    def pointer(self, remote_address: int) -> int | None: ...
    def close(self) -> None: ...

def post(
    worker: int,
    endpoint: int,
    get: bool,
    local_base: int,
    local_memory: Memory,
    remote_base: int,
    remote_key: RemoteKey,
    local_offsets: NDArray[np.uint64],
    remote_offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    window: int,
    stop: StopFlag,
    deadline_ns: int,
    describe: bool,
) -> tuple[int, int, int, int, bool, str]: ...
def flush(worker: int, endpoint: int, stop: StopFlag, deadline_ns: int) -> int: ...
def copy(
    src_base: int,
    dst_base: int,
    src_offsets: NDArray[np.uint64],
    dst_offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    stop: StopFlag,
    deadline_ns: int,
) -> tuple[int, int, int, int, bool]: ...
def copy_rows(
    src_base: int,
    src_nbytes: int,
    dst_base: int,
    dst_nbytes: int,
    places: NDArray[np.uint64],
    src_rows: NDArray[np.uint32],
    dst_rows: NDArray[np.uint32],
    stop: StopFlag,
    deadline_ns: int,
    bell: int,
    token: int,
) -> tuple[int, int, int, int, bool]: ...
def rings(words: NDArray[np.uint64], index: int, token: int, timeout_ns: int) -> bool: ...
def is_unmapped(start: int, nbytes: int) -> bool: ...
def memcpy(
    src_base: int,
    dst_base: int,
    src_offsets: NDArray[np.uint64],
    dst_offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
) -> None: ...
