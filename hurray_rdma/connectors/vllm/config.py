"""What `kv_connector_extra_config` may say, checked once. Knows no vLLM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from hurray_rdma.control import parse_address
from hurray_rdma.errors import ConfigError

__all__ = ["ConnectorConfig", "Mode"]

_MAX_PORT = 65535


class Mode(StrEnum):
    """Which side moves the pages; the same on both."""

    PULL = "pull"
    """Decode reads them once it has blocks for them."""
    PUSH = "push"
    """Prefill writes them layer by layer while it computes the end of the prompt, into blocks that decode has ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """Settings of one vLLM instance; the keys of ``kv_connector_extra_config``.

    Raises:
        ConfigError: a value is out of range.
    """

    mode: str = Mode.PULL
    """``pull`` or ``push``, as of `Mode`."""
    host: str = "127.0.0.1"
    """Address to listen on, and what the other side is told to connect to."""
    advertise: str | None = None
    """What the other side is told instead, where ``host`` is 0.0.0.0 for instance."""
    port: int = 0
    """Of the first worker; each tensor-parallel rank has the next one, and each data-parallel rank those after the rank
    before. 0 is any free one: the other side is told."""
    token_file: str | None = None
    """Where the shared secret of all instances is that exchange pages. In a file, since vLLM logs all settings."""
    allow_unauthenticated: bool = False
    """As of `hurray_rdma.Engine`."""
    push_to: Sequence[str] = ()
    """``host:port`` of each decode worker that a prefill side may push to: a request names them, and clients can write
    requests; the token is shown to no other."""
    lease_s: float = 60.0
    """How long blocks are kept for the other side: prefill's while nobody asks for them, decode's until prefill begins
    to push into them, which it does when it computes the end of the prompt."""
    timeout_s: float = 30.0
    """Budget of one transfer, the connection included."""
    peer_timeout_s: float = 5.0
    """As of `hurray_rdma.Engine`."""
    map_caches: bool = True
    """On the CPU: replaces the memory of vLLM's cache tensors, in place, by such as instances on this host can map
    (`PagePool.from_arrays`)."""
    switch_interval_s: float = 1e-4
    """How long vLLM's loop may keep Python's lock while the engine's thread waits for it (`sys.setswitchinterval`, of
    the whole process: with Python's own 5 ms each step of a hand-over waits so long). A shorter one stays."""

    def __post_init__(self) -> None:
        if self.mode not in tuple(Mode):
            raise ConfigError(f"must be one of {[str(mode) for mode in Mode]}", field="mode", value=self.mode)
        for address in self.push_to:
            if not isinstance(address, str):
                raise ConfigError("must be of strings", field="push_to", value=type(address).__name__)
            parse_address(address)
        if not 0 <= self.port <= _MAX_PORT:
            raise ConfigError(f"must be from 0 to {_MAX_PORT}", field="port", value=self.port)
        for name in ("lease_s", "timeout_s", "peer_timeout_s", "switch_interval_s"):
            if getattr(self, name) <= 0:
                raise ConfigError("must be above 0", field=name, value=getattr(self, name))

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any], /) -> ConnectorConfig:
        """From ``kv_connector_extra_config``.

        Raises:
            ConfigError: a key is unknown, or a value of the wrong type or out of range.
        """
        kinds: dict[str, tuple[type, ...]] = {}
        for each in fields(cls):
            kinds[each.name] = _KINDS.get(str(each.type), (str,))
        for name, value in extra.items():
            if name not in kinds:
                raise ConfigError(
                    f"is no key; there are {sorted(kinds)}",
                    field="kv_connector_extra_config",
                    value=name,
                    fix="Write the secret to a file, and its path as token_file" if name == "token" else None,
                )
            if not isinstance(value, kinds[name]) or (isinstance(value, bool) and bool not in kinds[name]):
                # Not the value: who mistakes a key may have written a secret there.
                kind = type(value).__name__
                raise ConfigError(f"must be {kinds[name][0].__name__}", field=f"type of {name}", value=kind)
        return cls(**extra)

    def port_of(self, worker: int, /) -> int:
        """Where a worker listens.

        Args:
            worker: its number among those of all data-parallel ranks.

        Raises:
            ConfigError: there is no such port.
        """
        if self.port and self.port + worker > _MAX_PORT:
            raise ConfigError(f"must be at most {_MAX_PORT - worker}: worker {worker}", field="port", value=self.port)
        return self.port + worker if self.port else 0

    @property
    def pushes(self) -> bool:
        """Whether prefill writes."""
        return self.mode == Mode.PUSH

    def check_role(self, *, produces: bool) -> None:
        """Whether an instance can do what it is there for.

        Args:
            produces: it computes prompts for others.

        Raises:
            ConfigError: it pushes, and may push to nobody.
        """
        if self.pushes and produces and not self.push_to:
            raise ConfigError(
                "is empty: in push mode prefill writes to nobody else",
                field="push_to",
                value=list(self.push_to),
                fix='List each decode worker there as "host:port", and give the decode side a fixed port',
            )

    def secret(self) -> str | None:
        """The token; None is none.

        Raises:
            ConfigError: ``token_file`` cannot be read, or is empty.
        """
        if self.token_file is None:
            return None
        try:
            token = Path(self.token_file).read_text().strip()
        except OSError as error:
            raise ConfigError(f"cannot be read: {error}", field="token_file", value=self.token_file) from error
        if not token:
            raise ConfigError("is empty", field="token_file", value=self.token_file)
        return token


_KINDS: dict[str, tuple[type, ...]] = {"int": (int,), "float": (float, int), "bool": (bool,), "Sequence[str]": (list,)}
