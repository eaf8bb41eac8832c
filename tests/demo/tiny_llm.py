"""A language model of three layers with random weights and a tokenizer of single characters, made in a moment."""

from __future__ import annotations

import string
from pathlib import Path

ALPHABET = string.ascii_letters + string.digits + " .,?!\n"


def save_tiny_model(folder: Path, *, dtype: str = "float32") -> Path:
    """Saves it as transformers does, in a torch dtype; returns the folder."""
    import torch
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {character: number for number, character in enumerate(("<end>", *ALPHABET))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.3,  # far from the usual 0.02, with which all logits are nearly equal
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    return folder
