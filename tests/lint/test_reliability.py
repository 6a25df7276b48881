"""docs/design/reliability.md names tests: every one of them is there."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.findall(r"`([A-Za-z_][\w*.…]+)`", (ROOT / "docs/design/reliability.md").read_text())


def names_of_tests() -> set[str]:
    names = set()
    for file in ROOT.glob("*/**/test_*.py"):
        names |= {file.name, *re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    for file in ROOT.glob("tests/*/*_test.cpp"):
        found = re.findall(r"^TEST(?:_P|_F)?\((\w+), (\w+)\)", file.read_text(), re.MULTILINE)
        names |= {f"{suite}.{name}" for suite, name in found}
    return names


def test_every_test_that_the_document_names_exists() -> None:
    there = names_of_tests()
    named = [n for n in NAMED if n.startswith("test_") or re.match(r"[A-Z]\w+\.[*\w]", n)]
    assert len(named) > 40
    missing = [n for n in named if not fnmatch.filter(there, n.replace("…", "*"))]
    assert not missing
