"""check_words finds a planted mistake of each kind, and nothing in a tree without one."""

from pathlib import Path

import pytest
from check_words import GLOSSARY, violations

LAWFUL = {
    GLOSSARY: """# Architecture

| word | meaning | defined in | instead of |
| --- | --- | --- | --- |
| trial | a few timed steps | `trial.py` | forecast, crystal ball |
| tile | some elements | `codec.h` | |
""",
    "README.md": "A trial decides; `forecast` is a name of the code.\n",
    "CONTRIBUTING.md": "Of documents only the words are checked.\n",
    "hooks/plan.h": "// The plan. It takes,\n// As a trial does, time.\nint plan;  // of one\n",
    "python_bindings/auto.py": '"""Tries codecs."""\n\nCOUNTED = 5  # of seven\n',
}


def planted(root: Path, **files: str) -> list[str]:
    for name, text in (LAWFUL | files).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return list(violations(root))


def test_lawful_tree_has_no_violation(tmp_path: Path) -> None:
    assert planted(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "where"),
    [
        ("README.md", "One line.\nForecasts are quick.\n", "README.md:2: 'Forecasts': say 'trial'"),
        ("docs/a/b.md", "| a crystal ball |\n", "docs/a/b.md:1: 'crystal ball': say 'trial'"),
        ("kernels/q4.cpp", "int a;  // by forecast\n", "kernels/q4.cpp:1: 'forecast': say 'trial'"),
        ("hooks/plan.h", "// A\n// crystal\n// ball.\n", "hooks/plan.h:1: 'crystal ball': say"),
        ("kernels/q4.cpp", "// Of quads of numbers.\n", "kernels/q4.cpp:1: no subject"),
        ("hooks/plan.h", "int a;\n// Of a bucket.\n", "hooks/plan.h:2: no subject: 'Of a bucket.'"),
        ("hooks/plan.h", "int a;  // one\n// As of old.\n", "hooks/plan.h:2: no subject"),
        (
            "benchmarks/a.py",
            "def f():\n    '''Runs. That of f.'''\n",
            "benchmarks/a.py:1: no subject",
        ),
        ("measure/a.py", "# A line.\n# As before, again.\n", "measure/a.py:1: no subject"),
    ],
)
def test_planted_mistake_is_found(tmp_path: Path, name: str, text: str, where: str) -> None:
    (found,) = planted(tmp_path, **{name: text})
    assert found.startswith(where)
