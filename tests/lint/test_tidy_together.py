"""tidy_together.py, with a clang-tidy that finds the word MISTAKE and a clash of two names."""

import json
from pathlib import Path

import pytest
import tidy_together

TOOL = """#!/bin/sh
for file; do :; done
echo "$(basename "$file")" >> looked_at
grep -ho '^#include "[^"]*"' "$file" | cut -d '"' -f 2 > included
if grep -q MISTAKE "$file" $(cat included); then echo "$file: a mistake"; exit 1; fi
if [ "$(cat "$file" $(cat included) | grep -o CLASH | wc -l)" -gt 1 ]; then exit 1; fi
"""


@pytest.fixture
def lint(tmp_path, monkeypatch):
    """lint({file: text}, ...) gives whether all is clean, and which files the tool was given."""
    monkeypatch.chdir(tmp_path)
    tool = tmp_path / "tool"
    tool.write_text(TOOL)
    tool.chmod(0o755)

    def run(texts: dict[str, str], alone: bool = False) -> tuple[bool, list[str]]:
        commands = tmp_path / "compile_commands.json"
        database = []
        for name, text in texts.items():
            source = tmp_path / name
            source.parent.mkdir(parents=True, exist_ok=True)
            source.write_text(text)
            command = f"g++ -O3 -Winvalid-pch -include /x/cmake_pch.hxx -o {name}.o -c {source}"
            database.append({"directory": "/", "command": command, "file": str(source)})
        commands.write_text(json.dumps(database))
        clean = tidy_together.check(str(tool), commands, Path("hooks"), tmp_path / "work", alone)
        return clean, (tmp_path / "looked_at").read_text().split()

    return run


def test_clean_sources_are_read_once_together(lint, tmp_path):
    assert lint({"hooks/a.cpp": "", "hooks/b.cpp": "", "measure/c.cpp": "MISTAKE"}) == (
        True,
        ["unit_0.cpp"],
    )
    database = json.loads((tmp_path / "work/compile_commands.json").read_text())
    assert [entry["command"].split() for entry in database] == [
        ["g++", "-O3", "-c", entry["file"]] for entry in database
    ]


@pytest.mark.parametrize(
    ("texts", "alone", "clean", "looked_at"),
    [
        ({"a": "", "b": "MISTAKE"}, False, False, ["unit_0.cpp", "a.cpp", "b.cpp"]),
        ({"a": "CLASH", "b": "CLASH"}, False, True, ["unit_0.cpp", "a.cpp", "b.cpp"]),
        ({"a": "", "peers": "MISTAKE"}, False, False, ["unit_0.cpp", "peers.cpp"]),
        ({"a": "", "b": ""}, True, True, ["a.cpp", "b.cpp"]),
    ],
    ids=["a mistake", "names that clash are none", "a source that stands alone", "all alone"],
)
def test_sources_are_read_again_one_by_one_where_needed(lint, texts, alone, clean, looked_at):
    sources = {f"hooks/{name}.cpp": text for name, text in texts.items()}
    assert lint(sources, alone=alone) == (clean, looked_at)


def test_a_folder_without_sources_is_an_error(lint):
    with pytest.raises(SystemExit, match="no source of hooks"):
        lint({"measure/c.cpp": ""})
