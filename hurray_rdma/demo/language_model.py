"""A real causal language model on the CPU: prompts to tokens, one pass over packed prompts, one step of a batch.

This module and those that import it need torch and transformers (extra ``[llm]``); the demo's processes import them,
their supervisor does not. Knows tensors; knows nothing of pages and engines.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from hurray_rdma.cache import CacheSpec
from hurray_rdma.demo.llm_batch import PackedPrompts
from hurray_rdma.errors import ConfigError

__all__ = ["LanguageModel", "Layers", "OnLayer"]

OnLayer = Callable[[int, Any, Any], None]
"""Called with a layer's index, keys and values, each ``[1, num_heads, num_tokens, head_dim]``."""

Layers = Sequence[tuple[Any, Any]]
"""Keys and values of each layer, torch tensors ``[num_seqs, num_heads, num_tokens, head_dim]``."""


class LanguageModel:
    """A model that attends to all tokens in every layer.

    Args:
        path: a GGUF file, or a folder as ``save_pretrained`` leaves it. Nothing is fetched.

    Raises:
        ConfigError: transformers cannot load it, or it forgets tokens (a sliding window).
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
        if any(layer.is_sliding for layer in DynamicCache(config=self._model.config).layers):
            raise ConfigError("has layers with a sliding window", field="--model", value=str(path))
        self._tokenizer: Any = None

    @property
    def dtype(self) -> Any:
        """The torch dtype that it computes in."""
        return self._model.dtype

    @property
    def ends(self) -> frozenset[int]:
        """Tokens that end a text."""
        end = self._model.generation_config.eos_token_id
        return frozenset(end if isinstance(end, list) else [] if end is None else [end])

    def spec(self, *, page_size: int) -> CacheSpec:
        """The cache that this model needs, in the dtype that it computes in."""
        config = self._model.config
        return CacheSpec(
            num_layers=config.num_hidden_layers,
            num_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            page_size=page_size,
            dtype=str(self.dtype).removeprefix("torch."),
        )

    def prompt_of(self, system: str, question: str) -> list[int]:
        """The token IDs of a question under a system prompt, in the model's chat format if it has one."""
        tokenizer = self._loaded_tokenizer()
        if tokenizer.chat_template is None:
            return list(tokenizer(f"{system}\n\n{question}").input_ids)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        return list(tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of some token IDs."""
        return str(self._loaded_tokenizer().decode(token_ids, skip_special_tokens=True))

    def read(self, prompts: PackedPrompts, *, on_layer: OnLayer) -> tuple[Layers, Any]:
        """Reads all prompts in one pass, each token of a shared prefix once. Blocks.

        Args:
            prompts: the batch.
            on_layer: called as soon as a layer's keys and values are there, while later layers are still to compute.

        Returns:
            Keys and values of each layer, ``[1, num_heads, num_packed, head_dim]``, and logits of the token after each
            prompt, ``[num_seqs, num_words]``.
        """
        attended = torch.from_numpy(prompts.attended())
        mask = torch.zeros(attended.shape, dtype=self.dtype).masked_fill(~attended, torch.finfo(self.dtype).min)
        cache = _WatchedCache(on_layer)
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.from_numpy(prompts.token_ids)[None],
                position_ids=torch.from_numpy(prompts.positions)[None],
                attention_mask=mask[None, None],
                cache=cache,
                use_cache=True,
                logits_to_keep=torch.from_numpy(prompts.last),
            )
        return [(layer.keys, layer.values) for layer in cache.layers], output.logits[0]

    def step(self, cache: DynamicCache, token_ids: Any, *, positions: Any, valid: Any) -> Any:
        """One token further for every sequence of a batch. Blocks.

        Args:
            cache: of the tokens before; grows by one.
            token_ids: int64 ``[num_seqs]``.
            positions: of those tokens, int64 ``[num_seqs]``.
            valid: which tokens of the cache, with the new ones, are a sequence's own; bool ``[num_seqs, num_tokens]``.

        Returns:
            Logits of the next token, ``[num_seqs, num_words]``.
        """
        with torch.inference_mode():
            output = self._model(
                input_ids=token_ids[:, None],
                position_ids=positions[:, None],
                attention_mask=valid,
                cache=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        return output.logits[:, -1]

    def reread(self, token_ids: Sequence[int], *, num_generated: int) -> Any:
        """Reads one whole text by itself, as from a book: no batch, no cache, no pages. Blocks.

        Returns:
            Logits from which each of the last ``num_generated`` tokens should follow, ``[num_generated, num_words]``.
        """
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([token_ids]), use_cache=False, logits_to_keep=num_generated + 1)
        return output.logits[0, :-1]

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
