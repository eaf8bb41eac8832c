"""Which vLLM instances the connector can be of. Knows vLLM's names of what they are, and imports nothing of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hurray_rdma.errors import ConfigError

__all__ = ["check_instance"]

_KNOWN_CACHES = ("FullAttentionSpec", "MLAAttentionSpec")
"""Whose blocks hold all tokens of a prompt, in their order, and nothing else; with a ``sliding_window``, too: that says
what vLLM looks at, not what it keeps. Exactly these: what derives from them keeps something else besides."""


def check_instance(parallel: Any, groups: Sequence[Any], /) -> None:
    """Refuses what would be handed over wrongly, or in part.

    Args:
        parallel: vLLM's `ParallelConfig`.
        groups: `KVCacheConfig.kv_cache_groups`.

    Raises:
        ConfigError: the instance is of a kind that the connector does not know.
    """
    for name in ("pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError("must be 1: the connector does not know it", field=name, value=getattr(parallel, name))
    if len(groups) != 1:
        rule = "must be 1: the connector does not know hybrid models"
        raise ConfigError(rule, field="kv_cache_groups", value=len(groups))
    kind = type(groups[0].kv_cache_spec).__name__
    if kind not in _KNOWN_CACHES:
        raise ConfigError(
            f"must be one of {_KNOWN_CACHES}: blocks of others do not hold a prompt's tokens one after another",
            field="kv_cache_groups[0].kv_cache_spec",
            value=kind,
        )
