"""HookState: what it prints, counts, saves and restores."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from collections.abc import Callable
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
from scenario import Run, Scenario, Weight
from world import World

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SCENARIO = Scenario(WEIGHTS, 2, error_feedback="both", ddp={"bucket_cap_mb": 0.02})


def case_resume(scenario: Scenario) -> dict[str, Any]:
    """Six steps at a stretch, and three, saved, and three more in a new model."""
    straight = Run(scenario)
    expected = [straight.step(step) for step in range(6)]
    before = Run(scenario)
    for step in range(3):
        before.step(step)
    after = before.saved_and_loaded()
    resumed = [after.step(step) for step in range(3, 6)]
    return {
        "equal": all(
            np.array_equal(a, b)
            for one, other in zip(expected[3:], resumed, strict=True)
            for a, b in zip(one, other, strict=True)
        ),
        "hashes": (straight.parameter_hash(), after.parameter_hash()),
        "steps": (straight.state.stats()["steps"], after.state.stats()["steps"]),
    }


@pytest.mark.torch_core
@pytest.mark.parametrize("nodes", [None, ((0, 1), (2, 3)), ((0, 2), (1,))])
@pytest.mark.parametrize("codec", ["q4", "rht:bits=2"])  # whose signs change with the step
def test_resumed_run_equals_one_that_never_stopped(
    worlds: Callable[[int], World], codec: str, nodes: tuple[tuple[int, ...], ...] | None
) -> None:
    world_size = sum(map(len, nodes)) if nodes else 2
    scenario = dataclasses.replace(SCENARIO, codec=codec, world_size=world_size, nodes=nodes)
    for answer in worlds(world_size).run(case_resume, scenario=scenario):
        assert answer["equal"]
        assert answer["hashes"][0] == answer["hashes"][1]
        assert answer["steps"] == (6, 6)


RESUMES = 30


def case_resume_again_and_again(scenario: Scenario) -> bool:
    """Whether a model that is new at every step has the bits of one that goes on."""
    straight, saved, same = Run(scenario), b"", True
    for step in range(RESUMES + 1):
        run = Run(scenario)
        if saved:
            loaded = torch.load(io.BytesIO(saved))
            run.model.load_state_dict(loaded["model"])
            run.state.load_state_dict(loaded["hook"])
        expected, gradients = straight.step(step), run.step(step)
        same &= all(map(np.array_equal, expected, gradients))
        file = io.BytesIO()
        torch.save({"model": run.model.state_dict(), "hook": run.state.state_dict()}, file)
        saved = file.getvalue()
    return same and run.parameter_hash() == straight.parameter_hash()


def test_thirty_resumes_one_after_the_other_change_no_bit(
    worlds: Callable[[int], World],
) -> None:
    scenario = dataclasses.replace(SCENARIO, codec="rht:bits=2")
    assert worlds(2).run(case_resume_again_and_again, scenario=scenario) == [True, True]


def case_refused(scenario: Scenario, changes: list[dict[str, Any]]) -> list[str]:
    import gradferry

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
    unknown = "on_resize='meen' is none of strict, mean, drop"
    with pytest.raises(gradferry.ConfigError, match=unknown):
        run.state.load_state_dict(saved, on_resize="meen")
    with pytest.raises(gradferry.StateError, match="of type NoneType, not the dict"):
        run.state.load_state_dict(None)
    run.state.load_state_dict(saved)
    return texts


def test_state_of_another_run_is_refused_by_name(world_of_2: World) -> None:
    changes = [
        {"worker": None},
        {"format": 4},
        {"codec": "bf16"},
        {"momentum": 0.9},
        {"world_size": 3},
        {"layout": 1},
        {"worker": torch.zeros(3)},
        {"owner": [0.0]},
        {"worker": torch.full((3,), float("nan"))},
        {"steps": -1},
        {"seed": 5},
        {"slot": "other"},
        {"slot_2": {}},
        {"loss_scale": -1.0},
        {"steps": None},
        {"owner_tiles": torch.zeros(3)},
        {"layout": '["nonsense"]'},
    ]
    answers = world_of_2.run(case_refused, scenario=SCENARIO, changes=changes)
    for rank, texts in enumerate(answers):
        assert f"slot_{rank}, worker, is not a tensor" in texts[0]
        for text, field in zip(
            texts[1:5], ["format", "codec", "momentum", "world_size"], strict=True
        ):
            assert f"has {field} " in text
        assert "of another model: what it says of its parameters was damaged" in texts[5]
        assert "another size, dtype or device" in texts[6]
        assert "owner, is not a tensor" in texts[7]
        assert "worker, is not finite" in texts[8]
        assert "steps -1, which is no count" in texts[9]
        assert "has seed 5" in texts[10]
        assert f"has no slot_{rank}, only slot_{1 - rank}" in texts[11]
        assert "has slot_2, though 2 ranks saved it" in texts[12]
        assert "loss_scale -1.0, which is no scale" in texts[13]
        assert "lacks steps" in texts[14]
        assert "owner_tiles, is not a tensor of torch.int64" in texts[15]
        assert "of another model: what it says of its parameters was damaged" in texts[16]


def case_other_models(scenario: Scenario, others: list[tuple[Weight, ...]]) -> dict[str, Any]:
    """What a hook says to states of other models, alone and merged."""
    import gradferry
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
    """What saving, loading and skipping say while backward runs, when buckets are through."""
    import gradferry

    run = Run(scenario)
    run.step(0)
    saved = run.state.state_dict()
    texts = []

    def look(_: torch.Tensor) -> None:
        # The last gradient of the model: buckets before it have been handed over.
        for call in (
            run.state.state_dict,
            lambda: run.state.load_state_dict(saved),
            run.state.skip_step,
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
    scenario = dataclasses.replace(SCENARIO, options={"exact_skip": True})
    for texts in world_of_2.run(case_in_the_middle, scenario=scenario):
        assert len(texts) == 4
        for text, what in zip(
            texts, ["save the state", "load a state", "skip a step", "scale residuals"], strict=True
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


@pytest.mark.parametrize("door", ["config", "parameters", "rank", "world_size", "passes_through"])
def test_what_was_agreed_on_is_not_there_before_the_state_is_bound(door: str) -> None:
    with pytest.raises(gradferry.StateError, match="not bound to a model"):
        getattr(gradferry.HookState("q4"), door)


def case_unused() -> list[list[str]]:
    """Warnings of steps with a state that is nobody's, and with one that is bound."""
    run = Run(SCENARIO)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    seen = []
    for bind in (False, True):
        state = gradferry.HookState("q4")
        if bind:
            state.bind(torch.nn.parallel.DistributedDataParallel(copy.deepcopy(run.model)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(8):
                optimizer.step()
        seen.append([str(each.message) for each in caught])
    return seen


def test_state_that_no_model_uses_says_so_once(world_of_2: World) -> None:
    for (said,), nothing in world_of_2.run(case_unused):
        assert "HookState(codec='q4', bound=False) compresses nothing" in said
        assert "GradferryCallback" in said
        assert nothing == []
