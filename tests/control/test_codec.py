"""Messages to bytes and back: literal bytes for the format's own messages, and any bytes at the decoder."""

import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hurray_rdma.control.codes import Capability, ErrorCode
from hurray_rdma.control.exchange import Abort, Ended, Quiet, SessionMessage
from hurray_rdma.control.framing import FrameDecoder, encode, encode_parts
from hurray_rdma.control.messages import (
    ClientHello,
    ErrorMessage,
    Malformed,
    Message,
    Ping,
    Pong,
    RdmaReady,
    RdmaRegister,
    ServerHello,
    TensorDataEndMessage,
    TensorDataMessage,
    TensorDescriptorMessage,
    TensorPut,
    TensorPutAck,
    TensorRequest,
)
from hurray_rdma.control.offers import Commit, Fetch, Grant, Offer, Prepare, Published, Reserve, Take
from hurray_rdma.control.pools import Pool, PoolRegion, PoolSegment
from hurray_rdma.errors import ConfigError, DescriptorError, GeometryError, ProtocolError
from hurray_rdma.testing.pair import commit_like

DESCRIPTOR = b"HRRY\x01\x00" + (21).to_bytes(4, "little") + bytes(11)

# Laid out by hand from WIRE.md.
LITERAL: list[tuple[Message, int, str]] = [
    (
        ClientHello(
            max_message_nbytes=0x10000, layouts=((0x0B, b""), (0xF0, b"hi")), devices=(0, 1), memory_classes=(0,)
        ),
        1,
        "01000000 01000000 1f00000001000000 00000100 04000000000000000200 0b f0 0200 68690200 00 010100 00",
    ),
    (
        ServerHello(max_message_nbytes=0x10000, capabilities=Capability(0xC), layouts=((0x0A, b""),)),
        1,
        "02000000 01000000 19000000 01000000 00000100 0c00000000000000 0100 0a 0100 00 0100 00",
    ),
    (
        TensorRequest(key="é", layouts=((0x0B, b""),), preferred_device=1, min_alignment=4096, request_flags=3),
        9,
        "03000000 09000000 12000000 02000000 c3a9 0100 0b 01 00100000 03000000",
    ),
    (
        TensorDescriptorMessage(descriptor=DESCRIPTOR, total_data_nbytes=5, shard_index=1, total_shards=2),
        3,
        "04000000 03000000 25000000" + DESCRIPTOR.hex() + "0500000000000000 01000000 02000000",
    ),
    (TensorDataMessage(offset_nbytes=258, data=b"abc"), 3, "05000000 03000000 0b000000 0201000000000000 616263"),
    (TensorDataEndMessage(), 0xFFFFFFFF, "06000000 ffffffff 00000000"),
    (
        TensorPut(key="k", descriptor=DESCRIPTOR, total_data_nbytes=1),
        2,
        "07000000 02000000 26000000 01000000 6b 15000000" + DESCRIPTOR.hex() + "0100000000000000",
    ),
    (TensorPutAck(), 2, "08000000 02000000 00000000"),
    (ErrorMessage(0xF1, "no"), 2, "09000000 02000000 0a000000 f1000000 02000000 6e6f"),
    (Ping(), 1, "0a000000 01000000 00000000"),
    (Pong(), 1, "0b000000 01000000 00000000"),
    (
        RdmaRegister(remote_addr=0x1234, nbytes=0x1000, rkey=b"\x07"),
        2,
        "0c000000 02000000 15000000 3412000000000000 0010000000000000 01000000 07",
    ),
    (RdmaReady(), 2, "0d000000 02000000 00000000"),
    (Quiet(), 2, "f5000000 02000000 00000000"),
    (Abort(0xF6, "why"), 2, "f4000000 02000000 07000000 92 ccf6 a3 776879"),
    (Ended((7,)), 2, "fc000000 02000000 07000000 91 c404 07000000"),
    (Ended((258, 0, 4095)), 2, "fc000000 02000000 0f000000 91 c40c 02010000 00000000 ff0f0000"),
    (
        Fetch(key="k", deadline_s=1.0, lane="cma", path="mapped"),
        2,
        "f6000000 02000000 18000000 95 a1 6b cb 3ff0000000000000 a3 636d61 a6 6d6170706564 01",
    ),
    (
        Fetch(key="k", deadline_s=1.0, path="frames", num_streams=300),
        2,
        "f6000000 02000000 17000000 95 a1 6b cb 3ff0000000000000 a0 a6 6672616d6573 cd012c",
    ),
    (
        Reserve(pool_id=1, generation=2, num_pages=300, deadline_s=1.0, lane="cma", path="mapped"),
        2,
        "f8000000 02000000 1a000000 96 01 02 cd012c cb 3ff0000000000000 a3 636d61 a6 6d6170706564",
    ),
]


def decode_all(data: bytes, max_message_nbytes: int = 1 << 20) -> list[tuple[int, Message]]:
    return list(FrameDecoder(max_message_nbytes).feed(data))


def decode_one(data: bytes) -> Message:
    ((_, message),) = decode_all(data)
    return message


@pytest.mark.parametrize(("message", "stream_id", "wire"), LITERAL, ids=lambda v: type(v).__name__)
def test_literal_bytes_both_ways(message: Message, stream_id: int, wire: str) -> None:
    data = bytes.fromhex(wire)
    assert encode(message, stream_id) == data
    assert decode_all(data) == [(stream_id, message)]


@pytest.mark.parametrize(("message", "stream_id", "wire"), LITERAL, ids=lambda v: type(v).__name__)
def test_every_cut_payload_is_malformed(message: Message, stream_id: int, wire: str) -> None:
    data = bytes.fromhex(wire)
    kind, payload = data[:4], data[12:]
    # The rest of a TENSOR_DATA payload is data of any length, so only its 8 bytes of offset can be cut.
    shortest_valid = 8 if isinstance(message, TensorDataMessage) else len(payload)
    for length in range(shortest_valid):
        cut = kind + struct.pack("<II", stream_id, length) + payload[:length]
        assert isinstance(decode_one(cut), Malformed), length
    if not isinstance(message, TensorDataMessage):
        longer = kind + struct.pack("<II", stream_id, len(payload) + 1) + payload + b"\0"
        assert isinstance(decode_one(longer), Malformed)


# One sequence of 3 tokens in page 5, for pool 1 in generation 2; the fields that OFFER and PUBLISHED begin with.
ONE_PAGE = {
    "pool_id": 1,
    "generation": 2,
    "descriptors": DESCRIPTOR,
    "block_table": np.array([5], np.uint32),
    "seq_ptr": np.array([0, 1], np.uint32),
    "seq_lens": np.array([3], np.uint32),
}
ONE_PAGE_WIRE = (
    f"01 02 c415 {DESCRIPTOR.hex()} c404 05000000 c408 00000000 01000000 c404 03000000 a3 4e4844 00 00 c400 00"
)


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (
            Offer(key="k", deadline_s=1.0, lane="", path="put", **ONE_PAGE),  # type: ignore[arg-type]
            f"9f {ONE_PAGE_WIRE} a1 6b cb 3ff0000000000000 a0 a3 707574",
        ),
        (
            commit_like(Offer(key="k", deadline_s=1.0, total_heads=8, **ONE_PAGE)),  # type: ignore[arg-type]
            f"98 a1 6b c415 {DESCRIPTOR.hex()} c404 05000000 c408 00000000 01000000 c404 03000000 a3 4e4844 00 08",
        ),
        (
            commit_like(Offer(key="k", deadline_s=1.0, total_heads=8, **ONE_PAGE), Prepare),  # type: ignore[arg-type]
            f"98 a1 6b c415 {DESCRIPTOR.hex()} c404 05000000 c408 00000000 01000000 c404 03000000 a3 4e4844 00 08",
        ),
        (Published(lease_s=20, **ONE_PAGE), f"9c {ONE_PAGE_WIRE} cb 4034000000000000"),  # type: ignore[arg-type]
        (
            Take(page_size=16, head_offset=2, num_heads=4, resident=np.array([True, False, True])),
            "94 10 02 04 c403 010001",
        ),
        (Take(page_size=300, head_offset=0, num_heads=1), "94 cd012c 00 01 c400"),
        (Grant(generation=2, page_ids=[5], lease_s=20), "96 02 c404 05000000 c400 cb 4034000000000000 00 00"),  # type: ignore[arg-type]
        (
            Grant(generation=2, page_ids=[5], lease_s=20, bell_offset_nbytes=4096, bell_token=300),  # type: ignore[arg-type]
            "96 02 c404 05000000 c400 cb 4034000000000000 cd1000 cd012c",
        ),
    ],
    ids=lambda v: type(v).__name__,
)
def test_literal_payloads_with_arrays(message: Message, wire: str) -> None:
    assert encode(message, 2)[12:] == bytes.fromhex(wire)
    assert encode(decode_one(encode(message, 2)), 2)[12:] == bytes.fromhex(wire)


def test_every_cut_of_a_message_with_arrays_is_malformed(
    make_offer: Callable[..., Offer],
    make_published: Callable[..., Published],
    make_pool: Callable[..., Pool],
    grant: Grant,
) -> None:
    session = SessionMessage(engine_name="e", token="t", host_id=b"h", worker_address=b"w", heartbeat_s=0.5)
    take = Take(page_size=16, head_offset=2, num_heads=4, resident=np.array([True, False]))
    for message in (
        session,
        make_pool(name="n"),
        make_offer(),
        make_published(),
        grant,
        commit_like(make_offer()),
        take,
    ):
        data = encode(message, 2)
        for length in range(len(data) - 12):
            cut = decode_one(data[:8] + struct.pack("<I", length) + data[12 : 12 + length])
            assert isinstance(cut, Malformed), (message, length)
            assert cut.error.code == ErrorCode.INVALID_MESSAGE
        longer = decode_one(data[:8] + struct.pack("<I", len(data) - 11) + data[12:] + b"\0")
        assert isinstance(longer, Malformed)


def test_a_published_snapshot_survives_the_way(make_published: Callable[..., Published]) -> None:
    keys = np.arange(4 * 32, dtype=np.uint8).reshape(4, 32)
    published = make_published(page_keys=keys, order="HND", head_offset=2, total_heads=8)
    again = decode_one(encode(published, 2))
    assert isinstance(again, Published)
    for name in ("block_table", "seq_ptr", "seq_lens", "page_keys"):
        np.testing.assert_array_equal(getattr(again, name), getattr(published, name))
    for name in ("pool_id", "generation", "descriptors", "order", "head_offset", "total_heads", "lease_s"):
        assert getattr(again, name) == getattr(published, name)
    assert again.num_descriptors == 4


def test_a_commit_survives_the_way(make_offer: Callable[..., Offer]) -> None:
    offer = make_offer(order="HND", head_offset=2, total_heads=8)
    again = decode_one(encode(commit_like(offer), 2))
    assert isinstance(again, Commit)
    for name in ("block_table", "seq_ptr", "seq_lens"):
        np.testing.assert_array_equal(getattr(again, name), getattr(offer, name))
    for name in ("key", "descriptors", "order", "head_offset", "total_heads"):
        assert getattr(again, name) == getattr(offer, name)
    told = again.of_pool(7, 3)
    assert (told.pool_id, told.generation, told.num_descriptors, told.total_heads) == (7, 3, 4, 8)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"seq_ptr": np.array([0, 1], np.uint32)}, GeometryError),
        ({"seq_ptr": np.array([0, 9, 4], np.uint32)}, GeometryError),
        ({"descriptors": b""}, DescriptorError),
        ({"order": "N" * 33}, ConfigError),
    ],
)
def test_tables_of_a_commit_are_held_to_the_rules_of_offers(
    changes: dict[str, object], kind: type[Exception], make_offer: Callable[..., Offer]
) -> None:
    commit = commit_like(make_offer())
    for name, value in changes.items():
        setattr(commit, name, value)
    again = decode_one(encode(commit, 2))
    assert isinstance(again, Commit)
    with pytest.raises(kind):
        again.of_pool(7, 3)


def test_a_commit_with_a_key_that_is_too_long_is_malformed(make_offer: Callable[..., Offer]) -> None:
    commit = commit_like(make_offer())
    commit.key = "k" * 1025
    assert isinstance(decode_one(encode(commit, 2)), Malformed)


def test_private_messages_survive_the_way(
    make_offer: Callable[..., Offer], make_pool: Callable[..., Pool], grant: Grant
) -> None:
    session = SessionMessage(
        engine_name="e", token="t", host_id=b"h", process_id=b"p", worker_address=b"w", heartbeat_s=0.5
    )
    answer = SessionMessage(
        engine_name="e",
        host_id=b"h",
        worker_address=b"w",
        heartbeat_s=0.5,
        pages_port=65535,
        pages_ticket=bytes(range(32)),
    )
    pool = make_pool(name="sliding")
    gone = Pool(pool_id=1, generation=2, name="full", removed=True)
    for message in (session, answer, pool, gone):
        assert decode_one(encode(message, 1)) == message
    offer, again = make_offer(), decode_one(encode(make_offer(), 2))
    assert isinstance(again, Offer)
    for name in ("block_table", "seq_ptr", "seq_lens"):
        np.testing.assert_array_equal(getattr(again, name), getattr(offer, name))
        assert getattr(again, name).dtype == np.uint32
        assert getattr(again, name).flags.aligned
    for name in ("key", "pool_id", "generation", "descriptors", "order", "deadline_s", "num_descriptors"):
        assert getattr(again, name) == getattr(offer, name)
    assert again.page_keys.shape == (0, 0)
    keys = np.arange(4 * 32, dtype=np.uint8).reshape(4, 32)
    keyed = decode_one(
        encode(make_offer(page_keys=keys, head_offset=2, total_heads=8, lane="x" * 64, path="frames"), 2)
    )
    assert isinstance(keyed, Offer)
    np.testing.assert_array_equal(keyed.page_keys, keys)
    assert (keyed.head_offset, keyed.total_heads) == (2, 8)
    assert (keyed.lane, keyed.path) == ("x" * 64, "frames")
    assert (again.lane, again.path) == ("", "put")
    granted = decode_one(encode(grant, 2))
    assert isinstance(granted, Grant)
    assert granted.page_ids.tolist() == [4, 0, 9]
    assert granted.resident.tolist() == []
    known = Grant(generation=3, page_ids=grant.page_ids, resident=np.array([True, False, True]), lease_s=1.0)
    again_known = decode_one(encode(known, 2))
    assert isinstance(again_known, Grant)
    assert again_known.resident.tolist() == [True, False, True]
    assert (granted.generation, granted.lease_s) == (3, 30.0)


def test_empty_batch_can_be_offered_and_granted(make_offer: Callable[..., Offer]) -> None:
    none = np.zeros(0, np.uint32)
    offer = decode_one(encode(make_offer(block_table=none, seq_ptr=[0], seq_lens=none), 2))
    assert isinstance(offer, Offer)
    assert len(offer.block_table) == len(offer.seq_lens) == 0
    granted = decode_one(encode(Grant(generation=1, page_ids=none, lease_s=1), 2))
    assert isinstance(granted, Grant)
    assert len(granted.page_ids) == 0


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"seq_ptr": [0, 2]}, GeometryError, "seq_ptr has 2 entries, but 2 sequences"),
        ({"seq_ptr": [1, 2, 4]}, GeometryError, "runs from 1 to 4"),
        ({"seq_ptr": [0, 2, 3]}, GeometryError, "the 4 entries of block_table"),
        ({"seq_ptr": [0, 5, 4]}, GeometryError, r"seq_ptr\[2\] = 4: is below seq_ptr\[1\] = 5"),
        ({"block_table": [7, -3, 7, 9]}, GeometryError, "from 0 to 4294967295"),
        ({"block_table": [7, 3.5, 7, 9]}, GeometryError, "must hold integers"),
        ({"block_table": [[7, 3], [7, 9]]}, GeometryError, "one axis"),
        ({"descriptors": b""}, DescriptorError, "at least one descriptor"),
        ({"descriptors": DESCRIPTOR + b"HRRY"}, DescriptorError, "at byte 27"),
        ({"descriptors": b"X" + DESCRIPTOR[1:]}, DescriptorError, "magic"),
        ({"deadline_s": 0.0}, ConfigError, "deadline_s"),
        ({"deadline_s": float("nan")}, ConfigError, "deadline_s"),
        ({"key": "k" * 1025}, ConfigError, "at most 1024"),
        ({"head_offset": -1}, ConfigError, "head_offset"),
        ({"total_heads": 2**32}, ConfigError, "total_heads"),
        ({"lane": "x" * 65}, ConfigError, "lane has 65 characters; at most 64"),
        ({"path": "get"}, ConfigError, "path = 'get': must be one of mapped, put, stream, frames"),
        ({"path": ""}, ConfigError, "path"),
        ({"page_keys": np.zeros((3, 32), np.uint8)}, GeometryError, "the 4 entries"),
        ({"page_keys": np.zeros((4, 257), np.uint8)}, GeometryError, "at most 256 bytes"),
        ({"page_keys": np.zeros(4, np.uint8)}, GeometryError, "two axes"),
    ],
)
def test_bad_offers_cannot_be_made(
    changes: dict[str, object], kind: type[Exception], text: str, make_offer: Callable[..., Offer]
) -> None:
    with pytest.raises(kind, match=text):
        make_offer(**changes)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({"lease_s": 0.0}, ConfigError, "lease_s"),
        ({"lease_s": float("inf")}, ConfigError, "lease_s"),
        ({"pool_id": 2**32}, ConfigError, "pool_id"),
        ({"generation": -1}, ConfigError, "generation"),
        ({"order": "N" * 33}, ConfigError, "order has 33 characters; at most 32"),
        ({"seq_ptr": [0, 5, 4]}, GeometryError, r"seq_ptr\[2\] = 4: is below seq_ptr\[1\] = 5"),
        ({"descriptors": b""}, DescriptorError, "at least one descriptor"),
        ({"page_keys": np.zeros((3, 32), np.uint8)}, GeometryError, "the 4 entries"),
    ],
)
def test_bad_published_snapshots_cannot_be_made(
    changes: dict[str, object], kind: type[Exception], text: str, make_published: Callable[..., Published]
) -> None:
    with pytest.raises(kind, match=text):
        make_published(**changes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"key": "k" * 1025}, "at most 1024"),
        ({"deadline_s": -1.0}, "deadline_s"),
        ({"deadline_s": 8 * 86400.0}, "at most 604800"),
        ({"lane": "x" * 65}, "at most 64"),
        ({"path": "MAPPED"}, "one of mapped, put, stream, frames"),
        ({"num_streams": 0}, "num_streams = 0: must be 1 to 4096"),
        ({"num_streams": 4097}, "num_streams"),
    ],
)
def test_bad_fetches_cannot_be_made(changes: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Fetch(**({"key": "k", "deadline_s": 1.0} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pool_id": -1}, "pool_id = -1"),
        ({"generation": 2**64}, "generation"),
        ({"num_pages": 0}, "num_pages = 0: must be 1 to 4194304"),
        ({"num_pages": 2**32}, "num_pages"),
        ({"deadline_s": 0.0}, "deadline_s"),
        ({"lane": "x" * 65}, "at most 64"),
        ({"path": "frames"}, "path = 'frames': must be one of mapped, put"),
    ],
)
def test_bad_reservations_cannot_be_made(changes: dict[str, object], text: str) -> None:
    facts: dict[str, object] = {"pool_id": 1, "generation": 2, "num_pages": 3, "deadline_s": 1.0}
    with pytest.raises(ConfigError, match=text):
        Reserve(**(facts | changes))  # type: ignore[arg-type]


REGION = PoolRegion(remote_addr=0x1000, nbytes=4 * 1280, rkey=b"rkey")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_pages": 0}, "num_pages = 0"),
        ({"num_pages": 11}, r"segments\[3\] has its last page at byte 5120 of region 0, which has 5120"),
        ({"head_dim": 2**32}, "head_dim"),
        ({"roles": ()}, "roles"),
        ({"layers": ()}, "layers"),
        ({"segments": ()}, "segments"),
        ({"total_heads": 0}, "total_heads = 0"),
        ({"head_offset": -1}, "head_offset = -1"),
        ({"device": "tpu:0"}, "device = 'tpu:0': must be 'cpu', or a device with its number"),
        ({"device": "cuda"}, "device = 'cuda'"),
        ({"device": "cpu:0"}, "device = 'cpu:0'"),
        ({"device": "cuda:-1"}, "device = 'cuda:-1'"),
        ({"segments": (PoolSegment(1, 0, 128, 32, 16),) * 4}, r"segments\[0\].region_index = 1"),
        ({"segments": (PoolSegment(-1, 0, 128, 32, 16),) * 4}, "region_index = -1"),
        ({"segments": (PoolSegment(0, -1, 128, 32, 16),) * 4}, "offset_nbytes = -1"),
        ({"segments": (PoolSegment(0, 0, -128, 32, 16),) * 4}, "page_stride_nbytes = -128"),
        ({"segments": (PoolSegment(0, 0, 128, 2**64, 16),) * 4}, "token_stride_nbytes"),
        ({"segments": (PoolSegment(0, 0, 128, 32, -1),) * 4}, "head_stride_nbytes = -1"),
    ],
)
def test_bad_pools_cannot_be_made(changes: dict[str, object], text: str, make_pool: Callable[..., Pool]) -> None:
    with pytest.raises((GeometryError, DescriptorError), match=text):
        make_pool(**changes)


def test_region_beyond_the_address_space() -> None:
    with pytest.raises(ConfigError, match="nbytes"):
        PoolRegion(remote_addr=2**64 - 10, nbytes=11, rkey=b"")


def test_a_page_granted_twice() -> None:
    with pytest.raises(GeometryError, match="page_ids = 5"):
        Grant(generation=1, page_ids=np.array([5, 1, 5]), lease_s=1)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ((), r"len\(descriptor_indices\) = 0: must be 1 to 4096"),
        ((0,) * 4097, r"len\(descriptor_indices\) = 4097: must be 1 to 4096"),
        ((3, -1, 2), r"min\(descriptor_indices\) = -1: must be 0 to 4095"),
        ((3, 4096, 2), r"max\(descriptor_indices\) = 4096: must be 0 to 4095"),
    ],
)
def test_bad_ends_cannot_be_made(indices: tuple[int, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Ended(indices)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        (0xF0, ("name", "token", b"host", b"pid", b"address")),
        (0xF0, ("name", "token", b"host", b"pid", b"address", 0.25, "more")),
        (0xF0, ("name", "token", b"host", b"pid", b"address", -1.0)),
        (0xF0, ("name", "token", b"host", b"pid", b"address", float("inf"))),
        (0xF0, ("name", 5, b"host", b"pid", b"address", 0.25)),
        (0xF0, ("name", "token", b"host", bytes(129), b"address", 0.25)),
        (0xF1, (1, 2, "n", False, 2**64 - 1, (0,), 1, 1, 1, "int8", ("key",), "NHD", 0, 1, None, False, "cpu", (), ())),
        (
            0xF1,
            (
                *(1, 2, "n", False, 1, (0,), 1, 1, 1, "int8", ("key",), "NHD", 0, 1, None, False, "cpu"),
                *(((1, 2**64 - 1, b""),), ((0, 0, 1, 1, 1),)),
            ),
        ),
        (0xF1, (-1, 2, "", True, 1, (0,), 1, 1, 1, "int8", ("key",), "NHD", 0, 1, None, False, "cpu", (), ())),
        (0xF1, (1, 2, "n" * 257, True, 0, (), 0, 0, 0, "", (), "NHD", 0, 0, None, False, "cpu", (), ())),
        (0xF2, (1, 1, DESCRIPTOR, b"\0\0\0", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "cma", "put")),
        (0xF2, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", -1, "k", 1.0, "cma", "put")),
        (0xF2, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"abc", 2, "k", 1.0, "cma", "put")),
        (0xF2, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"abc", 0, "k", 1.0, "cma", "put")),
        (0xF2, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "cma", "get")),
        (0xF2, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "c" * 65, "put")),
        (0xF2, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "cma")),
        (0xF3, (1, b"\0\0\0", b"", 1.0)),
        (0xF3, (1, b"\0\0\0\0\0\0\0\0", b"", 1.0)),
        (0xF3, (1, b"\0\0\0\0", b"\0\0", 1.0)),
        (0xF3, (-1, b"", b"", 1.0)),
        (0xF3, {"generation": 1, "page_ids": b"", "resident": b"", "lease_s": 1.0}),
        (0xF6, ("k", 1.0, "cma", "put")),
        (0xF6, ("k", 1.0, "cma", "get", 1)),
        (0xF6, ("k", 1.0, "c" * 65, "put", 1)),
        (0xF6, ("k" * 1025, 1.0, "cma", "put", 1)),
        (0xF6, ("k", float("nan"), "cma", "put", 1)),
        (0xF6, (b"k", 1.0, "cma", "put", 1)),
        (0xF6, ("k", 1.0, "cma", "put", 0)),
        (0xF6, ("k", 1.0, "cma", "put", 4097)),
        (0xF6, ("k", 1.0, "cma", "put", 1, 1)),
        (0xF7, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0)),
        (0xF7, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, 0.0)),
        (0xF7, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, 1.0, "more")),
        (0xF7, (1, 1, b"", b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, 1.0)),
        (0xF7, (1, -1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, 1.0)),
        (0xF7, (1, 1, DESCRIPTOR, b"\0\0\0", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, 1.0)),
        (0xF7, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0\1\0\0\0", b"\1\0\0\0", "NHD", 0, 0, b"", 0, 1.0)),
        (0xF8, (1, 2, 0, 1.0, "cma", "put")),
        (0xF8, (1, 2, -1, 1.0, "cma", "put")),
        (0xF8, (1, 2, 2**32, 1.0, "cma", "put")),
        (0xF8, (2**32, 2, 3, 1.0, "cma", "put")),
        (0xF8, (1, 2, 3, 0.0, "cma", "put")),
        (0xF8, (1, 2, 3, 1.0, "cma", "frames")),
        (0xF8, (1, 2, 3, 1.0, "cma")),
        (0xF8, (1, 2, 3.5, 1.0, "cma", "put")),
        (0xF9, (1, 1, DESCRIPTOR, b"\0\0\0", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "cma", "put")),
        (0xF9, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "cma", "frames")),
        (0xF9, (1, 1, b"", b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "cma", "put")),
        (0xF9, (1, 1, DESCRIPTOR, b"", b"\0\0\0\0", b"", "NHD", 0, 0, b"", 0, "k", 1.0, "cma")),
        (0xFB, (16, 0, 8)),
        (0xFB, (0, 0, 8, b"")),
        (0xFB, (2**32, 0, 8, b"")),
        (0xFB, (16, -1, 8, b"")),
        (0xFB, (16, 2**32, 8, b"")),
        (0xFB, (16, 0, 0, b"")),
        (0xFB, (16, 0, 2**32, b"")),
        (0xFB, (16, 0, 8, "no")),
        (0xFB, (16.0, 0, 8, b"")),
        (0xFB, (16, 0, 8, b"", b"")),
        (0xFC, (b"",)),
        (0xFC, (bytes(3),)),
        (0xFC, (bytes(5),)),
        (0xFC, (bytes(4 * 4097),)),
        (0xFC, (b"\x00\x10\0\0",)),  # 4096
        (0xFC, (bytes(4) + b"\xff\xff\xff\xff",)),
        (0xFC, ()),
        (0xFC, (bytes(4), bytes(4))),
        (0xFC, ([0, 1],)),
        (0xFC, (0,)),
        (0xFC, ("\0\0\0\0",)),
        (0xFC, (None,)),
        (0xFC, bytes(4)),
        (0xFC, {"descriptor_indices": bytes(4)}),
        (0xF4, (2**32, "reason")),
        (0xF4, (1, "r" * 4097)),
    ],
)
def test_private_payloads_that_break_a_rule_are_malformed(kind: int, fields: object) -> None:
    payload = msgspec.msgpack.encode(fields)
    message = decode_one(struct.pack("<III", kind, 2, len(payload)) + payload)
    assert isinstance(message, Malformed)
    assert message.error.code == ErrorCode.INVALID_MESSAGE


def test_length_is_checked_before_it_is_buffered() -> None:
    decoder = FrameDecoder(100)
    messages = decoder.feed(encode(Ping(), 1) + struct.pack("<III", 9, 1, 101))
    assert next(messages) == (1, Ping())
    with pytest.raises(ProtocolError, match="a ERROR message of 101 bytes is above the 100 bytes") as caught:
        next(messages)
    assert caught.value.code == ErrorCode.MESSAGE_TOO_LARGE


def test_stream_0_is_reserved() -> None:
    with pytest.raises(ProtocolError, match="stream_id = 0"):
        decode_all(struct.pack("<III", 10, 0, 0))


@pytest.mark.parametrize("kind", [0, 11 + 3, 0xEF, 0xFE, 0xFF, 0xFFFFFFFF])
def test_unknown_types_are_malformed_and_do_not_stop_the_stream(kind: int) -> None:
    data = struct.pack("<III", kind, 5, 3) + b"abc" + encode(Pong(), 1)
    (stream_id, message), rest = decode_all(data)
    assert stream_id == 5
    assert isinstance(message, Malformed)
    assert rest == (1, Pong())


def test_too_large_for_the_peer_is_told_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="1008 bytes is above the 1000"):
        encode_parts(TensorDataMessage(offset_nbytes=0, data=bytes(1000)), 3, max_message_nbytes=1000)


def test_page_data_is_not_copied() -> None:
    data = bytes(1 << 20)
    _, parts = encode_parts(TensorDataMessage(offset_nbytes=0, data=data), 3)
    assert parts[-1] is data
    frame = b"".join(parts)
    ((_, message),) = decode_all(frame, 2 << 20)
    assert isinstance(message, TensorDataMessage)
    assert isinstance(message.data, memoryview)
    assert message.data.obj is frame
    assert message.data.readonly


def test_repr_shows_no_secret() -> None:
    session = SessionMessage(engine_name="e", token="hunter2", host_id=b"h", worker_address=b"w", heartbeat_s=0.5)
    assert "hunter2" not in repr(session)
    assert "rkey" not in repr(REGION)


MESSAGES = [encode(message, stream_id) for message, stream_id, _ in LITERAL]


@settings(max_examples=200, deadline=None)
@given(picks=st.lists(st.sampled_from(MESSAGES), max_size=12), cuts=st.lists(st.integers(0, 400), max_size=30))
def test_any_split_gives_the_same_messages(picks: list[bytes], cuts: list[int]) -> None:
    data = b"".join(picks)
    expected = decode_all(data)
    decoder = FrameDecoder(1 << 20)
    got: list[tuple[int, Message]] = []
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    for start, stop in pairwise(edges):
        got += decoder.feed(data[start:stop])
    assert got == expected
    assert not decoder.in_message


@settings(max_examples=400, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes_give_messages_or_a_protocol_error(data: bytes) -> None:
    with suppress(ProtocolError):
        for stream_id, message in FrameDecoder(1000).feed(data):
            assert stream_id > 0
            assert not isinstance(message, Malformed) or message.error.code == ErrorCode.INVALID_MESSAGE


@settings(max_examples=600, deadline=None)
@given(kind=st.sampled_from([*range(1, 14), *range(0xF0, 0xFE)]), payload=st.binary(max_size=200))
def test_any_payload_of_each_type(kind: int, payload: bytes) -> None:
    message = decode_one(struct.pack("<III", kind, 2, len(payload)) + payload)
    assert not isinstance(message, Malformed) or isinstance(message.error, ProtocolError)


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=24),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(kind=st.integers(0xF0, 0xFC), value=_VALUES)
def test_any_messagepack_value_as_private_payload(kind: int, value: object) -> None:
    payload = msgspec.msgpack.encode(value)
    message = decode_one(struct.pack("<III", kind, 2, len(payload)) + payload)
    assert not isinstance(message, Malformed) or message.error.code == ErrorCode.INVALID_MESSAGE


PRIVATE = [
    SessionMessage(engine_name="e", token="t", host_id=b"h", process_id=b"p", worker_address=b"w", heartbeat_s=0.5),
    Pool(
        pool_id=1,
        generation=2,
        name="n",
        num_pages=4,
        layers=(0, 1),
        num_heads=1,
        head_dim=8,
        page_size=4,
        dtype="int8",
        roles=("key",),
        total_heads=1,
        regions=(REGION,),
        segments=(PoolSegment(0, 0, 32, 8, 8), PoolSegment(0, 128, 32, 8, 8)),
    ),
    Offer(key="k", deadline_s=1, lane="cma", **ONE_PAGE),  # type: ignore[arg-type]
    Grant(generation=2, page_ids=np.array([5, 1]), resident=np.array([True, False]), lease_s=20),
    Abort(0xF6, "why"),
    Fetch(key="k", deadline_s=1, lane="cma"),
    Published(lease_s=20, page_keys=np.ones((1, 16), np.uint8), **ONE_PAGE),  # type: ignore[arg-type]
    Take(page_size=16, head_offset=2, num_heads=4, resident=np.array([True, False])),
    Reserve(pool_id=1, generation=2, num_pages=3, deadline_s=1, lane="cma"),
    commit_like(Offer(key="k", deadline_s=1, **ONE_PAGE)),  # type: ignore[arg-type]
    commit_like(Offer(key="k", deadline_s=1, **ONE_PAGE), Prepare),  # type: ignore[arg-type]
    Ended((3, 0, 2)),
]


@settings(max_examples=1000, deadline=None)
@given(data=st.data())
def test_mutated_private_messages(data: st.DataObject) -> None:
    message = data.draw(st.sampled_from(PRIVATE))
    frame = bytearray(encode(message, 2))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(12, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    decoder = FrameDecoder(1 << 20)
    ((stream_id, again),) = [*decoder.feed(bytes(frame[:cut])), *decoder.feed(bytes(frame[cut:]))]
    assert stream_id == 2
    assert isinstance(again, type(message) | Malformed)
    if isinstance(again, Malformed):
        assert again.error.code == ErrorCode.INVALID_MESSAGE
