"""The first messages of a session: what opens it, what ends it, and that nothing is said too early."""

import hmac
from collections.abc import Callable

import pytest

from hurray_rdma.control import (
    ClientSession,
    Event,
    ServerSession,
    SessionClosed,
    SessionConfig,
    SessionOpened,
    encode,
)
from hurray_rdma.control.codes import (
    Capability,
    DeviceUnavailableError,
    ErrorCode,
    LocalProtocolError,
    MessageType,
    error_code,
)
from hurray_rdma.control.exchange import SessionMessage
from hurray_rdma.control.framing import FrameDecoder
from hurray_rdma.control.messages import ClientHello, ErrorMessage, Message, Ping, ServerHello
from hurray_rdma.control.offers import Fetch, Offer
from hurray_rdma.control.pools import Pool
from hurray_rdma.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineExceededError,
    HurrayError,
    PeerLostError,
    ProtocolError,
)
from hurray_rdma.testing.pair import ConnectionPair

MakeConfig = Callable[..., SessionConfig]
HELLO = ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""), (0xF0, b"hurray_rdma/9")))
SESSION = SessionMessage(engine_name="e", token="", host_id=b"", worker_address=b"", heartbeat_s=1)


def said(session: ClientSession | ServerSession) -> list[Message]:
    return [message for _, message in FrameDecoder(1 << 30).feed(session.data_to_send())]


def closing_error(events: list[Event]) -> HurrayError | None:
    assert [type(event) for event in events] == [SessionClosed]
    (event,) = events
    assert isinstance(event, SessionClosed)
    return event.error


def test_each_message_in_turn(make_config: MakeConfig) -> None:
    client = ClientSession(make_config("prefill", token="s"), now=0)
    server = ServerSession(make_config("decode", token="s"), now=0)
    hello = client.data_to_send()
    ((stream_id, message),) = FrameDecoder(1 << 20).feed(hello)
    assert stream_id == 1
    assert message == ClientHello(
        max_message_nbytes=64 << 20,
        capabilities=Capability.RDMA_DATA_PLANE,
        layouts=((0x0B, b""), (0x0A, b""), (0xF0, b"hurray_rdma/9")),
    )
    assert server.receive(hello, 0) == []
    answer = server.data_to_send()
    assert list(FrameDecoder(1 << 20).feed(answer)) == [
        (1, ServerHello(max_message_nbytes=64 << 20, layouts=((0x0B, b""), (0xF0, b"hurray_rdma/9")))),
    ]
    assert client.receive(answer, 0) == []
    session = client.data_to_send()
    assert b"s" in session
    assert [type(event) for event in server.receive(session, 0)] == [SessionOpened]
    assert [type(event) for event in client.receive(server.data_to_send(), 0)] == [SessionOpened]


@pytest.mark.parametrize(
    ("client", "server", "dialect"),
    [
        (("adr-024", "hurray-0.2"), ("hurray-0.2", "adr-024"), "adr-024"),
        (("hurray-0.2", "adr-024"), ("adr-024", "hurray-0.2"), "hurray-0.2"),
        (("adr-024", "hurray-0.2"), ("hurray-0.2",), "hurray-0.2"),
    ],
)
def test_the_clients_first_dialect_that_the_server_accepts(
    client: tuple[str, ...], server: tuple[str, ...], dialect: str, make_config: MakeConfig
) -> None:
    pair = ConnectionPair(make_config(dialects=client), make_config(dialects=server))
    pair.settle()
    assert pair.client.peer is not None
    assert pair.server.peer is not None
    assert pair.client.peer.dialect == pair.server.peer.dialect == dialect


@pytest.mark.parametrize(
    ("client", "server", "code"),
    [
        ({"dialects": ("adr-024",)}, {"dialects": ("hurray-0.2",)}, ErrorCode.LAYOUT_UNAVAILABLE),
        ({"devices": (1,)}, {"devices": (0, 2)}, ErrorCode.DEVICE_UNAVAILABLE),
    ],
)
def test_nothing_in_common_ends_both_sides(
    client: dict[str, object], server: dict[str, object], code: ErrorCode, make_config: MakeConfig
) -> None:
    pair = ConnectionPair(make_config(**client), make_config(**server))
    pair.settle()
    for error in (closing_error(pair.take("client")), closing_error(pair.take("server"))):
        assert isinstance(error, ProtocolError | DeviceUnavailableError)
        assert error_code(error) == code


def test_each_side_hears_what_devices_the_other_has(make_config: MakeConfig) -> None:
    pair = ConnectionPair(make_config(devices=(0,)), make_config(devices=(1, 0)))
    pair.settle()
    assert pair.client.peer is not None
    assert pair.server.peer is not None
    assert pair.client.peer.devices == (1, 0)
    assert pair.server.peer.devices == (0,)


@pytest.mark.parametrize("token", [None, "", "wrong", "righ", "right "])
def test_a_wrong_token_gets_nothing_but_an_error(token: str | None, make_config: MakeConfig) -> None:
    pair = ConnectionPair(make_config(token=token), make_config("decode", token="right"))
    heard: list[Message] = []

    def listen(sender: str, messages: list[tuple[int, Message]]) -> list[tuple[int, Message]]:
        if sender == "server":
            heard.extend(message for _, message in messages)
        return messages

    pair.spoil = listen
    pair.settle()
    assert [type(message) for message in heard] == [ServerHello, ErrorMessage]
    assert isinstance(closing_error(pair.take("client")), AuthenticationError)
    assert isinstance(closing_error(pair.take("server")), AuthenticationError)
    assert "right" not in str(heard)


def test_a_token_is_not_needed_where_none_is_asked(make_config: MakeConfig) -> None:
    pair = ConnectionPair(make_config(token="any"), make_config())
    pair.settle()
    assert pair.server.is_open


TENANTS = {"blue": "b-token", "green": "g-token", "grün": "schlüssel"}


@pytest.mark.parametrize(
    ("own", "sent", "tenant"),
    [
        ("own", "own", ""),
        ("own", "b-token", "blue"),
        ("own", "g-token", "green"),
        ("own", "schlüssel", "grün"),
        (None, "b-token", "blue"),
        (None, None, ""),
        ("", "", ""),
        ("own", None, None),
        ("own", "", None),
        ("own", "b-toke", None),
        ("own", "b-token ", None),
        ("own", "blue", None),
        (None, "other", None),
        ("", "b", None),
    ],
)
def test_a_token_says_whose_peer_it_is(
    own: str | None, sent: str | None, tenant: str | None, make_config: MakeConfig
) -> None:
    pair = ConnectionPair(make_config(token=sent), make_config("decode", token=own, tenants=TENANTS))
    pair.settle()
    if tenant is None:
        assert isinstance(closing_error(pair.take("server")), AuthenticationError)
        error = closing_error(pair.take("client"))
        assert isinstance(error, AuthenticationError)
        assert not any(secret in str(error) for secret in (*TENANTS, *TENANTS.values()))
    else:
        assert pair.server.peer is not None
        assert pair.server.peer.tenant == tenant
        assert pair.client.peer is not None
        assert pair.client.peer.tenant == ""


def test_tenants_come_and_go_between_handshakes(make_config: MakeConfig) -> None:
    tenants: dict[str, str] = {}
    config = make_config("decode", token="own", tenants=tenants)

    def tenant_of(token: str) -> str | None:
        pair = ConnectionPair(make_config(token=token), config)
        pair.settle()
        return pair.server.peer.tenant if pair.server.peer is not None else None

    assert tenant_of("b") is None
    tenants["blue"] = "b"
    assert tenant_of("b") == "blue"
    tenants["empty"] = ""
    assert tenant_of("") is None
    tenants["green"] = "b"  # A mistake that cannot be refused any more when it is made.
    assert tenant_of("b") is None
    tenants["green"] = "own"
    assert tenant_of("own") is None
    tenants.clear()
    assert tenant_of("b") is None
    assert tenant_of("own") == ""


def test_every_candidate_is_compared_whatever_matches(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def count(secret: bytes, given: bytes) -> bool:
        compared.append((secret, given))
        return compare(secret, given)

    monkeypatch.setattr(hmac, "compare_digest", count)
    for sent in ("b-token", "own", "nobody's"):
        ConnectionPair(make_config(token=sent), make_config(token="own", tenants=TENANTS)).settle()
        secrets = sorted(secret.encode() for secret in (*TENANTS.values(), "own"))
        assert sorted(secret for secret, _ in compared) == secrets
        assert {given for _, given in compared} == {sent.encode()}
        compared.clear()


@pytest.mark.parametrize(
    ("token", "tenants", "text"),
    [
        (None, {"": "t"}, "1 to 256 characters"),
        (None, {"n" * 257: "t"}, "1 to 256 characters"),
        (None, {"blue": ""}, "tenant 'blue' needs a token"),
        ("same", {"blue": "same"}, "tenant 'blue' has the token of the engine"),
        (None, {"blue": "same", "green": "same"}, "tenant 'green' has the token of tenant 'blue'"),
    ],
)
def test_tenants_that_cannot_be_told_apart_are_refused(
    token: str | None, tenants: dict[str, str], text: str, make_config: MakeConfig
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        make_config(token=token, tenants=tenants)
    assert "same" not in str(caught.value)


def test_settings_show_no_secret(make_config: MakeConfig) -> None:
    config = make_config(token="hunter2", tenants={"blue": "swordfish"})
    assert "hunter2" not in repr(config)
    assert "swordfish" not in repr(config)
    assert isinstance(hash(config), int)


@pytest.mark.parametrize(
    "first",
    [
        encode(SESSION, 1),
        encode(Ping(), 1),
        encode(ServerHello(max_message_nbytes=1 << 20, layouts=HELLO.layouts), 1),
        encode(HELLO, 2),
        encode(HELLO, 1) + encode(HELLO, 1),
        encode(HELLO, 1) + encode(Ping(), 7),
        b"GET / HTTP/1.1\r\nHost: decode-3\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
        bytes(12),
        encode(ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""),)), 1),
        encode(ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""), (0xF0, b"hurray_rdma/1"))), 1),
        encode(ClientHello(max_message_nbytes=1024, layouts=HELLO.layouts), 1),
        encode(ClientHello(protocol_version=2, max_message_nbytes=1 << 20, layouts=HELLO.layouts), 1),
    ],
)
def test_a_server_answers_a_wrong_start_with_error_and_closes(first: bytes, make_config: MakeConfig) -> None:
    server = ServerSession(make_config(), now=0)
    assert isinstance(closing_error(server.receive(first, 0)), ProtocolError)
    assert isinstance(said(server)[-1], ErrorMessage)
    assert server.is_closed
    assert server.receive(encode(HELLO, 1), 0) == []
    assert server.data_to_send() == b""


@pytest.mark.parametrize(
    ("first", "texts"),
    [
        (b"GET / HTTP/1.1\r\nHost: decode-3\r\n\r\n", ("not a Hurray connection", "an HTTP client", "GET / HTTP/1")),
        (b"PRI * HTTP/2.0\r\n\r\n", ("not a Hurray connection", "an HTTP client")),
        (
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
            ("not a Hurray connection", "a TLS client", "TLS on both"),
        ),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ("not a Hurray connection", "SSH-2.0-Open")),
        (bytes(12), ("not a Hurray connection",)),
        (
            encode(ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""), (0xF0, b"hurray_rdma/1"))), 1),
            ("this side speaks 'hurray_rdma/9', the peer 'hurray_rdma/1'", "same release"),
        ),
        (
            encode(ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""), (0xF0, b"\x1b[2J\xff"))), 1),
            (r"the peer '\x1b[2J\ufffd'",),
        ),
        (
            encode(ClientHello(max_message_nbytes=1 << 20, layouts=((0x0B, b""),)), 1),
            ("only the plain Hurray messages",),
        ),
        (encode(ClientHello(max_message_nbytes=1 << 20, layouts=((0x55, b""), HELLO.layouts[1])), 1), ("offers none",)),
        (
            encode(ClientHello(protocol_version=2, max_message_nbytes=1 << 20, layouts=HELLO.layouts), 1),
            ("version 2 of the Hurray protocol", "version 1"),
        ),
    ],
)
def test_an_error_says_who_speaks_and_what_to_do(first: bytes, texts: tuple[str, ...], make_config: MakeConfig) -> None:
    error = closing_error(ServerSession(make_config(), now=0).receive(first, 0))
    for text in texts:
        assert text in str(error)
    assert "payload_length" not in str(error)


@pytest.mark.parametrize(
    ("first", "text"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "an HTTP server"),
        (b"\x15\x03\x03\x00\x02\x02\x46", "a TLS server"),  # An alert, then it hangs up.
        (b"HTTP/1.0 ", "an HTTP server"),
    ],
)
def test_a_client_says_what_answered(first: bytes, text: str, make_config: MakeConfig) -> None:
    client = ClientSession(make_config(), now=0)
    error = closing_error(client.receive(first, 0) or client.connection_lost(0))
    assert isinstance(error, ProtocolError)
    assert "not a Hurray connection" in str(error)
    assert text in str(error)


def test_before_authentication_no_more_than_64_kib_are_accepted(make_config: MakeConfig) -> None:
    server = ServerSession(make_config(), now=0)
    header = MessageType.CLIENT_HELLO.to_bytes(4, "little") + (1).to_bytes(4, "little") + (65537).to_bytes(4, "little")
    error = closing_error(server.receive(header, 0))
    assert isinstance(error, ProtocolError)
    assert error.code == ErrorCode.MESSAGE_TOO_LARGE


@pytest.mark.parametrize("tags", [(0x0B, 0x0A), (), (0x55,)])
def test_a_client_wants_exactly_one_of_its_dialects(tags: tuple[int, ...], make_config: MakeConfig) -> None:
    client = ClientSession(make_config(), now=0)
    hello = ServerHello(max_message_nbytes=1 << 20, layouts=(*((tag, b"") for tag in tags), (0xF0, b"hurray_rdma/9")))
    error = closing_error(client.receive(encode(hello, 1), 0))
    assert isinstance(error, ProtocolError)
    assert error.code == ErrorCode.LAYOUT_UNAVAILABLE


@pytest.mark.parametrize("kind", [ClientSession, ServerSession])
def test_a_handshake_that_stalls_ends_at_its_deadline(
    kind: type[ClientSession] | type[ServerSession], make_config: MakeConfig
) -> None:
    session = kind(make_config(hello_timeout_s=3), now=100)
    assert session.next_timeout() == 103
    assert session.handle_timeout(102.9) == []
    assert isinstance(closing_error(session.handle_timeout(103)), DeadlineExceededError)
    assert session.next_timeout() is None
    assert session.handle_timeout(200) == []


def test_nothing_can_be_asked_before_the_session_is_open_or_after_its_end(
    make_config: MakeConfig, make_offer: Callable[..., Offer], make_pool: Callable[..., Pool]
) -> None:
    client, server = ClientSession(make_config(), now=0), ServerSession(make_config(), now=0)
    with pytest.raises(LocalProtocolError):
        client.offer(make_offer(), now=0, timeout_s=1)
    with pytest.raises(LocalProtocolError):
        client.fetch(Fetch(key="k", deadline_s=1), now=0, timeout_s=1)
    with pytest.raises(LocalProtocolError):
        server.announce(make_pool(), now=0)
    client.close(0)
    server.close(0)
    with pytest.raises(PeerLostError):
        client.offer(make_offer(), now=0, timeout_s=1)
    with pytest.raises(PeerLostError):
        client.fetch(Fetch(key="k", deadline_s=1), now=0, timeout_s=1)
    assert not server.announce(make_pool(), now=0)


def test_the_connection_breaks_in_the_handshake(make_config: MakeConfig) -> None:
    client = ClientSession(make_config(), now=0)
    client.receive(b"\x02\x00", 0)
    error = closing_error(client.connection_lost(0))
    assert isinstance(error, PeerLostError)
    assert "in the middle of a message" in str(error)
    assert client.connection_lost(0) == client.close(0) == []
    server = ServerSession(make_config(), now=0)
    error = closing_error(server.connection_lost(0))
    assert str(error).startswith("the peer closed the connection. ")


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"heartbeat_s": 0}, "heartbeat_s"),
        ({"heartbeat_s": float("nan")}, "heartbeat_s"),
        ({"heartbeat_s": 1, "peer_timeout_s": 1.9}, "peer_timeout_s"),
        ({"hello_timeout_s": -1}, "hello_timeout_s"),
        ({"max_message_nbytes": 1000}, "max_message_nbytes"),
        ({"max_message_nbytes": 2**32}, "max_message_nbytes"),
        ({"dialects": ()}, "dialects"),
        ({"dialects": ("adr-024", "adr-024")}, "dialects"),
        ({"dialects": ("adr-25",)}, "dialects"),
        ({"devices": ()}, "devices"),
        ({"devices": (255,)}, "devices"),
        ({"max_open_transfers": 0}, "max_open_transfers"),
    ],
)
def test_settings_out_of_range(changes: dict[str, object], field: str, make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError) as caught:
        make_config(**changes)
    assert caught.value.field == field


def test_an_engine_name_that_no_message_can_carry_is_refused_at_once(make_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="engine_name"):
        ClientSession(make_config("n" * 257), now=0)
