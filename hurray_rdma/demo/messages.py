"""What the demo's processes and their supervisor say to each other. Facts and commands, never page data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.demo.batch import Batch
from hurray_rdma.engine import TransferStats

__all__ = [
    "Command",
    "Compared",
    "Copied",
    "Drawn",
    "Listening",
    "Ready",
    "Received",
    "Sent",
]


class Command(Enum):
    """What the supervisor tells a process to do next."""

    TRANSFER = auto()
    """Prefill: send the batch, with a language model read it first. Decode: await it."""
    COPY = auto()
    """Prefill: memcpy the same pages within the process."""
    COMPARE = auto()
    """Decode: compare every token, then overwrite and release the pages."""
    CONTINUE = auto()
    """Both, with a language model: generate all tokens."""
    FINISH = auto()
    """Close everything and end."""


@dataclass(frozen=True, slots=True)
class Listening:
    """Decode: the engine is up."""

    address: str
    """``host:port`` of its control channel."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Prefill: what will be sent. The supervisor draws nothing itself: its deadline holds for processes."""

    batch: Batch


@dataclass(frozen=True, slots=True)
class Ready:
    """Prefill: the source pages are written."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Prefill: the receiver has acknowledged the transfer."""

    stats: TransferStats


@dataclass(frozen=True, slots=True)
class Received:
    """Decode: the snapshot is complete."""

    block_table: NDArray[np.uint32]
    """Page IDs of the receiving pool, uint32 ``[seq_ptr[-1]]``."""
    seq_ptr: NDArray[np.uint32]
    seq_lens: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Copied:
    """Prefill: the memcpy is done."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Compared:
    """Decode: every token is as it was sent."""

    nbytes: int
    """Bytes compared, each alias counted."""
