"""Engines whose control channel is TLS: who is let in, who is not, and what each is told."""

from __future__ import annotations

import asyncio
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from hurray_rdma import AuthenticationError, ConfigError, Engine, HurrayError, PagePool, PeerLostError, ProtocolError
from hurray_rdma.control import Tls
from hurray_rdma.testing.processes import Child
from hurray_rdma.transport import Context
from tests.engine.test_fallback import RECEIVER, SENDER
from tests.hazards.scenes import LANES, SPEC, connected, digest, fill, make_pool, receiver, run, settled, snapshot_of

pytestmark = pytest.mark.both_loops

FILES = Path(__file__).parents[1] / "control" / "tls"
CA, SERVER, CLIENT = FILES / "ca.pem", FILES / "server.pem", FILES / "client.pem"
EXPIRED, EXPIRED_CLIENT = FILES / "expired.pem", FILES / "expired-client.pem"
ONE_SIDED = Tls(certificate=SERVER)
MUTUAL = Tls(certificate=SERVER, authority=CA)


@pytest.mark.parametrize(
    ("server", "client", "host"),
    [
        (ONE_SIDED, Tls(authority=CA), "127.0.0.1"),
        (ONE_SIDED, Tls(authority=CA), "localhost"),
        (ONE_SIDED, Tls(authority=str(CA), server_name="localhost"), "127.0.0.1"),
        (MUTUAL, Tls(certificate=CLIENT, authority=CA), "127.0.0.1"),
        (MUTUAL, Tls(certificate=str(CLIENT), private_key=str(CLIENT), authority=CA), "127.0.0.1"),
        (ONE_SIDED, Tls(certificate=CLIENT, authority=CA), "127.0.0.1"),
    ],
    ids=[
        "server only",
        "by name",
        "by another name",
        "mutual",
        "mutual, key in a file of its own",
        "client needlessly",
    ],
)
def test_who_trusts_each_other_transfers(server: Tls, client: Tls, host: str) -> None:
    async def job() -> None:
        with make_pool(SPEC, 16) as pool, Child(receiver, {"tls": server, "token": "both"}) as child:
            fill(pool, 1)
            sent = snapshot_of(pool, [3, 1, 4], [3, 5])
            address = (await asyncio.to_thread(child.receive)).replace("127.0.0.1", host)
            async with connected(pool, address, tls=client, token="both", timeout_s=10) as peer:
                assert (await peer.send(sent, key="secret")).path == "mapped"
                assert await asyncio.to_thread(child.receive) == ("secret", digest(sent))
            async with Engine(pool, tls=client, token="wrong") as engine:
                with pytest.raises(AuthenticationError, match="token"):
                    async with engine.connect(address, timeout_s=5):
                        pass
            child.send("counts")
            assert await asyncio.to_thread(child.receive) == (32, 0, 0)
            child.send("end")

    run(job())


def test_pages_on_an_encrypted_control_channel() -> None:
    async def job() -> None:
        with make_pool(SPEC, 64, context=Context(SENDER)) as pool, Child(tls_frames_receiver) as child:
            fill(pool, 2)
            sent = snapshot_of(pool, list(range(63, 0, -1)))
            address = await asyncio.to_thread(child.receive)
            async with connected(pool, address, tls=Tls(certificate=CLIENT, authority=CA), timeout_s=10) as peer:
                assert (await peer.send(sent, key="frames")).path == "frames"
                assert await asyncio.to_thread(child.receive) == ("frames", digest(sent))
            child.send("end")

    run(job())


def tls_frames_receiver(connection: Connection) -> None:
    LANES["frames"] = ("engine-owned", RECEIVER)
    receiver(connection, {"lane": "frames", "num_pages": 64, "tls": MUTUAL})


@pytest.mark.parametrize(
    ("server", "client", "host", "error", "says"),
    [
        (ONE_SIDED, Tls(authority=CLIENT), "127.0.0.1", AuthenticationError, "certificate"),
        (ONE_SIDED, Tls(), "127.0.0.1", AuthenticationError, "certificate"),
        (ONE_SIDED, Tls(authority=CA, server_name="decode-3"), "127.0.0.1", AuthenticationError, "decode-3"),
        (Tls(certificate=EXPIRED), Tls(authority=CA), "127.0.0.1", AuthenticationError, "expired"),
        (MUTUAL, Tls(authority=CA), "127.0.0.1", (AuthenticationError, PeerLostError), "certificate"),
        (
            MUTUAL,
            Tls(certificate=EXPIRED_CLIENT, authority=CA),
            "127.0.0.1",
            (AuthenticationError, PeerLostError),
            "certificate",
        ),
        (ONE_SIDED, None, "127.0.0.1", (PeerLostError, ProtocolError), "TLS"),
        (None, Tls(authority=CA), "127.0.0.1", (AuthenticationError, PeerLostError), "TLS"),
    ],
    ids=[
        "wrong authority",
        "the system's authorities",
        "wrong name",
        "expired server",
        "no client certificate",
        "expired client",
        "plain client",
        "plain server",
    ],
)
def test_who_does_not_trust_the_other_is_told_why_and_nobody_else_suffers(
    server: Tls | None, client: Tls | None, host: str, error: type[HurrayError], says: str
) -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 8) as pool:
            async with Engine(pool, listen=f"{host}:0", tls=server, timeout_s=5) as engine:
                async with Engine(pool, tls=client) as other:
                    with pytest.raises(error, match=says) as caught:
                        async with other.connect(engine.address, timeout_s=5):
                            pass
                    assert caught.value.fix
                    assert other.stats().num_peers == 0
                good = server and Tls(certificate=CLIENT, authority=CA)
                if server is None or server.certificate != EXPIRED:
                    async with connected(pool, engine.address, tls=good, timeout_s=5) as peer:
                        await peer.send(snapshot_of(pool, [1]))
                        (await anext(engine.arrivals())).release()
                stats = engine.stats()
                assert stats.num_connects == (0 if server and server.certificate == EXPIRED else 1)
                await settled(pool, 8, 0, 0)

    run(job())


def test_files_that_cannot_be_used_are_named_before_anything_listens(tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")

    async def job() -> None:
        with PagePool.allocate(SPEC, 4) as pool:
            for wrong in (tmp_path / "missing.pem", nonsense, CA):  # the authority's has no key
                with pytest.raises(ConfigError) as caught:
                    Engine(pool, tls=Tls(certificate=wrong))
                assert (caught.value.field, caught.value.value) == ("tls.certificate", str(wrong))
            for wrong in (tmp_path / "missing.pem", nonsense):
                with pytest.raises(ConfigError) as caught:
                    Engine(pool, tls=Tls(authority=wrong))
                assert caught.value.field == "tls.authority"
            with pytest.raises(ConfigError, match="an engine that listens needs one"):
                async with Engine(pool, listen="127.0.0.1:0", tls=Tls(authority=CA)):
                    pass
            async with Engine(pool, tls=Tls(authority=CA)):
                pass  # one that only connects needs none

    asyncio.run(job())


def test_listening_to_everyone_needs_certificates_a_token_or_a_word() -> None:
    async def job() -> None:
        with PagePool.allocate(SPEC, 4) as pool:
            for refused in ({}, {"tls": ONE_SIDED}):
                with pytest.raises(ConfigError, match="anyone who reaches this address"):
                    async with Engine(pool, listen="0.0.0.0:0", **refused):  # type: ignore[arg-type]
                        pass
            for allowed in ({"tls": MUTUAL}, {"token": "t"}, {"allow_unauthenticated": True}):
                async with Engine(pool, listen="0.0.0.0:0", **allowed) as engine:  # type: ignore[arg-type]
                    assert engine.address.startswith("0.0.0.0:")

    asyncio.run(job())
