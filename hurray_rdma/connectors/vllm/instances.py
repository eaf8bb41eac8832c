"""vLLM instances of one side, asked over HTTP in turn, and the errors that their failures become for a client.

Knows vLLM's HTTP interface, and nothing of what is asked. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from typing import Any

import aiohttp
from aiohttp import web

__all__ = ["Instances", "RefusedError", "refusal_of"]

_log = logging.getLogger(__name__)

_HEALTH_S = 5.0


class RefusedError(Exception):
    """An answer for the client in the place of the one that it wants."""

    def __init__(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        super().__init__(status, body)
        self.status, self.body, self.content_type = status, body, content_type

    def response(self) -> web.Response:
        return web.Response(status=self.status, body=self.body, content_type=self.content_type)


def refusal_of(status: int, message: str) -> RefusedError:
    """In the shape of vLLM's own errors."""
    kind = "BadRequestError" if status == 400 else "BadGatewayError"
    error = {"message": message, "type": kind, "param": None, "code": status}
    return RefusedError(status, json.dumps({"error": error}).encode())


class Instances:
    """Those of one side. They can be asked once `client` is set.

    Args:
        side: what the client is told that they are.
        urls: of each.
    """

    client: aiohttp.ClientSession

    def __init__(self, side: str, urls: Iterable[str]) -> None:
        self.side = side
        self.urls = [url.rstrip("/") for url in urls]
        self._next = itertools.cycle(self.urls)

    def turn(self) -> Iterator[str]:
        """Each once, from the one whose turn it is; the next time from the one after the last that was taken."""
        return itertools.islice(self._next, len(self.urls))

    async def post(
        self, url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> aiohttp.ClientResponse:
        """The answer, as soon as it begins. To be closed.

        Raises:
            aiohttp.ClientConnectorError: it does not listen: nothing was asked yet.
            RefusedError: it broke off.
        """
        try:
            return await self.client.post(url + path, json=body, headers=headers)
        except aiohttp.ClientConnectorError:
            raise
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.unreachable(url, error) from error

    @contextlib.asynccontextmanager
    async def asked(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[tuple[str, aiohttp.ClientResponse]]:
        """The instance whose turn it is, or the next one where it does not listen; and its answer, as soon as that
        begins. It is cut off when the block ends before it.

        Raises:
            RefusedError: none listens, or it broke off.
        """
        refusal: RefusedError | None = None
        for url in self.turn():
            try:
                answer = await self.post(url, path, body, headers)
            except aiohttp.ClientConnectorError as error:
                refusal = self.unreachable(url, error)
            else:
                async with answer:
                    yield url, answer
                return
        assert refusal is not None, "there are none"
        raise refusal

    async def content_of(self, url: str, answer: aiohttp.ClientResponse) -> bytes:
        """All of an answer.

        Raises:
            RefusedError: it broke off.
        """
        try:
            content: bytes = await answer.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self.unreachable(url, error) from error
        return content

    async def pieces_of(self, url: str, answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        """Of a stream; an error as vLLM tells one in a stream, if it breaks off."""
        try:
            async for piece in answer.content.iter_any():
                yield piece
        except (aiohttp.ClientError, TimeoutError) as error:
            yield b"data: " + self.unreachable(url, error).body + b"\n\ndata: [DONE]\n\n"

    async def health_of(self, url: str) -> str:
        """``ok``, or what is wrong."""
        try:
            async with asyncio.timeout(_HEALTH_S), self.client.get(f"{url}/health") as answer:
                return "ok" if answer.status == 200 else f"status {answer.status}"
        except TimeoutError:
            return f"no answer in {_HEALTH_S:.0f} s"
        except aiohttp.ClientError as error:
            return str(error)

    def unreachable(self, url: str, error: Exception) -> RefusedError:
        """What a client is told of it."""
        _log.error("%s instance %s: %r", self.side, url, error)
        words = str(error) or type(error).__name__
        return refusal_of(502, f"the {self.side} instance {url} could not be reached, or broke off: {words}")
