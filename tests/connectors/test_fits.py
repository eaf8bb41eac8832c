"""Which instances the connector refuses, by the names that vLLM gives what they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hurray_rdma import ConfigError
from hurray_rdma.connectors.vllm.config import ConnectorConfig
from hurray_rdma.connectors.vllm.fits import check_instance


def parallel(**changes: int) -> Any:
    sizes = {"pipeline_parallel_size": 1, "prefill_context_parallel_size": 1, "decode_context_parallel_size": 1}
    return SimpleNamespace(**(sizes | changes))


def groups(*kinds: str) -> list[Any]:
    return [SimpleNamespace(kv_cache_spec=type(kind, (), {})()) for kind in kinds]


@pytest.mark.parametrize("kind", ["FullAttentionSpec", "MLAAttentionSpec"])
def test_caches_that_hold_every_token_are_known(kind: str) -> None:
    check_instance(parallel(), groups(kind))


@pytest.mark.parametrize(
    "kind",
    [
        "SlidingWindowSpec",
        "SlidingWindowMLASpec",
        "ChunkedLocalAttentionSpec",
        "MambaSpec",
        "CrossAttentionSpec",
        "SinkFullAttentionSpec",
        "UniformTypeKVCacheSpecs",
    ],
)
def test_a_single_group_of_another_kind_is_refused_by_its_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=rf"kv_cache_groups\[0\].kv_cache_spec = '{kind}': must be one of"):
        check_instance(parallel(), groups(kind))


def test_what_derives_from_a_kind_that_is_known_is_not_that_kind() -> None:
    full = type("FullAttentionSpec", (), {})
    derived = SimpleNamespace(kv_cache_spec=type("RSWASpec", (full,), {})())
    with pytest.raises(ConfigError, match="RSWASpec"):
        check_instance(parallel(), [derived])


def test_hybrid_models_and_parallel_sizes() -> None:
    with pytest.raises(ConfigError, match="kv_cache_groups = 2: must be 1"):
        check_instance(parallel(), groups("FullAttentionSpec", "MambaSpec"))
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2: must be 1"):
        check_instance(parallel(pipeline_parallel_size=2), groups("FullAttentionSpec"))


def test_no_two_workers_have_one_port() -> None:
    fixed, any_free = ConnectorConfig.from_extra({"port": 65530}), ConnectorConfig.from_extra({})
    assert [fixed.port_of(first + rank) for first in (0, 2, 4) for rank in range(2)] == list(range(65530, 65536))
    assert [any_free.port_of(worker) for worker in (0, 5)] == [0, 0]
    with pytest.raises(ConfigError, match="port = 65530: must be at most 65529: worker 6"):
        fixed.port_of(6)
