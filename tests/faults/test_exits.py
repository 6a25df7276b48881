"""However a process ends, it waits for no peer, has the user's exit code, and does not abort.

What waits for a peer that stays silent waits for the group's timeout, which is an hour: it hangs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from exit_server import EXIT_CODES, USERS_ERROR, Ending
from killing import Place, random_place
from resumable import Job, drawn_job

SERVER = Path(__file__).parents[1] / "helpers" / "exit_server.py"
UNDER_VALGRIND = 4

Server = subprocess.Popen


def drawn_ending(seed: int) -> Ending:
    rng = random.Random(seed)
    how = rng.choice(list(EXIT_CODES))
    from_outside = how.startswith("SIG")
    peer = "goes on" if from_outside else rng.choice(("stays", "goes on", "together"))
    while True:
        job = drawn_job(rng)
        # What torch itself has in flight can block its end: collectives of FSDP2, of join(), and
        # of find_unused_parameters.
        if not (job.sharded or job.uneven or (job.in_turns and peer == "stays")):
            break
    options = {name: value for name, value in job.hook.items() if name != "nodes"}
    job = dataclasses.replace(job, world_size=2, hook=options)
    place = random_place(rng, rng.randrange(5), 0, job)
    if place.name == "save" and how == "exception":
        how = "sys.exit"  # save() makes an exception that of all ranks, and waits for theirs
    if peer == "stays" and place.name == "save":  # before it waits for the other's file
        place = dataclasses.replace(place, number=place.number % 3)
    if from_outside:
        job = dataclasses.replace(job, steps=10**6)
    return Ending(job, how, place, 2 * rng.random(), peer, rng.random() < 0.5)


@contextlib.contextmanager
def exit_server(*under: str | Path, env: dict[str, str] | None = None) -> Iterator[Server]:
    """What forks ranks and says how they ended. `under`: a command that runs it."""
    command = [*under, sys.executable, SERVER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as server:
        yield server
        server.stdin.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with exit_server() as started:
        yield started


def end(server: Server, ending: Ending, folder: Path) -> None:
    """Both ranks end, with codes and words that are checked."""
    server.stdin.write(json.dumps({**dataclasses.asdict(ending), "folder": str(folder)}) + "\n")
    server.stdin.flush()
    became = json.loads(server.stdout.readline())
    what = f"{ending}:\n" + "\n".join(became["says"])
    first, second = became["codes"]
    code = EXIT_CODES[ending.how]
    # A rank that meets the other's end has an exception of its own.
    if ending.peer == "together":
        assert {first, second} <= {code, 1}, what
        assert code in (first, second), what
    else:
        assert first == code, what
        assert second in (0, 1), what
    assert "terminate called" not in what
    if ending.how == "exception" and ending.peer != "together":
        assert USERS_ERROR in became["says"][0], what


# The way in, how rank 0 ends, and whether it destroys its process group.
ENDED = [
    ("ddp", "exception", False),
    ("standard hook", "sys.exit", True),
    ("reducer", "return", True),
]


@pytest.mark.parametrize(("way", "how", "destroys"), ENDED)
def test_exit_code_is_the_users(
    server: Server, tmp_path: Path, way: str, how: str, destroys: bool
) -> None:
    job = Job("q4", 2, way=way, steps=3)
    end(server, Ending(job, how, Place(2, "after step", 0), 0, "together", destroys), tmp_path)


@pytest.mark.parametrize("way", ["ddp", "standard hook", "async reducer"])
def test_exception_with_a_bucket_in_flight_waits_for_no_peer(
    server: Server, tmp_path: Path, way: str
) -> None:
    # Rank 1 begins no step 2 before rank 0 has ended, so its half of the bucket never comes.
    job = Job("q4", 2, way=way, steps=3)
    end(server, Ending(job, "exception", Place(2, "in backward", 0), 0, "stays", False), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_end_at_any_moment_has_the_users_code(server: Server, tmp_path: Path, seed: int) -> None:
    end(server, drawn_ending(seed), tmp_path)


# Python's interpreter reads what it has not written, and torch writes such bytes into a file, where
# nothing of ours is on the stack: only errors that name our module count.
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_no_end_uses_memory_that_is_not_there(tmp_path: Path) -> None:
    log = tmp_path / "valgrind.%p"
    valgrind = ("valgrind", "--error-limit=no", "--num-callers=40", f"--log-file={log}")
    with exit_server(*valgrind, env={**os.environ, "PYTHONMALLOC": "malloc"}) as server:
        for seed in range(UNDER_VALGRIND):
            folder = tmp_path / str(seed)
            folder.mkdir()
            end(server, drawn_ending(seed), folder)
    logs = [path.read_text(errors="replace") for path in tmp_path.glob("valgrind.*")]
    # The server's, two ranks' each, and those of what torch starts.
    assert sum("ERROR SUMMARY" in text for text in logs) >= 1 + 2 * UNDER_VALGRIND
    errors = [error for text in logs for error in errors_in(text)]
    ours = [error for error in errors if re.search(r"gradferry/_native|gradferry::", error)]
    assert not ours, "\n\n".join(ours)


def errors_in(log: str) -> list[str]:
    """What memcheck reports: paragraphs of lines without its prefix, each with its stacks."""
    text = re.sub(r"^==\d+== ?", "", log, flags=re.MULTILINE)
    return [part for part in text.split("\n\n") if re.search(r"^ +at 0x", part, re.MULTILINE)]
