"""A rank that dies among three: the others raise PeerError at once, and keep it."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from outcomes import attempt
from scenario import Run, Scenario, Weight
from world import COLLECTIVE_SECONDS, World, WorldError

SCENARIO = Scenario(
    (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60))),
    world_size=3,
    ddp={"bucket_cap_mb": 0.02},
)
VICTIM = 2
# A death closes connections, which takes milliseconds; only waiting for an answer takes as long as
# the group's timeout.
MOST_SECONDS = COLLECTIVE_SECONDS / 4


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def case_death_in_step(place: str, native: bool, folder: str) -> None:
    """The victim dies at `place` of step 2; what the others see goes to files."""
    run = Run(Scenario(**{**vars(SCENARIO), "native": native}))
    run.step(0)
    run.step(1)  # after it, buckets are in the order in which gradients come
    if run.rank == VICTIM:
        if place == "between steps":
            die()
        last = run.ddp.module.get_parameter(run.buckets[-1][-1][-1])
        last.register_post_accumulate_grad_hook(die)
    calls = (lambda: run.step(2), lambda: run.step(3), run.state.state_dict, run.state.skip_step)
    outcomes = [attempt(call) for call in calls]
    seen = [(o.error, o.headline, o.seconds) for o in outcomes]
    Path(folder, str(run.rank)).write_text(json.dumps(seen))


@pytest.mark.parametrize(
    ("place", "native"),
    [
        ("between steps", True),
        ("in its last bucket", True),
        ("in its last bucket", False),
    ],
)
def test_death_of_a_rank_is_named_at_once_and_stays(
    world_of_3: World, tmp_path: Path, place: str, native: bool
) -> None:
    with pytest.raises(WorldError) as caught:
        world_of_3.run(case_death_in_step, place=place, native=native, folder=str(tmp_path))
    failed = re.findall(r"^rank \d: .*", str(caught.value), re.MULTILINE)
    assert failed == [f"rank {VICTIM}: process ended with code -9"]
    # What the first survivor found out is what all say.
    named = re.compile(
        rf"rank \d lost contact with rank {VICTIM} "
        r"\(step 2, (chunk|bucket) \d+, (scatter|gather|commit)\): .*"
        r"; look at the other ranks' errors first, then restart"
    )
    for rank in range(VICTIM):
        seen = json.loads((tmp_path / str(rank)).read_text())
        assert named.fullmatch(seen[0][1]), seen
        assert {(error, text) for error, text, _ in seen} == {("PeerError", seen[0][1])}
        assert max(seconds for *_, seconds in seen) < MOST_SECONDS
