"""Payloads of the private messages 0xF0..0xFD: MessagePack arrays of a fixed schema.

This module knows how the private messages lie in bytes. A payload is one MessagePack array, decoded against a schema
(types, number of elements; nothing unknown is let through); integer arrays travel as little-endian bytes. The length of
a list is held to its limit before its elements are looked at, so that no message costs much to refuse. The rules on
values are those of the constructors in exchange.py, pools.py and offers.py. What breaks one is a :class:`ProtocolError`
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from operator import attrgetter
from struct import pack
from typing import Annotated, Any

import msgspec
import numpy as np

from hurray_rdma.control.checks import U32_MAX, Uint8Array, Uint32Array
from hurray_rdma.control.codes import ErrorCode, MessageType
from hurray_rdma.control.exchange import (
    MAX_DESCRIPTORS,
    MAX_QUIET_SESSIONS,
    Abort,
    Ended,
    Quiet,
    Renew,
    SessionMessage,
)
from hurray_rdma.control.messages import Message
from hurray_rdma.control.offers import (
    NO_PAGE_KEYS,
    NONE_RESIDENT,
    Commit,
    Fetch,
    Grant,
    Offer,
    Prepare,
    Published,
    Reserve,
    SnapshotFields,
    Take,
)
from hurray_rdma.control.pools import (
    MAX_LAYERS,
    MAX_REGIONS,
    MAX_ROLES,
    MAX_SEGMENTS,
    Pool,
    PoolRegion,
    PoolSegment,
    segment_values,
)
from hurray_rdma.errors import HurrayError, ProtocolError

__all__ = ["PRIVATE_DECODERS", "PRIVATE_ENCODERS"]


class _Session(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    engine_name: str
    token: str
    host_id: bytes
    process_id: bytes
    worker_address: bytes
    heartbeat_s: float
    session_id: bytes
    quiet_sessions: Annotated[tuple[bytes, ...], msgspec.Meta(max_length=MAX_QUIET_SESSIONS)]
    pages_port: int
    pages_ticket: bytes


class _Pool(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    pool_id: int
    generation: int
    name: str
    removed: bool
    num_pages: int
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    num_heads: int
    head_dim: int
    page_size: int
    dtype: str
    roles: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_ROLES)]
    order: str
    head_offset: int
    total_heads: int
    scale_dtype: str | None
    zero_points: bool
    device: str
    regions: Annotated[tuple[tuple[int, int, bytes], ...], msgspec.Meta(max_length=MAX_REGIONS)]
    segments: Annotated[tuple[tuple[int, int, int, int, int], ...], msgspec.Meta(max_length=MAX_SEGMENTS)]


class _Snapshot(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    pool_id: int
    generation: int
    descriptors: bytes
    block_table: bytes
    seq_ptr: bytes
    seq_lens: bytes
    order: str
    head_offset: int
    total_heads: int
    page_keys: bytes
    page_key_nbytes: int


class _Offer(_Snapshot, array_like=True, forbid_unknown_fields=True, frozen=True):
    key: str
    deadline_s: float
    lane: str
    path: str


class _Commit(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    key: str
    descriptors: bytes
    block_table: bytes
    seq_ptr: bytes
    seq_lens: bytes
    order: str
    head_offset: Annotated[int, msgspec.Meta(ge=0, le=U32_MAX)]
    total_heads: Annotated[int, msgspec.Meta(ge=0, le=U32_MAX)]


class _Fetch(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    key: str
    deadline_s: float
    lane: str
    path: str
    num_streams: int


class _Published(_Snapshot, array_like=True, forbid_unknown_fields=True, frozen=True):
    lease_s: float


class _Grant(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    generation: int
    page_ids: bytes
    resident: bytes
    lease_s: float
    bell_offset_nbytes: int
    bell_token: int


class _Take(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    page_size: int
    head_offset: int
    num_heads: int
    resident: bytes


class _Reserve(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    pool_id: int
    generation: int
    num_pages: int
    deadline_s: float
    lane: str
    path: str


class _Abort(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    code: int
    reason: str


class _Ended(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    descriptor_indices: Annotated[bytes, msgspec.Meta(max_length=4 * MAX_DESCRIPTORS)]


_MAX_KNOWN_NBYTES = 2048
_REGION = attrgetter(*PoolRegion.__slots__)
_UINT32_LE = np.dtype("<u4")
_ENCODER = msgspec.msgpack.Encoder()
_SESSION = msgspec.msgpack.Decoder(_Session)
_POOL = msgspec.msgpack.Decoder(_Pool)
_OFFER = msgspec.msgpack.Decoder(_Offer)
_FETCH = msgspec.msgpack.Decoder(_Fetch)
_PUBLISHED = msgspec.msgpack.Decoder(_Published)
_COMMIT = msgspec.msgpack.Decoder(_Commit)
_GRANT = msgspec.msgpack.Decoder(_Grant)
_TAKE = msgspec.msgpack.Decoder(_Take)
_RESERVE = msgspec.msgpack.Decoder(_Reserve)
_ABORT = msgspec.msgpack.Decoder(_Abort)
_ENDED = msgspec.msgpack.Decoder(_Ended)


def _u32_array(name: str, data: bytes) -> Uint32Array:
    if len(data) % 4:
        raise ProtocolError(f"{name} has {len(data)} bytes, not a multiple of 4")
    array = np.frombuffer(data, _UINT32_LE)
    return array if _UINT32_LE.isnative else array.astype(np.uint32)


def _u8_rows(name: str, data: bytes, row_nbytes: int) -> Uint8Array:
    if not data and not row_nbytes:
        return NO_PAGE_KEYS
    if row_nbytes < 0 or (len(data) % row_nbytes if row_nbytes else len(data)):
        raise ProtocolError(f"{name} has {len(data)} bytes, not rows of {row_nbytes}")
    return np.frombuffer(data, np.uint8).reshape(len(data) // row_nbytes if row_nbytes else 0, row_nbytes)


def _decode_session(payload: memoryview) -> Message:
    raw = _SESSION.decode(payload)
    return SessionMessage(
        engine_name=raw.engine_name,
        token=raw.token,
        host_id=raw.host_id,
        process_id=raw.process_id,
        worker_address=raw.worker_address,
        heartbeat_s=raw.heartbeat_s,
        session_id=raw.session_id,
        quiet_sessions=raw.quiet_sessions,
        pages_port=raw.pages_port,
        pages_ticket=raw.pages_ticket,
    )


def _decode_pool(payload: memoryview) -> Message:
    raw = _POOL.decode(payload)
    return Pool(
        pool_id=raw.pool_id,
        generation=raw.generation,
        name=raw.name,
        removed=raw.removed,
        num_pages=raw.num_pages,
        layers=raw.layers,
        num_heads=raw.num_heads,
        head_dim=raw.head_dim,
        page_size=raw.page_size,
        dtype=raw.dtype,
        roles=raw.roles,
        order=raw.order,
        head_offset=raw.head_offset,
        total_heads=raw.total_heads,
        scale_dtype=raw.scale_dtype,
        zero_points=raw.zero_points,
        device=raw.device,
        regions=tuple(PoolRegion(remote_addr=a, nbytes=n, rkey=k) for a, n, k in raw.regions),
        segments=tuple(PoolSegment(*segment) for segment in raw.segments),
    )


def _snapshot_fields(raw: _Snapshot) -> dict[str, Any]:
    """The arguments that an Offer and a Published have in common."""
    return {
        "pool_id": raw.pool_id,
        "generation": raw.generation,
        "descriptors": raw.descriptors,
        "block_table": _u32_array("block_table", raw.block_table),
        "seq_ptr": _u32_array("seq_ptr", raw.seq_ptr),
        "seq_lens": _u32_array("seq_lens", raw.seq_lens),
        "order": raw.order,
        "head_offset": raw.head_offset,
        "total_heads": raw.total_heads,
        "page_keys": _u8_rows("page_keys", raw.page_keys, raw.page_key_nbytes),
    }


def _decode_offer(payload: memoryview) -> Offer:
    raw = _OFFER.decode(payload)
    return Offer(key=raw.key, deadline_s=raw.deadline_s, lane=raw.lane, path=raw.path, **_snapshot_fields(raw))


def _decode_commit(kind: type[Commit], payload: memoryview) -> Message:
    raw = _COMMIT.decode(payload)
    return kind(
        key=raw.key,
        descriptors=raw.descriptors,
        block_table=_u32_array("block_table", raw.block_table),
        seq_ptr=_u32_array("seq_ptr", raw.seq_ptr),
        seq_lens=_u32_array("seq_lens", raw.seq_lens),
        order=raw.order,
        head_offset=raw.head_offset,
        total_heads=raw.total_heads,
    )


def _decode_reserve(payload: memoryview) -> Message:
    raw = _RESERVE.decode(payload)
    return Reserve(
        pool_id=raw.pool_id,
        generation=raw.generation,
        num_pages=raw.num_pages,
        deadline_s=raw.deadline_s,
        lane=raw.lane,
        path=raw.path,
    )


def _decode_fetch(payload: memoryview) -> Message:
    raw = _FETCH.decode(payload)
    return Fetch(key=raw.key, deadline_s=raw.deadline_s, lane=raw.lane, path=raw.path, num_streams=raw.num_streams)


def _decode_published(payload: memoryview) -> Message:
    raw = _PUBLISHED.decode(payload)
    return Published(lease_s=raw.lease_s, **_snapshot_fields(raw))


def _decode_take(payload: memoryview) -> Message:
    raw = _TAKE.decode(payload)
    return Take(
        page_size=raw.page_size,
        head_offset=raw.head_offset,
        num_heads=raw.num_heads,
        resident=np.frombuffer(raw.resident, np.uint8) != 0,
    )


def _decode_grant(payload: memoryview) -> Message:
    raw = _GRANT.decode(payload)
    return Grant(
        generation=raw.generation,
        page_ids=_u32_array("page_ids", raw.page_ids),
        resident=np.frombuffer(raw.resident, np.uint8) != 0 if raw.resident else NONE_RESIDENT,
        lease_s=raw.lease_s,
        bell_offset_nbytes=raw.bell_offset_nbytes,
        bell_token=raw.bell_token,
    )


def _decode_abort(payload: memoryview) -> Message:
    raw = _ABORT.decode(payload)
    return Abort(raw.code, raw.reason)


def _decode_ended(payload: memoryview) -> Message:
    # Senders of one cache say the same again and again.
    return _known_ended(bytes(payload)) if len(payload) <= _MAX_KNOWN_NBYTES else _ended(payload)


def _ended(payload: memoryview | bytes) -> Ended:
    return Ended(tuple(_u32_array("descriptor_indices", _ENDED.decode(payload).descriptor_indices).tolist()))


_known_ended = lru_cache(maxsize=64)(_ended)


def _decode_nothing(message: Quiet | Renew, payload: memoryview) -> Message:
    if len(payload):
        name = type(message).__name__.upper()
        raise ProtocolError(f"{name} carries nothing, but its payload has {len(payload)} bytes")
    return message


def _checked(decode: Callable[[memoryview], Message]) -> Callable[[memoryview], Message]:
    def decode_payload(payload: memoryview) -> Message:
        try:
            return decode(payload)
        except ProtocolError:
            raise
        except HurrayError as error:
            raise ProtocolError(str(error), code=ErrorCode.INVALID_MESSAGE) from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"payload does not fit the schema: {error}", code=ErrorCode.INVALID_MESSAGE) from error

    return decode_payload


PRIVATE_DECODERS: dict[int, Callable[[memoryview], Message]] = {
    MessageType.SESSION: _checked(_decode_session),
    MessageType.POOL: _checked(_decode_pool),
    MessageType.OFFER: _checked(_decode_offer),
    MessageType.GRANT: _checked(_decode_grant),
    MessageType.ABORT: _checked(_decode_abort),
    MessageType.QUIET: _checked(partial(_decode_nothing, Quiet())),
    MessageType.FETCH: _checked(_decode_fetch),
    MessageType.PUBLISHED: _checked(_decode_published),
    MessageType.RESERVE: _checked(_decode_reserve),
    MessageType.COMMIT: _checked(partial(_decode_commit, Commit)),
    MessageType.PREPARE: _checked(partial(_decode_commit, Prepare)),
    MessageType.RENEW: _checked(partial(_decode_nothing, Renew())),
    MessageType.TAKE: _checked(_decode_take),
    MessageType.ENDED: _checked(_decode_ended),
}
"""Payload decoder of each private message type; each raises :class:`ProtocolError` and nothing else."""


def _swapped(array: Uint32Array) -> memoryview:
    return array.astype(_UINT32_LE).data


_le: Callable[[Uint32Array], memoryview] = attrgetter("data") if _UINT32_LE.isnative else _swapped
"""The bytes of an array, which MessagePack takes whatever its elements are. It is always contiguous: the constructors
see to it, or who makes a COMMIT."""


def _snapshot_values(snapshot: SnapshotFields) -> tuple[object, ...]:
    return (
        snapshot.pool_id,
        snapshot.generation,
        snapshot.descriptors,
        _le(snapshot.block_table),
        _le(snapshot.seq_ptr),
        _le(snapshot.seq_lens),
        snapshot.order,
        snapshot.head_offset,
        snapshot.total_heads,
        snapshot.page_keys.tobytes(),
        snapshot.page_keys.shape[1],
    )


def _encode_session(session: SessionMessage) -> bytes:
    fields: tuple[object, ...] = (session.engine_name, session.token, session.host_id, session.process_id)
    fields += (session.worker_address, float(session.heartbeat_s), session.session_id, session.quiet_sessions)
    fields += (session.pages_port, session.pages_ticket)
    return _ENCODER.encode(fields)


def _encode_pool(pool: Pool) -> bytes:
    fields: tuple[object, ...] = (pool.pool_id, pool.generation, pool.name, pool.removed, pool.num_pages)
    fields += (pool.layers, pool.num_heads, pool.head_dim, pool.page_size, pool.dtype, pool.roles, pool.order)
    fields += (pool.head_offset, pool.total_heads, pool.scale_dtype, pool.zero_points, pool.device)
    fields += (tuple(map(_REGION, pool.regions)), tuple(map(segment_values, pool.segments)))
    return _ENCODER.encode(fields)


def _encode_offer(offer: Offer) -> bytes:
    return _ENCODER.encode((*_snapshot_values(offer), offer.key, float(offer.deadline_s), offer.lane, offer.path))


def _encode_commit(commit: Commit) -> bytes:
    tables = (_le(commit.block_table), _le(commit.seq_ptr), _le(commit.seq_lens))
    fields = (commit.key, commit.descriptors, *tables, commit.order, commit.head_offset, commit.total_heads)
    return _ENCODER.encode(fields)


def _encode_published(published: Published) -> bytes:
    return _ENCODER.encode((*_snapshot_values(published), float(published.lease_s)))


def _encode_grant(grant: Grant) -> bytes:
    fields = (grant.generation, _le(grant.page_ids), grant.resident.tobytes(), float(grant.lease_s))
    return _ENCODER.encode((*fields, grant.bell_offset_nbytes, grant.bell_token))


def _encode_fetch(fetch: Fetch) -> bytes:
    return _ENCODER.encode((fetch.key, float(fetch.deadline_s), fetch.lane, fetch.path, fetch.num_streams))


def _encode_take(take: Take) -> bytes:
    resident = take.resident.astype(np.uint8).tobytes()
    return _ENCODER.encode((take.page_size, take.head_offset, take.num_heads, resident))


def _encode_reserve(reserve: Reserve) -> bytes:
    fields = (reserve.pool_id, reserve.generation, reserve.num_pages)
    return _ENCODER.encode((*fields, float(reserve.deadline_s), reserve.lane, reserve.path))


def _encode_ended(ended: Ended) -> bytes:
    indices = ended.descriptor_indices
    return _ENCODER.encode((pack(f"<{len(indices)}I", *indices),))


PRIVATE_ENCODERS: dict[type[Any], tuple[MessageType, Callable[[Any], bytes]]] = {
    SessionMessage: (MessageType.SESSION, _encode_session),
    Pool: (MessageType.POOL, _encode_pool),
    Offer: (MessageType.OFFER, _encode_offer),
    Grant: (MessageType.GRANT, _encode_grant),
    Abort: (MessageType.ABORT, lambda m: _ENCODER.encode((int(m.code), m.reason))),
    Quiet: (MessageType.QUIET, lambda _: b""),
    Renew: (MessageType.RENEW, lambda _: b""),
    Fetch: (MessageType.FETCH, _encode_fetch),
    Published: (MessageType.PUBLISHED, _encode_published),
    Reserve: (MessageType.RESERVE, _encode_reserve),
    Commit: (MessageType.COMMIT, _encode_commit),
    Prepare: (MessageType.PREPARE, _encode_commit),
    Take: (MessageType.TAKE, _encode_take),
    Ended: (MessageType.ENDED, _encode_ended),
}
"""Type of each private message, and what makes its payload; elements in the order of the schemas above."""
