"""A peer's rkey, unpacked, and where in this process the memory it is of can be loaded from and stored to.

UCX believes the peer: its pointer is the difference of two addresses that the peer states, added to where the memory is
mapped here, and may be anywhere in this process. So may a put through shared memory, which is the same store.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hurray_rdma.errors import TransportError
from hurray_rdma.transport.binding import native
from hurray_rdma.transport.envelope import unseal
from hurray_rdma.transport.mappings import shared_memory_kind
from hurray_rdma.transport.memory import RemoteRegion

if TYPE_CHECKING:
    from hurray_rdma.transport.endpoint import Endpoint

__all__ = ["OpenedKey", "open_key"]

_ATTEMPTS = 8
"""To find the place of a mapping empty, and then to get it: other threads may take it in between."""

_unpacking = threading.Lock()
"""Held while a region is opened: what another peer's key brings is never taken for what this one brings."""


@dataclass(frozen=True, slots=True)
class OpenedKey:
    """An rkey for one endpoint."""

    key: native.RemoteKey
    pointer: int = 0
    """First byte of the region, an address in this process; 0 where it is not mapped."""
    kind: str | None = None
    """As of `shared_memory_kind`; None where it is not mapped."""


def open_key(endpoint: Endpoint, remote: RemoteRegion) -> OpenedKey:
    """Unpacks the rkey of a region (``ucp_ep_rkey_unpack``), and says where the region is mapped, if it is host memory.

    Raises:
        ProtocolError: the rkey is damaged.
        TransportError: UCX cannot use it; or the region is not in the memory that the rkey is of, or that cannot be
            told, as no file can be opened: nothing may be moved.
    """
    packed = unseal(remote.rkey, field="rkey")
    try:
        with endpoint.current():  # UCX looks whether the memory can be mapped
            if remote.device == "cpu":
                return _open_host(endpoint, packed, remote)
            # Memory of a device is not for this process's own loads and stores, wherever it is mapped.
            return OpenedKey(native.RemoteKey(endpoint.bound, packed))
    except native.UcxError as error:
        raise TransportError(f"the peer's rkey cannot be used here: {error}", status=error.status) from error


def _open_host(endpoint: Endpoint, packed: bytes, remote: RemoteRegion) -> OpenedKey:
    """Each unpacking maps the memory anew, and only destroying that key unmaps it. So what was nowhere mapped without
    the key, and is with it, is the key's own; other shared memory of this process stays when the key goes.

    A thread that maps shared memory in between, just there, would be mistaken: pools of peers it cannot be, for the
    lock, and what else is mapped is not at a peer's command.

    Not so with xpmem: there UCX keeps what it has attached of a peer for as long as it uses any of it, and gives the
    same place again. So a region in what is attached already is taken at the peer's word: a lie may reach memory of
    other peers that is attached, and none of this process.

    On an endpoint of a worker to itself UCX takes any stated address for the pointer. There it must be the whole of a
    region of this process, and who knows its key may reach that anyhow.
    """
    empty: int | None = None
    with _unpacking:
        for _ in range(_ATTEMPTS):
            key = native.RemoteKey(endpoint.bound, packed)
            try:
                pointer = key.pointer(remote.remote_addr)
                if pointer is None:
                    return OpenedKey(key)
                own = pointer == remote.remote_addr and endpoint.owns(remote)
                if own or pointer == empty:
                    kind = _kind_at(pointer, remote)
                    if kind is not None:
                        return OpenedKey(key, pointer, kind)
                    if own:  # and private to this process: UCX moves the bytes
                        return OpenedKey(key)
            except BaseException:
                key.close()
                raise
            key.close()
            is_empty = native.is_unmapped(pointer, remote.nbytes)
            stays = not is_empty and _kind_at(pointer, remote) == "xpmem"
            empty = pointer if is_empty or stays else None
    raise TransportError(
        "the peer's region is not in the memory that its rkey is of",
        field="remote_addr",
        value=f"{remote.remote_addr:#x}",
    )


def _kind_at(pointer: int, remote: RemoteRegion) -> str | None:
    try:
        return shared_memory_kind(pointer, pointer + remote.nbytes)
    except OSError as error:
        raise TransportError(
            f"where the peer's region is mapped cannot be looked at: {error}",
            field="remote_addr",
            value=f"{remote.remote_addr:#x}",
            fix="Raise the limit of open files (`ulimit -n`)",
        ) from error
