"""How a sender's bytes get into pages here, and so what makes a late write impossible once it has fallen silent."""

from __future__ import annotations

from enum import Enum, auto
from functools import lru_cache

__all__ = ["NEVER_LATE", "Reach", "reach_of"]

_MAPPED = frozenset({"sysv", "posix", "shared", "private"})
_BY_ADDRESS = frozenset({"cma", "knem", "xpmem", "cuda_ipc"})


class Reach(Enum):
    """What carries the bytes."""

    FRAMES = auto()
    """The control channel: nothing outlives the session."""
    STREAM = auto()
    """A page stream, which this side's own threads read, under a permit: nothing outlives the transfer."""
    MAPPING = auto()
    """Stores into memory that both processes map: ends with the process, or when the memory is replaced."""
    ADDRESS = auto()
    """The kernel or a device writes where an address points, without asking UCX: ends with the process, once messages
    of it, which may carry some of the pages of a GPU, can come no more, either."""
    SOCKET = auto()
    """Messages of UCX's own: end when this side's worker is closed, or has taken all of a dead process's."""
    KEY = auto()
    """A network card, by key: ends when the memory is registered anew."""


NEVER_LATE = frozenset({Reach.FRAMES, Reach.STREAM})
"""Of which nothing can land once this side has ended the transfer."""


@lru_cache(maxsize=64)
def reach_of(path: str, lane: str) -> Reach:
    """The reach of a sender that writes by ``path`` over ``lane``, as it said in its offer.

    Args:
        path: ``mapped``, ``put``, ``stream`` or ``frames``.
        lane: name of a UCX transport, or several: ``"cma"``, ``"tcp (emulated)"``, ``"rc_mlx5+tcp"``. To or from a
            GPU also ``"tcp (staged)"`` and ``"rc_mlx5 (expected)"``, which may come to the same.
    """
    if path == "frames":
        return Reach.FRAMES
    if path == "stream":
        return Reach.STREAM
    names, _, how = lane.partition(" ")
    transports = set(names.split("+"))
    if how in ("(staged)", "(expected)"):  # nobody knows yet, or UCX chooses for each size: some may go by address
        return Reach.ADDRESS
    if path == "mapped" and transports <= _MAPPED:
        return Reach.MAPPING
    if transports & _BY_ADDRESS:
        return Reach.ADDRESS
    # Beside tcp: emulated puts, which come as messages, by a card or through shared memory, and the receiver copies.
    if "tcp" in transports or how == "(emulated)" or transports <= _MAPPED:
        return Reach.SOCKET
    return Reach.KEY
