"""These tests start real vLLM instances: `scripts/test-vllm` runs them, in an environment that has it."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") is not None else ["test_*.py"]
