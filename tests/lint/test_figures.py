"""Measured figures of pages come from benchmarks/results, and every file there is used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from documented import PAGES, ROOT
from gradferry_lab.cli import parser
from test_documentation import loaded

figures = loaded("figures")
measure_all = loaded("measure_all", "benchmarks")

MEASURED = re.compile(
    r"\d[\d.,]*\s*(?:ms\b|%|times\s+(?:as\b|fewer|faster|slower|less|more|with|a\s+step))"
)
# What looks like a measured number, and is none.
RULES = {
    ("README.md", "2 %"): "how `auto` chooses",
    ("docs/guide/which_codec.md", "2 %"): "how `auto` chooses",
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
        for code in (r"^```.*?^```", r"`[^`]*`"):
            text = re.sub(code, "", text, flags=re.MULTILINE | re.DOTALL)
        found |= {(page, match[0]) for match in MEASURED.finditer(text)}
    assert found == set(RULES), "a number that was measured needs a mark (tools/figures.py)"


def test_a_page_is_renewed_between_marks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"hook": hook, "ms_median": ms, "round_ms": [ms, ms]}
        for hook, ms in (("none", 100.0), ("torch:fp32", 1200.0), ("q4", 400.0))
    ]
    monkeypatch.setattr(figures, "results", lambda name: {"rows": rows})
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


def test_every_result_file_is_used_and_says_how_it_was_made() -> None:
    pages = [*figures.PAGES, *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/*.py")]
    used = "".join(page.read_text() for page in pages)
    for file in figures.RESULTS.glob("*.json"):
        assert file.stem in used or file.stem.startswith("train_"), f"{file} is used nowhere"
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
    train = {f"train_{link}" for link in figures.LINKS}
    assert train <= set(measure_all.MEASUREMENTS)


def test_measurements_that_are_newer_than_a_date_are_skipped() -> None:
    shown = subprocess.run(
        [sys.executable, measure_all.__file__, "--dry-run", "--since", "2020-01-01", "demo"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "0 measurements, about 0 minutes on two cores\n"
