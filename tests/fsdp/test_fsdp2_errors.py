"""What `gradferry.fsdp.attach` refuses, and errors in training, which all ranks must hear of."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.averaging import step_numbers
from outcomes import Outcome, attempt
from own_groups import own_group
from sharding import SHAPES, Model, Sharding, assert_refused, attached
from stepping import texts
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim import SGD
from world import World

Worlds = Callable[[int], World]


def case_refused() -> dict[str, Outcome]:
    sharding = Sharding()
    mesh = sharding.mesh()

    def attached_to(model: Any, group: Any = None, **options: Any) -> Outcome:
        options = {"codec": "q4", **options}
        return attempt(
            lambda: gradferry.fsdp.attach(
                model, replicate_group=mesh["replica"] if group is None else group, **options
            )
        )

    found = {
        "no module": attached_to(3),
        "not sharded": attached_to(Model()),
        "FSDP1": attached_to(FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))),
        "native replicas": attached_to(sharding.model(mesh)),
        "two dimensions": attached_to(sharding.model(mesh["shard"]), mesh),
        "shard group": attached_to(sharding.model(mesh["shard"]), mesh["shard"]),
        "auto": attached_to(sharding.model(mesh["shard"]), codec="auto"),
        "unknown codec": attached_to(sharding.model(mesh["shard"]), codec="q5"),
        "unequal replicas": attached_to(sharding.model(mesh["shard"], seed=dist.get_rank() // 2)),
        "unequal codecs": attached_to(
            sharding.model(mesh["shard"]), codec=("q4", "q8")[dist.get_rank() // 2]
        ),
    }
    with torch.device("meta"):
        meta = Model()
    fully_shard(meta, mesh=mesh["shard"])
    found["meta"] = attached_to(meta)
    mixed = Model()
    fully_shard(mixed.blocks[0], mesh=mesh["replica"])
    fully_shard(mixed, mesh=mesh["shard"])
    found["two meshes"] = attached_to(mixed)
    model = sharding.model(mesh["shard"])
    found["first"] = attached_to(model)
    found["second"] = attached_to(model)
    model.set_requires_all_reduce(False)
    loss = model(sharding.targets(0, 0, dist.get_rank()))
    found["no all-reduce"] = attempt(loss.backward)
    model.set_requires_all_reduce(True)
    found["after an error"] = attempt(lambda: sharding.backward(model, 0))
    return found


TEXTS = {
    "no module": "model must be a module, not int",
    "not sharded": "no parameters under FSDP2 that require grad",
    "FSDP1": "(FSDP1), whose communication hooks take no hybrid sharding",
    "native replicas": "over replicas itself, since its mesh has two dimensions; shard over one",
    "two dimensions": "a mesh of 2 dimensions",
    "shard group": "of this rank's shard group; give the ranks",
    "auto": "codec='auto' tries codecs in the steps of DistributedDataParallel",
    "unknown codec": "q5",
    # Ranks of the world: shard 0 is on ranks 0 and 2, shard 1 on 1 and 3.
    "unequal replicas": "rank {second} differs from rank {first} in values of 'table', in which",
    "unequal codecs": "rank {second} differs from rank {first} in codec",
    "meta": "is on the meta device; attach after model.to_empty",
    "two meshes": "shard all modules over one mesh",
    "second": "gradferry is attached to this model already",
    "no all-reduce": "set_requires_all_reduce(False)",
    "after an error": "set_requires_all_reduce(False)",
}
KINDS = {
    "unequal replicas": "RankMismatchError",
    "unequal codecs": "RankMismatchError",
    "no all-reduce": "StateError",
    "after an error": "StateError",
}


@pytest.mark.torch_core
def test_what_cannot_be_hooked_is_refused_with_a_reason(worlds: Worlds) -> None:
    for rank, found in enumerate(worlds(4).run(case_refused)):
        assert found.pop("first").error is None
        assert_refused(found, TEXTS, KINDS, first=rank % 2, second=2 + rank % 2)


def case_bad_gradient(rank: int) -> dict[str, Any]:
    """Rank `rank` cannot go on; the other replica of its shard hears why."""
    sharding = Sharding()
    model, state = attached(sharding, nonfinite="raise")
    sharding.backward(model, 0)
    targets = sharding.targets(1, 0, dist.get_rank())
    if dist.get_rank() == rank:
        targets["blocks.0"]["weight"][[0, -1], 0] = float("nan")  # one row of each shard
    outcome = attempt(lambda: model(targets).backward())
    return {"outcome": outcome, "ended": attempt(state.state_dict)}


def test_replicas_raise_the_same_error(worlds: Worlds) -> None:
    answers = worlds(4).run(case_bad_gradient, rank=2)
    for rank, answer in enumerate(answers):
        outcome = answer["outcome"]
        assert outcome.error == "StateError"
        assert "blocks.0.weight" in outcome.text
        assert outcome.headline == answers[rank % 2]["outcome"].headline
        assert answer["ended"].error == "StateError"


@contextlib.contextmanager
def hears_late(said: Store) -> Iterator[None]:
    """Rank 0 looks whether it waits for nothing only when rank 3 knows of the error and has told
    it; and if rank 3 has gone on by then, when rank 2 has come from there, too.
    """
    from gradferry.core.rendezvous import store_of

    meet = _rendezvous().meet

    def late(group: Any, longest: Any, purpose: str, beside: Any = None) -> None:
        if purpose == "hear of an error" and dist.get_rank() == 3:
            said.set("rank 3", "waits until all know")
        is_late = beside is not None and dist.get_rank() == 0
        if is_late and said.get("rank 3") == b"has gone on":  # get() waits until it is there
            store = PrefixStore("gradferry/meetings", store_of(group))
            store.wait([f"{store.add('number', 0)}/rank/1"])
        meet(group, longest, purpose, beside)

    with mock.patch.object(_rendezvous(), "meet", late):
        yield


def _rendezvous() -> Any:
    return sys.modules["gradferry.fsdp.rendezvous"]


def case_no_group(given: Any) -> list[Outcome]:
    """Rank 2 names no group of replicas, and cannot tell its replica on rank 0."""
    from gradferry.core.rendezvous import store_of

    said = store_of(dist.new_group())
    sharding = Sharding()
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    own = own_group("own", dist.HashStore(), 0, 1)
    wrong = {"shard": mesh["shard"], "own": own}.get(given, given)
    group = wrong if dist.get_rank() == 2 else mesh["replica"]
    with hears_late(said):
        refused = attempt(lambda: gradferry.fsdp.attach(model, "q4", group))
        if dist.get_rank() == 3 and not said.check(["rank 3"]):
            said.set("rank 3", "has gone on")
        return [
            refused,
            attempt(lambda: gradferry.fsdp.attach(model, "q4", mesh["replica"])),
            attempt(lambda: sharding.backward(model, 0)),
        ]


# What one rank gives for its group, and the error.
NO_REPLICAS = {
    None: "replicate_group is missing",
    "replica": "group='replica' is no process group",
    "shard": "replicate_group has ranks [2, 3] of this rank's shard group",
    "own": "torch.distributed does not know replicate_group",
}


@pytest.mark.torch_core
@pytest.mark.parametrize("given", NO_REPLICAS, ids=["missing", "wrong", "shards", "unknown"])
def test_a_rank_without_replicate_group_does_not_keep_the_others_waiting(
    worlds: Worlds, given: Any
) -> None:
    # Groups of a mesh wait for five minutes, and a case has one.
    text = NO_REPLICAS[given]
    for rank, (refused, *later) in enumerate(worlds(4).run(case_no_group, given=given)):
        assert refused.error == "ConfigError"
        assert refused.text.startswith(text if rank == 2 else f"rank 2: {text}"), refused.text
        assert [outcome.error for outcome in later] == [None, None]


def case_late_error() -> list[Outcome]:
    sharding = Sharding()
    model, _ = attached(sharding)
    if dist.get_rank() >= 2:
        model.blocks[0].weight.requires_grad_(False)
    return [attempt(lambda: sharding.backward(model, 0)) for _ in range(2)]


def test_error_of_a_replica_names_its_rank_in_the_world(worlds: Worlds) -> None:
    text = "requires_grad of 'weight' has changed in 'blocks.0' since attach"
    for rank, outcomes in enumerate(worlds(4).run(case_late_error)):
        for outcome in outcomes:
            assert text in outcome.text, outcome
            if rank < 2:
                assert f"rank {rank + 2}: {text}" in outcome.text


def case_unsharded_part() -> list[str]:
    sharding = Sharding()
    mesh = sharding.mesh()
    torch.manual_seed(0)
    model = Model()
    fully_shard(model.blocks[0], mesh=mesh["shard"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gradferry.fsdp.attach(model, "q4", mesh["replica"])
    return [str(each.message) for each in warned]


def test_parameters_outside_are_named(worlds: Worlds) -> None:
    for warned in worlds(4).run(case_unsharded_part):
        count = sum(len(shapes) for shapes in SHAPES.values()) - len(SHAPES["blocks.0"])
        assert len(warned) == 1
        assert f"gradients of 'table' and {count - 1} more" in warned[0]


def case_block_alone(siblings: str) -> list[str]:
    sharding = Sharding()
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        gradferry.fsdp.attach(model.blocks[0], "q4", mesh["replica"])
        if siblings == "frozen":
            model.table.requires_grad_(False)
            model.scale.requires_grad_(False)
            model.blocks[1].requires_grad_(False)
        for step in range(2):
            model(sharding.targets(step, 0, dist.get_rank()))
    return [str(each.message) for each in warned]


@pytest.mark.parametrize("siblings", ["trained", "frozen"])
def test_part_of_a_sharded_model_is_warned_of_once_it_is_known(
    worlds: Worlds, siblings: str
) -> None:
    for warned in worlds(4).run(case_block_alone, siblings=siblings):
        assert len(warned) == (1 if siblings == "trained" else 0), warned
        for text in warned:
            assert "attach was called on a part of a sharded model: the gradients of" in text
            assert "'the model' and 1 more are not averaged over replicas" in text


def case_warning_is_an_error(of: str) -> tuple[list[Outcome], int]:
    """Two passes, and the calls that took the backend's collective. On rank 0 warnings are errors:
    of a parameter without a gradient, or of a block that is attached alone.
    """
    sharding = Sharding(2, 1, without=(("blocks.0", "bias"),) if of == "parts" else ())
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    attached_to = model if of == "parts" else model.blocks[0]
    state = gradferry.fsdp.attach(attached_to, "q4", mesh["replica"])
    outcomes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if dist.get_rank() else "error", gradferry.GradferryWarning)
        for step in range(2):
            outcomes.append(attempt(lambda step=step: sharding.backward(model, step)))
            if outcomes[-1].error:
                break
    return outcomes, state.stats()["fallbacks"]


@pytest.mark.parametrize("of", ["parts", "block"])
def test_a_warning_that_is_an_error_on_one_rank_ends_all(world_of_2: World, of: str) -> None:
    (first, counted), (second, also) = world_of_2.run(case_warning_is_an_error, of=of)
    assert first[-1].error == "GradferryWarning"
    assert second[-1].error == "PeerError"
    assert f"rank 0: GradferryWarning: {first[-1].text}" in second[-1].text
    assert counted == also == (of == "parts")  # both were in the collective


# --- what changes after attach --------------------------------------------------------------------


def case_changed() -> dict[str, Outcome]:
    sharding = Sharding()
    mesh = sharding.mesh()

    def trained(change: Callable[[Any], None], frozen: bool = False) -> Outcome:
        model = sharding.model(mesh["shard"])
        if frozen:
            model.blocks[0].requires_grad_(False)
        gradferry.fsdp.attach(model, "q4", mesh["replica"])
        change(model)
        return attempt(lambda: sharding.backward(model, 0))

    def swap(model: Any) -> None:
        model.blocks[0].weight.requires_grad_(False)

    def assign(model: Any) -> None:
        model.load_state_dict(sharding.model(mesh["shard"]).state_dict(), assign=True)

    later = Model()
    for module in later.blocks:
        fully_shard(module, mesh=mesh["shard"])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in later.parameters():
            parameter.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the root is not sharded
        gradferry.fsdp.attach(later, "q4", mesh["replica"])
    fully_shard(later, mesh=mesh["shard"])
    return {
        "unfrozen": trained(lambda model: model.blocks[0].requires_grad_(True), frozen=True),
        "frozen": trained(swap),
        "assigned": trained(assign),
        "sharded later": attempt(lambda: sharding.backward(later, 0)),
    }


@pytest.mark.torch_core
def test_changes_after_attach_are_errors(worlds: Worlds) -> None:
    texts = {
        "unfrozen": "requires_grad of 'weight' has changed in 'blocks.0' since attach",
        "frozen": "requires_grad of 'weight' has changed in 'blocks.0' since attach",
        "assigned": "was replaced, as load_state_dict(assign=True) does",
        "sharded later": "fully_shard was called on 'the model' after attach",
    }
    for found in worlds(4).run(case_changed):
        assert_refused(found, texts, dict.fromkeys(texts, "StateError"))


def case_one_shard_differs(frozen: bool) -> Outcome:
    sharding = Sharding()
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    if frozen:
        model.table.requires_grad_(False)
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.table.to_local().add_(1.0)
    return attempt(lambda: gradferry.fsdp.attach(model, "q4", mesh["replica"]))


@pytest.mark.torch_core
@pytest.mark.parametrize("frozen", [False, True])
def test_all_shards_hear_of_an_error_in_one(worlds: Worlds, frozen: bool) -> None:
    for outcome in worlds(4).run(case_one_shard_differs, frozen=frozen):
        assert outcome.error == "RankMismatchError"
        assert "in values of 'table', in which replicas must begin equal" in outcome.text


def case_due_in_a_step_of_passes() -> list[Outcome]:
    whole = Sharding(shards=1)
    without = tuple((module, next(iter(shapes))) for module, shapes in SHAPES.items())
    partial = dataclasses.replace(whole, without=without)
    model, _ = attached(whole, check_every=2)
    outcomes = []
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            with torch.no_grad():
                model.table.to_local().add_(1)
        sharding = partial if step == 2 else whole
        outcomes.append(attempt(lambda: sharding.backward(model, step)))  # noqa: B023
    return outcomes


@pytest.mark.filterwarnings("ignore:some parameters of:UserWarning")
def test_comparison_due_in_a_step_of_nothing_but_passes_comes_with_the_next(
    worlds: Worlds,
) -> None:
    for outcomes in worlds(2).run(case_due_in_a_step_of_passes):
        errors = [outcome.error for outcome in outcomes]
        assert errors == [None, None, None, "DivergedError"]


# --- the watch over a sharded model ---------------------------------------------------------------


def train_sharded(sharding: Sharding, model: nn.Module, steps: int) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        sharding.backward(model, step)
        optimizer.step()


def case_other_hook_on_shards() -> tuple[list[str], Outcome]:
    """Warnings before another hook takes the place of gradferry's on one rank, local steps among
    them, which keep gradients to themselves; and what all ranks hear then.
    """
    sharding = Sharding(replicas=2, shards=1)
    model, _ = attached(sharding)
    with texts(__file__) as before:
        train_sharded(sharding, model, 4)
        model.set_requires_gradient_sync(False)
        train_sharded(sharding, model, 4)
        model.set_requires_gradient_sync(True)
    if dist.get_rank() == 1:
        model.set_all_reduce_hook(lambda reduced: None)
    return before, attempt(lambda: train_sharded(sharding, model, 1))


def test_another_hook_on_shards_is_an_error_on_all_ranks(world_of_2: World) -> None:
    for before, outcome in world_of_2.run(case_other_hook_on_shards):
        assert before == []
        assert outcome.error in ("StateError", "PeerError")  # its own, or another rank's
        assert "rank 1: 'the model' was given another all-reduce hook after attach" in (
            outcome.text if outcome.error == "PeerError" else f"rank 1: {outcome.text}"
        )


def case_added_beside_shards(every: int) -> tuple[Outcome, bool]:
    """What training says of a layer that is not sharded, and whether the watch ends with it."""
    count = len(step_numbers._calls)

    def train() -> tuple[Outcome, weakref.ref[nn.Module]]:
        sharding = Sharding(replicas=2, shards=1)
        model, _ = attached(sharding, check_every=every)
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


def case_beside_shards_from_the_start() -> tuple[list[str], Outcome]:
    """What attach and training say of a layer that was never sharded."""
    sharding = Sharding(replicas=2, shards=1)
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    model.added = nn.Linear(3, 3)
    with texts(__file__) as warned:
        gradferry.fsdp.attach(model, "q4", replicate_group=mesh["replica"], check_every=1)
    return warned, attempt(lambda: train_sharded(sharding, model, 2))


def test_a_parameter_that_was_warned_about_at_attach_ends_no_training(world_of_2: World) -> None:
    for warned, outcome in world_of_2.run(case_beside_shards_from_the_start):
        assert outcome.error is None, outcome.text
        (text,) = [text for text in warned if "FSDP2 does not reduce" in text]
        assert "the gradients of 'added.weight' and 1 more" in text
