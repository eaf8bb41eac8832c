"""What the tests of this folder ask."""

from __future__ import annotations

import os

MODEL = os.environ.get("HURRAY_VLLM_MODEL", "")
"""A folder that vLLM loads; `scripts/test-vllm` makes it."""
PROMPTS = [
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "Water boils at a temperature of one hundred degrees. " * 3 + "Ice melts at",
    "In the beginning there was nothing but silence, and then " + "the sea, the wind, the stones, " * 8,
    "List three colours: red, green,",
    "The quick brown fox jumps over the lazy dog. " * 12,
    "A long letter to a friend. " + "I hope that you are well and that the garden grows. " * 20,
    "To be, or not to be, that is",
    "One, two, three, four, five, six, seven, eight, nine, ten. " * 25,
]
"""Of unlike lengths: from 4 tokens to several hundred."""
