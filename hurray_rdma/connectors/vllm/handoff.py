"""What two vLLM instances tell each other of a request, through `kv_transfer_params` and whatever proxy carries them.

Knows the keys and their rules; what else a proxy adds is left alone. Knows no vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from hurray_rdma.errors import ConfigError

__all__ = ["Layout", "RemotePrefill", "wants_remote_decode", "wants_remote_prefill"]


class Layout(StrEnum):
    """What an attention backend keeps inside a block; others than these are known by name only."""

    ROWS = "rows"
    """A token's content lies together: blocks can be cut between any two tokens."""
    CPU_VEC = "cpu-vec"
    """Of vLLM's CPU backend without AMX: of each head first the keys, ``[content, tokens]``, then the values,
    ``[tokens, content]``. (Found by writing known numbers with its own `cpu_attn_reshape_and_cache`, vLLM 0.32.)"""


def wants_remote_decode(params: Mapping[str, Any] | None, /) -> bool:
    """Whether a request is a prefill whose pages another instance will want."""
    return bool(params and params.get("do_remote_decode"))


def wants_remote_prefill(params: Mapping[str, Any] | None, /) -> bool:
    """Whether another instance has the pages of a request's prompt."""
    return bool(params and params.get("do_remote_prefill"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePrefill:
    """Where the pages of a prompt are: what the prefill side returns, and the decode side is given."""

    key: str
    """What they are published as."""
    addresses: tuple[str, ...]
    """``host:port`` of each tensor-parallel worker that has them."""
    num_tokens: int
    """Of the prompt."""
    model: str
    """What the cache is of, as of `model_of`."""
    lease_s: float
    """How long they are kept if nobody asks for them."""
    block_size: int
    """Tokens of a block there."""
    layout: str
    """What is inside a block, as of `Layout`."""

    def to_params(self) -> dict[str, Any]:
        """As `kv_transfer_params` that ask the decode side for it."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_request_id": self.key,
            "remote_addresses": list(self.addresses),
            "remote_num_tokens": self.num_tokens,
            "remote_model": self.model,
            "remote_lease_s": self.lease_s,
            "remote_block_size": self.block_size,
            "remote_layout": self.layout,
        }

    @classmethod
    def from_params(cls, params: Mapping[str, Any], /) -> RemotePrefill:
        """From a request's `kv_transfer_params`; whatever came over the network.

        Raises:
            ConfigError: a key is missing, or of another type.
        """
        addresses = _taken(params, "remote_addresses", list)
        if not addresses or not all(isinstance(address, str) for address in addresses):
            raise ConfigError("must be one or more strings", field="remote_addresses", value=addresses)
        num_tokens = _taken(params, "remote_num_tokens", int)
        if num_tokens < 1:
            raise ConfigError("must be above 0", field="remote_num_tokens", value=num_tokens)
        return cls(
            key=_taken(params, "remote_request_id", str),
            addresses=tuple(addresses),
            num_tokens=num_tokens,
            model=_taken(params, "remote_model", str),
            lease_s=float(_taken(params, "remote_lease_s", (int, float))),
            block_size=_taken(params, "remote_block_size", int),
            layout=_taken(params, "remote_layout", str),
        )


def _taken(params: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = params.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(
            "is not what the prefill side returned",
            field=f"kv_transfer_params.{name}",
            value=value,
            fix="Pass the kv_transfer_params of the prefill side's answer on as they are",
        )
    return value
