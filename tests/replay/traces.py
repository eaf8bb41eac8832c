"""Traces for the replay's tests: the one that a script makes, and the public one where it lies beside the checkout."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = ROOT.parent / "shared" / "traces" / "conversation_trace.jsonl"

needs_public = pytest.mark.skipif(not PUBLIC.is_file(), reason=f"no public trace at {PUBLIC}")


def make_trace(folder: Path, *, requests: int, seed: int = 2026) -> Path:
    path = folder / f"made-{requests}-{seed}.jsonl"
    script = [sys.executable, str(ROOT / "scripts" / "make-trace"), str(path)]
    subprocess.run([*script, "--requests", str(requests), "--seed", str(seed)], check=True, timeout=30)
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line(blocks: list[int], *, tokens: int | None = None, timestamp: int = 0, output: int = 1) -> bytes:
    request = {
        "timestamp": timestamp,
        "input_length": 512 * len(blocks) if tokens is None else tokens,
        "output_length": output,
        "hash_ids": blocks,
    }
    return json.dumps(request).encode()
