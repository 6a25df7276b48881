"""However a process ends, it ends at once, with the user's exit code, and without an abort."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("exit_script.py")
MOST_SECONDS = 5.0  # on a machine that does little else
# What waits for a peer waits for the group's timeout of 60 s: half of it is a hang on any machine.
MOST_SECONDS_WHEN_BUSY = 30.0
EXIT_CODES = {"return": 0, "sys_exit": 3, "exception": 1}
DESTROYED = ("destroyed", "kept")


def start(tmp_path: Path, registered: str, ending: str, destroy: str) -> list[subprocess.Popen]:
    return [
        subprocess.Popen(
            [
                *(sys.executable, SCRIPT, str(rank), tmp_path / "rendezvous"),
                *(registered, ending, destroy),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def finish(process: subprocess.Popen) -> None:
    """Waits, and checks the seconds from the time it said it would end to its end."""
    output, errors = process.communicate(timeout=120)
    ended = time.monotonic()
    assert output, errors
    assert "terminate called" not in errors
    began, slowdown = map(float, output.split())
    assert ended - began < min(MOST_SECONDS * slowdown, MOST_SECONDS_WHEN_BUSY)


def check(tmp_path: Path, registered: str, ending: str, destroy: str) -> None:
    processes = start(tmp_path, registered, ending, destroy)
    try:
        for process in processes:
            finish(process)
    finally:
        for process in processes:
            process.kill()
    assert [p.returncode for p in processes] == [EXIT_CODES[ending]] * 2


@pytest.mark.parametrize(
    ("registered", "ending", "destroy"),
    [
        ("native", "exception", "kept"),
        ("native", "return", "destroyed"),
        ("reducer", "return", "destroyed"),
    ],
)
def test_exit_code_is_the_users(tmp_path: Path, registered: str, ending: str, destroy: str) -> None:
    check(tmp_path, registered, ending, destroy)


@pytest.mark.slow
@pytest.mark.parametrize("attempt", range(4))
@pytest.mark.parametrize("registered", ["native", "python"])
@pytest.mark.parametrize("destroy", DESTROYED)
@pytest.mark.parametrize("ending", list(EXIT_CODES))
def test_exit_code_is_the_users_every_time(
    tmp_path: Path, registered: str, ending: str, destroy: str, attempt: int
) -> None:
    check(tmp_path, registered, ending, destroy)


@pytest.mark.parametrize("registered", ["native", "python", "reducer"])
def test_exception_with_a_bucket_in_flight_ends_at_once(tmp_path: Path, registered: str) -> None:
    processes = start(tmp_path, registered, "in_flight", "kept")
    try:
        # Rank 1 waits for its standard input, so its half of the bucket never comes.
        finish(processes[0])
        assert processes[0].returncode == 1
        assert processes[1].poll() is None
        finish(processes[1])  # closes its standard input
        assert processes[1].returncode == 0
    finally:
        for process in processes:
            process.kill()
