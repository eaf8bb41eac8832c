"""What the benchmark's two processes and their supervisor say to each other. Facts and commands, never page data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from hurray_rdma.bench.case import Case
from hurray_rdma.engine import Tls
from hurray_rdma.transport import RemoteRegion

__all__ = [
    "Arrived",
    "CloseCase",
    "Closed",
    "Collect",
    "Contact",
    "Finish",
    "JoinCase",
    "Joined",
    "Leave",
    "OpenCase",
    "Opened",
    "Party",
    "Ran",
    "RanLayers",
    "Run",
    "RunLayers",
    "Settle",
    "Settled",
    "UsePages",
    "Used",
]


class Party(StrEnum):
    """Who moves the pages."""

    HURRAY = "hurray"
    """``peer.send`` into a pool that the engine allocated."""
    HURRAY_CALLER = "hurray-caller"
    """``peer.send`` into a pool over memory of the caller's."""
    HURRAY_PULL = "hurray-pull"
    """``peer.fetch`` out of a pool that the engine allocated, by the receiving process."""
    MEMCPY = "memcpy"
    """A C loop of memcpy over the same pages within the sending process: the yardstick, 1.00."""
    STREAM = "nt-copy"
    """The same with stores that bypass the cache: what this machine's memory can do at best."""
    MAPPED = "mapped-copy"
    """The same stores, straight into the receiver's own pages where this process can map them: what a copy into just
    that memory can do, and so the limit of `HURRAY`."""
    CMA = "cma"
    """``process_vm_writev`` of the same pages, 1024 a call."""
    UCX_PUT = "ucx-put"
    """A C loop of ``ucp_put_nbx`` and a flush, into memory that UCX did not allocate."""
    SOCKET = "socket"
    """``sendmsg`` and ``recvmsg_into`` of the same pages over TCP on this host."""
    UCX_PERFTEST = "ucx_perftest"
    """``ucx_perftest -t ucp_put_bw``: one buffer over and over, hot in the cache. A check of the lane, not a goal."""
    NIXL = "nixl"
    """NIXL write at its best: without its progress thread, prepared lists, its transfer alone."""
    NIXL_DEFAULT = "nixl-default"
    """NIXL write as it comes: with its progress thread, not pinned."""
    MOONCAKE = "mooncake"
    """Mooncake Transfer Engine over tcp."""


@dataclass(frozen=True, slots=True)
class OpenCase:
    """To the receiving process: make pools and listen."""

    case: Case
    parties: frozenset[Party]


@dataclass(frozen=True, slots=True)
class Opened:
    """Where the receiving process can be reached."""

    pid: int
    address: str
    """``host:port`` of the engine with the allocated pool."""
    caller_address: str
    """``host:port`` of the engine with the caller's memory."""
    worker_address: bytes
    region: RemoteRegion | None
    """The allocated pool."""
    caller_region: RemoteRegion | None
    """The caller's memory, for puts and ``process_vm_writev``."""
    socket_port: int


@dataclass(frozen=True, slots=True)
class JoinCase:
    """To the sending process: make a pool, connect, send once."""

    case: Case
    parties: frozenset[Party]
    opened: Opened
    token: str | None = None
    """Shared secret of the engines."""
    tls: Tls | None = None
    """Certificates of the control channel."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The sending process is connected and has sent once to each engine."""

    lanes: dict[Party, str]
    """Party -> ``"sysv, mapped"``, of those that UCX carries."""
    address: str
    """``host:port`` of its engine, which has published the pages; empty unless they are to be pulled."""


@dataclass(frozen=True, slots=True)
class Settle:
    """To the receiving process: say where the first transfer went, once it was compared."""


@dataclass(frozen=True, slots=True)
class Settled:
    page_ids: NDArray[np.uint32]
    """The receiver's page IDs, uint32 ``[num_pages]``, in the order of the sender's."""
    compared_nbytes: int
    """Bytes that were compared with what was sent."""


@dataclass(frozen=True, slots=True)
class UsePages:
    """To both: these are the receiver's pages, for everyone."""

    page_ids: NDArray[np.uint32]
    publisher: str = ""
    """`Joined.address`."""


@dataclass(frozen=True, slots=True)
class Used:
    """The page lists are laid out."""

    skipped: dict[Party, str]
    """Those that cannot run here, and why."""
    lanes: dict[Party, str]
    """As of `Joined`, of those that the process itself runs."""
    compared_nbytes: int = 0
    """As of `Settled`, of what was pulled."""


@dataclass(frozen=True, slots=True)
class Run:
    """To the process that moves them: move everything ``count`` times, one after the other."""

    party: Party
    count: int


@dataclass(frozen=True, slots=True)
class Ran:
    """Clock of the host, nanoseconds, int64 ``[count]`` each."""

    started_ns: NDArray[np.int64]
    ended_ns: NDArray[np.int64]
    """Whoever moved it knows that the receiver has it."""


@dataclass(frozen=True, slots=True)
class Contact:
    """To the sending process: connect to the receiver's engine anew and send everything, ``count`` times."""

    count: int


@dataclass(frozen=True, slots=True)
class RunLayers:
    """To the sending process: the pages, layer by layer; another process computes each layer before it is moved."""

    work: int
    """Units of computing a layer, of a fixed amount each; 0 does not compute."""
    by: Party | None
    """Who moves the pages: the engine, a copy past the cache within the sending process, or nobody."""
    core: int | None
    """Where the computing process stays."""


@dataclass(frozen=True, slots=True)
class RanLayers:
    """Clock of the host, nanoseconds."""

    started_ns: int
    ended_ns: int
    computed_ns: NDArray[np.int64]
    """Begin and end of each layer's computing, ``[num_layers, 2]``."""
    sent_ns: NDArray[np.int64]
    """Begin and end of each layer's sending, ``[num_layers, 2]``."""


@dataclass(frozen=True, slots=True)
class Collect:
    """To the receiving process: when did the last ``count`` transfers of the party become usable?"""

    party: Party
    count: int


@dataclass(frozen=True, slots=True)
class Arrived:
    usable_ns: NDArray[np.int64]
    """``[count]``, clock of the host."""
    layers_ns: NDArray[np.int64]
    """When each layer was usable, ``[count, num_layers]``."""


@dataclass(frozen=True, slots=True)
class Leave:
    """To the receiving process: end the connection to the sender's engine, so that no session ends unasked."""


@dataclass(frozen=True, slots=True)
class CloseCase:
    """To either: close everything of the case."""


@dataclass(frozen=True, slots=True)
class Closed:
    """Done."""


@dataclass(frozen=True, slots=True)
class Finish:
    """To either: end."""
