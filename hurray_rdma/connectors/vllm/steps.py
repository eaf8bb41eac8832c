"""What the scheduler's side tells the workers' side with each step of vLLM, plain values, since they may be pickled;
and what that one tells vLLM after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hurray_rdma.connectors.vllm.handoff import PushedPrefill, PushTarget, RemotePrefill
from hurray_rdma.engine import TransferStats

__all__ = ["Ended", "Handshake", "Load", "Publish", "Step"]


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a worker tells the scheduler's side once."""

    address: str
    """Where its engine listens."""


@dataclass(frozen=True, slots=True)
class Publish:
    """A prompt whose last tokens are computed in this step."""

    request_id: str
    key: str
    block_ids: list[int]
    num_tokens: int
    push_to: PushTarget | None = None
    """Where it is pushed; None where the other side reads it."""


@dataclass(frozen=True, slots=True)
class Load:
    """A prompt for which blocks were found."""

    request_id: str
    remote: RemotePrefill | PushedPrefill | None
    """None where it was refused."""
    refusal: str
    """Why."""
    block_ids: list[int]
    """Of all of the prompt's tokens that come from there, prefix hits included."""
    num_present: int
    """How many of the first blocks are prefix hits, and stay as they are."""


@dataclass(slots=True)
class Step:
    """Everything new since the last step."""

    publish: list[Publish] = field(default_factory=list)
    retire: list[str] = field(default_factory=list)
    """Requests whose publication nobody is to begin to read any more."""
    preempted: dict[str, bool] = field(default_factory=dict)
    """Requests whose publication or push must have ended before anything is computed, since their blocks are others' by
    now; and whether vLLM is still to be told that they were sent."""
    num_refused: int = 0
    """Prompts that were to be pushed, and are not."""
    load: list[Load] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    """Requests whose load is not wanted any more."""
    decline: list[RemotePrefill | PushedPrefill] = field(default_factory=list)
    """Prompts of which nothing will be read, so that the other side can free them."""
    hold: dict[str, RemotePrefill] = field(default_factory=dict)
    """Requests that wait for blocks."""
    unhold: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Ended:
    """What has ended since the last step."""

    sent: set[str] = field(default_factory=set)
    """Requests whose blocks nobody reads any more."""
    received: set[str] = field(default_factory=set)
    """Requests whose loads have ended, failed ones included: nothing writes into their blocks any more."""
    failed_block_ids: set[int] = field(default_factory=set)
    """Blocks of failed loads; what is in them is undefined."""
    transfers: list[TransferStats] = field(default_factory=list)
    """That this side moved."""
    num_read_prompts: int = 0
    """That the other side has read: of them this one knows what it had published, not what was there already. Only the
    first of tensor-parallel workers counts them; each counts its own part of their blocks."""
    num_read_blocks: int = 0
    read_nbytes: int = 0
    failures: list[str] = field(default_factory=list)
    """Kinds of errors."""
