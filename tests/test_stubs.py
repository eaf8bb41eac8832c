"""Stubs of the native modules: they name the functions that are there, with the same parameters, and no others."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import hurray_rdma.transport  # which loads UCX before the modules that need it

ROOT = Path(hurray_rdma.__file__).parent
STUBS = sorted(ROOT.rglob("_*.pyi"))


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_is_what_its_module_is(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT.parent).with_suffix("").parts))
    told = {each.name: each for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)}
    functions = {
        name: each
        for name, each in vars(module).items()
        if type(each).__name__ == "cython_function_or_method" and not name.startswith("_")
    }
    assert set(told) == set(functions)
    for name, function in functions.items():
        arguments = told[name].args
        named = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        assert named == list(inspect.signature(function).parameters), name
