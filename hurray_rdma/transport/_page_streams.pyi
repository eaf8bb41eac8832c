"""Types of the native module; its docstrings are in native/_page_streams.pyx."""

from typing import final

import numpy as np
from numpy.typing import NDArray

MAX_PIECES: int
MAX_NBYTES: int

OK: int
ENDED: int
FORBIDDEN: int
BROKEN: int
LOST: int
STOPPED: int
TIMED_OUT: int
NO_MEMORY: int

@final
class Permits:
    def add(
        self,
        transfer_id: int,
        writes: bool,
        regions: NDArray[np.uint64],
        segments: NDArray[np.uint64],
        page_ids: NDArray[np.uint32],
    ) -> None: ...
    def remove(self, transfer_id: int) -> bool: ...
    def serve(self, socket: int) -> tuple[int, int, int, int, int]: ...

def move(
    socket: int,
    get: bool,
    transfer_id: int,
    region: int,
    local_base: int,
    local_offsets: NDArray[np.uint64],
    remote_offsets: NDArray[np.uint64],
    lengths: NDArray[np.uint64],
    stop: int,
    deadline_ns: int,
) -> tuple[int, int, bool]: ...
