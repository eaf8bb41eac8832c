"""Settings of a replay: ``replay.toml``, a file of the user's over it, options over both; checked once.

Knows names, types and ranges of settings; knows nothing of what they do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from hurray_rdma.demo.config import CacheConfig, Settings, merge_settings
from hurray_rdma.errors import ConfigError

__all__ = ["ReplayConfig", "RunConfig", "WorkersConfig", "load_config"]

_Workers = Annotated[int, msgspec.Meta(ge=1, le=64)]
_Pages = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class WorkersConfig(_Table, frozen=True):
    """Processes and their pools."""

    prefill: _Workers
    """Sending processes; they take turns."""
    decode: _Workers
    """Receiving processes."""
    prefill_pages: _Pages
    """Of each prefill worker's pool."""
    decode_pages: _Pages
    """Of each decode worker's pool."""
    in_flight: Annotated[int, msgspec.Meta(ge=1, le=256)]
    """Requests that a prefill worker sends at a time."""


class RunConfig(_Table, frozen=True):
    """How the trace is run."""

    speed: Annotated[float, msgspec.Meta(gt=0)]
    """Seconds of the trace in one second; inf: as fast as it goes."""
    token_ms: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    """Decoding of one output token, milliseconds of the trace's time."""
    timeout_s: _Seconds
    """Time budget of one send, the wait for pages included, seconds."""
    deadline_s: _Seconds
    """Time budget of everything, seconds."""
    lane: str
    """UCX transports (``UCX_TLS``); empty leaves the choice to UCX."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    """Of the content."""


class ReplayConfig(_Table, frozen=True):
    """Everything that shapes one replay, besides the trace."""

    cache: CacheConfig
    workers: WorkersConfig
    run: RunConfig


def load_config(path: Path | None = None, *, overrides: Settings | None = None) -> ReplayConfig:
    """Reads the defaults, lays the file at ``path`` and then ``overrides`` over them, and checks the result.

    Args:
        path: a TOML file with some or all keys of ``replay.toml``.
        overrides: settings that outrank both files; a value of None is left out.

    Raises:
        ConfigError: a file cannot be read, or a setting is unknown, of the wrong type or out of range.
    """
    config = merge_settings(ReplayConfig, "replay.toml", path, overrides, what="the replay")
    if config.cache.page_size < 2:
        raise ConfigError(
            "must be 2 or more, so that a block that is not full can be a page that is not full",
            field="cache.page_size",
            value=config.cache.page_size,
        )
    return config
