"""What the watch over a sharded model says: of another hook, and of what was added after attach."""

from __future__ import annotations

import gc
import weakref

import gradferry
from gradferry.reduction import step_numbers
from outcomes import Outcome, attempt
from sharding import Sharding
from test_watch import texts
from torch import nn
from torch.optim import SGD
from world import World


def sharded() -> tuple[Sharding, nn.Module]:
    sharding = Sharding(replicas=2, shards=1)
    return sharding, sharding.model(sharding.mesh()["shard"])


def train_sharded(sharding: Sharding, model: nn.Module, steps: int) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        sharding.backward(model, step)
        optimizer.step()


def case_other_hook_on_shards() -> list[list[str]]:
    """Warnings before another hook takes the place of gradferry's, and after; and of local steps,
    which keep gradients to themselves.
    """
    sharding, model = sharded()
    gradferry.fsdp.attach(model, "q4", sharding.mesh()["replica"])
    said = []
    with texts(__file__) as before:
        train_sharded(sharding, model, 4)
        model.set_requires_gradient_sync(False)
        train_sharded(sharding, model, 4)
        model.set_requires_gradient_sync(True)
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(lambda reduced: None)
    with texts(__file__) as after:
        train_sharded(sharding, model, 8)
    said += [before, after]
    return said


def test_other_hook_on_shards_is_warned_about_once(world_of_2: World) -> None:
    for before, (text,) in world_of_2.run(case_other_hook_on_shards):
        assert before == []
        assert text.startswith("SGD has stepped 3 times in a row without a synced backward")
        assert "'the model' was given another hook after attach" in text


def case_added_beside_shards(every: int) -> tuple[Outcome, bool]:
    """What training says of a layer that is not sharded, and whether the watch ends with it."""
    count = len(step_numbers._calls)

    def train() -> tuple[Outcome, weakref.ref[nn.Module]]:
        sharding, model = sharded()
        gradferry.fsdp.attach(model, "q4", sharding.mesh()["replica"], check_every=every)
        train_sharded(sharding, model, 2)
        model.added = nn.Linear(3, 3)
        assert len(step_numbers._calls) > count
        return attempt(lambda: train_sharded(sharding, model, 2)), weakref.ref(model)

    outcome, alive = train()
    gc.collect()
    return outcome, alive() is None and len(step_numbers._calls) == count


def test_check_names_a_parameter_beside_the_shards(world_of_2: World) -> None:
    for outcome, _ in world_of_2.run(case_added_beside_shards, every=1):
        assert outcome.error == "StateError"
        assert "parameter 'added.weight' was added, or unfrozen, after attach" in outcome.text
    for outcome, ended in world_of_2.run(case_added_beside_shards, every=0):
        assert (outcome.error, ended) == (None, True)
