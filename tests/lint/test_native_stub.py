"""gradferry/_native.pyi names every argument as the built module does.

`make lint` compares what there is, by stubtest, which cannot see the arguments of pybind11's
functions; their documentation begins with them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradferry import _native

STUB = Path(_native.__file__).parent / "_native.pyi"


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of the stub and of its classes, by dotted name."""
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef) and not inner.decorator_list:
                    yield f"{node.name}.{inner.name}", inner


def runtime(name: str) -> ast.FunctionDef:
    """As the first line of its documentation has it."""
    found: Any = _native
    for part in name.split("."):
        found = getattr(found, part)
    (parsed,) = ast.parse(f"def {found.__doc__.splitlines()[0]}: ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def arguments(function: ast.FunctionDef) -> tuple[list[str], list[str], int, int]:
    """Names of positional arguments and of those by name alone; how many have a default."""
    every = function.args
    positional = [argument.arg for argument in (*every.posonlyargs, *every.args)]
    by_name = [argument.arg for argument in every.kwonlyargs]
    defaults = sum(default is not None for default in every.kw_defaults)
    return positional, by_name, len(every.defaults), defaults


@pytest.mark.parametrize(("name", "stub"), [pytest.param(*f, id=f[0]) for f in functions()])
def test_stub_names_the_arguments_of_the_built_function(name: str, stub: ast.FunctionDef) -> None:
    assert arguments(stub) == arguments(runtime(name))
