"""docs/guide/two_machines.md: its commands train, and mistakes end with the texts that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from documented import ROOT, blocks
from two_machines import run_on_two, without_numbers

pytestmark = pytest.mark.usefixtures("namespaces_allowed")

PAGE = "docs/guide/two_machines.md"
COMMANDS = blocks(PAGE, "")
(EXPORT,) = (each for each in COMMANDS if each.startswith("export"))
PAIRS = list(
    zip(
        *([each for each in COMMANDS if f"--node-rank {rank}" in each] for rank in (0, 1)),
        strict=True,
    )
)
SHOWN = blocks(PAGE, "text")
CHECKS = [each for each in COMMANDS if each.startswith("$ ")]


def test_every_command_of_the_page_is_tested() -> None:
    assert len(PAIRS) == len(SHOWN) == 2
    assert sorted(COMMANDS) == sorted([EXPORT, *CHECKS, *sum(PAIRS, ())])
    for first, second in PAIRS:
        assert second == first.replace("--node-rank 0", "--node-rank 1")


def expect_shown(shown: str, said: list[str]) -> None:
    """Every line that a page shows was printed, but for numbers and what is behind it."""
    lines = [without_numbers(line) for line in said]
    for line in shown.splitlines():
        # A name of the first column, where it is a table.
        begin = without_numbers(line.split("  ")[0])
        assert line == "..." or any(each.startswith(begin) for each in lines), (line, said)


@pytest.mark.slow
def test_doctor_talks_between_two_machines(tmp_path: Path) -> None:
    checks = "".join(each.splitlines()[0].removeprefix("$ ") + "\n" for each in CHECKS)
    ended = run_on_two([checks + EXPORT + each for each in PAIRS[0]], tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    for block in (*CHECKS, SHOWN[0]):
        expect_shown(re.sub(r"^\$ .*\n", "", block), ended[0][1])


@pytest.mark.slow
def test_example_trains_on_two_machines(tmp_path: Path) -> None:
    ended = run_on_two([EXPORT + each for each in PAIRS[1]], tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended
    expect_shown(SHOWN[1], ended[0][1])


# --- mistakes -------------------------------------------------------------------------------------

SCRIPT = "examples/ddp_minimal.py"
FIRST, SECOND = (EXPORT + each for each in PAIRS[1])
IDLE = "tail -f /dev/null"  # until the other machine has failed
AT_ONCE = ("--master-port 29500", "--master-port 29500 --rdzv-conf timeout=3")  # not ten minutes
LISTENS = "until (: </dev/tcp/10.0.0.1/29500) 2>/dev/null; do sleep 0.1; done"
# What arrives passes if it comes from port 29500 or goes there.
FIREWALL = "ip rule add pref 100 lookup local; ip rule del pref 0" + "".join(
    f"; ip rule add pref {number} iif eth0 ipproto tcp {what}"
    for number, what in enumerate(
        ("dport 29500 lookup local", "sport 29500 lookup local", "blackhole"), 10
    )
)
# Scripts of a mistake: a change of the example.
CHANGED = {
    "q8.py": ('"q4"', '"q8"'),
    "impatient.py": (
        'init_process_group("gloo")',
        'init_process_group("gloo", timeout=__import__("datetime").timedelta(seconds=2))',
    ),
    "missing.py": (
        "import gradferry\n",
        "raise ModuleNotFoundError(\"No module named 'gradferry'\")\n",
    ),
    "old.py": (
        "def main()",
        'import gradferry.core.agreement as used\nused.GRADFERRY_VERSION = "0.1.0"\ndef main()',
    ),
}
# By words of the cause in the table: what both machines run first, and what each runs.
MISTAKES = {
    "was not started": ("", FIRST.replace(*AT_ONCE), IDLE),
    "another address or port": ("", IDLE, SECOND.replace(*AT_ONCE).replace("29500", "29501")),
    "the same `--node-rank`": ("", *[FIRST.replace(*AT_ONCE)] * 2),
    "not installed on machine 2": ("", FIRST, SECOND.replace(SCRIPT, "FOLDER/missing.py")),
    "another training": ("", f"{FIRST.strip()} & {LISTENS}\n{FIRST}", IDLE),
    "names no interface": ("", FIRST, SECOND.replace("eth0", "eth9")),
    "gloo took loopback": ("", *(each.replace("eth0", "lo") for each in (FIRST, SECOND))),
    "a firewall lets": (
        FIREWALL,
        *(each.replace(SCRIPT, "FOLDER/impatient.py") for each in (FIRST, SECOND)),
    ),
    "versions of gradferry": ("", FIRST, SECOND.replace(SCRIPT, "FOLDER/old.py")),
    "versions of the script": ("", FIRST, SECOND.replace(SCRIPT, "FOLDER/q8.py")),
}
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \| [^|]+ \|$", (ROOT / PAGE).read_text(), re.MULTILINE)


def texts(cause: str) -> list[str]:
    """What the row of the table with that cause shows in backticks."""
    (said,) = (said for said, each in ROWS if cause in each)
    return re.findall("`([^`]+)`", said)


def test_every_mistake_of_the_page_is_tested() -> None:
    assert len(MISTAKES) == len(ROWS) - 2  # the table's head
    assert all(texts(cause) for cause in MISTAKES)


@pytest.mark.slow
@pytest.mark.parametrize("cause", MISTAKES)
def test_a_mistake_ends_with_the_text_of_the_page(tmp_path: Path, cause: str) -> None:
    for name, change in CHANGED.items():
        (tmp_path / name).write_text((ROOT / SCRIPT).read_text().replace(*change))
    before, *scripts = MISTAKES[cause]
    scripts = [script.replace("FOLDER", str(tmp_path)) for script in scripts]
    ended = run_on_two(scripts, tmp_path, before)
    said = without_numbers("\n".join(line for _, lines in ended for line in lines))
    for text in texts(cause):
        assert without_numbers(text) in said
