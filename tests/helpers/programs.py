"""Programs of this tree that are no modules of a package, for tests of their parts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

_ROOT = Path(__file__).parents[2]


def load_program(path: str, name: str | None = None) -> ModuleType:
    """Runs a program, which may import those beside it, without its ``__main__`` part. Returns it
    as a module of its own: each call runs it again.

    Args:
        path: from the root of the tree.
        name: of the module, where others look it up; by default the file's.
    """
    program = _ROOT / path
    spec = importlib.util.spec_from_file_location(name or program.stem, program)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(program.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(program.parent))
    return module
