"""A batch of texts that a model continues greedily, step by step, from keys and values wherever they came from.

Sequences of unequal length stand side by side, right-aligned, so that all grow at the same end; what is left of a
shorter one is masked. Two continuations that begin with equal bytes compute equal bytes: shapes and order of sums are
the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from hurray_rdma.demo.language_model import LanguageModel, Layers
from hurray_rdma.demo.llm_messages import Generated

__all__ = ["Continuation", "side_by_side"]


def side_by_side(rows: Sequence[Any]) -> Any:
    """One tensor of sequences of unequal length, right-aligned over zeros.

    Args:
        rows: torch tensors ``[seq_len, num_heads, head_dim]``.

    Returns:
        ``[num_seqs, num_heads, max(seq_len), head_dim]``.
    """
    longest = max(len(row) for row in rows)
    _, num_heads, head_dim = rows[0].shape
    joined = torch.zeros((len(rows), num_heads, longest, head_dim), dtype=rows[0].dtype)
    for seq, row in enumerate(rows):
        joined[seq, :, longest - len(row) :] = row.permute(1, 0, 2)
    return joined


class Continuation:
    """Generated tokens of a batch, and the cache from which the next ones follow.

    Args:
        model: continues.
        layers: keys and values of everything before ``first_tokens``, as `side_by_side` joins them.
        seq_lens: tokens of each sequence in ``layers``.
        first_tokens: the input at the next position of each sequence, generated already.
    """

    def __init__(
        self, model: LanguageModel, layers: Layers, *, seq_lens: NDArray[np.uint32], first_tokens: Sequence[int]
    ) -> None:
        self._model = model
        self._cache = DynamicCache()
        for index, (keys, values) in enumerate(layers):
            self._cache.update(keys, values, index)
        self._positions = torch.from_numpy(seq_lens.astype(np.int64))
        longest = int(seq_lens.max())
        self._valid = torch.arange(longest)[None, :] >= longest - self._positions[:, None]
        self._steps = [torch.tensor(first_tokens)]
        self._digest = hashlib.sha256()

    def step(self, *, then: Any = None) -> Any:
        """Generates a token for each sequence. Blocks.

        Args:
            then: tokens that stand in place of the generated ones, int64 ``[num_seqs]``; None is the likeliest ones.

        Returns:
            The logits that it is taken from, ``[num_seqs, num_words]``.
        """
        self._valid = torch.cat([self._valid, torch.ones((len(self._valid), 1), dtype=torch.bool)], dim=1)
        logits = self._model.step(self._cache, self._steps[-1], positions=self._positions, valid=self._valid)
        self._positions = self._positions + 1
        self._steps.append(logits.argmax(dim=-1) if then is None else then)
        self._digest.update(logits.contiguous().view(torch.uint8).numpy())
        return logits

    def run(self, num_tokens: int) -> list[Any]:
        """Goes on until each sequence has ``num_tokens`` generated tokens, the first ones included. Blocks.

        Returns:
            The logits of each step.
        """
        return [self.step() for _ in range(num_tokens - len(self._steps))]

    @property
    def token_ids(self) -> Any:
        """All tokens so far, the first ones included, int64 ``[num_generated, num_seqs]``, with what follows an end."""
        return torch.stack(self._steps)

    @property
    def texts(self) -> tuple[tuple[int, ...], ...]:
        """The tokens of each sequence, to its end."""
        return tuple(_to_end(sequence, self._model.ends) for sequence in self.token_ids.T.tolist())

    @property
    def generated(self) -> Generated:
        """The texts, and the digest of all logits so far."""
        return Generated(self.texts, self._digest.hexdigest())


def _to_end(token_ids: list[int], ends: frozenset[int]) -> tuple[int, ...]:
    end = next((place for place, token in enumerate(token_ids) if token in ends), len(token_ids))
    return tuple(token_ids[: end + 1])
