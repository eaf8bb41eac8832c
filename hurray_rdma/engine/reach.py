"""How a sender's bytes get into pages here, and so what makes a late write impossible once it has fallen silent."""

from __future__ import annotations

from enum import Enum, auto

__all__ = ["Reach", "reach_of"]

_MAPPED = frozenset({"sysv", "posix", "shared", "private"})
_BY_ADDRESS = frozenset({"cma", "knem", "xpmem", "cuda_ipc"})


class Reach(Enum):
    """What carries the bytes."""

    FRAMES = auto()
    """The control channel: nothing outlives the session."""
    MAPPING = auto()
    """Stores into memory that both processes map: ends with the process, or when the memory is replaced."""
    ADDRESS = auto()
    """The kernel or a device writes where an address points, without asking UCX: ends with the process."""
    SOCKET = auto()
    """A socket of UCX's own: ends when this side's is closed, or has been read to the end of a dead process's."""
    KEY = auto()
    """A network card, by key: ends when the memory is registered anew."""


def reach_of(path: str, lane: str) -> Reach:
    """The reach of a sender that writes by ``path`` over ``lane``, as it said in its offer.

    Args:
        path: ``mapped``, ``put`` or ``frames``.
        lane: name of a UCX transport, or several: ``"cma"``, ``"tcp (emulated)"``, ``"rc_mlx5+tcp"``.
    """
    if path == "frames":
        return Reach.FRAMES
    transports = set(lane.partition(" ")[0].split("+"))
    if path == "mapped" and transports <= _MAPPED:
        return Reach.MAPPING
    if transports & _BY_ADDRESS:
        return Reach.ADDRESS
    # Beside tcp: messages through shared memory of UCX's own, emulated puts that the receiver copies.
    if "tcp" in transports or transports <= _MAPPED:
        return Reach.SOCKET
    return Reach.KEY
