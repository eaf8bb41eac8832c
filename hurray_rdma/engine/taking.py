"""The reader's side of a pull in frames: what comes is put into its pages, and nothing else may come."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec, PagePool
from hurray_rdma.control import AllEnded, DescriptorsEnded, TensorData
from hurray_rdma.engine.frames import Unpacker
from hurray_rdma.engine.mover import Moves
from hurray_rdma.errors import DeadlineExceededError, HurrayError

__all__ = ["Taking"]

_LOOK_AGAIN_S = 0.01


class Taking:
    """Frames of one pull on their way into pages. Runs on the event loop.

    Args:
        source: the cache that they come from.
        pool: the reader's.
        page_ids: its pages that they go into, uint32 ``[num_pages]``.

    Raises:
        DeviceUnavailableError: the pool is not in host memory.
    """

    def __init__(self, source: CacheSpec, pool: PagePool, page_ids: NDArray[np.uint32]) -> None:
        self._unpacker = Unpacker(source, pool, page_ids)
        self._pool = pool
        self.moves = Moves()
        self.whole: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when everything is in place."""

    def hear(self, event: TensorData | DescriptorsEnded | AllEnded) -> None:
        """Takes what the source says; what is wrong with it fails ``whole``."""
        if self.whole.done():
            return
        started = time.monotonic()
        try:
            match event:
                case TensorData(descriptor_index=index, offset_nbytes=offset, data=data):
                    count = self._unpacker.feed(index, offset, data)
                    self.moves.add(Moves(count, len(data), time.monotonic() - started))
                case DescriptorsEnded(descriptor_indices=indices):
                    for index in indices:
                        self._unpacker.finish(index)
                case AllEnded():
                    self.whole.set_result(None)
        except HurrayError as error:
            self.fail(error)

    def fail(self, error: HurrayError) -> None:
        """It comes to nothing; no byte is written any more."""
        if not self.whole.done():
            self.whole.set_exception(error)
            self.whole.exception()  # somebody may wait for it, or nobody

    @contextlib.asynccontextmanager
    async def writing(self, deadline: float) -> AsyncIterator[None]:
        """While frames may come: the pool is not registered anew meanwhile.

        Args:
            deadline: until when that may be waited for, on the monotonic clock, seconds.

        Raises:
            DeadlineExceededError: the pool was being registered anew all the time.
        """
        while (moving := self._pool.gate.try_moving()) is None:
            if time.monotonic() >= deadline:
                raise DeadlineExceededError("the pool was being registered anew all the time")
            await asyncio.sleep(_LOOK_AGAIN_S)
        with moving:
            yield
