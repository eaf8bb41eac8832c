"""The model's side of --llm, with a tiny model of random weights: packing, batching and pages change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hurray_rdma import PagePool, Snapshot
from hurray_rdma.demo.llm_batch import PackedPrompts, lay_out, pack
from hurray_rdma.demo.llm_messages import Continued
from hurray_rdma.demo.llm_plan import Variant
from hurray_rdma.demo.llm_run import missing_extra
from hurray_rdma.errors import ConfigError, GeometryError
from tests.demo.tiny_llm import save_tiny_model

pytestmark = [
    pytest.mark.llm,
    pytest.mark.skipif(bool(missing_extra()), reason=f"the [llm] extra is not installed: {', '.join(missing_extra())}"),
]
PAGE_SIZE = 4
COMPUTED = Variant(PAGE_SIZE, PAGE_SIZE, quantized=False)
INT8 = Variant(PAGE_SIZE, PAGE_SIZE, quantized=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from hurray_rdma.demo.language_model import LanguageModel

    return LanguageModel(save_tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def prompts(model: Any) -> PackedPrompts:
    questions = ("Hi!", "Who are you, and where do you live?", "Tell me a story.")
    return pack([model.prompt_of("You keep the light.", question) for question in questions], page_size=PAGE_SIZE)


@pytest.fixture(scope="module")
def read(model: Any, prompts: PackedPrompts) -> tuple[Any, Any, list[int]]:
    """Keys and values, logits, and the layers in the order in which they were told."""
    told: list[int] = []
    layers, logits = model.read(prompts, on_layer=lambda layer, keys, values: told.append(layer))
    return layers, logits, told


def prompt_of(prompts: PackedPrompts, seq: int) -> list[int]:
    return [int(token) for token in prompts.token_ids[prompts.places(seq)]]


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """The plainest way: the whole text anew for each token."""
    text = list(prompt)
    while len(text) < len(prompt) + num_tokens:
        text.append(int(model.reread([*text, 0], num_generated=1)[0].argmax()))
    return text[len(prompt) :]


def test_one_packed_pass_reads_as_one_pass_for_each_prompt(model: Any, prompts: PackedPrompts, read: Any) -> None:
    import torch

    layers, logits, told = read
    assert told == [0, 1, 2]
    assert prompts.prefix_tokens == 20  # of "You keep the light.\n\n" with its 21 characters
    for seq in range(prompts.num_seqs):
        alone = pack([prompt_of(prompts, seq)], page_size=PAGE_SIZE)
        alone_layers, alone_logits = model.read(alone, on_layer=lambda *_: None)
        assert torch.allclose(logits[seq], alone_logits[0], atol=1e-4)
        for packed, single in zip(layers, alone_layers, strict=True):
            for ours, theirs in zip(packed, single, strict=True):
                assert torch.allclose(ours[:, :, prompts.places(seq)], theirs, atol=1e-4)


def test_a_batch_continues_as_each_text_does_alone(model: Any, prompts: PackedPrompts, read: Any) -> None:
    from hurray_rdma.demo.llm_alone import Alone

    layers, logits, _ = read
    first = logits.argmax(dim=-1).tolist()
    alone = Alone(model, prompts, layers, first, num_tokens=9)
    for seq, text in enumerate(alone.exact.texts):
        plain = greedy(model, prompt_of(prompts, seq), 9)
        end = plain.index(0) + 1 if 0 in plain else 9
        assert list(text) == plain[:end]
    assert alone.reread.num_same == alone.reread.num_tokens == sum(map(len, alone.exact.texts))
    assert alone.reread.max_shortfall == 0
    drift = alone.drift
    assert 0 < drift.mean_abs < drift.max_abs < drift.spread
    assert 0 < drift.num_same <= drift.num_tokens == sum(len(text) - 1 for text in alone.quantized.texts)

    verdict = alone.verdict([COMPUTED, INT8], Continued((alone.exact.generated, alone.quantized.generated)))
    assert verdict.decode_texts[0] == verdict.single_texts == tuple(map(model.text_of, alone.exact.texts))
    assert verdict.generated == (alone.exact.generated, alone.quantized.generated)
    assert verdict.generated[0].logits_digest != verdict.generated[1].logits_digest


@pytest.mark.parametrize("kind", [COMPUTED, INT8], ids=["computed", "int8"])
def test_pages_hold_what_memory_holds_and_damaged_ones_do_not(
    model: Any, prompts: PackedPrompts, read: Any, kind: Variant
) -> None:
    import torch

    from hurray_rdma.demo.continuation import Continuation
    from hurray_rdma.demo.llm_pages import layer_from_pages, layers_from_memory, write_layer

    layers, logits, _ = read
    first = logits.argmax(dim=-1).tolist()
    pages = lay_out(prompts, page_size=PAGE_SIZE, seed=3)
    spec = kind.source(model.spec(page_size=PAGE_SIZE))
    memory = layers_from_memory(prompts, layers, quantized=kind.quantized)

    def continued(tables: Any) -> tuple[Any, Any]:
        snapshot = Snapshot.from_block_tables(pool, tables, seq_lens=prompts.seq_lens)
        from_pages = [layer_from_pages(snapshot, layer, dtype=model.dtype) for layer in range(3)]
        text = Continuation(model, from_pages, seq_lens=prompts.seq_lens, first_tokens=first)
        text.run(9)
        return from_pages, text.generated

    with PagePool.allocate(spec, num_pages=pages.pool_pages) as pool:
        for layer, (keys, values) in enumerate(layers):
            write_layer(pool, layer, keys, values, pages=pages)
        from_pages, generated = continued(pages.tables)
        for ours, theirs in zip(from_pages, memory, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
        alone = Continuation(model, memory, seq_lens=prompts.seq_lens, first_tokens=first)
        alone.run(9)
        assert generated == alone.generated

        # A page of another prompt in place of the last but one. Order alone is nothing: keys know their positions.
        mixed = [
            np.array([*table[:-2], pages.tables[seq - 1][-2], table[-1]]) for seq, table in enumerate(pages.tables)
        ]
        for ours, theirs in zip(continued(mixed)[1].texts, generated.texts, strict=True):
            assert ours != theirs
        if kind.quantized:
            pool.scales("value", 1)[pages.tables[1][-1], 0] *= 1.5
            assert continued(pages.tables)[1].logits_digest != generated.logits_digest

        with pytest.raises(GeometryError, match=r"shape of the key cache of layer 0 = \(1, 2, 3, 16\)"):
            write_layer(pool, 0, keys[:, :, :3], values, pages=pages)


@pytest.mark.parametrize("kind", [COMPUTED, INT8], ids=["computed", "int8"])
def test_pages_of_a_model_in_bfloat16(tmp_path: Path, kind: Variant) -> None:
    import torch

    from hurray_rdma.demo.language_model import LanguageModel
    from hurray_rdma.demo.llm_pages import layer_from_pages, layers_from_memory, write_layer

    model = LanguageModel(save_tiny_model(tmp_path, dtype="bfloat16"))
    prompts = pack([[5, 6, 7, 8, 9], [5, 6, 7, 8, 11, 12, 13]], page_size=PAGE_SIZE)
    pages = lay_out(prompts, page_size=PAGE_SIZE, seed=3)
    spec = kind.source(model.spec(page_size=PAGE_SIZE))
    assert spec.dtype == ("int8" if kind.quantized else "bfloat16")
    with PagePool.allocate(spec, num_pages=pages.pool_pages) as pool:
        layers, _ = model.read(prompts, on_layer=lambda *each: write_layer(pool, *each, pages=pages))
        snapshot = Snapshot.from_block_tables(pool, pages.tables, seq_lens=prompts.seq_lens)
        for layer, memory in enumerate(layers_from_memory(prompts, layers, quantized=kind.quantized)):
            for ours, theirs in zip(layer_from_pages(snapshot, layer, dtype=model.dtype), memory, strict=True):
                assert ours.dtype == torch.bfloat16
                assert torch.equal(ours, theirs)


def test_int8_is_within_half_a_scale_of_each_value() -> None:
    import torch

    from hurray_rdma.demo.llm_pages import quantize

    tokens = (
        torch.randn((50, 3, 8), generator=torch.Generator().manual_seed(1)) * torch.logspace(-30, 6, 50)[:, None, None]
    )
    tokens[17] = 0
    stored, scales = quantize(tokens)
    assert (stored.dtype, scales.dtype, scales.shape) == (np.int8, np.float32, (50,))
    assert np.isfinite(scales).all()
    assert (scales > 0).all()
    assert np.abs(stored.astype(int)).max(axis=(1, 2)).tolist() == [127] * 17 + [0] + [127] * 32
    off = np.abs(stored * scales[:, None, None].astype(np.float64) - tokens.numpy())
    assert (off <= 0.5001 * scales[:, None, None]).all()


def test_a_text_stops_where_it_ends(model: Any, prompts: PackedPrompts, read: Any) -> None:
    import torch

    from hurray_rdma.demo.continuation import Continuation
    from hurray_rdma.demo.llm_pages import layers_from_memory

    memory = layers_from_memory(prompts, read[0], quantized=False)
    text = Continuation(model, memory, seq_lens=prompts.seq_lens, first_tokens=[5, 6, 0])
    for tokens in ([7, 0, 8], [9, 9, 9]):
        text.step(then=torch.tensor(tokens))
    assert model.ends == {0}
    assert text.texts == ((5, 7, 9), (6, 0), (0,))


def test_a_model_that_forgets_is_refused(tmp_path: Path) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    from hurray_rdma.demo.language_model import LanguageModel

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    config = MistralConfig(**sizes, num_attention_heads=1, num_key_value_heads=1, sliding_window=4)
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sliding window"):
        LanguageModel(tmp_path)
