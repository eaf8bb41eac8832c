"""Which transports carry RMA on an endpoint: read from UCX's own report, never assumed.

UCX falls back to software emulation (active messages that the target's CPU copies) without a word; here it gets one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Lane", "LaneReport", "carried_by", "parse_lanes"]

_LANE = re.compile(
    r"^#\s*lane\[\d+\]:\s+\d+:(?P<transport>[^/\s]+)/(?P<device>\S+)\s+md\[\d+\]\s+->\s+\S+(?P<roles>.*)$"
)
_DEVICE_ONLY = frozenset({"cuda_ipc", "cuda_copy", "gdr_copy"})
"""Transports that carry no host memory."""
_NETWORK = re.compile(r"^(rc|dc|ud)(_|$)")
"""RDMA hardware, which reaches device memory where the machine allows GPUDirect."""
_RMA_ROLE = re.compile(r"\brma(_bw#\d+)?(?=\s|$)")
_CARRIER = re.compile(r"(?<![\w/])([a-z][a-z0-9_]*)/[a-z]")
_EMULATED = "software emulation"
_BY_MESSAGES = " (emulated)"
_QUEUES = frozenset({"posix", "sysv", "xpmem"})
"""Transports whose messages wait in memory that all senders share."""


@dataclass(frozen=True, slots=True)
class Lane:
    """One UCX lane."""

    transport: str
    """UCX's name: ``cma``, ``sysv``, ``tcp``, ``rc_mlx5``, ``cuda_ipc`` ..."""
    device: str
    """UCX's name of the device: ``memory``, ``lo``, ``mlx5_0:1`` ..."""

    def __str__(self) -> str:
        return f"{self.transport}/{self.device}"


@dataclass(frozen=True, slots=True)
class LaneReport:
    """What one endpoint uses."""

    rma: tuple[Lane, ...]
    """Lanes that move bytes one-sided; empty means that UCX emulates RMA in software."""
    messages: tuple[Lane, ...]
    """Lanes for everything else."""
    error_handling: bool
    """True if UCX reports a dead peer on this endpoint."""

    @property
    def emulated(self) -> bool:
        """True if puts are copied by the target's CPU out of messages: correct, and slow."""
        return not self.rma

    @property
    def name(self) -> str:
        """The transport that carries RMA of host memory, e.g. ``"cma"``, ``"tcp"`` or ``"tcp (emulated)"``."""
        rma = [lane.transport for lane in self.rma if lane.transport not in _DEVICE_ONLY]
        return _joined(rma) or _joined(self._message_transports) + _BY_MESSAGES

    @property
    def only_tcp(self) -> bool:
        """Whether nothing but TCP carries host memory, be it one-sided or emulated."""
        return self.name in ("tcp", "tcp (emulated)")

    @property
    def queued(self) -> bool:
        """Whether puts of host memory are emulated by messages through shared memory: all senders' go into one queue of
        the target's worker.

        A sender takes its place there before it writes the message. If it is killed in between, UCX's worker waits at
        that place for ever, and with it whatever anybody puts into the queue after it.
        """
        return self.name.endswith(_BY_MESSAGES) and not _QUEUES.isdisjoint(self._message_transports)

    def name_between(self, device: str, peer_device: str) -> str:
        """The same, of memory on a device here or of the peer: ``"cuda_ipc (expected)"``, ``"tcp (staged)"``.

        Staged: through host memory of UCX's own, with messages; UCX has no lane between the two. Expected: the endpoint
        has the lane, and does not tell whether it can do just this memory; `carried_by` does.
        """
        if device == peer_device == "cpu":
            return self.name
        rma = [lane.transport for lane in self.rma]
        if "cuda_ipc" in rma and "cpu" not in (device, peer_device):
            return "cuda_ipc (expected)"
        network = _joined(transport for transport in rma if _NETWORK.match(transport))
        return f"{network} (expected)" if network else f"{_joined(self._message_transports)} (staged)"

    @property
    def _message_transports(self) -> list[str]:
        lanes = (lane.transport for lane in (*self.messages, *self.rma))
        return [transport for transport in lanes if transport not in _DEVICE_ONLY | {"cma"}]


def _joined(transports: Iterable[str]) -> str:
    return "+".join(dict.fromkeys(transports))


def carried_by(description: str) -> str:
    """The lane of an operation on memory of a device, by what UCX says of it (``ucp_request_query``); "" if nothing.

    UCX chooses for each kind of memory: the lane that an endpoint has for GPUs carries no managed memory, none that its
    owner cannot export, and nothing between GPUs that cannot reach each other.

    >>> carried_by("{proto} put(multi) from cuda memory length 65536 zero-copy cuda_ipc/cuda 200000.0 MB/s 0.50 us")
    'cuda_ipc'
    >>> carried_by("{proto} put(multi) from cuda memory length 65536 software emulation tcp/lo 11.9 MB/s 327.88 us")
    'tcp (staged)'
    """
    what, _, how = description.rpartition(" length ")  # before it is the memory: "from cuda/GPU0"
    transports = _joined(_CARRIER.findall(how if what else description))
    return f"{transports} (staged)" if transports and _EMULATED in description else transports


def parse_lanes(info: str, *, error_handling: bool) -> LaneReport:
    """Reads the text of ``ucp_ep_print_info``.

    >>> report = parse_lanes(
    ...     "#   lane[0]:  4:posix/memory.0 md[3]  -> md[3]/posix/sysdev[255] seg 42 am keepalive\\n"
    ...     "#   lane[1]:  5:cma/memory.0 md[4]    -> md[4]/cma/sysdev[255] seg 42 rma_bw#0\\n",
    ...     error_handling=True,
    ... )
    >>> report.name, report.emulated, str(report.messages[0])
    ('cma', False, 'posix/memory')
    """
    rma: list[Lane] = []
    messages: list[Lane] = []
    for line in info.splitlines():
        found = _LANE.match(line)
        if found is None:
            continue
        lane = Lane(transport=found["transport"], device=re.sub(r"\.\d+$", "", found["device"]))
        (rma if _RMA_ROLE.search(found["roles"]) else messages).append(lane)
    return LaneReport(rma=tuple(rma), messages=tuple(messages), error_handling=error_handling)
