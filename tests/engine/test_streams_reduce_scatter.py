"""A reduce-scatter on a device with streams: the cases of test_reduce_scatter.py, to the bit.

tests/fsdp/test_fsdp2_device.py has what FSDP2 sees of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from outcomes import Outcome, attempt
from reduce_scattering import Case, Steps, assert_bit_equal, case_steps
from residual_sums import aligned
from test_reduce_scatter import SMALL
from watching import expect_no_race, in_two_orders
from world import World

Worlds = Callable[[int], World]


def case_in_two_orders(case: Case) -> list[dict[str, Any]]:
    return in_two_orders(lambda: case_steps(case))


@pytest.mark.torch_core
@pytest.mark.parametrize(
    "case",
    [
        Case(2, "exact", device="streamed"),
        Case(3, "exact", torch.bfloat16, options=SMALL, device="streamed"),
        Case(3, "exact", torch.float64, options=SMALL, device="streamed"),
        Case(2, "q4", torch.bfloat16, "worker", device="staged"),
        Case(2, "q8", torch.float16, options=SMALL, device="streamed"),
        Case(4, "sign1", error_feedback="worker", options={"seed": 7}, device="streamed"),
        Case(3, "topk:ratio=0.05", error_feedback="worker", device="streamed"),
        Case(2, "rht:bits=3", error_feedback="worker", options={"seed": 7}, device="streamed"),
        Case(2, "q4", error_feedback="worker", options={"warmup_steps": 2}, device="streamed"),
        Case(
            2,
            "q4",
            error_feedback="worker",
            scales=(4.0, 1024.0, 0.5),
            options=SMALL,
            device="streamed",
        ),
        Case(
            3,
            "q4",
            error_feedback="worker",
            poison=(1, 0, "block.weight", 2),
            device="streamed",
        ),
    ],
    ids=lambda case: f"{case.world_size}-{case.codec}-{case.kind}-{case.device}",
)
def test_means_residuals_and_bytes_are_as_written(device_worlds: Worlds, case: Case) -> None:
    for answers in zip(
        *device_worlds(case.world_size).run(case_in_two_orders, case=case), strict=True
    ):
        assert_bit_equal(answers, case)
        # A commit for each bucket on a host; here one for the step before.
        commits = 64 * (case.world_size - 1) * (3 * case.steps - (case.steps - 1))
        expected = [total - commits for total in case.wire_bytes()]
        for answer, sent in zip(answers, expected, strict=True):
            stats, workspace = answer["stats"], answer["workspace"]
            assert stats["host_waits"] == 0
            assert stats["wire_bytes"] == sent
            assert (stats["chunks"] > stats["buckets"]) == ("workspace_cap_mb" in case.options)
            assert workspace["gathered_bytes"] == workspace["own_message_bytes"] == 0
            assert stats["workspace_bytes"] <= case.options.get("workspace_cap_mb", 96) * 2**20


# --- waits, allocations, launches ----------------------------------------------------------------

SLOTS = 3
CHUNKS = 6  # of the second bucket of a step, of three tiles for every owner; the first has one


class Watched:
    """Steps of two buckets, and what handing over and awaiting the second does to the device."""

    def __init__(self) -> None:
        from fake_device import machine

        shards = {"first.weight": (21, 21), "second.weight": (CHUNKS * 3 * 4096,) * 2}
        cap = {"workspace_cap_mb": 0.25}
        case = Case(2, "q4", options=cap, shards=shards, device="streamed")
        self.machine = machine
        self.steps = Steps(case)

    def step(self, step: int, omitted: int = -1) -> dict[str, int]:
        """Counts. `omitted`: a wait of those that they count."""
        steps, machine = self.steps, self.machine
        (first, given), (second, others) = (
            (bucket, steps.bucket(step, bucket)) for bucket in steps.case.buckets
        )
        call = steps.reducer.start([(first, given)], in_background=False)
        others = others.clone()
        before = machine.counters()
        machine.omit_wait(omitted)
        steps.reducer.start([(second, others)], in_background=False).wait()
        machine.omit_wait(-1)
        after = machine.counters()
        call.wait()
        others.cpu()  # read where an optimizer would
        machine.synchronize()
        return {key: after[key] - before[key] for key in after}


def case_waits() -> dict[str, Any]:
    run = Watched()
    machine = run.machine
    for step in range(2):
        run.step(step)
    launches = machine.counters()["launches"]
    counts = run.step(2)
    launches = machine.counters()["launches"] - launches
    expect_no_race()
    found = []
    for number in range(counts["waits"]):
        run.step(3 + number, omitted=number)
        found.append(bool(machine.races()))
    engine = run.steps.engine
    assert engine.workspace()["slots"] == SLOTS
    return {"counts": counts, "launches": launches, "found": found, "stats": engine.stats()}


def expected_waits() -> list[tuple[str, bool]]:
    """Waits for the second bucket in the order of posting, and whether each is needed: the first
    slots are free since the step before.
    """
    waits = [("ready", True)]
    for chunk in range(CHUNKS + 1):
        if chunk < CHUNKS:
            waits.append((f"slot of {chunk}", chunk >= SLOTS - 1))
        if chunk >= 1:
            waits.append((f"scatter of {chunk - 1}", True))
    return [*waits, ("end", True)]


@pytest.mark.torch_core
def test_every_wait_is_needed_and_a_chunk_takes_two_launches(device_worlds: Worlds) -> None:
    names, needed = zip(*expected_waits(), strict=True)
    for answer in device_worlds(2).run(case_waits):
        counts = answer["counts"]
        assert answer["stats"]["chunks"] == (3 + counts["waits"]) * (CHUNKS + 1)
        assert (counts["allocations"], counts["host_waits"]) == (0, 0)
        assert counts["waits"] == len(names)
        assert dict(zip(names, answer["found"], strict=True)) == dict(
            zip(names, needed, strict=True)
        )
        # And the gain, and the commit of the step before.
        assert answer["launches"] == 2 * (CHUNKS + 1) + 2
        assert answer["stats"]["host_waits"] == 0


# --- worlds of one, errors ------------------------------------------------------------------------


def case_alone(device: str) -> list[bytes]:
    """What a world of one makes of a state in which a larger one has withheld ones."""
    case = Case(1, "q4", error_feedback="worker", device=device)
    steps = Steps(case)
    withheld = torch.ones(sum(aligned(size) for size in case.sizes))
    steps.engine.load_state(0, withheld, torch.zeros(0), 0.0)
    means = [mean for step in range(2) for mean in steps.run(step)]
    assert means[0][-1] == case.gradient(0, 0, 0)[-1] + 1
    return [mean.tobytes() for mean in means]


def test_alone_a_rank_delivers_what_a_larger_world_withheld(device_worlds: Worlds) -> None:
    host, device = (device_worlds(1).run(case_alone, device=d) for d in ("cpu", "streamed"))
    assert host == device


def case_nonfinite() -> list[Outcome]:
    case = Case(
        3,
        "q4",
        options={"nonfinite": "raise"},
        poison=(1, 0, "block.weight", 2),
        device="streamed",
    )
    steps = Steps(case)
    outcomes = [attempt(lambda step=step: steps.run(step)) for step in range(3)]
    return [*outcomes, attempt(lambda: steps.run(3)), attempt(steps.engine.state)]


@pytest.mark.torch_core
def test_a_mean_that_is_not_finite_is_one_error_on_all_ranks(device_worlds: Worlds) -> None:
    """Only rank 2 could see it, in step 1; the commits of that step are read in step 3."""
    answers = device_worlds(3).run(case_nonfinite)
    for *before, third, state in answers:
        assert [outcome.error for outcome in before] == [None] * 3
        for outcome in (third, state):
            assert outcome.error == "StateError"
            assert outcome.headline == (
                "the averaged gradient of 'block.weight[2]' was not finite at step 1; lower the "
                "learning rate or the loss scale, or attach with nonfinite='propagate' to see it "
                "in .grad"
            )
