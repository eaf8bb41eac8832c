"""Settings of the demo: defaults from ``demo.toml``, a file of the user's over them, options over both; checked once.

Knows names, types and ranges of settings; knows nothing of what they do.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

import hurray_rdma
from hurray_rdma.errors import ConfigError

__all__ = [
    "BatchConfig",
    "CacheConfig",
    "DemoConfig",
    "LlmConfig",
    "RunConfig",
    "Settings",
    "default_path",
    "load_config",
    "merge_settings",
    "named",
    "read_toml",
]

Settings = Mapping[str, Mapping[str, Any]]
"""Table of the file -> key -> value."""

_Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
_Config = TypeVar("_Config")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class CacheConfig(_Table, frozen=True):
    """Geometry of the cache; see `hurray_rdma.CacheSpec`."""

    num_layers: _Count
    num_heads: _Count
    head_dim: _Count
    page_size: _Count
    """Tokens per page."""
    dtype: str


class BatchConfig(_Table, frozen=True):
    """The sequences that are sent."""

    num_sequences: _Count
    tokens_min: _Count
    """Shortest sequence."""
    tokens_max: _Count
    """Longest sequence."""
    num_sharing: Annotated[int, msgspec.Meta(ge=0)]
    """Sequences that begin with the same prefix."""
    shared_prefix_tokens: Annotated[int, msgspec.Meta(ge=0)]
    """Length of that prefix; the whole pages of it are shared."""
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class RunConfig(_Table, frozen=True):
    """How the demo runs."""

    rounds: _Count
    """Transfers, each with a memcpy of the same pages and a comparison of every token."""
    lane: str
    """UCX transports (``UCX_TLS``); empty leaves the choice to UCX."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """Time budget of the whole demo, seconds."""


class LlmConfig(_Table, frozen=True):
    """The language model's run (``--llm``)."""

    new_tokens: Annotated[int, msgspec.Meta(ge=2, le=4096)]
    """Tokens to generate for each prompt: the first by the prefill process, the others by the decode process."""
    rounds: _Count
    """Transfers of each kind that are timed: layer by layer, and all layers at the end."""
    max_prompt_tokens: _Count
    """Room in each receive pool, tokens."""
    page_size: _Count
    """Tokens per page."""
    decode_page_size: _Count
    """Tokens per page of the receive pools that are unlike the sender's; equal to ``page_size``: there are none."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86400)]
    """Time budget of the whole run, seconds."""
    system_prompt: Annotated[str, msgspec.Meta(min_length=1)]
    """What every prompt begins with."""
    prompts: Annotated[tuple[Annotated[str, msgspec.Meta(min_length=1)], ...], msgspec.Meta(min_length=1)]
    """One sequence each."""


class DemoConfig(_Table, frozen=True):
    """Everything that shapes one run of the demo; the same value makes both processes do the same."""

    cache: CacheConfig
    batch: BatchConfig
    run: RunConfig
    llm: LlmConfig


def default_path(name: str = "demo.toml") -> Path:
    """A shipped file of settings: inside the installed package, or beside the package in a checkout.

    Raises:
        ConfigError: it is in neither place.
    """
    package = Path(hurray_rdma.__file__).parent
    places = (package / "configs" / name, package.parent / "configs" / name)
    for path in places:
        if path.is_file():
            return path
    raise ConfigError("does not exist", field=f"configs/{name}", value=str(places[0]), fix="Install the package again")


def load_config(path: Path | None = None, *, overrides: Settings | None = None) -> DemoConfig:
    """Reads the defaults, lays the file at ``path`` and then ``overrides`` over them, and checks the result.

    Args:
        path: a TOML file with some or all keys of ``demo.toml``.
        overrides: settings that outrank both files; a value of None is left out.

    Raises:
        ConfigError: a file cannot be read, or a setting is unknown, of the wrong type or out of range.
    """
    config = merge_settings(DemoConfig, "demo.toml", path, overrides, what="the demo")
    _check_batch(config)
    return config


def merge_settings(
    kind: type[_Config], defaults: str, path: Path | None, overrides: Settings | None, *, what: str
) -> _Config:
    """Settings of one kind: shipped defaults, a file over them, options over both.

    Args:
        kind: a struct of tables.
        defaults: name of the shipped file.
        path, overrides: as of `load_config`.
        what: that has the settings, for messages.

    Raises:
        ConfigError: as of `load_config`.
    """
    merged = read_toml(default_path(defaults))
    layers: list[Settings] = [] if path is None else [read_toml(path)]
    layers.append(
        {table: {k: v for k, v in keys.items() if v is not None} for table, keys in (overrides or {}).items()}
    )
    for layer in layers:
        for table, keys in layer.items():
            if not isinstance(keys, Mapping):
                raise ConfigError(f"must stand in one of the tables {sorted(merged)}", field=table, value=keys)
            merged[table] = {**merged.get(table, {}), **keys}
    try:
        return msgspec.convert(merged, kind)
    except msgspec.ValidationError as error:
        raise named(error, merged, kind, what=what) from error


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field="config", value=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"is not TOML: {error}", field="config", value=str(path)) from error


def named(error: msgspec.ValidationError, merged: Mapping[str, Any], kind: type[Any], *, what: str) -> ConfigError:
    """The error of a setting, with its name and value. msgspec says the rule and the place; the value is found there.

    Args:
        error: as msgspec raised it.
        merged: what was converted.
        kind: to what struct.
        what: that has the settings, for the message.
    """
    rule, _, place = str(error).partition(" - at `$.")
    field = place.rstrip("`")
    unknown = re.search(r"unknown field `(.+)`", rule)
    fix = None
    if unknown:
        fix = f"There are {', '.join(_keys(kind, field))}"
        field = f"{field}.{unknown[1]}".lstrip(".")
        rule = f"is no setting of {what}"
    value: Any = merged
    for key in _steps(field):
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):  # it is missing, or something stands where a table should
            value = None
    return ConfigError(rule, field=field, value=value, fix=fix)


def _steps(place: str) -> list[str | int]:
    """``sweep[0].lane`` as what leads there one by one."""
    return [int(key) if key.isdigit() else key for key in re.findall(r"\w+", place)]


def _keys(kind: type[Any], place: str) -> list[str]:
    """Those of the table at a place: ``run``, ``sweep[0]``, or "" for the uppermost."""
    table: Any = msgspec.inspect.type_info(kind)
    for key in _steps(place):
        table = (
            table.item_type if isinstance(key, int) else next(each.type for each in table.fields if each.name == key)
        )
        if isinstance(table, msgspec.inspect.UnionType):  # it may be left out
            (table,) = (each for each in table.types if not isinstance(each, msgspec.inspect.NoneType))
    return [each.name for each in table.fields]


def _check_batch(config: DemoConfig) -> None:
    batch = config.batch
    if batch.tokens_max < batch.tokens_min:
        raise ConfigError(
            f"must be at least batch.tokens_min {batch.tokens_min}", field="batch.tokens_max", value=batch.tokens_max
        )
    if batch.num_sharing > batch.num_sequences:
        raise ConfigError(
            f"must be at most batch.num_sequences {batch.num_sequences}",
            field="batch.num_sharing",
            value=batch.num_sharing,
        )
    if batch.shared_prefix_tokens > batch.tokens_min:
        raise ConfigError(
            f"must be at most batch.tokens_min {batch.tokens_min}: each sharing sequence holds all of the prefix",
            field="batch.shared_prefix_tokens",
            value=batch.shared_prefix_tokens,
        )
