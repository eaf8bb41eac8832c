"""The shape of the house: imports point downwards, and each foreign thing has one room that names it."""

from __future__ import annotations

import ast
import functools
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hurray_rdma

PACKAGE = Path(hurray_rdma.__file__).parent
# Top down; a room imports only from rooms after it, and everyone may use the errors.
ROOMS = [
    "testing",
    "connectors",
    "cli",
    "replay",
    "bench",
    "demo",
    "sync",
    "engine",
    "control",
    "plan",
    "cache",
    "transport",
    "format",
    "errors",
]
FORBIDDEN = {
    "format": {"transport", "cache"},
    "plan": {"transport"},
    "control": {"transport", "cache", "plan"},
}


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Absolute names of modules that a file imports at run time or for its types."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
    return names


def modules() -> list[tuple[str, Path]]:
    return [
        (path.relative_to(PACKAGE).parts[0].removesuffix(".py"), path)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "__init__.py"
    ]


def test_imports_point_downwards() -> None:
    for room, path in modules():
        for name in imports_of(path):
            parts = name.split(".")
            if parts[0] != "hurray_rdma" or len(parts) == 1:
                continue
            target = parts[1]
            assert ROOMS.index(room) <= ROOMS.index(target), f"{path}: {room} may not import {name}"
            assert target not in FORBIDDEN.get(room, set()), f"{path}: {room} may not know {target}"


def test_every_directory_is_a_known_room() -> None:
    assert {room for room, _ in modules()} <= set(ROOMS)


@pytest.mark.parametrize(
    ("foreign", "allowed"),
    [
        ({"ucxx", "libucx"}, {"transport/binding.py"}),
        (
            {"socket", "ssl"},
            {"control/channel.py", "control/listener.py", "control/tls.py", "transport/page_streams.py"},
        ),
        ({"pickle", "marshal", "shelve"}, set()),
    ],
)
def test_foreign_things_have_one_place(foreign: set[str], allowed: set[str]) -> None:
    for room, path in modules():
        if room in {"testing", "bench"}:
            continue
        used = {name.split(".")[0] for name in imports_of(path)} & foreign
        assert not used or str(path.relative_to(PACKAGE)) in allowed, f"{path} imports {used}"


def test_heavy_things_are_imported_only_where_used() -> None:
    heavy = ["torch", "cupy", "transformers", "matplotlib", "gguf"]
    rooms = [f"hurray_rdma.{room}" for room in ROOMS]
    script = (
        f"import sys, importlib; sys.modules.update(dict.fromkeys({heavy}));"  # None there makes an import of it fail
        f"[importlib.import_module(room) for room in {rooms}]; import hurray_rdma.cli.main"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_public_names_exist() -> None:
    for name in hurray_rdma.__all__:
        assert getattr(hurray_rdma, name) is not None
    for room in ("format", "transport", "cache", "plan", "control", "engine"):
        module = importlib.import_module(f"hurray_rdma.{room}")
        for name in module.__all__:
            assert hasattr(module, name), f"{room}.{name}"
