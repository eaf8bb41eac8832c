"""A real language model: the decode process continues a text that it never saw."""

from __future__ import annotations

from pathlib import Path

import pytest

from hurray_rdma.demo import LLM_STEPS, MismatchError, load_config, run_llm
from hurray_rdma.demo.llm_run import check_tokens, default_model, missing_extra
from hurray_rdma.errors import ConfigError

SKIP = (
    f"the [llm] extra is not installed: {', '.join(missing_extra())}"
    if missing_extra()
    else f"no model at {default_model()}: run scripts/get-model"
)
WITH_MODEL = pytest.mark.skipif(bool(missing_extra()) or not default_model().is_file(), reason=SKIP)


@pytest.mark.llm
@WITH_MODEL
def test_the_decode_process_continues_as_one_process_does() -> None:
    config = load_config(overrides={"llm": {"new_tokens": 12}})
    steps: list[str] = []
    report = run_llm(config, model=None, on_step=steps.append)
    assert len(steps) == LLM_STEPS
    assert (report.num_layers, report.num_heads, report.head_dim) == (30, 3, 64)
    assert len(report.tokens) == 12
    assert report.text.strip()
    assert report.num_pages == -(-report.prompt_tokens // 16)
    itemsize = {"float32": 4, "bfloat16": 2, "float16": 2}[report.dtype]
    assert report.sent_nbytes == report.num_pages * 16 * 3 * 64 * itemsize * 30 * 2
    assert "emulated" not in report.lane


@pytest.mark.llm
@WITH_MODEL
def test_damaged_keys_and_values_change_the_tokens() -> None:
    """What the comparison of tokens is worth: a cache with two tokens swapped continues otherwise."""
    import numpy as np
    import torch

    from hurray_rdma import PagePool, Snapshot
    from hurray_rdma.demo.language_model import LanguageModel, cache_from_pages, write_layer

    model = LanguageModel(default_model())
    spec = model.spec(page_size=16)
    prompt = model.tokens_of(load_config().llm.prompt)
    num_pages = -(-len(prompt) // 16)
    page_ids = np.arange(num_pages, dtype=np.uint32)[::-1].copy()
    with PagePool.allocate(spec, num_pages=num_pages) as pool:
        cache, first = model.read(
            prompt, on_layer=lambda layer, keys, values: write_layer(pool, layer, keys, values, page_ids=page_ids)
        )
        snapshot = Snapshot.from_block_tables(pool, [page_ids], seq_lens=[len(prompt)])
        again = cache_from_pages(snapshot, seq=0)
        for ours, theirs in zip(again.layers, cache.layers, strict=True):
            assert torch.equal(ours.keys, theirs.keys)
            assert torch.equal(ours.values, theirs.values)
        alone = model.continue_greedily(cache, first, num_tokens=12)
        assert model.continue_greedily(again, first, num_tokens=12) == alone

        damaged = Snapshot.from_block_tables(pool, [page_ids[::-1]], seq_lens=[len(prompt)])
        assert model.continue_greedily(cache_from_pages(damaged, seq=0), first, num_tokens=12) != alone


def test_a_differing_token_is_an_error_with_its_place() -> None:
    check_tokens((5, 6, 7), (5, 6, 7))
    with pytest.raises(MismatchError, match=r"tokens\[1\] = \(9,\): a single process generates \(6,\) there"):
        check_tokens((5, 9, 7), (5, 6, 7))
    with pytest.raises(MismatchError, match=r"tokens\[2\] = \(\): a single process generates \(7,\) there"):
        check_tokens((5, 6), (5, 6, 7))


@pytest.mark.skipif(not missing_extra(), reason="the [llm] extra is installed")
def test_a_missing_extra_is_named_with_the_command_that_gets_it() -> None:
    with pytest.raises(ConfigError, match=r"torch.*pip install \"hurray-rdma\[llm\]\""):
        run_llm(load_config(), model=None, on_step=lambda _: None)


@pytest.mark.skipif(bool(missing_extra()), reason="the [llm] extra is not installed")
def test_a_missing_model_is_named_with_the_command_that_gets_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.gguf.*scripts/get-model"):
        run_llm(load_config(), model=tmp_path / "absent.gguf", on_step=lambda _: None)
