"""A rank that fails while the others wait: they soon know which one, and why.

The world's collectives time out long after a case must have ended: its errors are ones that were
told.
"""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from scenario import ChosenGradients, Run, Scenario, Weight
from torch.nn.parallel import DistributedDataParallel
from world import World, WorldError

WEIGHTS = (Weight("first", (90, 100)), Weight("last", (50, 60)))
VICTIM = 1
SHORT_SECONDS = 2.0  # a timeout that is waited for


def case_fails_before_it_posts(native: bool, failing_step: int) -> tuple[Outcome, Outcome, bool]:
    """The victim's scale becomes one that cannot be, and it stays alive."""
    scaler = torch.amp.GradScaler("cpu")
    run = Run(Scenario(WEIGHTS, native=native, options={"grad_scaler": scaler}))
    for step in range(failing_step):
        run.step(step)
    if dist.get_rank() == VICTIM:
        scaler._scale.fill_(0.0)
    outcome = attempt(lambda: run.step(failing_step))
    again = attempt(run.state.state_dict)
    dist.barrier()  # the victim is there, and so is the group
    return outcome, again, Run(Scenario(WEIGHTS)).step(0)[0] is not None


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_rank_that_fails_before_it_posts_is_named_by_all_with_its_text(
    world_of_3: World, native: bool
) -> None:
    answers = world_of_3.run(case_fails_before_it_posts, native=native, failing_step=2)
    own = answers[VICTIM][0]
    for rank, (outcome, again, trained) in enumerate(answers):
        assert again.headline == outcome.headline
        assert trained
        if rank != VICTIM:
            assert outcome.error == "PeerError"
            assert outcome.headline == f"rank {VICTIM} failed: {own.headline}"
    assert "scale" in own.headline


def case_killed(victim: int) -> None:
    run = Run(Scenario(WEIGHTS))
    for step in range(12):
        run.step(step)
    dist.barrier()
    if dist.get_rank() == victim:
        os._exit(9)
    outcome = attempt(lambda: run.step(12))
    shown = outcome.text.count("\n  step ")
    raise AssertionError(f"survivor: {outcome.error}: {outcome.headline} / {shown} buckets")


def test_death_of_the_rank_that_serves_the_store_is_named(world_of_3: World) -> None:
    with pytest.raises(WorldError) as failures:
        world_of_3.run(case_killed, victim=0)
    text = str(failures.value)
    assert text.count("lost contact with rank 0 (step 12, chunk") == 2, text
    assert text.count("its connection was closed") == 2
    assert text.count("the store does not answer") == 2
    assert text.count("/ 8 buckets") == 2


def case_sees_its_own_end(reasons: tuple[str, ...]) -> str:
    """A collective has failed, and every rank knows it from another source."""
    from gradferry.core import agreement, meeting

    group = dist.group.WORLD
    failed = RuntimeError(reasons[dist.get_rank()])
    with mock.patch.object(agreement, "_gather_records", side_effect=failed):
        outcome = attempt(lambda: agreement.gather_records({}, group, torch.device("cpu")))
    meeting.meet(group, timedelta(seconds=60), "come")  # after which it is forgotten
    assert outcome.error == "PeerError"
    return outcome.text


def test_a_lost_collective_is_one_text_on_all_ranks_that_know_it_otherwise(
    world_of_3: World,
) -> None:
    reasons = ("Timed out waiting", "Connection closed by peer", "Address in use")
    texts = world_of_3.run(case_sees_its_own_end, reasons=reasons)
    assert len(set(texts)) == 1, texts
    assert "lost contact with another rank: " in texts[0]


def case_told(at: str) -> Outcome:
    """The victim takes part in the first steps, then posts nothing, and says why."""
    from gradferry.core import engine

    told: list[Any] = []
    options = engine._native.EngineOptions

    def remember(**arguments: Any) -> Any:
        told.append(arguments["store"])
        return options(**arguments)

    with mock.patch.object(engine._native, "EngineOptions", remember):
        run = Run(Scenario(WEIGHTS))
    for step in range(2):  # DDP communicates by itself when it rebuilds its buckets
        run.step(step)
    if dist.get_rank() == VICTIM:
        time.sleep(0 if at == "once" else 1.5)
        told[0].set("error", "rank 1 could not read a commit")
        outcome = Outcome("PeerError", True, "rank 1 could not read a commit")
    else:
        outcome = attempt(lambda: run.step(2))
    dist.barrier()
    return outcome


@pytest.mark.parametrize("at", ["once", "in silence"])
def test_what_one_rank_tells_is_raised_by_those_that_wait(world_of_3: World, at: str) -> None:
    for outcome in world_of_3.run(case_told, at=at):
        assert (outcome.error, outcome.headline) == ("PeerError", "rank 1 could not read a commit")


def case_silence() -> tuple[list[str], bool]:
    """A slow rank: the others are silent for longer than a second, and then all goes on."""
    run = Run(Scenario(WEIGHTS))
    run.step(0)
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = store.num_keys()
    dist.barrier()
    run.step(1)
    dist.barrier()
    quick = store.num_keys() - before
    if dist.get_rank() == VICTIM:
        time.sleep(2.5)
    gradients = run.step(2)
    return quick, gradients[0] is not None


def test_steps_without_silence_leave_nothing_in_the_store(world_of_2: World) -> None:
    for keys, trained in world_of_2.run(case_silence):
        assert keys == 0
        assert trained


def case_skips_a_backward() -> tuple[Outcome, str, bool]:
    """The victim leaves out one backward pass, so that the others have one more than it."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT_SECONDS))
    run = Run(Scenario(WEIGHTS), group)

    def train() -> None:
        for step in range(5):
            # Not earlier: DDP communicates by itself when it rebuilds its buckets.
            if step == 2 and dist.get_rank() == VICTIM:
                run.ddp(run.targets(step))
            else:
                run.step(step)

    outcome = attempt(train)
    dist.barrier()  # the victim is there
    return outcome, run.parameter_hash(), Run(Scenario(WEIGHTS)).step(0)[0] is not None


def test_rank_that_skips_a_backward_pass_is_missed_after_the_timeout(world_of_2: World) -> None:
    answers = world_of_2.run(case_skips_a_backward)
    waiting, ahead = answers[0][0], answers[VICTIM][0]
    assert waiting.error == "PeerError"
    assert f"rank 0 lost contact with rank {VICTIM} (step 4, chunk" in waiting.headline
    assert "nothing came within the timeout" in waiting.headline
    assert ahead.error is None
    # The victim's passes are those of other steps, but ranks have applied the same averages.
    assert len({parameters for _, parameters, _ in answers}) == 1
    assert all(trained for *_, trained in answers)


def case_killed_beside_its_child() -> None:
    """The child, as a DataLoader's worker would, keeps connections open that its parent had."""
    group = dist.new_group(timeout=timedelta(seconds=SHORT_SECONDS))
    run = Run(Scenario(WEIGHTS), group)
    for step in range(2):
        run.step(step)
    dist.barrier()
    if dist.get_rank() == VICTIM:
        if os.fork() == 0:
            signal.alarm(2 * int(SHORT_SECONDS))
            signal.pause()
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = attempt(lambda: run.step(2))
    raise AssertionError(f"survivor: {outcome.error}: {outcome.headline}")


def test_rank_that_is_killed_beside_its_forked_child_is_named(world_of_2: World) -> None:
    with pytest.raises(WorldError) as failures:
        world_of_2.run(case_killed_beside_its_child)
    text = f"survivor: PeerError: rank 0 lost contact with rank {VICTIM} (step 2, chunk"
    assert text in str(failures.value), failures.value


def case_foreign_bucket() -> Outcome:
    """One rank hands in a bucket of another model."""
    import gradferry

    run = Run(Scenario(WEIGHTS))
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    for step in range(2):
        run.step(step)
    if dist.get_rank() == VICTIM:
        other = DistributedDataParallel(ChosenGradients(Scenario(WEIGHTS)), process_group=alone)
        other.register_comm_hook(run.state, gradferry.hook)
        ones = {w.name: torch.ones(w.shape) for w in WEIGHTS}
        outcome = attempt(lambda: other(ones).backward())
    else:
        outcome = attempt(lambda: run.step(2))
    dist.barrier()
    return outcome


def test_bucket_that_never_reaches_the_engine_is_told_to_all(world_of_2: World) -> None:
    waiting, failing = world_of_2.run(case_foreign_bucket)
    assert failing.error == "StateError"
    assert waiting.error == "PeerError"
    assert waiting.headline == f"rank {VICTIM} failed: {failing.headline}"
