"""HookState: what it prints and counts, and the states that it refuses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from collections.abc import Callable
from typing import Any

import gradferry
import pytest
import torch
from gradferry.averaging.saved_state import signed
from on_ranks import on_ranks
from outcomes import attempt
from scenario import Run, Scenario, Weight
from stepping import warned
from torch.nn.parallel import DistributedDataParallel

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SCENARIO = Scenario(WEIGHTS, 2, error_feedback="both", ddp={"bucket_cap_mb": 0.02})


# What is changed in a saved state, None being what is lost.
DAMAGES: list[dict[str, Any]] = [
    *({"worker": worker} for worker in (None, torch.zeros(3), torch.full((3,), float("nan")))),
    {"owner": [0.0]},
    {"owner_tiles": torch.zeros(3)},
    *({"steps": steps} for steps in (None, -1, 2)),
    {"loss_scale": -1.0},
    {"layout": '["nonsense"]'},
    {"codec": "bf16"},
    {"compressed_warmup": 1},
    {"slot_2": {}},
    {"slot": "other"},
]
# What is said of a state of another hook.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"format": 5}, "has format 5, and this gradferry reads format "),
    ({"codec": "bf16"}, "has codec 'bf16', this hook has 'q4'"),
    ({"momentum": 0.9}, "has momentum 0.9"),
    ({"world_size": 3, "nodes": "[[0], [1], [2]]"}, "has world_size 3, this hook has 2"),
    ({"seed": 5}, "has seed 5"),
    ({"slot": "other"}, "has no slot_{rank}, only slot_{other}"),
]


@on_ranks(2)
def test_state_of_another_run_is_refused_by_name() -> None:
    run = Run(SCENARIO)
    run.step(0)
    saved = run.state.state_dict()
    slot = f"slot_{run.rank}"

    def refused(change: dict[str, Any], change_digests: Callable[[Any], Any]) -> str:
        residuals = {k: v for k, v in change.items() if k in saved[slot]}
        others = {k: v for k, v in change.items() if k not in saved[slot]}
        wrong = {**saved, slot: {**saved[slot], **residuals}, **others}
        wrong = {k: v for k, v in wrong.items() if v is not None}
        if change.get("slot") == "other":
            wrong[f"slot_{1 - run.rank}"] = wrong.pop(slot)
        outcome = attempt(lambda: run.state.load_state_dict(change_digests(wrong)))
        assert outcome.error == "StateError", change
        return outcome.text

    one_bit = saved[slot]["owner"].clone()
    one_bit.view(torch.int32)[-1] ^= 1
    for change in (*DAMAGES, {"owner": one_bit}):
        part = "it" if change.keys() <= saved.keys() else "slot_"
        assert f"returned: {part}" in refused(change, lambda wrong: wrong)
    for change, text in WRONG:
        assert text.format(rank=run.rank, other=1 - run.rank) in refused(change, signed)
    with pytest.raises(gradferry.ConfigError, match="'meen' is none of strict, mean, fold, drop"):
        run.state.load_state_dict(saved, on_resize="meen")
    with pytest.raises(gradferry.StateError, match="of type NoneType, is not what state_dict"):
        run.state.load_state_dict(None)
    run.state.load_state_dict(saved)


FIRST, BIAS, SECOND = WEIGHTS
# And what they differ in from WEIGHTS.
OTHER_MODELS: list[tuple[tuple[Weight, ...], str]] = [
    (
        (FIRST, BIAS, Weight("second", (120, 64))),
        "parameter 2 (second) with shape [120, 64], this hook has [120, 60]",
    ),
    (
        (FIRST, BIAS, Weight("other", (120, 60))),
        "parameter 2 (second) with name 'other', this hook has 'second'",
    ),
    (
        (FIRST, Weight("bias", (50,), torch.float16), SECOND),
        "parameter 1 (bias) with dtype 'torch.float16', this hook has 'torch.float32'",
    ),
    ((FIRST, BIAS), "the saved state has no parameter 2 (second)"),
    ((*WEIGHTS, Weight("third", (3,))), "parameter 3 (third), this hook has none"),
]


@on_ranks(2)
def test_state_of_another_model_names_the_first_parameter_that_differs() -> None:
    """When it is loaded; it cannot be merged, either."""
    run = Run(SCENARIO)
    run.step(0)
    own = run.state.state_dict()
    for weights, text in OTHER_MODELS:
        saved = Run(dataclasses.replace(SCENARIO, weights=weights)).state.state_dict()
        without_slots = {key: saved[key] for key in saved if not key.startswith("slot_")}
        loading = attempt(lambda: run.state.load_state_dict(saved))  # noqa: B023
        merging = attempt(lambda: gradferry.checkpoint.merge([own, without_slots]))  # noqa: B023
        assert loading.error == merging.error == "StateError"
        assert text in loading.text
        assert "differ in layout" in merging.text


@on_ranks(2)
def test_state_is_refused_in_the_middle_of_a_step() -> None:
    run = Run(SCENARIO)
    run.step(0)
    saved = run.state.state_dict()
    seen = []

    def look(_: torch.Tensor) -> None:
        # The last gradient of the model: buckets before it have been handed over.
        for call, what in (
            (run.state.state_dict, "save the state"),
            (lambda: run.state.load_state_dict(saved), "load a state"),
            (lambda: run.state.scale_residuals(0.5), "scale residuals"),
        ):
            with pytest.raises(gradferry.StateError) as caught:
                call()
            assert f"cannot {what} in the middle of step 2" in str(caught.value)
            seen.append(what)

    run.step(1)  # after it, buckets are in the order in which gradients come
    first = run.ddp.module.get_parameter(run.buckets[-1][-1][-1])
    handle = first.register_post_accumulate_grad_hook(look)
    run.step(2)
    handle.remove()
    run.state.state_dict()
    assert len(seen) == 3


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("how", COPIES)
@on_ranks(2)
def test_copied_state_says_that_it_is_unbound_and_can_be_bound(how: str) -> None:
    run = Run(SCENARIO)
    run.step(0)
    with warned() as said:
        state = COPIES[how](run.state)
    (text,) = said
    assert "is not bound to a model" in str(text.message)
    assert repr(state) == "HookState(codec='q4', bound=False)"
    ddp = DistributedDataParallel(copy.deepcopy(run.model))
    state.bind(ddp)
    ddp.register_comm_hook(state, gradferry.hook)
    ddp(run.targets(0)).backward()
    assert state.config == run.state.config
    assert state.stats()["buckets"] > 0


@on_ranks(2)
def test_state_prints_the_outcome_of_the_rules_and_counts() -> None:
    run = Run(dataclasses.replace(SCENARIO, rules=(("second", "bf16"),), ddp={}))
    before = run.state.stats()
    for step in range(3):
        run.step(step)
    text, after = str(run.state), run.state.stats()
    assert f"gradferry: q4, error feedback both, rank {run.rank} of 2" in text
    assert "q4: 1 parameters, 6,300 elements (46.5%), 4.28 bits/element" in text
    assert "bf16: 1 parameters, 7,200 elements (53.1%), 16.00 bits/element" in text
    assert "exempt from compression: bias" in text
    assert repr(run.state) == "HookState(codec='q4', bound=True)"
    assert run.ddp._get_ddp_logging_data()["comm_hook"] == "gradferry:q4"
    codecs = {p.name: str(p.codec) for p in run.state.parameters}
    assert codecs == {"first": "q4", "bias": "exact", "second": "bf16"}
    assert run.state.config.error_feedback == "both"
    assert (run.state.rank, run.state.world_size) == (run.rank, 2)
    assert not run.state.passes_through
    assert before["wire_bytes"] == before["ratio"] == before["buckets"] == 0
    assert (after["steps"], after["in_flight"]) == (3, 0)
    assert after["gradient_bytes"] == 3 * 4 * (6300 + 50 + 7200)
    assert after["ratio"] == after["gradient_bytes"] / after["wire_bytes"]
    assert sorted(i for bucket in after["step_buckets"] for i in bucket) == [0, 1, 2]


def test_what_was_agreed_on_and_numbers_are_not_there_before_the_state_is_bound() -> None:
    state = gradferry.HookState("q4")
    agreed = ("config", "parameters", "rank", "world_size", "passes_through")
    calls = (state.stats, state.events, lambda: state.on_step(print))
    for call in (*calls, *(functools.partial(getattr, state, name) for name in agreed)):
        with pytest.raises(gradferry.StateError, match="not bound to a model"):
            call()
