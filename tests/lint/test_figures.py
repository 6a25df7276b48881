"""Measured figures of pages come from benchmarks/results, and every file there is used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from documented import PAGES, ROOT
from gradferry_lab.cli import parser
from programs import load_program

figures = load_program("tools/figures.py")
result_files = sys.modules["result_files"]
measure_all = load_program("benchmarks/measure_all.py")

MEASURED = re.compile(
    r"\d[\d.,]*\s*(?:ms\b|%|times\s+(?:as\b|fewer|faster|slower|less|more|with|a\s+step))"
)
# What looks like a measured number, and is none.
RULES = {
    ("README.md", "2 %"): "how `auto` chooses",
    ("docs/guide/which_codec.md", "2 %"): "how `auto` chooses",
    ("README.md", "3 %"): "which matrices are the smallest",
    ("docs/guide/start.md", "3 %"): "which matrices are the smallest",
    ("docs/guide/which_codec.md", "3 %"): "which matrices are the smallest",
    ("docs/guide/momentum.md", "20 %"): "when to freeze, advice",
    ("docs/guide/training.md", "10 %"): "how large a residual is, an order of magnitude",
}


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_of_a_page_are_those_of_the_files(page: Path) -> None:
    text = page.read_text()
    assert figures.page(text) == text, "run tools/figures.py"


def test_measured_numbers_of_guide_and_readme_come_from_files() -> None:
    found = set()
    for page in PAGES:
        text = figures.MARK.sub("", (ROOT / page).read_text())
        # Code goes; what commands print, in blocks of `text` or without a language, stays.
        for code in (r"^```(?!text)\w+$.*?^```$", r"^```\w*$", r"`[^`]*`"):
            text = re.sub(code, "", text, flags=re.MULTILINE | re.DOTALL)
        found |= {(page, match[0]) for match in MEASURED.finditer(text)}
    assert found == set(RULES), "a number that was measured needs a mark (tools/figures.py)"


def test_a_page_is_renewed_between_marks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"hook": hook, "ms_median": ms, "round_ms": [ms, ms]}
        for hook, ms in (("none", 100.0), ("torch:fp32", 1200.0), ("q4", 400.0))
    ]
    monkeypatch.setattr(result_files, "results", lambda name: {"rows": rows})
    old = (
        "q4 <!-- figures: ms 1gbit q4 -->999<!-- end --> ms, "
        "<!-- figures: faster 1gbit q4 --><!-- end -->"
    )
    new = figures.page(old)
    assert re.sub(r"<!--.*?-->", "", new) == "q4 400 ms, 3.00"
    assert figures.page(new) == new
    assert figures.page("99 ms") == "99 ms"
    for wrong in ("nothing", "ms 1gbit q3"):
        with pytest.raises(figures.FigureError):
            figures.page(f"<!-- figures: {wrong} --><!-- end -->")


@pytest.fixture
def files_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], set[str]]:
    """files_of("ms 1gbit q4") gives the names of the result files that a figure is made of."""
    asked: set[str] = set()
    read = result_files.results
    monkeypatch.setattr(result_files, "results", lambda name: asked.add(name) or read(name))

    def found(call: str) -> set[str]:
        asked.clear()
        figures.figure(call)
        return set(asked)

    return found


def test_the_occasion_of_every_table_stands_in_its_section(
    files_of: Callable[[str], set[str]],
) -> None:
    seen = {"readme_hooks"}
    for page in figures.PAGES:
        if page.name == "README.md":  # it links to the page that has them
            continue
        for section in re.split("^#+ ", page.read_text(), flags=re.MULTILINE):
            calls = [match[1] for match in figures.MARK.finditer(section)]
            said = {name for call in calls for name in call.split()[1:] if "occasion" in call}
            for call in calls:
                if call.split()[0] in figures.TABLES:
                    seen.add(call.split()[0])
                    missing = files_of(call) - said
                    assert not missing, f"{page.name}, {call}: needs the occasion of {missing}"
    assert seen == set(figures.TABLES)


def test_every_result_file_is_used_and_says_how_it_was_made(
    files_of: Callable[[str], set[str]],
) -> None:
    used = set()
    for page in ROOT.glob("docs/**/*.md"):
        used |= set(re.findall(r"benchmarks/results/(\w+)\.json\)", page.read_text()))
    for page in figures.PAGES:
        for match in figures.MARK.finditer(page.read_text()):
            if not match[1].startswith(("occasion", "command")):
                used |= files_of(match[1])
    for file in figures.RESULTS.glob("*.json"):
        assert file.stem in used, f"{file} is used nowhere"
        facts = json.loads(file.read_text())["environment"]
        assert facts["date"], file
        assert "command" in facts or file.stem == "gpu_check_h100", file


def test_every_measurement_is_a_command_whose_file_is_there() -> None:
    for name in measure_all.MEASUREMENTS:
        _, first, *words, flag, path = measure_all.command(name)
        assert (flag, ROOT / path) == ("--json", figures.RESULTS / f"{name}.json")
        assert (ROOT / path).exists(), name
        if first == "-m":
            parser().parse_args(words[1:])
        else:
            assert (ROOT / first).exists()


def test_every_result_file_is_measured_or_named_with_its_command() -> None:
    files = {file.stem for file in figures.RESULTS.glob("*.json")}
    assert sorted([*measure_all.MEASUREMENTS, *measure_all.ELSEWHERE]) == sorted(files)


def test_measurements_that_are_newer_than_a_date_are_skipped() -> None:
    shown = subprocess.run(
        [sys.executable, measure_all.__file__, "--dry-run", "--since", "2020-01-01", "demo"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "0 measurements, about 0 minutes on two cores\n"
