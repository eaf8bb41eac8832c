"""Traces of requests in the form of the public Mooncake traces: a JSON object a line.

Knows lines, fields and block IDs; knows neither pages nor processes. ``hash_ids`` has one ID for each 512 tokens of the
input, and equal IDs are equal prefixes.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from hurray_rdma.errors import ConfigError

__all__ = ["BLOCK_TOKENS", "Malformed", "Trace", "parse_trace", "read_trace"]

BLOCK_TOKENS = 512
"""Tokens that one ID stands for."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**31)]


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[float, msgspec.Meta(ge=0, le=1e15)]
    input_length: Annotated[int, msgspec.Meta(ge=1, le=2**31)]
    output_length: _Count
    hash_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no request."""

    line: int
    """From 1."""
    rule: str


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of their timestamps. Block IDs are numbered anew from 0, in order of appearance."""

    lines: NDArray[np.int64]
    """Where each request stands in the file, from 1, ``[num_requests]``."""
    arrival_s: NDArray[np.float64]
    """Seconds after the first, ``[num_requests]``."""
    input_tokens: NDArray[np.int64]
    """``[num_requests]``."""
    output_tokens: NDArray[np.int64]
    """``[num_requests]``."""
    block_ptr: NDArray[np.int64]
    """Where each request's blocks start, ``[num_requests + 1]``."""
    blocks: NDArray[np.uint32]
    """Block numbers of all requests, ``[block_ptr[-1]]``."""
    num_blocks: int
    """Distinct ones."""
    malformed: tuple[Malformed, ...]
    """Lines that were skipped."""

    def __len__(self) -> int:
        """Requests."""
        return len(self.lines)

    def blocks_of(self, request: int) -> NDArray[np.uint32]:
        """Block numbers of one request, in order."""
        return self.blocks[self.block_ptr[request] : self.block_ptr[request + 1]]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Blocks of each request, ``[num_requests]``."""
        return np.diff(self.block_ptr)

    @property
    def ragged(self) -> NDArray[np.bool_]:
        """Whether a request's last block has fewer than all its tokens, ``[num_requests]``."""
        return np.asarray(self.input_tokens % BLOCK_TOKENS != 0)


def read_trace(path: Path, *, skip_malformed: bool, limit: int | None = None) -> Trace:
    """Reads a file.

    Args:
        path: a JSON object a line; empty lines are passed over, further fields ignored.
        skip_malformed: keep the lines that are no requests in `Trace.malformed`; else the first is an error.
        limit: take so many requests from the start of the file.

    Raises:
        ConfigError: it cannot be read, a line is malformed, or no request is left.
    """
    try:
        with path.open("rb") as file:
            return parse_trace(file, skip_malformed=skip_malformed, limit=limit, name=str(path))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field="trace", value=str(path)) from error


def parse_trace(
    lines: Iterable[bytes], *, skip_malformed: bool, limit: int | None = None, name: str = "trace"
) -> Trace:
    """The same of lines as they come; ``name`` is told where they are wrong, the rest is as of `read_trace`."""
    decoder = msgspec.json.Decoder(_Line)
    kept: list[tuple[int, _Line]] = []
    malformed: list[Malformed] = []
    places: dict[int, _Place] = {}
    for number, text in enumerate(lines, 1):
        if limit is not None and len(kept) == limit:
            break
        if not text.strip():
            continue
        try:
            line = _decoded(decoder, text)
            _check(line, places)
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
            if not skip_malformed:
                raise ConfigError(
                    f"line {number} is no request: {error}; it begins with {text[:60]!r}",
                    field="trace",
                    value=name,
                    fix="Mend the line, or skip such lines with --skip-malformed",
                ) from error
            malformed.append(Malformed(number, str(error)))
            continue
        kept.append((number, line))
        for at, block in enumerate(line.hash_ids):
            places.setdefault(block, _Place.of(line, at, number))
    if not kept:
        raise ConfigError(
            f"must have a request: it has none, and {len(malformed)} malformed lines", field="trace", value=name
        )
    kept.sort(key=lambda pair: pair[1].timestamp)
    return _trace(kept, malformed)


def _decoded(decoder: msgspec.json.Decoder[_Line], text: bytes) -> _Line:
    if text.startswith(codecs.BOM_UTF8):
        raise ConfigError("must begin with an object, not with a byte order mark", field="line", value=text[:3])
    try:
        return decoder.decode(text)
    except RecursionError:
        raise ConfigError("is nested too deep", field="line", value=text[:4]) from None


class _Place(NamedTuple):
    """Where an ID was seen first; since it stands for a whole prefix, it is the same everywhere."""

    before: int | None
    """The ID before it."""
    tokens: int
    """What its block holds, at most `BLOCK_TOKENS`."""
    line: int

    @classmethod
    def of(cls, line: _Line, at: int, number: int) -> _Place:
        return cls(
            before=line.hash_ids[at - 1] if at else None,
            tokens=min(BLOCK_TOKENS, line.input_length - at * BLOCK_TOKENS),
            line=number,
        )


def _check(line: _Line, places: dict[int, _Place]) -> None:
    wanted = -(-line.input_length // BLOCK_TOKENS)
    if len(line.hash_ids) != wanted:
        raise ConfigError(
            f"must be {wanted} for input_length {line.input_length}", field="len(hash_ids)", value=len(line.hash_ids)
        )
    if len(set(line.hash_ids)) != len(line.hash_ids):
        raise ConfigError("has an ID twice", field="hash_ids", value=line.hash_ids[:4])
    for at, block in enumerate(line.hash_ids):
        if (known := places.get(block)) is None:
            continue
        here = _Place.of(line, at, 0)
        if here.before != known.before:
            before = "stands first" if known.before is None else f"comes after {known.before}"
            raise ConfigError(
                f"{before} in line {known.line}: equal IDs are equal prefixes", field=f"hash_ids[{at}]", value=block
            )
        if (here.tokens == BLOCK_TOKENS) != (known.tokens == BLOCK_TOKENS):
            raise ConfigError(
                f"has {here.tokens} tokens here and {known.tokens} in line {known.line}: equal IDs are equal blocks",
                field=f"hash_ids[{at}]",
                value=block,
            )


def _trace(kept: list[tuple[int, _Line]], malformed: list[Malformed]) -> Trace:
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(block, len(numbers)) for _, line in kept for block in line.hash_ids]
    timestamps = np.array([line.timestamp for _, line in kept])
    return Trace(
        lines=np.array([number for number, _ in kept], np.int64),
        arrival_s=(timestamps - timestamps[0]) / 1e3,
        input_tokens=np.array([line.input_length for _, line in kept], np.int64),
        output_tokens=np.array([line.output_length for _, line in kept], np.int64),
        block_ptr=np.concatenate([[0], np.cumsum([len(line.hash_ids) for _, line in kept])]).astype(np.int64),
        blocks=np.array(blocks, np.uint32),
        num_blocks=len(numbers),
        malformed=tuple(malformed),
    )
