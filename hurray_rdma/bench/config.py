"""Settings of the benchmark: one TOML file, options over it; checked once.

Knows names, types and ranges of settings; knows nothing of what they do. A section that is left out is not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

import hurray_rdma
from hurray_rdma.bench.case import Pattern
from hurray_rdma.demo.config import named, read_toml
from hurray_rdma.errors import ConfigError

__all__ = [
    "BenchConfig",
    "ContactConfig",
    "FreshConfig",
    "IdleConfig",
    "LatencyConfig",
    "OverheadConfig",
    "OverlapConfig",
    "PlanningConfig",
    "RunConfig",
    "ServeConfig",
    "SweepConfig",
    "load_config",
]

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Mib = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]
_PageNbytes = Annotated[int, msgspec.Meta(ge=1, le=2**30)]
_Counts = Annotated[tuple[_Count, ...], msgspec.Meta(min_length=1)]
_Pages = Annotated[tuple[_PageNbytes, ...], msgspec.Meta(min_length=1)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class RunConfig(_Table, frozen=True):
    """What all sections share."""

    rounds: _Count = 5
    """Rounds of every section; all parties take their turn in each."""
    deadline_s: _Seconds = 3600.0
    """Time budget of everything, seconds."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] = 2026
    """Of page lists and content."""
    peers: tuple[str, ...] = ()
    """Besides the engine: memcpy, cma, ucx_put, ucx_perftest, socket, nixl, mooncake."""
    huge_pages: bool = True
    """Whether all memory, everyone's, asks for transparent huge pages."""


class SweepConfig(_Table, frozen=True):
    """Whole transfers: every page size with every transfer size and pattern."""

    lane: str
    """UCX transports (``UCX_TLS``), e.g. ``"tcp"``; empty leaves the choice to UCX."""
    page_nbytes: _Pages
    transfer_mib: Annotated[tuple[_Mib, ...], msgspec.Meta(min_length=1)]
    """Bytes of one transfer, MiB."""
    patterns: Annotated[tuple[Pattern, ...], msgspec.Meta(min_length=1)]
    """How the pages lie: random, gather, fragmented, contiguous."""


class LatencyConfig(_Table, frozen=True):
    """Small transfers, warm, one after the other."""

    page_nbytes: _PageNbytes
    num_pages: _Counts
    repeats: _Count
    """Transfers a round."""
    ahead_pages: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Pages that the receiver (``hurray``) grants ahead, as of `hurray_rdma.Engine`: a small send
    then asks for none."""


class OverlapConfig(_Table, frozen=True):
    """Layer by layer beside computing."""

    num_layers: Annotated[int, msgspec.Meta(ge=2, le=1024)]
    layer_mib: _Mib
    page_nbytes: _PageNbytes
    compute_ratio: Annotated[float, msgspec.Meta(ge=0.1, le=100)]
    """Computing of a layer over the transfer of one, in time."""


class PlanningConfig(_Table, frozen=True):
    """Plans alone."""

    num_pages: _Counts


class OverheadConfig(_Table, frozen=True):
    """What a page costs beyond its bytes."""

    page_nbytes: _PageNbytes
    num_pages: _Count


class ContactConfig(_Table, frozen=True):
    """Cold peers."""

    page_nbytes: _PageNbytes
    pool_pages: _Counts


class IdleConfig(_Table, frozen=True):
    """Nothing to do."""

    seconds: _Seconds


class FreshConfig(_Table, frozen=True):
    """One contiguous snapshot."""

    mib: _Mib
    page_nbytes: _PageNbytes


class ServeConfig(_Table, frozen=True):
    """The pools of `hurray-rdma serve`: one for each page size, so that a sender of any of them finds its like."""

    page_nbytes: _Pages
    pool_mib: _Mib
    """Of each pool, MiB."""


class BenchConfig(_Table, frozen=True):
    """Everything that shapes one run."""

    run: RunConfig
    sweep: tuple[SweepConfig, ...] = ()
    latency: LatencyConfig | None = None
    overlap: OverlapConfig | None = None
    planning: PlanningConfig | None = None
    overhead: OverheadConfig | None = None
    contact: ContactConfig | None = None
    idle: IdleConfig | None = None
    fresh: FreshConfig | None = None
    serve: ServeConfig | None = None


def load_config(source: str, *, overrides: Mapping[str, Any] | None = None) -> BenchConfig:
    """Reads settings and checks them.

    Args:
        source: ``"quick"``, ``"full"`` or ``"two-machines"`` for a shipped file, or the path of one.
        overrides: settings of ``[run]`` that outrank the file; a value of None is left out.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown, of the wrong type or out of range.
    """
    path = _shipped(source) or Path(source)
    if path == Path(source) and not path.exists():
        raise ConfigError(
            "does not exist", field="--config", value=source, fix="Give quick, full, two-machines, or a TOML file"
        )
    tables = read_toml(path)
    tables["run"] = {**tables.get("run", {}), **{k: v for k, v in (overrides or {}).items() if v is not None}}
    try:
        config = msgspec.convert(tables, BenchConfig)
    except msgspec.ValidationError as error:
        raise named(error, tables, BenchConfig, what="the benchmark") from error
    for name in config.run.peers:
        if name not in _peer_names():
            raise ConfigError(f"must be one of {', '.join(_peer_names())}", field="run.peers", value=name)
    return config


def _peer_names() -> tuple[str, ...]:
    return ("memcpy", "cma", "ucx_put", "ucx_perftest", "socket", "nixl", "mooncake")


def _shipped(name: str) -> Path | None:
    package = Path(hurray_rdma.__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        path = folder / f"bench-{name}.toml"
        if path.is_file():
            return path
    return None
