"""Moves the pages of a plan between this process and a peer's memory: in a mover thread, or on the event loop where
they are mapped and few (`INLINE_NBYTES`). The native loops release the GIL."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import PagePool
from hurray_rdma.engine.remote_pool import one_path
from hurray_rdma.errors import HurrayError
from hurray_rdma.plan import MovesTogether, Plan, TransferPlan
from hurray_rdma.transport import Region, RemoteMemory, StopFlag

__all__ = ["INLINE_NBYTES", "STEP_NBYTES", "Mover", "Moves"]


Offsets = NDArray[np.uint64]

INLINE_NBYTES = 2 << 20
"""What is copied through a mapping on the event loop: a third of a millisecond, as long as a thread takes to begin and
to be heard of."""
STEP_NBYTES = 32 << 20
"""Bytes per native call below which layers are put together: what is around a call costs as much as copying 2 MiB."""


@dataclass(slots=True)
class Moves:
    """What was moved."""

    num_operations: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, other: Moves) -> None:
        """Both together."""
        self.num_operations += other.num_operations
        self.nbytes += other.nbytes
        self.seconds += other.seconds


class Mover:
    """The moves of one transfer.

    Args:
        pool: this process's pages.
        plan: what is moved: out of ``pool``, or into it.
        memories: the peer's regions, as the plan counts them.
        reads: whether pages come from the peer; else they go there.
        zeros: a region of ``plan.zeros_nbytes`` zeros, where the plan has any and ``pool`` is on the host; on a GPU,
            they come from memory of it, by the lane of the pages.
        stop: ends it early.
        deadline: until when, on the monotonic clock, seconds.
        transfer_id: of the session.
    """

    def __init__(
        self,
        pool: PagePool,
        plan: TransferPlan,
        memories: tuple[RemoteMemory, ...],
        *,
        reads: bool = False,
        zeros: Region | None = None,
        stop: StopFlag,
        deadline: float,
        transfer_id: int,
    ) -> None:
        self._pool = pool
        self._plan = plan
        self._memories = memories
        self._path = one_path(memories, pool.device)
        self._reads = reads
        self._zeros = zeros
        self._stop = stop
        self._deadline = deadline
        self._transfer_id = transfer_id
        self.in_doubt = False
        """Whether bytes of a move that failed may still arrive."""

    def move(self, layers: Sequence[int], ended: Callable[[list[int]], None]) -> Moves:
        """Moves layer by layer, every role; blocks.

        Args:
            layers: which.
            ended: told, on this thread, which descriptors are complete where they were to go.

        Raises:
            HurrayError: as `RemoteMemory.write`.
        """
        spec, moves = self._pool.spec, Moves()
        step = max(1, STEP_NBYTES // max(1, self._plan.nbytes // spec.num_layers))
        try:
            for start in range(0, len(layers), step):
                tensors = spec.indices(layers[start : start + step])
                for same in self._plan.together(tensors):
                    self._move(same, moves)
                if self._reads:
                    self._pool.make_visible()
                ended(tensors)
        except HurrayError as error:
            self.in_doubt = self.in_doubt or error.in_doubt
            raise
        except BaseException:
            self.in_doubt = True
            raise
        return moves

    def _move(self, same: MovesTogether, done: Moves) -> None:
        program, src_region, dst_region, bases = same
        here, there = (dst_region, src_region) if self._reads else (src_region, dst_region)
        local, remote = self._pool.regions[here], self._memories[there]
        for plan in program.plans():
            self._run(local, remote, plan, bases, done)
        if program.zeros is not None:
            self._run(self._all_zeros(), remote, program.zeros, [(0, dst_base) for _, dst_base in bases], done)

    def _all_zeros(self) -> Region:
        index = self._pool.device_index
        if self._zeros is None and index is not None:
            self._zeros = self._pool.regions[0].context.zeros_on(index, self._plan.zeros_nbytes)
        assert self._zeros is not None
        return self._zeros

    def _run(self, local: Region, remote: RemoteMemory, plan: Plan, bases: list[tuple[int, int]], done: Moves) -> None:
        src_offsets, dst_offsets, lengths = _placed(plan, bases)
        with self._pool.gate.moving(timeout_s=self._left_s()):
            moved = (remote.read if self._reads else remote.write)(
                local,
                src_offsets=src_offsets,
                dst_offsets=dst_offsets,
                lengths=lengths,
                stop=self._stop,
                timeout_s=self._left_s(),
                path=self._path,  # zeros, which are in host memory, go the way of the pages
                transfer_id=self._transfer_id,
            )
        done.add(Moves(moved.num_operations, moved.nbytes, moved.seconds))

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _placed(plan: Plan, bases: list[tuple[int, int]]) -> tuple[Offsets, Offsets, Offsets]:
    """One plan at each (source, destination) base: offsets in the two regions, uint64 ``[len(bases) * operations]``."""
    places = np.array(bases, np.uint64)
    return (
        (places[:, :1] + plan.src_offsets).ravel(),
        (places[:, 1:] + plan.dst_offsets).ravel(),
        np.tile(plan.lengths, len(bases)),
    )
