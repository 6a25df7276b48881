"""Names of parameters, without what torch's wrappers put into them; and of ranks, which are those
of the world also in a group where they have other ranks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.core import engine
from gradferry.core.names import plain_name
from on_ranks import on_ranks
from outcomes import Outcome, attempt, little_patience
from sharding import Sharding
from stepping import flip_last_bit
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from world import World


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("weight", "weight"),
        ("_orig_mod.blocks.0._checkpoint_wrapped_module.weight", "blocks.0.weight"),
        ("a._fsdp_wrapped_module._orig_mod.b", "a.b"),
        ("blocks.0._orig_mod", "blocks.0"),
        ("_orig_mod.*", "*"),
        ("my_orig_mod.module.weight", "my_orig_mod.module.weight"),
    ],
)
def test_plain_name_leaves_out_wrappers(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPERS = {
    "plain": lambda module: module,
    "compiled": compiled,
    "checkpointed": lambda module: nn.Sequential(checkpoint_wrapper(module[0]), module[1]),
}
RULES = [{"name": "_orig_mod.1.weight", "codec": "q8"}]


def case_trained(wrapper: str, rules: list[dict]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(WRAPPERS[wrapper](model))
    state = gradferry.attach(ddp, "q4", rules=rules)
    ddp(torch.full((8, 64), 0.1)).square().mean().backward()
    return {
        "names": {p.name: str(p.codec) for p in state.parameters},
        "saved": state.state_dict(),
        "gradients": [p.grad for p in ddp.parameters()],
    }


def case_loaded(wrapper: str, states: list[tuple[dict, str]]) -> list[Any]:
    """By (state, on_resize): the error, if any, and the state that the hook has then."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    ddp = DistributedDataParallel(WRAPPERS[wrapper](model))
    seen = []
    for saved, on_resize in states:
        state = gradferry.HookState("q4", ddp, rules=RULES)
        outcome = attempt(functools.partial(state.load_state_dict, saved, on_resize=on_resize))
        seen.append((outcome, state.state_dict()))
    return seen


def renamed(state: dict[str, Any], change: Any) -> dict[str, Any]:
    layout = json.loads(state["layout"])
    layout = [{**each, "name": change(each["name"])} for each in layout]
    return {**state, "layout": json.dumps(layout, sort_keys=True)}


def test_states_and_rules_know_parameters_by_their_plain_names(world_of_2: World) -> None:
    seen = {name: world_of_2.run(case_trained, wrapper=name, rules=RULES) for name in WRAPPERS}
    names = {"0.weight": "q4", "0.bias": "exact", "1.weight": "q8", "1.bias": "exact"}
    for answers in seen.values():
        assert [answer["names"] for answer in answers] == [names] * 2
        assert [a["saved"]["layout"] for a in answers] == [
            a["saved"]["layout"] for a in seen["plain"]
        ]
    saved = seen["compiled"][0]["saved"]
    assert saved["slot_0"]["worker"].any()
    merged = {**saved, **seen["compiled"][1]["saved"]}
    other = renamed(merged, lambda name: f"other.{name}")
    states = [(merged, "strict"), (other, "strict"), (other, "drop")]
    for rank, answers in enumerate(world_of_2.run(case_loaded, wrapper="plain", states=states)):
        assert [outcome.error for outcome, _ in answers] == [None, "StateError", None]
        assert "parameter 0 (0.weight) has name 'other.0.weight'" in answers[1][0].text
        for kind in ("worker", "owner"):
            kept = answers[0][1][f"slot_{rank}"][kind]
            assert torch.equal(kept, merged[f"slot_{rank}"][kind])
        dropped = answers[2][1]
        assert dropped["steps"] == 1
        assert not dropped[f"slot_{rank}"]["worker"].any()


class FabricModule(nn.Module):
    """Lightning Fabric wraps what its strategy has wrapped like this."""

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module

    def forward(self, *args: Any) -> Any:
        return self._forward_module(*args)


@on_ranks()
def test_attach_finds_the_model_that_a_wrapper_holds() -> None:
    model = nn.Linear(64, 64)

    def ddp() -> DistributedDataParallel:
        return DistributedDataParallel(model)

    def bind(wrapped: Any) -> Any:
        state = gradferry.HookState("q4")
        state.bind(wrapped)
        return state

    makers = [
        lambda: gradferry.attach(compiled(ddp()), "q4"),
        lambda: gradferry.attach(FabricModule(ddp(), model), "q4"),
        lambda: gradferry.attach(FabricModule(compiled(ddp()), model), "q4"),
        lambda: gradferry.HookState("q4", compiled(ddp())),
        lambda: bind(FabricModule(ddp(), model)),
    ]
    for make in makers:
        assert [p.name for p in make().parameters] == ["weight", "bias"]
    refused = attempt(lambda: gradferry.attach(compiled(model), "q4"))
    assert refused.error == "ConfigError"
    assert "must be a DistributedDataParallel, not Linear" in refused.text
    fabric = FabricModule(ddp(), model)
    state = gradferry.attach(fabric, "q4")
    fabric(torch.ones(2, 64)).sum().backward()
    assert state.stats()["steps"] == 1


def case_sharded(wrapped: bool) -> dict[str, Any]:
    sharding = Sharding(2, 1)
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    state = gradferry.fsdp.attach(compiled(model) if wrapped else model, "q4", mesh["replica"])
    return {"names": [p.name for p in state.parameters], "saved": state.state_dict()}


@pytest.mark.torch_core
def test_shards_have_plain_names_as_well(world_of_2: World) -> None:
    plain, wrapped = (world_of_2.run(case_sharded, wrapped=each) for each in (False, True))
    for one, other in zip(plain, wrapped, strict=True):
        assert one["names"] == other["names"]
        assert one["saved"]["shard_0_of_1"]["layout"] == other["saved"]["shard_0_of_1"]["layout"]


GROUP = [1, 2]  # of a world of three; in the group these are ranks 0 and 1


def named() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(40, 50), "b": torch.zeros(70, 30)}


def reducer(group: Any, codec: str = "q4", **options: Any) -> Any:
    return gradferry.Reducer(named(), codec, group, **options)


def other_codec(group: Any, second: bool) -> Outcome:
    return attempt(lambda: reducer(group, "q8" if second else "q4"))


def bad_codec(group: Any, second: bool) -> Outcome:
    return attempt(lambda: reducer(group, "q5" if second else "q4"))


def stays_away(group: Any, second: bool) -> Outcome:
    with little_patience():
        return attempt(lambda: None if second else reducer(group))


def cannot_connect(group: Any, second: bool) -> Outcome:

    from gradferry.errors import PeerError

    error = PeerError("cannot connect to the other ranks: too many open files")
    broken = mock.patch.object(engine, "make_lanes", side_effect=error)
    with broken if second else contextlib.nullcontext(), little_patience():
        return attempt(lambda: reducer(group))


def bad_tensors(group: Any, second: bool) -> Outcome:
    made = reducer(group)
    given = {"a": torch.zeros(3)} if second else named()
    return attempt(lambda: made.all_reduce(given))


def lets_go(group: Any, second: bool) -> Outcome:
    made = reducer(group)
    made.all_reduce()
    if second:
        del made
        gc.collect()
        outcome = attempt(lambda: None)
    else:
        outcome = attempt(made.all_reduce)
    dist.barrier(group)
    return outcome


def other_step(group: Any, second: bool) -> Outcome:
    made = reducer(group)
    state = made.state_dict()
    if second:
        made.load_state_dict({**state, "steps": 5})
    return attempt(made.all_reduce)


def diverged(group: Any, second: bool) -> Outcome:
    model = torch.nn.Linear(40, 50)
    ddp = DistributedDataParallel(model, process_group=group)
    gradferry.attach(ddp, "q4", check_every=1)
    ddp(torch.ones(1, 40)).sum().backward()
    if second:
        flip_last_bit(model.weight)
    return attempt(lambda: ddp(torch.ones(1, 40)).sum().backward())


# By case: what the errors of the group's ranks contain.
CASES: dict[Callable[[Any, bool], Outcome], tuple[str, str]] = {
    other_codec: ("rank 2 differs from rank 1 in codec",) * 2,
    bad_codec: ("rank 2: codec 'q5'", "codec 'q5'"),
    stays_away: ("rank 2 did not make a Reducer", ""),
    cannot_connect: ("rank 2: cannot connect to the other ranks: too many open files",) * 2,
    bad_tensors: ("rank 2: the tensors lack 'b'", "the tensors lack 'b'"),
    lets_go: ("rank 1 lost contact with rank 2 (step 1", ""),
    other_step: ("rank 1 refused a message from rank 2 (step 0",) * 2,
    diverged: ("parameter 'weight' of rank 2 differs from that of rank 1 at step 1",) * 2,
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@on_ranks(3)
def test_errors_name_ranks_of_the_world(case: Callable[[Any, bool], Outcome]) -> None:
    group, rank = dist.new_group(GROUP), dist.get_rank()
    if rank in GROUP:
        second = rank == GROUP[1]
        text, outcome = CASES[case][second], case(group, second)
        assert text in outcome.text, outcome
        assert (outcome.error is None) == (text == "")
    dist.barrier()


@on_ranks(3)
def test_text_of_a_state_says_which_ranks_of_the_world_the_group_has() -> None:
    group, rank = dist.new_group(GROUP), dist.get_rank()
    if rank in GROUP:
        text = str(reducer(group))
        assert f"rank {rank - 1} of 2, " in text
        assert "(ranks 1 and 2 of the world)" in text
