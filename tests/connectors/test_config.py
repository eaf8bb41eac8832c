"""What may be set is what the README says may be set."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from hurray_rdma.connectors.vllm.config import ConnectorConfig

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_lists_every_key_of_the_extra_config() -> None:
    section = README.read_text().partition("\n## vLLM\n")[2].partition("\n## ")[0]
    table = section.partition("| key | default |")[2].partition("\n\n")[0]
    told: dict[str, str] = {}
    for row in table.splitlines()[2:]:
        names, default = row.split("|")[1:3]
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), default.strip(" `"))
    known = {each.name: each.default for each in fields(ConnectorConfig)}
    assert told.keys() == known.keys()
    for name, default in known.items():
        if isinstance(default, bool):
            assert told[name] == str(default).lower(), name
        elif isinstance(default, int | float):
            assert float(told[name]) == default, name
        elif isinstance(default, str):
            assert told[name] == default, name
