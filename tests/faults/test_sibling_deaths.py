"""A rank that dies, or stops, while its siblings wait for it: they raise PeerError in time."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from outcomes import attempt
from scenario import Run
from test_node_memory import local_stage, mapped_bytes
from test_two_levels import scenario_on
from world import World, WorldError

# Ranks 1 and 2 share a node, and rank 1 alone exchanges with rank 0, which serves the store. One
# bucket of one chunk.
SCENARIO = scenario_on("1+2", error_feedback="both")
AWAY = 0
# A death closes connections, and takes no timeout; only what is silent does.
TIMEOUT_SECONDS = {signal.SIGKILL: 600.0, signal.SIGSTOP: 3.0}


def chunks(run: Run) -> int:
    return run.state.stats()["chunks"]


def when_posted(run: Run, begun: int, store: dist.Store, victim: int, number: int) -> None:
    """Ends the victim when both siblings have posted what they scatter between them."""
    while chunks(run) == begun:
        time.sleep(0.001)
    store.set(f"posted/{run.rank}", "")
    if run.rank == victim:
        store.wait([f"posted/{3 - victim}"])
        os.kill(os.getpid(), number)


def case_sibling_ends(victim: int, stage: str, number: int, folder: str) -> None:
    from gradferry.core import engine

    timeout = timedelta(seconds=TIMEOUT_SECONDS[signal.Signals(number)])
    with mock.patch.object(engine, "_timeout", return_value=timeout):
        run = Run(SCENARIO)
    run.step(0)
    run.step(1)
    rank = run.rank
    if rank != AWAY:
        assert local_stage(run) == "shared memory"
    pids: list[int] = [0] * SCENARIO.world_size
    dist.all_gather_object(pids, os.getpid())
    store = dist.PrefixStore(
        f"ends/{victim}/{stage}/{number}", dist.distributed_c10d._get_default_store()
    )
    if rank == AWAY:  # so that rank 1 has nothing to forward
        store.wait(["seen"])
    elif stage == "forward":
        threading.Thread(target=when_posted, args=(run, chunks(run), store, victim, number)).start()
    elif rank == victim:
        os.kill(os.getpid(), number)
    outcome = attempt(lambda: run.step(2))
    if rank == 3 - victim:
        store.set("seen", "")
        Path(folder, "seen").write_text(json.dumps([outcome.error, outcome.text]))
        if number == signal.SIGKILL:  # the world ends with it
            return
        os.kill(pids[victim], signal.SIGCONT)
        del run
        gc.collect()
        deadline = time.monotonic() + 60
        while mapped_bytes() and time.monotonic() < deadline:
            time.sleep(0.01)
        Path(folder, "left").write_text(str(mapped_bytes()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "stage", "number"),
    [
        (1, "local scatter", signal.SIGKILL),
        (2, "local scatter", signal.SIGKILL),
        (1, "forward", signal.SIGKILL),
        (1, "local scatter", signal.SIGSTOP),
        (1, "forward", signal.SIGSTOP),
    ],
)
def test_sibling_that_dies_or_stops_is_named(
    world_of_3: World, tmp_path: Path, victim: int, stage: str, number: int
) -> None:
    if number == signal.SIGSTOP:
        world_of_3.run(
            case_sibling_ends, victim=victim, stage=stage, number=number, folder=str(tmp_path)
        )
        why = "nothing came within the timeout"
    else:
        with pytest.raises(WorldError, match=f"rank {victim}: process ended with code -9"):
            world_of_3.run(
                case_sibling_ends, victim=victim, stage=stage, number=number, folder=str(tmp_path)
            )
        why = "its connection was closed"
    error, text = json.loads((tmp_path / "seen").read_text())
    assert error == "PeerError"
    # The rank that is away, and waits for nothing, is missing, too.
    assert text.startswith(
        f"rank {3 - victim} lost contact with ranks {AWAY} and {victim} "
        f"(step 2, chunk 2, {stage}): {why}; look at the other ranks' errors first"
    ), text
    if number == signal.SIGSTOP:
        assert (tmp_path / "left").read_text() == "0"
