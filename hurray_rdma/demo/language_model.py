"""A real causal language model and its key-value cache, between torch tensors and pages.

The only module of the room that imports torch and transformers (extra ``[llm]``); the demo's processes import it, their
supervisor does not. Knows models and page views; knows nothing of engines.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from hurray_rdma.cache import CacheSpec, PagePool, Snapshot
from hurray_rdma.errors import ConfigError, GeometryError

__all__ = ["LanguageModel", "cache_from_pages", "write_layer"]

OnLayer = Callable[[int, Any, Any], None]
"""Called with a layer's index, keys and values, each ``[1, num_heads, num_tokens, head_dim]``."""


class LanguageModel:
    """A model on the CPU, run greedily.

    Args:
        path: a GGUF file, or a folder as ``save_pretrained`` leaves it. Nothing is fetched.

    Raises:
        ConfigError: transformers cannot load it.
    """

    def __init__(self, path: Path) -> None:
        logging.disable_progress_bar()
        logging.set_verbosity_error()
        place, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        self._place, self._options = place, options | {"local_files_only": True}
        try:
            self._model = AutoModelForCausalLM.from_pretrained(place, **self._options).eval()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"cannot be loaded: {error}", field="--model", value=str(path)) from error
        self._tokenizer: Any = None

    def spec(self, *, page_size: int) -> CacheSpec:
        """The cache that this model needs, in the dtype that it computes in."""
        config = self._model.config
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        return CacheSpec(
            num_layers=config.num_hidden_layers,
            num_heads=num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            page_size=page_size,
            dtype=str(self._model.dtype).removeprefix("torch."),
        )

    def tokens_of(self, text: str) -> list[int]:
        """The token IDs of ``text``."""
        return list(self._loaded_tokenizer()(text).input_ids)

    def text_of(self, tokens: tuple[int, ...]) -> str:
        """The text of some token IDs."""
        return str(self._loaded_tokenizer().decode(tokens, skip_special_tokens=True))

    def read(self, prompt: list[int], *, on_layer: OnLayer) -> tuple[DynamicCache, int]:
        """Reads a prompt: its cache, and the first generated token. Blocks.

        Args:
            prompt: token IDs.
            on_layer: called as soon as a layer's keys and values are there, while later layers are still to compute.
        """
        cache = _WatchedCache(on_layer)
        return cache, self._next(cache, prompt)

    def continue_greedily(self, cache: DynamicCache, first_token: int, *, num_tokens: int) -> tuple[int, ...]:
        """Generates from a cache: up to ``num_tokens`` token IDs, ``first_token`` included; ends with the text. Blocks.

        Args:
            cache: of everything before ``first_token``; grows.
            first_token: the input at the next position.
            num_tokens: >= 1.
        """
        end = self._model.generation_config.eos_token_id
        ends = set(end) if isinstance(end, list) else {end}
        tokens = [first_token]
        while len(tokens) < num_tokens and tokens[-1] not in ends:
            tokens.append(self._next(cache, tokens[-1:]))
        return tuple(tokens)

    def _next(self, cache: DynamicCache, tokens: list[int]) -> int:
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    def _loaded_tokenizer(self) -> Any:
        # The decode process has no text to read or write: it never loads one.
        if self._tokenizer is None:
            self._tokenizer = AutoTokenizer.from_pretrained(self._place, **self._options)
        return self._tokenizer


class _WatchedCache(DynamicCache):  # type: ignore[misc]  # transformers is not typed
    """A cache that tells when a layer has been written for the first time."""

    def __init__(self, on_layer: OnLayer) -> None:
        super().__init__()
        self._on_layer = on_layer
        self._num_told = 0

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._num_told:
            self._num_told += 1
            self._on_layer(layer_idx, keys, values)
        return keys, values


def write_layer(pool: PagePool, layer: int, keys: Any, values: Any, *, page_ids: NDArray[np.uint32]) -> None:
    """Writes one layer's keys and values of one sequence into its pages.

    Args:
        pool: written in place.
        layer: index.
        keys, values: torch tensors ``[1, num_heads, num_tokens, head_dim]``.
        page_ids: the sequence's pages in order.

    Raises:
        GeometryError: the model keeps something else in its cache (a sliding window, other heads per layer).
    """
    spec = pool.spec
    for role, tensor in (("key", keys), ("value", values)):
        num_tokens = tensor.shape[2]
        if tuple(tensor.shape) != (1, spec.num_heads, num_tokens, spec.head_dim) or (
            -(-num_tokens // spec.page_size) != len(page_ids)
        ):
            raise GeometryError(
                f"must be [1, {spec.num_heads}, num_tokens, {spec.head_dim}] and fill {len(page_ids)} pages of "
                f"{spec.page_size} tokens",
                field=f"shape of the {role} cache of layer {layer}",
                value=tuple(tensor.shape),
            )
        tokens = tensor[0].permute(1, 0, 2).contiguous().view(torch.uint8).numpy().view(spec.storage_dtype)
        slots = np.arange(num_tokens)
        pool.pages(role, layer)[page_ids[slots // spec.page_size], slots % spec.page_size] = tokens


def cache_from_pages(snapshot: Snapshot, *, seq: int) -> DynamicCache:
    """A model's cache again, from received pages (a gathered copy)."""
    spec = snapshot.pool.spec
    dtype = getattr(torch, spec.dtype)
    cache = DynamicCache()
    for layer in range(spec.num_layers):
        keys, values = (
            torch.from_numpy(snapshot.tokens(role, layer=layer, seq=seq).view(np.uint8)).view(dtype).permute(1, 0, 2)
            for role in ("key", "value")
        )
        cache.update(keys[None].contiguous(), values[None].contiguous(), layer)
    return cache
