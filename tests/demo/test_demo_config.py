"""Settings: the shipped defaults, what outranks what, and every wrong one named with its value."""

from __future__ import annotations

from pathlib import Path

import pytest

from hurray_rdma.demo import load_config
from hurray_rdma.errors import ConfigError


def test_the_defaults_are_the_geometry_of_llama_3_8b_and_a_batch_that_shares() -> None:
    config = load_config()
    cache = config.cache
    assert (cache.num_layers, cache.num_heads, cache.head_dim, cache.page_size) == (32, 8, 128, 16)
    assert cache.dtype == "bfloat16"
    assert config.batch.num_sequences >= 8
    assert config.batch.num_sharing >= 2
    assert config.batch.shared_prefix_tokens >= cache.page_size
    assert config.batch.tokens_min < config.batch.tokens_max
    assert config.run.rounds >= 5


def test_a_file_outranks_the_defaults_and_options_outrank_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[cache]\nnum_layers = 3\nnum_heads = 2\n")
    config = load_config(path, overrides={"cache": {"num_heads": 5, "head_dim": None}})
    assert (config.cache.num_layers, config.cache.num_heads, config.cache.head_dim) == (3, 5, 128)


@pytest.mark.parametrize(
    ("overrides", "field", "value"),
    [
        ({"cache": {"num_layers": 0}}, "cache.num_layers", 0),
        ({"cache": {"page_size": -16}}, "cache.page_size", -16),
        ({"cache": {"dtype": 16}}, "cache.dtype", 16),
        ({"run": {"deadline_s": 0.0}}, "run.deadline_s", 0.0),
        ({"run": {"rounds": "many"}}, "run.rounds", "many"),
        ({"batch": {"seed": -1}}, "batch.seed", -1),
        ({"cache": {"layers": 4}}, "cache.layers", 4),
        ({"cash": {"layers": 4}}, "cash", {"layers": 4}),
        ({"batch": {"tokens_min": 300, "tokens_max": 299}}, "batch.tokens_max", 299),
        ({"batch": {"num_sequences": 3, "num_sharing": 4}}, "batch.num_sharing", 4),
        ({"batch": {"tokens_min": 32, "shared_prefix_tokens": 33}}, "batch.shared_prefix_tokens", 33),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(
    overrides: dict[str, dict[str, object]], field: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert (caught.value.field, caught.value.value) == (field, value)
    assert isinstance(caught.value, ValueError)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("[cache\n")
    with pytest.raises(ConfigError, match=r"broken\.toml.*is not TOML"):
        load_config(broken)
    flat = tmp_path / "flat.toml"
    flat.write_text("num_layers = 3\n")
    with pytest.raises(ConfigError) as caught:
        load_config(flat)
    assert (caught.value.field, caught.value.value) == ("num_layers", 3)
