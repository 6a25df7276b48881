"""Holds documents and comments to the glossary, the table of words in docs/design/architecture.md.

Refuses in documents, comments and docstrings other words for what the glossary names, and in
comments and docstrings sentences that begin with "Of", "That" or "As" in place of their subject.
Code in `backticks` is free.

Run it as a script; it prints one line per violation and fails if there is one.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

INSTEAD = {  # the glossary's word, by one that says the same
    "fragment": "chunk",
    "sub-bucket": "chunk",
    "quantization error": "compression error",
    "error memory": "residual",
    "error buffer": "residual",
    "leftover": "residual",
    "forecast": "trial",
    "prognosis": "trial",
    "two-tier": "two levels",
    "multi-level": "two levels",
    "delegate": "leader",
    "handshake": "rendezvous",
}
FOLDERS = ("python_bindings", "benchmarks", "hooks", "include", "kernels")
_NO_SUBJECT = re.compile(r"(?:^|[.!?:]\s+)((?:Of|That|As) \S+ \S+)")


def prose(name: str, text: str) -> Iterator[tuple[int, str]]:
    """The comments and docstrings of a source, or the lines of a document, each with its line."""
    lines = text.splitlines()
    if name.endswith(".md"):
        yield from enumerate(lines, 1)
        return
    if name.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = {t.start[0]: t.string.strip("# ") for t in tokens if t.type == tokenize.COMMENT}
    else:
        found = {n: re.search(r"(?:^|\s)//+ (.*)", line) for n, line in enumerate(lines, 1)}
        comments = {n: match[1] for n, match in found.items() if match}
    alone = {n for n in comments if lines[n - 1].lstrip().startswith(("#", "//"))}
    for n in comments:  # whole lines one after the other are one comment
        if n not in alone or n - 1 not in alone:
            last = next(m for m in range(n, len(lines) + 1) if not {m, m + 1} <= alone)
            yield n, " ".join(comments[m] for m in range(n, last + 1))


def violations(root: Path) -> Iterator[str]:
    """One line for each retired word, and for each sentence without a subject."""
    words = re.compile(rf"\b({'|'.join(map(re.escape, INSTEAD))})s?\b", re.IGNORECASE)
    paths = [*root.glob("docs/**/*.md"), root / "README.md", root / "CONTRIBUTING.md"]
    paths += [path for folder in FOLDERS for path in (root / folder).rglob("*.*")]
    for path in sorted(p for p in paths if p.suffix in (".md", ".py", ".h", ".cpp", ".cu")):
        name = path.relative_to(root).as_posix()
        for line, text in prose(name, path.read_text()):
            for match in words.finditer(re.sub(r"`[^`]*`", "", text)):
                yield f"{name}:{line}: {match[0]!r}: say {INSTEAD[match[1].lower()]!r}"
            if path.suffix != ".md":
                yield from (f"{name}:{line}: no subject: {s!r}" for s in _NO_SUBJECT.findall(text))


if __name__ == "__main__":
    found = list(violations(Path(__file__).parents[2]))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(bool(found))
