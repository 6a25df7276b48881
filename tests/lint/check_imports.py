"""Checks the dependency law of the Python packages, and that modules do not import in a circle.

    the command -> the package -> lab -> integrations -> public modules -> ddp, fsdp
                -> reduction -> core -> ground

An arrow reads "may import"; a room may import all that are to its right, and ddp and fsdp know
nothing of each other. Imports count wherever
they stand: inside functions, under TYPE_CHECKING, relative ones, import_module("gradferry...") too.
Lab is the package gradferry_lab. Of the library only the command imports it.

Run it as a script; it prints one line per violation and fails if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "gradferry"
LAB = "gradferry_lab"
# From the top to the ground. Modules that lie directly in the package are listed by name, all
# others belong to the room that their folder is called after.
ROOMS = (
    "command",
    "package",
    "lab",
    "integrations",
    "public",
    "ddp",
    "fsdp",
    "reduction",
    "core",
    "ground",
)
FOLDERS = ("integrations", "ddp", "fsdp", "reduction", "core")
MODULES = {
    "": "package",  # gradferry/__init__.py
    "__main__": "command",
    "checkpoint": "public",
    "diagnosis": "public",
    "diloco": "public",
    "kept_reducers": "public",
    "optim": "public",
    "outer_steps": "public",
    "reducer": "public",
    "tensor": "public",
    "errors": "ground",
    "_build_info": "ground",
    "_compat": "ground",
    "_cuda": "ground",  # compiled, as _native is
    "_native": "ground",
}


@dataclass(frozen=True)
class Arrow:
    """One module imports another."""

    source: str
    target: str
    line: int


def modules(*packages: Path) -> dict[str, Path]:
    """Files by dotted name. Of a module and its stub, the module."""
    found: dict[str, Path] = {}
    files = [file for package in packages for file in package.rglob("*.py*")]
    for file in sorted(file for file in files if file.suffix in (".py", ".pyi")):
        package = next(each for each in packages if file.is_relative_to(each))
        parts = file.relative_to(package.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name not in found or file.suffix == ".py":
            found[name] = file
    return found


def arrows(*packages: Path) -> list[Arrow]:
    """Every import of a module of the packages by another one, in the order of files and lines."""
    files = modules(*packages)
    found = []
    for name, file in files.items():
        for line, target in _imports(name, file, files):
            if target != name:
                found.append(Arrow(name, target, line))
    return found


def _imports(name: str, file: Path, files: Mapping[str, Path]) -> Iterator[tuple[int, str]]:
    is_package = file.stem == "__init__"

    def visit(node: ast.AST) -> Iterator[tuple[int, str]]:
        for target in _targets(node, name, is_package, files):
            yield node.lineno, target  # type: ignore[attr-defined]
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(ast.parse(file.read_text(), str(file)))


def _targets(
    node: ast.AST, name: str, is_package: bool, files: Mapping[str, Path]
) -> Iterator[str]:
    """Modules of the package that a statement or call imports."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if _is_ours(alias.name))
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            here = name.split(".")
            above = here[: len(here) - node.level + is_package]
            base = ".".join([*above, *base.split(".")] if base else above)
        if _is_ours(base):
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield inner if inner in files or _is_compiled(inner) else base
    elif isinstance(node, ast.Call) and node.args:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        first = node.args[0]
        named = first.value if isinstance(first, ast.Constant) else None
        if called in ("import_module", "__import__") and isinstance(named, str) and _is_ours(named):
            yield named


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in (PACKAGE, LAB)


def _is_compiled(name: str) -> bool:
    return MODULES.get(name.removeprefix(f"{PACKAGE}.")) == "ground"


def room_of(name: str) -> str | None:
    """The room of a module; None when it is in none."""
    if name.split(".")[0] == LAB:
        return "lab"
    first = name.removeprefix(PACKAGE).removeprefix(".").split(".")[0]
    if first in FOLDERS:
        return first
    return MODULES.get(name.removeprefix(PACKAGE).removeprefix("."))


def complaint(arrow: Arrow) -> str | None:
    """Why a module must not import another, or None when it may."""
    source, target = room_of(arrow.source), room_of(arrow.target)
    if source is None or target is None:
        return None  # said of the module itself
    if ROOMS.index(target) < ROOMS.index(source):
        return f"{source} must not import {target}, which is above it"
    if (source, target) == ("ddp", "fsdp"):
        return "ddp must not import fsdp, which is beside it"
    if (source, target) == ("package", "lab"):
        return "the library must not import the laboratory"
    return None


def circles(found: list[Arrow]) -> list[list[str]]:
    """Groups of modules that import each other, directly or through others; each group sorted."""
    after: dict[str, set[str]] = {}
    for arrow in found:
        after.setdefault(arrow.source, set()).add(arrow.target)
    reached = {name: _reached(name, after) for name in after}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached.get(other, ())))
        for name in after
        if name in reached[name]
    }
    return [list(group) for group in sorted(groups)]


def _reached(start: str, after: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    pending = list(after.get(start, ()))
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += after.get(name, ())
    return reached


def violations(*packages: Path) -> list[str]:
    """One line per module without a room, import that breaks the law, and circle."""
    packages = tuple(package.resolve() for package in packages)
    files = modules(*packages)

    def shown(name: str) -> Path:
        package = next(each for each in packages if files[name].is_relative_to(each))
        return files[name].relative_to(package.parent)

    lines = [
        f"{shown(name)}: is in no room of this check: "
        f"put it into one of {', '.join(f'{folder}/' for folder in FOLDERS)}, or list it"
        for name in files
        if room_of(name) is None
    ]
    found = arrows(*packages)
    for arrow in found:
        if reason := complaint(arrow):
            lines.append(f"{shown(arrow.source)}:{arrow.line}: imports {arrow.target}: {reason}")
    lines += [f"a circle of imports: {', '.join(circle)}" for circle in circles(found)]
    return lines


def packages() -> tuple[Path, Path]:
    """The library and the laboratory of this tree."""
    root = Path(__file__).parents[2]
    return root / "python_bindings" / PACKAGE, root / "benchmarks" / LAB


def main() -> int:
    lines = violations(*packages())
    print(*lines, sep="\n", end="\n" if lines else "")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
