"""What one process generates by itself from its model's own tensors: what the decode process must generate, too.

No pages, no engine. There are exact texts, and quantised ones for int8 pages. Both are batched as the decode process
batches, so that equal keys and values give equal logits to the last bit; that the batch itself is right is checked by
reading each text again alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hurray_rdma.demo.continuation import Continuation
from hurray_rdma.demo.language_model import LanguageModel, Layers
from hurray_rdma.demo.llm_batch import PackedPrompts
from hurray_rdma.demo.llm_messages import Continued, Drift, Reread, Verdict
from hurray_rdma.demo.llm_pages import layers_from_memory
from hurray_rdma.demo.llm_plan import Variant

__all__ = ["Alone"]


class Alone:
    """Texts from one process's own keys and values, exact and quantised. Blocks while it generates them.

    Args:
        model: generates.
        prompts: what was read.
        layers: as `LanguageModel.read` returned them.
        first_tokens: of each sequence.
        num_tokens: to generate for each, the first one included.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: PackedPrompts,
        layers: Layers,
        first_tokens: Sequence[int],
        *,
        num_tokens: int,
    ) -> None:
        self._model, self._prompts, self._layers, self._first_tokens = model, prompts, layers, first_tokens
        self.exact = self._begin(quantized=False)
        self.exact.run(num_tokens)
        self.quantized = self._begin(quantized=True)
        quantized_logits = self.quantized.run(num_tokens)
        follower = self._begin(quantized=False)
        exact_logits = [follower.step(then=tokens) for tokens in self.quantized.token_ids[1:]]
        self.drift = _drift(exact_logits, quantized_logits, self.quantized)
        self.reread = self._reread()

    def verdict(self, kinds: Sequence[Variant], continued: Continued) -> Verdict:
        """Everything that the supervisor compares and tells."""
        return Verdict(
            generated=tuple((self.quantized if kind.quantized else self.exact).generated for kind in kinds),
            single_texts=self._words(self.exact.texts),
            decode_texts=tuple(self._words(each.texts) for each in continued.generated),
            drift=self.drift,
            reread=self.reread,
        )

    def _begin(self, *, quantized: bool) -> Continuation:
        layers = layers_from_memory(self._prompts, self._layers, quantized=quantized)
        return Continuation(self._model, layers, seq_lens=self._prompts.seq_lens, first_tokens=self._first_tokens)

    def _words(self, texts: Sequence[Sequence[int]]) -> tuple[str, ...]:
        return tuple(self._model.text_of(text) for text in texts)

    def _reread(self) -> Reread:
        num_same, shortfalls = 0, []
        for seq, text in enumerate(self.exact.texts):
            prompt = self._prompts.token_ids[self._prompts.places(seq)].tolist()
            logits = self._model.reread([*prompt, *text], num_generated=len(text)).float().numpy()
            chosen = logits[np.arange(len(text)), text]
            shortfalls.append(float((logits.max(axis=1) - chosen).max()))
            num_same += int((logits.argmax(axis=1) == text).sum())
        return Reread(num_same, sum(map(len, self.exact.texts)), max(shortfalls))


def _drift(exact: list[Any], quantized: list[Any], texts: Continuation) -> Drift:
    """Over the steps that belong to a text: after its end a model says anything."""
    lengths = np.array([len(text) - 1 for text in texts.texts])
    own = np.arange(len(exact))[:, None] < lengths  # [steps, sequences]
    ours, theirs = (np.stack([step.float().numpy() for step in logits])[own] for logits in (exact, quantized))
    if not len(ours):  # every text ended with its first token
        return Drift(0.0, 0.0, 0.0, 0, 0)
    off = np.abs(ours - theirs)
    return Drift(
        max_abs=float(off.max()),
        mean_abs=float(off.mean()),
        spread=float(ours.std()),
        num_same=int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum()),
        num_tokens=len(ours),
    )
