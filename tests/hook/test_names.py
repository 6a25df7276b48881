"""Names of parameters without what torch's wrappers put into them, and models inside wrappers."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
from gradferry.core.names import plain_name
from outcomes import attempt
from sharding import Sharding
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
    earlier = renamed(merged, lambda name: f"_orig_mod.{name}")
    other = renamed(merged, lambda name: f"other.{name}")
    bigger = {**other, "layout": other["layout"].replace("64, 64", "64, 65")}
    states = [
        (merged, "strict"),
        (earlier, "strict"),
        (other, "strict"),
        (other, "drop"),
        (bigger, "drop"),
    ]
    for rank, answers in enumerate(world_of_2.run(case_loaded, wrapper="plain", states=states)):
        errors = [outcome.error for outcome, _ in answers]
        assert errors == [None, None, "StateError", None, "StateError"]
        assert "parameter 0 (0.weight) has name 'other.0.weight'" in answers[2][0].text
        assert "parameter 0 (0.weight) has shape [64, 65]" in answers[4][0].text
        for outcome, state in answers[:2]:
            assert outcome.error is None
            for kind in ("worker", "owner"):
                assert torch.equal(state[f"slot_{rank}"][kind], merged[f"slot_{rank}"][kind])
        dropped = answers[3][1]
        assert dropped["steps"] == 1
        assert not dropped[f"slot_{rank}"]["worker"].any()


class FabricModule(nn.Module):
    """As Lightning Fabric wraps what its strategy has wrapped."""

    def __init__(self, forward_module: nn.Module, original_module: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward_module
        self._original_module = original_module

    def forward(self, *args: Any) -> Any:
        return self._forward_module(*args)


def note_names(make: Callable[[], Any], names: list[str]) -> None:
    names.extend(p.name for p in make().parameters)


def case_wrapped_again() -> list[Any]:
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
        lambda: gradferry.attach(compiled(model), "q4"),
    ]
    seen = []
    for make in makers:
        names: list[str] = []
        seen.append((attempt(functools.partial(note_names, make, names)), names))
    fabric = FabricModule(ddp(), model)
    state = gradferry.attach(fabric, "q4")
    fabric(torch.ones(2, 64)).sum().backward()
    return [*seen, state.stats()["steps"]]


def test_attach_finds_the_model_that_a_wrapper_holds(world_of_2: World) -> None:
    for *wrapped, (refused, _), steps in world_of_2.run(case_wrapped_again):
        assert [(outcome.error, names) for outcome, names in wrapped] == [
            (None, ["weight", "bias"])
        ] * 5
        assert refused.error == "ConfigError"
        assert "must be a DistributedDataParallel, not Linear" in refused.text
        assert steps == 1


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
