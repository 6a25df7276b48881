"""HookState: what it prints and counts, and the states that it refuses."""

from __future__ import annotations

import copy
import dataclasses
import functools
import pickle
from typing import Any

import gradferry
import pytest
import torch
from on_ranks import on_ranks
from outcomes import attempt
from scenario import Run, Scenario, Weight
from stepping import warned
from torch.nn.parallel import DistributedDataParallel

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SCENARIO = Scenario(WEIGHTS, 2, error_feedback="both", ddp={"bucket_cap_mb": 0.02})


# What is changed in a saved state, None being what is lost, and what is said of it.
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"worker": None}, "slot_{rank}, worker, is not a tensor"),
    ({"format": 4}, "has format "),
    ({"codec": "bf16"}, "has codec "),
    ({"momentum": 0.9}, "has momentum "),
    ({"world_size": 3, "nodes": "[[0], [1], [2]]"}, "has world_size "),
    ({"layout": 1}, "of another model: what it says of its parameters was damaged"),
    ({"worker": torch.zeros(3)}, "another size, dtype or device"),
    ({"owner": [0.0]}, "owner, is not a tensor"),
    ({"worker": torch.full((3,), float("nan"))}, "worker, is not finite"),
    ({"steps": -1}, "steps -1, which is no count"),
    ({"seed": 5}, "has seed 5"),
    ({"slot": "other"}, "has no slot_{rank}, only slot_{other}"),
    ({"slot_2": {}}, "has slot_2, though 2 ranks saved it"),
    ({"loss_scale": -1.0}, "loss_scale -1.0, which is no scale"),
    ({"steps": None}, "lacks steps"),
    ({"owner_tiles": torch.zeros(3)}, "owner_tiles, is not a tensor of torch.int64"),
    ({"layout": '["nonsense"]'}, "of another model: what it says of its parameters was damaged"),
]


@on_ranks(2)
def test_state_of_another_run_is_refused_by_name() -> None:
    run = Run(SCENARIO)
    run.step(0)
    saved = run.state.state_dict()
    slot = f"slot_{run.rank}"
    for change, text in WRONG:
        residuals = {k: v for k, v in change.items() if k in saved[slot]}
        others = {k: v for k, v in change.items() if k not in saved[slot]}
        wrong = {**saved, slot: {**saved[slot], **residuals}, **others}
        wrong = {k: v for k, v in wrong.items() if v is not None}
        if change.get("slot") == "other":
            wrong[f"slot_{1 - run.rank}"] = wrong.pop(slot)
        outcome = attempt(lambda: run.state.load_state_dict(wrong))  # noqa: B023
        assert outcome.error == "StateError", change
        assert text.format(rank=run.rank, other=1 - run.rank) in outcome.text
    with pytest.raises(gradferry.ConfigError, match="'meen' is none of strict, mean, fold, drop"):
        run.state.load_state_dict(saved, on_resize="meen")
    with pytest.raises(gradferry.StateError, match="of type NoneType, not the dict"):
        run.state.load_state_dict(None)
    run.state.load_state_dict(saved)


FIRST, BIAS, SECOND = WEIGHTS
# And what they differ in from WEIGHTS.
OTHER_MODELS: list[tuple[tuple[Weight, ...], str]] = [
    (
        (FIRST, BIAS, Weight("second", (120, 64))),
        "parameter 2 (second) has shape [120, 64], {} has [120, 60]",
    ),
    (
        (FIRST, BIAS, Weight("other", (120, 60))),
        "parameter 2 (second) has name 'other', {} has 'second'",
    ),
    (
        (FIRST, Weight("bias", (50,), torch.float16), SECOND),
        "parameter 1 (bias) has dtype 'torch.float16', {} has 'torch.float32'",
    ),
    ((FIRST, BIAS), "{} has parameter 2 (second), it has only 2 parameters"),
    (
        (*WEIGHTS, Weight("third", (3,))),
        "it has parameter 3 (third), {} has only 3 parameters",
    ),
]


@on_ranks(2)
def test_state_of_another_model_names_the_first_parameter_that_differs() -> None:
    """When it is loaded, and when it is merged."""
    run = Run(SCENARIO)
    run.step(0)
    own = run.state.state_dict()
    for weights, text in OTHER_MODELS:
        saved = Run(dataclasses.replace(SCENARIO, weights=weights)).state.state_dict()
        without_slots = {key: saved[key] for key in saved if not key.startswith("slot_")}
        loading = attempt(lambda: run.state.load_state_dict(saved))  # noqa: B023
        merging = attempt(lambda: gradferry.checkpoint.merge([own, without_slots]))  # noqa: B023
        assert loading.error == merging.error == "StateError"
        assert text.format("this hook") in loading.text
        assert text.format("another") in merging.text


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
