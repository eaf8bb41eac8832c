"""What the demo's processes and their supervisor say to each other. Facts and commands, never page data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.cache import CacheSpec
from hurray_rdma.demo.batch import Batch
from hurray_rdma.engine import TransferStats

__all__ = [
    "Command",
    "Compared",
    "Continued",
    "Copied",
    "Drawn",
    "FirstToken",
    "Listening",
    "Prefilled",
    "Ready",
    "Received",
    "Sent",
    "Verdict",
]


class Command(Enum):
    """What the supervisor tells a process to do next."""

    TRANSFER = auto()
    """Prefill: send the batch. Decode: await it."""
    COPY = auto()
    """Prefill: memcpy the same pages within the process."""
    COMPARE = auto()
    """Decode: compare every token, then overwrite and release the pages."""
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


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill, with a language model: the prompt is read, its pages are sent."""

    stats: TransferStats
    spec: CacheSpec
    first_token: FirstToken


@dataclass(frozen=True, slots=True)
class FirstToken:
    """To decode, with a language model: all that it gets besides the pages and their number of tokens."""

    token_id: int
    """The first generated token, which the prefill process knows already: the input at the next position."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Decode, with a language model: what it generated from the received pages, greedily."""

    tokens: tuple[int, ...]
    """Token IDs, the first token included."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Prefill, with a language model: the same greedy run in the process that saw the prompt."""

    tokens: tuple[int, ...]
    text: str
    """The tokens of the decode process as text."""
