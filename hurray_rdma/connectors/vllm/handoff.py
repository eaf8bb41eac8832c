"""What two vLLM instances tell each other of a request, through `kv_transfer_params` and whatever proxy carries them.

They pass through clients' hands, and say where to connect to, which is where the engine shows its token, and under
which name pages come: so whoever has a token signs them, and whoever has one believes only what is signed. In push mode
a proxy makes them, and prefill connects only to where its own settings allow. Knows the keys and their rules; what else
a proxy adds is left alone. Knows no vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from hurray_rdma.connectors.vllm.signing import SIGNATURE, check_signature, signature_of
from hurray_rdma.control import parse_address
from hurray_rdma.errors import ConfigError

__all__ = [
    "Layout",
    "PushTarget",
    "PushedPrefill",
    "RemotePrefill",
    "push_params",
    "wants_remote_decode",
    "wants_remote_prefill",
]

_READ, _PUSHED = "RemotePrefill, 1", "a push, 1"
"""Kinds of what is signed."""
_MIN_LEASE_S = 1.0
"""However short the other side's is: signs of life are not sent in every step."""
_AS_IT_IS = "Pass the kv_transfer_params of the prefill side's answer on as they are"
_SAME_TOKEN = "give both instances the same token_file"


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

    def to_params(self, *, token: str | None) -> dict[str, Any]:
        """As `kv_transfer_params` that ask the decode side for it; signed, where there is a token."""
        signature = {} if token is None else {SIGNATURE: signature_of(asdict(self), what=_READ, token=token)}
        return signature | {
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
    def from_params(cls, params: Mapping[str, Any], /, *, token: str | None) -> RemotePrefill:
        """From a request's `kv_transfer_params`; whatever came over the network.

        Args:
            params: of the request.
            token: with one, they must be signed by an instance that has it, too; without, they are believed.

        Raises:
            ConfigError: a key is missing, of another type or out of range; or they are not signed, or other ones were.
        """
        told = cls(
            key=_taken(params, "remote_request_id", str),
            addresses=_addresses(params),
            num_tokens=_positive(params, "remote_num_tokens"),
            model=_taken(params, "remote_model", str),
            lease_s=_seconds(params, "remote_lease_s"),
            block_size=_positive(params, "remote_block_size"),
            layout=_taken(params, "remote_layout", str),
        )
        if token is not None:
            check_signature(params, asdict(told), what=_READ, token=token, fix=f"{_AS_IT_IS}, and {_SAME_TOKEN}")
        return replace(told, lease_s=max(told.lease_s, _MIN_LEASE_S))


def push_params(
    name: str,
    *,
    token: str | None,
    addresses: Sequence[str] | None = None,
    block_size: int | None = None,
) -> dict[str, Any]:
    """`kv_transfer_params` that ask for a push; signed, where there is a token.

    Args:
        name: of the hand-over, of both sides: its own for each, and none that anybody can guess.
        token: of all instances.
        addresses: for prefill, ``host:port`` of each tensor-parallel worker of the decode side; None for decode.
        block_size: tokens of the other side's blocks, where they are not as many as in those of who is asked.
    """
    params: dict[str, Any] = {"do_remote_decode": addresses is not None, "do_remote_prefill": addresses is None}
    params["remote_request_id"] = name
    if addresses is not None:
        params["remote_addresses"] = list(addresses)
    if block_size is not None:
        params["remote_block_size"] = block_size
    if token is not None:
        params[SIGNATURE] = signature_of(_said_of_push(params), what=_PUSHED, token=token)
    return params


def _said_of_push(params: Mapping[str, Any]) -> dict[str, Any]:
    names = ("remote_request_id", "remote_addresses", "remote_block_size")
    return {"to": "decode" if wants_remote_prefill(params) else "prefill"} | {name: params.get(name) for name in names}


def _check_push(params: Mapping[str, Any], token: str | None) -> None:
    """A name that is not signed may be one that a client has chosen, and somebody else's."""
    if token is not None:
        fix = f"Let the proxy sign them (its --token-file), and {_SAME_TOKEN}"
        check_signature(params, _said_of_push(params), what=_PUSHED, token=token, fix=fix)


@dataclass(frozen=True, slots=True, kw_only=True)
class PushTarget:
    """Where the pages of a prompt are pushed: what a proxy gives the prefill side in push mode."""

    key: str
    """The proxy's name for the hand-over, its own for each; the decode side is given the same."""
    addresses: tuple[str, ...]
    """``host:port`` of each tensor-parallel worker of the decode side."""
    block_size: int
    """Tokens of a block there."""

    @classmethod
    def from_params(cls, params: Mapping[str, Any], /, *, block_size: int, token: str | None) -> PushTarget:
        """From a request's `kv_transfer_params`, as of `push_params`.

        Args:
            params: whatever came over the network.
            block_size: of this side, where they do not say what the other's is.
            token: as of `RemotePrefill.from_params`.

        Raises:
            ConfigError: a key is missing, of another type or out of range; or they are not signed, or other ones were.
        """
        told = cls(
            key=_taken(params, "remote_request_id", str),
            addresses=_addresses(params),
            block_size=_positive({"remote_block_size": block_size, **params}, "remote_block_size"),
        )
        _check_push(params, token)
        return told


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedPrefill:
    """A prompt whose pages the other side pushes: what a proxy gives the decode side in push mode."""

    key: str
    num_tokens: int
    """Of the prompt."""
    block_size: int
    """Tokens of a block there."""

    @classmethod
    def from_params(
        cls, params: Mapping[str, Any], /, *, num_tokens: int, block_size: int, token: str | None
    ) -> PushedPrefill:
        """From a request's `kv_transfer_params`, as of `push_params`.

        Args:
            params: whatever came over the network.
            num_tokens: of the request's prompt.
            block_size, token: as of `PushTarget.from_params`.

        Raises:
            ConfigError: as of it.
        """
        told = cls(
            key=_taken(params, "remote_request_id", str),
            num_tokens=num_tokens,
            block_size=_positive({"remote_block_size": block_size, **params}, "remote_block_size"),
        )
        _check_push(params, token)
        return told


def _addresses(params: Mapping[str, Any]) -> tuple[str, ...]:
    """Of workers; each can be read."""
    addresses = _taken(params, "remote_addresses", list)
    if not addresses or not all(isinstance(address, str) for address in addresses):
        raise ConfigError("must be one or more strings", field="remote_addresses", value=addresses)
    for address in addresses:
        parse_address(address)
    return tuple(addresses)


def _positive(params: Mapping[str, Any], name: str) -> int:
    number: int = _taken(params, name, int)
    if number < 1:
        raise ConfigError("must be above 0", field=name, value=number)
    return number


def _seconds(params: Mapping[str, Any], name: str) -> float:
    number = _taken(params, name, (int, float))
    try:
        seconds = float(number)
    except OverflowError:
        seconds = math.inf
    if not (math.isfinite(seconds) and seconds > 0):
        raise ConfigError("must be a time above 0", field=name, value=seconds)
    return seconds


def _taken(params: Mapping[str, Any], name: str, kind: type | tuple[type, ...]) -> Any:
    value = params.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConfigError(
            "is not what the prefill side returned",
            field=f"kv_transfer_params.{name}",
            value=value,
            fix=_AS_IT_IS,
        )
    return value
