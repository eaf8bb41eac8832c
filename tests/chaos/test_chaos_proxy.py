"""The proxy over real sockets: what passes, what is spoiled, and that it closes as TCP closes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from hurray_rdma.control import MessageType
from hurray_rdma.testing.chaos import Action, ChaosProxy, Direction, Rule
from hurray_rdma.testing.chaos.seats import until
from tests.chaos.test_frame_faults import A, B, C


class _Echo:
    """Answers every byte with itself, and remembers them."""

    def __init__(self) -> None:
        self.heard = b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1000):
                self.heard += data
                writer.write(data)
        writer.close()


@contextlib.asynccontextmanager
async def joined() -> AsyncIterator[tuple[ChaosProxy, asyncio.StreamReader, asyncio.StreamWriter, _Echo]]:
    echo = _Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    async with asyncio.timeout(10), server, ChaosProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        host, port = proxy.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        yield proxy, reader, writer, echo
        writer.close()


def rule(action: Action, direction: Direction, **settings: float) -> Rule:
    return Rule(action=action, kind=MessageType.PING, direction=direction, **settings)  # type: ignore[arg-type]


def test_bytes_pass_both_ways_and_the_end_of_one_direction_with_what_is_not_whole() -> None:
    async def job() -> None:
        async with joined() as (proxy, reader, writer, echo):
            for byte in A.data + C.data[:7]:
                writer.write(bytes([byte]))
                await writer.drain()
            assert await reader.readexactly(len(A.data)) == A.data
            writer.write_eof()
            assert await reader.read() == C.data[:7]
            assert echo.heard == A.data + C.data[:7]
            assert proxy.num_accepted == 1

    asyncio.run(job())


def test_a_rule_tells_the_directions_apart() -> None:
    async def job() -> None:
        async with joined() as (proxy, reader, writer, echo):
            drop = proxy.arm(rule(Action.DROP, Direction.TO_CLIENT))
            writer.write(B.data + A.data)
            assert await reader.readexactly(len(A.data)) == A.data
            assert echo.heard == B.data + A.data
            assert drop.fired
            proxy.arm(rule(Action.DUPLICATE, Direction.TO_SERVER))
            proxy.disarm()
            writer.write(B.data + A.data)
            assert await reader.readexactly(len(A.data + B.data)) == B.data + A.data

    asyncio.run(job())


def test_a_delayed_message_is_overtaken_and_a_stalled_one_is_not() -> None:
    async def job() -> None:
        async with joined() as (proxy, reader, writer, _):
            for action, expected in ((Action.DELAY, A.data + B.data), (Action.STALL, B.data + A.data)):
                proxy.arm(rule(action, Direction.TO_SERVER, seconds=0.2))
                started = time.monotonic()
                writer.write(B.data + A.data)
                assert await reader.readexactly(len(expected)) == expected
                assert time.monotonic() - started > 0.15

    asyncio.run(job())


def test_a_cut_ends_both_directions_after_the_bytes_it_keeps() -> None:
    async def job() -> None:
        async with joined() as (proxy, reader, writer, echo):
            proxy.arm(rule(Action.CUT, Direction.TO_SERVER, keep_nbytes=5))
            writer.write(A.data + B.data + C.data)
            with contextlib.suppress(ConnectionError):
                await reader.read()
            await until(lambda: len(echo.heard) >= len(A.data) + 5, "the kept bytes come", within_s=5)
            assert echo.heard == A.data + B.data[:5]
            await until(lambda: not proxy.num_open, "the connection ends", within_s=5)

    asyncio.run(job())


def test_all_connections_can_be_cut_even_in_a_stall_and_new_ones_pass() -> None:
    async def job() -> None:
        async with joined() as (proxy, reader, writer, _):
            proxy.arm(rule(Action.STALL, Direction.TO_SERVER, seconds=60))
            writer.write(B.data)
            await until(lambda: proxy.num_open == 1, "it is connected", within_s=5)
            assert proxy.cut() == 1
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            host, port = proxy.address.split(":")
            again_reader, again = await asyncio.open_connection(host, int(port))
            again.write(A.data)
            assert await again_reader.readexactly(len(A.data)) == A.data
            again.close()

    asyncio.run(job())


def test_a_missing_engine_looks_like_one_and_one_that_comes_later_is_found() -> None:
    async def job() -> None:
        echo = _Echo()
        server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        server.close()
        await server.wait_closed()
        async with asyncio.timeout(10), ChaosProxy("127.0.0.1", port) as proxy:
            host, _, own_port = proxy.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(own_port))
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            server = await asyncio.start_server(echo.serve, "127.0.0.1", port)
            async with server:
                reader, writer = await asyncio.open_connection(host, int(own_port))
                writer.write(A.data)
                assert await reader.readexactly(len(A.data)) == A.data
                writer.close()

    asyncio.run(job())
