"""README and guide: every snippet of Python runs, and every command is one that exists."""

from __future__ import annotations

import contextlib
import re
import shlex
from pathlib import Path

import pytest
from documented import PAGES, ROOT, blocks, case_snippets
from gradferry_lab.cli import main, parser
from programs import load_program
from world import Worlds

# What a page's snippets are run with, beside what `documented` gives to all of them.
WORLD_SIZES = {"fsdp.md": 4, "compatibility.md": 4}
SNIPPETS = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.parametrize("page", SNIPPETS, ids=str)
def test_every_snippet_runs(worlds: Worlds, page: str, tmp_path: Path) -> None:
    name = Path(page).name
    snippets = blocks(page, "python")
    world = worlds(WORLD_SIZES.get(name, 2))
    answers = world.run(case_snippets, page=page, snippets=snippets, folder=str(tmp_path))
    assert answers == [len(snippets)] * world.size


def commands() -> list[tuple[str, str]]:
    """Every command line of the pages, with its page."""
    found = []
    for page in PAGES:
        for block in blocks(page, ""):
            shows_output = block.startswith("$ ")
            for line in block.splitlines():
                command = line.removeprefix("$ ").split("  #")[0].strip()
                is_one = line.startswith("$ ") or not shows_output
                if is_one and re.match(r"(gradferry|torchrun|make|pip|python)\b", command):
                    found.append((page, command))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_every_command_is_one(page: str, command: str) -> None:
    words = shlex.split(command)
    if "-m gradferry" in command:
        words = words[words.index("gradferry", words.index("-m")) :]
    if words[0] == "gradferry":
        with contextlib.redirect_stderr(None):
            parser().parse_args(words[1:])
    elif words[0] == "make":
        goals = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[1] in goals
    elif words[0] == "pip":
        assert words[1] == "install"
    elif words[1] == "-c":
        compile(words[2], page, "exec")
    else:  # of an example or benchmark, which has tests of its own
        script = next(word for word in words if word.endswith(".py"))
        assert (ROOT / script).exists()


@pytest.mark.parametrize(
    ("page", "shown"),
    [
        (page, block)
        for page in PAGES
        for block in blocks(page, "")
        if block.startswith("$ gradferry plan")
    ],
)
def test_a_plan_that_is_shown_is_what_it_prints(
    page: str, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *lines = shown.splitlines()
    words = shlex.split(command.removeprefix("$ gradferry "))
    assert main(words) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in lines:
        if line != "...":
            assert line.split() in printed


def test_page_of_the_command_line_is_that_of_the_parsers() -> None:
    made = load_program("tools/command_line_page.py")
    assert made.PAGE.read_text() == made.page(), "run tools/command_line_page.py"
