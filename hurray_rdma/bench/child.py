"""What the benchmark's two processes have in common: their core, their UCX context, and answering requests."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from hurray_rdma.bench.memory import libc
from hurray_rdma.bench.messages import Finish
from hurray_rdma.demo.child import Link
from hurray_rdma.errors import ProtocolError
from hurray_rdma.transport import Context, default_context

__all__ = ["Handler", "allow_writes", "answer", "context_of", "pin"]

Handler = Callable[[Any], Awaitable[object]]

_PR_SET_PTRACER = 0x59616D61  # prctl(2); only Yama knows it
_PR_SET_PTRACER_ANY = -1


async def answer(link: Link, handlers: Mapping[type, Handler]) -> None:
    """Answers the supervisor's requests one by one until it says `Finish`.

    Raises:
        ProtocolError: a request is of no kind that ``handlers`` has.
    """
    while not isinstance(request := await link.receive(object), Finish):
        handler = handlers.get(type(request))
        if handler is None:
            raise ProtocolError("is no request of this process", field="request", value=type(request).__name__)
        link.send(await handler(request))


def pin(core: int | None) -> None:
    """Keeps this process on one core; None leaves it where it is."""
    if core is not None:
        os.sched_setaffinity(0, {core})


def context_of(lane: str) -> Context:
    """The process's UCX context, restricted to the transports ``lane`` unless that is empty."""
    return default_context({"TLS": lane} if lane else None)


def allow_writes() -> None:
    """Lets any process of this user write here with ``process_vm_writev``, where the Yama module would forbid it."""
    libc.prctl(_PR_SET_PTRACER, ctypes.c_ulong(_PR_SET_PTRACER_ANY), 0, 0, 0)
