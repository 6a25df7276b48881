"""HookState: what it prints, counts, saves and restores."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
from scenario import Run, Scenario, Weight
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
RESUMES = 5
SCENARIO = Scenario(WEIGHTS, 2, error_feedback="both", ddp={"bucket_cap_mb": 0.02})


def case_resume(scenario: Scenario) -> list[Any]:
    """Whether a model that is new at every step, and loads what was saved after the one before, has
    the gradients of one that goes on; and parameters and steps of both.
    """
    straight, run = Run(scenario), Run(scenario)
    same = True
    for step in range(RESUMES + 1):
        same &= all(map(np.array_equal, straight.step(step), run.step(step)))
        if step < RESUMES:
            run = run.saved_and_loaded()
    return [
        same,
        *(each.parameter_hash() for each in (straight, run)),
        *(each.state.stats()["total_steps"] for each in (straight, run)),
    ]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("codec", "nodes"),
    [
        ("q4", ((0, 1), (2, 3))),
        ("rht:bits=2", None),  # whose signs change with the step
        ("rht:bits=2", ((0, 2), (1,))),
        pytest.param("q4", None, marks=pytest.mark.slow),
        pytest.param("q4", ((0, 2), (1,)), marks=pytest.mark.slow),
        pytest.param("rht:bits=2", ((0, 1), (2, 3)), marks=pytest.mark.slow),
    ],
)
def test_run_that_resumes_at_every_step_equals_one_that_never_stopped(
    worlds: Callable[[int], World], codec: str, nodes: tuple[tuple[int, ...], ...] | None
) -> None:
    world_size = sum(map(len, nodes)) if nodes else 2
    scenario = dataclasses.replace(SCENARIO, codec=codec, world_size=world_size, nodes=nodes)
    steps = RESUMES + 1
    for same, one, other, *counts in worlds(world_size).run(case_resume, scenario=scenario):
        assert same
        assert one == other
        assert counts == [steps, steps]


def case_refused(scenario: Scenario, changes: list[dict[str, Any]]) -> list[str]:
    run = Run(scenario)
    run.step(0)
    saved = run.state.state_dict()
    texts = []
    slot = f"slot_{run.rank}"
    for change in changes:
        residuals = {k: v for k, v in change.items() if k in saved[slot]}
        others = {k: v for k, v in change.items() if k not in saved[slot]}
        wrong = {**saved, slot: {**saved[slot], **residuals}, **others}
        wrong = {k: v for k, v in wrong.items() if v is not None}
        if change.get("slot") == "other":
            wrong[f"slot_{1 - run.rank}"] = wrong.pop(slot)
        with pytest.raises(gradferry.StateError) as caught:
            run.state.load_state_dict(wrong)
        texts.append(str(caught.value))
    unknown = "on_resize='meen' is none of strict, mean, fold, drop"
    with pytest.raises(gradferry.ConfigError, match=unknown):
        run.state.load_state_dict(saved, on_resize="meen")
    with pytest.raises(gradferry.StateError, match="of type NoneType, not the dict"):
        run.state.load_state_dict(None)
    run.state.load_state_dict(saved)
    return texts


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


def test_state_of_another_run_is_refused_by_name(world_of_2: World) -> None:
    changes = [change for change, _ in WRONG]
    answers = world_of_2.run(case_refused, scenario=SCENARIO, changes=changes)
    for rank, texts in enumerate(answers):
        for text, (_, part) in zip(texts, WRONG, strict=True):
            assert part.format(rank=rank, other=1 - rank) in text


def case_other_models(scenario: Scenario, others: list[tuple[Weight, ...]]) -> dict[str, Any]:
    """What a hook says to states of other models, alone and merged."""
    from gradferry.checkpoint import merge

    run = Run(scenario)
    run.step(0)
    own = run.state.state_dict()
    loading, merging = [], []
    for weights in others:
        saved = Run(dataclasses.replace(scenario, weights=weights)).state.state_dict()
        with pytest.raises(gradferry.StateError) as caught:
            run.state.load_state_dict(saved)
        loading.append(str(caught.value))
        with pytest.raises(gradferry.StateError) as caught:
            merge([own, {key: saved[key] for key in saved if not key.startswith("slot_")}])
        merging.append(str(caught.value))
    return {"loading": loading, "merging": merging}


def test_state_of_another_model_names_the_first_parameter_that_differs(world_of_2: World) -> None:
    first, bias, second = WEIGHTS
    others = [
        (first, bias, Weight("second", (120, 64))),
        (first, bias, Weight("other", (120, 60))),
        (first, Weight("bias", (50,), torch.float16), second),
        (first, bias),
        (*WEIGHTS, Weight("third", (3,))),
    ]
    for answer in world_of_2.run(case_other_models, scenario=SCENARIO, others=others):
        for text, merged, part in zip(
            answer["loading"],
            answer["merging"],
            [
                "parameter 2 (second) has shape [120, 64], {} has [120, 60]",
                "parameter 2 (second) has name 'other', {} has 'second'",
                "parameter 1 (bias) has dtype 'torch.float16', {} has 'torch.float32'",
                "{} has parameter 2 (second), it has only 2 parameters",
                "it has parameter 3 (third), {} has only 3 parameters",
            ],
            strict=True,
        ):
            assert f"of another model: {part.format('this hook')};" in text
            assert merged.endswith(f"of different models: {part.format('another')}")


def case_in_the_middle(scenario: Scenario) -> list[Any]:
    """What saving, loading and scaling say while backward runs, when buckets are through."""
    run = Run(scenario)
    run.step(0)
    saved = run.state.state_dict()
    texts = []

    def look(_: torch.Tensor) -> None:
        # The last gradient of the model: buckets before it have been handed over.
        for call in (
            run.state.state_dict,
            lambda: run.state.load_state_dict(saved),
            lambda: run.state.scale_residuals(0.5),
        ):
            with pytest.raises(gradferry.StateError) as caught:
                call()
            texts.append(str(caught.value))

    run.step(1)  # after it, buckets are in the order in which gradients come
    first = run.ddp.module.get_parameter(run.buckets[-1][-1][-1])
    handle = first.register_post_accumulate_grad_hook(look)
    run.step(2)
    handle.remove()
    run.state.state_dict()
    return texts


def test_state_is_refused_in_the_middle_of_a_step(world_of_2: World) -> None:
    for texts in world_of_2.run(case_in_the_middle, scenario=SCENARIO):
        assert len(texts) == 3
        for text, what in zip(
            texts, ["save the state", "load a state", "scale residuals"], strict=True
        ):
            assert f"cannot {what} in the middle of step 2" in text
            assert "after backward() returned" in text


def case_describe(scenario: Scenario) -> dict[str, Any]:
    run = Run(scenario)
    unused = run.state.stats()
    for step in range(3):
        run.step(step)
    with pytest.warns(UserWarning, match="attach again"):
        copied = copy.deepcopy(run.state)
    return {
        "text": str(run.state),
        "repr": repr(run.state),
        "copy": repr(copied),
        "before": unused,
        "after": run.state.stats(),
        "hook_name": run.ddp._get_ddp_logging_data()["comm_hook"],
        "codecs": {p.name: str(p.codec) for p in run.state.parameters},
        "agreed": (run.state.config.error_feedback, run.state.rank, run.state.world_size),
        "passes_through": run.state.passes_through,
    }


def test_state_prints_the_outcome_of_the_rules_and_counts(world_of_2: World) -> None:
    rules = (("second", "bf16"),)
    scenario = dataclasses.replace(SCENARIO, rules=rules, ddp={})
    for rank, answer in enumerate(world_of_2.run(case_describe, scenario=scenario)):
        text = answer["text"]
        assert f"gradferry: q4, error feedback both, rank {rank} of 2" in text
        assert "q4: 1 parameters, 6,300 elements (46.5%), 4.28 bits/element" in text
        assert "bf16: 1 parameters, 7,200 elements (53.1%), 16.00 bits/element" in text
        assert "exempt from compression: bias" in text
        assert answer["repr"] == "HookState(codec='q4', bound=True)"
        assert answer["copy"] == "HookState(codec='q4', bound=False)"
        assert answer["hook_name"] == "gradferry:q4"
        assert answer["codecs"] == {"first": "q4", "bias": "exact", "second": "bf16"}
        assert answer["agreed"] == ("both", rank, 2)
        assert not answer["passes_through"]
        before, after = answer["before"], answer["after"]
        assert before["wire_bytes"] == before["ratio"] == before["buckets"] == 0
        assert (after["steps"], after["in_flight"]) == (3, 0)
        assert after["gradient_bytes"] == 3 * 4 * (6300 + 50 + 7200)
        assert after["ratio"] == after["gradient_bytes"] / after["wire_bytes"]
        assert sorted(i for bucket in after["step_buckets"] for i in bucket) == [0, 1, 2]


def test_what_was_agreed_on_is_not_there_before_the_state_is_bound() -> None:
    for door in ("config", "parameters", "rank", "world_size", "passes_through"):
        with pytest.raises(gradferry.StateError, match="not bound to a model"):
            getattr(gradferry.HookState("q4"), door)
