"""Limits on what one message may say: each is held at its number, on both sides, before the message costs much."""

import struct
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from hurray_rdma.control.codes import MessageType
from hurray_rdma.control.exchange import Ended, SessionMessage
from hurray_rdma.control.framing import FrameDecoder, encode
from hurray_rdma.control.messages import ClientHello, Malformed, Message
from hurray_rdma.control.offers import Grant, Offer, Reserve
from hurray_rdma.control.pools import Pool, PoolRegion, PoolSegment
from hurray_rdma.errors import ConfigError, DescriptorError, GeometryError, ProtocolError


def decode_one(data: bytes) -> Message:
    ((_, message),) = FrameDecoder(2**32 - 1).feed(data)
    return message


# What a message may cost to read.


def test_a_snapshot_has_at_most_4096_descriptors(make_offer: Callable[..., Offer]) -> None:
    tiny = b"HRRY\x01\x00" + (20).to_bytes(4, "little") + bytes(10)
    most = decode_one(encode(make_offer(descriptors=tiny * 4096), 2))
    assert isinstance(most, Offer)
    assert most.num_descriptors == 4096
    two = tiny + b"HRRY\x01\x00" + (20).to_bytes(4, "little") + bytes(10)
    one = tiny[:6] + (40).to_bytes(4, "little") + bytes(30)  # As long as two, until its length is changed.
    data = encode(make_offer(descriptors=tiny * 4095 + one), 2)
    again = decode_one(data.replace(one, two))
    assert isinstance(again, Malformed)
    assert "may have 4096 descriptors, and 20 bytes follow" in str(again.error)
    with pytest.raises(DescriptorError, match="over 4096"):
        make_offer(descriptors=tiny * 4097)


@pytest.mark.parametrize(
    ("name", "limit", "one"),
    [
        ("layers", 4096, 0),
        ("roles", 16, "key"),
        ("regions", 12288, PoolRegion(remote_addr=0, nbytes=5120, rkey=b"")),
        ("segments", 12288, PoolSegment(0, 0, 128, 32, 16)),
    ],
)
def test_the_lists_of_a_pool_are_bounded_before_they_are_read(
    name: str, limit: int, one: object, make_pool: Callable[..., Pool]
) -> None:
    most = make_pool(**{name: (one,) * limit})
    data = encode(most, 1)
    assert decode_one(data) == most
    with pytest.raises(GeometryError, match=rf"len\({name}\) = {limit + 1}: must be at most {limit}"):
        make_pool(**{name: (one,) * (limit + 1)})
    count = b"\xdc" + limit.to_bytes(2, "big")  # MessagePack: an array of so many elements.
    assert data.count(count) == 1
    # Only its length says more: what follows is never looked at, else the end of the payload would be missed first.
    refused = decode_one(data.replace(count, b"\xdc" + (limit + 1).to_bytes(2, "big")))
    assert isinstance(refused, Malformed)
    assert f"length <= {limit}" in str(refused.error)


def test_a_grant_has_at_most_4194304_pages() -> None:
    most = Grant(generation=3, page_ids=np.arange(4194304), lease_s=1)
    again = decode_one(encode(most, 2))
    assert isinstance(again, Grant)
    assert len(again.page_ids) == 4194304
    with pytest.raises(ConfigError, match="4194305: must be 0 to 4194304"):
        Grant(generation=3, page_ids=np.arange(4194305), lease_s=1)
    with pytest.raises(ConfigError, match="4194305: must be 1 to 4194304"):
        Reserve(pool_id=0, generation=0, num_pages=4194305, deadline_s=1)


def test_an_ended_names_at_most_4096_descriptors() -> None:
    most = Ended(tuple(range(4096)))
    data = encode(most, 2)
    assert decode_one(data) == most
    payload = data[12:]
    assert payload[:4] == b"\x91\xc5\x40\x00"  # MessagePack: an array of one element, 16384 bytes.
    longer = payload[:2] + (4 * 4097).to_bytes(2, "big") + payload[4:] + bytes(4)
    refused = decode_one(data[:8] + struct.pack("<I", len(longer)) + longer)
    assert isinstance(refused, Malformed)
    assert "length <= 16384" in str(refused.error)


def test_messages_without_tables_or_data_have_at_most_64_kib() -> None:
    # TENSOR_DATA, POOL, OFFER, GRANT, PUBLISHED, COMMIT, TAKE, PREPARE
    long = {5, 0xF1, 0xF2, 0xF3, 0xF7, 0xF9, 0xFB, 0xFD}
    for kind in MessageType:
        header = struct.pack("<III", kind, 1, 65537)
        decoder = FrameDecoder(1 << 20)
        if kind in long:
            assert list(decoder.feed(header)) == []
            continue
        with pytest.raises(ProtocolError, match=rf"{kind.name} message of 65537 bytes is above the 65536"):
            list(decoder.feed(header))
        assert list(FrameDecoder(1 << 20).feed(struct.pack("<III", kind, 1, 65536))) == []
    unknown = struct.pack("<III", 77, 5, 65537) + bytes(65537)
    ((_, message),) = FrameDecoder(1 << 20).feed(unknown)  # Costs nothing to skip, and fails its own stream only.
    assert isinstance(message, Malformed)


def test_a_hello_names_at_most_256_layouts() -> None:
    hello = ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""),) * 256)
    assert decode_one(encode(hello, 1)) == hello
    refused = decode_one(encode(replace(hello, layouts=((0x0B, b""),) * 257), 1))
    assert isinstance(refused, Malformed)
    assert "layout count = 257: must be at most 256" in str(refused.error)


# Names of sessions.


@pytest.mark.parametrize("nbytes", [0, 1, 15, 16, 64, 65])
def test_a_name_of_a_session_is_16_to_64_bytes_or_none(nbytes: int) -> None:
    facts = {"engine_name": "e", "host_id": b"h", "worker_address": b"w", "heartbeat_s": 0.5}
    name = bytes(range(nbytes))
    ok = 16 <= nbytes <= 64
    for field, value, allowed in (("session_id", name, ok or not nbytes), ("quiet_sessions", (name,), ok)):
        if allowed:
            session = SessionMessage(**facts, **{field: value})  # type: ignore[arg-type]
            assert decode_one(encode(session, 1)) == session
            continue
        with pytest.raises(ConfigError, match=rf"{nbytes}: must be 16 to 64") as caught:
            SessionMessage(**facts, **{field: value})  # type: ignore[arg-type]
        assert repr(name) not in str(caught.value)  # It is a secret.
        longer = SessionMessage(**facts, **{field: bytes(32) if field == "session_id" else (bytes(32),)})  # type: ignore[arg-type]
        data = encode(longer, 1)
        other = data[12:].replace(b"\xc4\x20" + bytes(32), b"\xc4" + bytes([nbytes]) + name)
        heard = decode_one(data[:8] + struct.pack("<I", len(other)) + other)
        assert isinstance(heard, Malformed)
        assert "must be 16 to 64" in str(heard.error)
