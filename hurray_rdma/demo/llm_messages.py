"""What the two processes of ``--llm`` and their supervisor say to each other, besides `hurray_rdma.demo.messages`.

Facts, tokens and times, never page data. Times are those of `time.monotonic`, which processes of one machine share.
"""

from __future__ import annotations

from dataclasses import dataclass

from hurray_rdma.cache import CacheSpec
from hurray_rdma.engine import TransferStats

__all__ = ["Arrived", "Continued", "Drift", "FirstTokens", "Generated", "Loaded", "Prefilled", "Reread", "Verdict"]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Prefill: the model is loaded, the prompts are packed."""

    spec: CacheSpec
    """Of the cache as the model computes."""
    seq_lens: tuple[int, ...]
    """Tokens of each prompt."""
    prefix_tokens: int
    """That all prompts begin with, in whole pages."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """Prefill, for decode: all that it gets besides the pages, their table and the number of tokens."""

    token_ids: tuple[int, ...]
    """The first generated token of each sequence: the input at the next position."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """Prefill: the prompts are read and sent."""

    stats: TransferStats
    started_at_s: float
    """Reading began."""
    read_at_s: float
    """Reading ended: the first tokens are known."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Decode: everything of one move is there, and has been used for one step."""

    ready_at_s: float
    """All keys and values are out of the pages, the first tokens are known."""
    token_at_s: float
    """The first token of its own is generated."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What one process generated from one variant's keys and values, greedily."""

    texts: tuple[tuple[int, ...], ...]
    """Token IDs of each sequence, the first token included, to the end of the text if it came."""
    logits_digest: str
    """SHA-256 of all logits: equal bytes compute equal logits."""


@dataclass(frozen=True, slots=True)
class Continued:
    """Decode: its texts."""

    generated: tuple[Generated, ...]
    """For each of `hurray_rdma.demo.llm_plan.variants`."""


@dataclass(frozen=True, slots=True)
class Drift:
    """How far logits from quantised keys and values are from those of the exact ones, given the same tokens before."""

    max_abs: float
    mean_abs: float
    spread: float
    """Standard deviation of the exact logits, to compare with."""
    num_same: int
    """Tokens that are the likeliest ones by both."""
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reread:
    """Each text read again by itself, in one pass without batch, cache and pages."""

    num_same: int
    """Generated tokens that are the likeliest ones there, too."""
    num_tokens: int
    max_shortfall: float
    """By how much the logit of a generated token was below the highest one, at most; 0 if all are the same."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Prefill: what a single process generates from its own tensors, and the texts of both in words."""

    generated: tuple[Generated, ...]
    """For each variant."""
    single_texts: tuple[str, ...]
    decode_texts: tuple[tuple[str, ...], ...]
    """For each variant."""
    drift: Drift
    reread: Reread
