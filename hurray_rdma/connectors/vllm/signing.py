"""Signatures of what passes through clients' hands: whoever has a token believes only who has it, too.

Knows neither keys nor what they mean.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from typing import Any

from hurray_rdma.errors import ConfigError

__all__ = ["SIGNATURE", "check_signature", "signature_of"]

SIGNATURE = "remote_signature"
"""The key of one."""


def signature_of(said: Mapping[str, Any], *, what: str, token: str) -> str:
    """HMAC-SHA256 of all that is said.

    Args:
        said: what JSON can tell.
        what: names the kind of it; what is signed as one kind is good for no other.
        token: of all instances.
    """
    text = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return hmac.new(token.encode(), f"hurray_rdma: kv_transfer_params of {what}\n{text}".encode(), "sha256").hexdigest()


def check_signature(params: Mapping[str, Any], said: Mapping[str, Any], *, what: str, token: str, fix: str) -> None:
    """Whether somebody with the token has signed it.

    Args:
        params: of a request; whatever came over the network.
        said: as `signature_of` is told.
        what, token: as of it.
        fix: what to do about another one.

    Raises:
        ConfigError: the parameters have no signature, or another.
    """
    signature = params.get(SIGNATURE)
    known = signature.encode(errors="replace") if isinstance(signature, str) else b""
    if not hmac.compare_digest(known, signature_of(said, what=what, token=token).encode()):
        raise ConfigError(
            f"is not what an instance with this one's token makes of them ({said})",
            field=f"kv_transfer_params.{SIGNATURE}",
            value=signature,
            fix=fix,
        )
