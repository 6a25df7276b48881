"""The reduce-scatter of `gradferry.fsdp.attach`: means of shards, residuals, states, errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from outcomes import Outcome, attempt
from reference import ReferenceReduceScatter, scattered_bytes_per_step
from reference.layout import resolve_codecs
from reference.scalars import narrow, widen
from sharded_training import (
    case_load_and_go_on,
    case_native,
    case_save_and_go_on,
    gradients_of,
)
from sharding import SHAPES, Sharding, assert_refused, same
from torch.distributed.fsdp import FSDPModule
from world import World

Worlds = Callable[[int], World]

STEPS = 3
FOUR = Sharding(replicas=1, shards=4)


def case_train(sharding: Sharding, attach: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    mesh = sharding.mesh()
    model = sharding.model(mesh["shard"])
    state = gradferry.fsdp.attach(model, all_gather="off", **attach)
    rows: list[dict[str, Any]] = []
    state.on_step(rows.append)
    gradients = gradients_of(model, sharding, steps)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    return {"gradients": gradients, "stats": state.stats(), "rows": rows, "text": str(state)}


def parts(sharding: Sharding) -> list[tuple[str, str, int]]:
    """(module, name, owner) of what the engine takes for parameters, in its order."""
    return [
        (module, name, owner)
        for module, shapes in SHAPES.items()
        for owner in range(sharding.shards)
        for name in shapes
    ]


def codecs_of_parts(sharding: Sharding, codec: str) -> list[str]:
    described = dict(zip(sharding.named(), sharding.described(), strict=True))
    return resolve_codecs([described[m, n] for m, n, _ in parts(sharding)], codec)[0]


def expected(sharding: Sharding, attach: dict[str, Any]) -> list[list[np.ndarray]]:
    """[step][part]: means."""
    codecs = codecs_of_parts(sharding, attach["codec"])
    dtype = str(sharding.reduced_in).removeprefix("torch.")
    reference = ReferenceReduceScatter(
        sharding.shards,
        [sharding.size(module, name) for module, name, _ in parts(sharding)],
        codecs,
        dtype,
        keeps=[attach.get("scatter_feedback") == "worker" and codec != "exact" for codec in codecs],
        seed=attach.get("seed", 0),
    )
    means = []
    for step in range(STEPS):
        gradients = []
        for rank in range(sharding.shards):
            whole = {
                (module, name): sum(
                    sharding.gradient(step, turn, rank, module, name)
                    for turn in range(sharding.passes)
                )
                for module, name in sharding.named()
            }
            flat = [sharding.padded(whole[m, n], owner) for m, n, owner in parts(sharding)]
            gradients.append([narrow(each, dtype) for each in flat])
        warmup = "exact" if step < attach.get("warmup_steps", 0) else None
        means.append(reference.step(step, gradients, warmup=warmup))
    return means


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("sharding", "attach"),
    [
        (FOUR, {"codec": "q4"}),
        (FOUR, {"codec": "sign1", "scatter_feedback": "worker", "warmup_steps": 1}),
        (Sharding(1, 2, passes=2), {"codec": "topk:ratio=0.05", "scatter_feedback": "worker"}),
        (Sharding(1, 3, reduce_dtype=torch.bfloat16), {"codec": "q8", "seed": 3}),
        (Sharding(1, 2, dtype=torch.bfloat16), {"codec": "rht:bits=3"}),
    ],
    ids=["q4", "sign1", "topk", "bf16 reduced", "bf16"],
)
def test_means_equal_the_reference(
    worlds: Worlds, sharding: Sharding, attach: dict[str, Any]
) -> None:
    answers = worlds(sharding.shards).run(case_train, sharding=sharding, attach=attach)
    assert_means_equal_the_reference(answers, sharding, attach)


def assert_means_equal_the_reference(
    answers: Sequence[dict[str, Any]], sharding: Sharding, attach: dict[str, Any]
) -> None:
    """Of all ranks, and the bytes that they have sent."""
    means = expected(sharding, attach)
    dtype = str(sharding.reduced_in).removeprefix("torch.")
    for rank, answer in enumerate(answers):
        mine = [index for index, part in enumerate(parts(sharding)) if part[2] == rank]
        for step in range(STEPS):
            for got, index in zip(answer["gradients"][step], mine, strict=True):
                # What lies beyond the last row is padding.
                wanted = widen(means[step][index], dtype)[: got.size]
                assert np.array_equal(got, wanted), (rank, step, parts(sharding)[index])
    if "warmup_steps" in attach:
        return
    codecs = codecs_of_parts(sharding, attach["codec"])
    formula = scattered_bytes_per_step(
        [sharding.size(module, name) for module, name, _ in parts(sharding)],
        codecs,
        [owner for _, _, owner in parts(sharding)],
        [[i for i, part in enumerate(parts(sharding)) if part[0] == module] for module in SHAPES],
        sharding.shards,
        dtype=dtype,
    )
    # A commit for each module on a host; on a device one for the step before.
    missing = 0 if sharding.device == "cpu" else STEPS * len(SHAPES) - (STEPS - 1)
    for sent, answer in zip(formula, answers, strict=True):
        stats = answer["stats"]
        assert stats["wire_bytes"] == STEPS * sent - 64 * missing * (sharding.shards - 1)
        # A ring passes all shards but this rank's own on, once.
        ring = stats["gradient_bytes"] * (sharding.shards - 1) / sharding.shards
        assert stats["ratio"] == pytest.approx(ring / stats["wire_bytes"], rel=1e-12)
        assert [row["ratio"] for row in answer["rows"]] == [stats["ratio"]]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("exact", torch.float32), ("exact", torch.float16), ("off", torch.float16)],
    ids=["average", "sum", "off"],
)
def test_exact_is_what_fsdp2_reduces_itself(worlds: Worlds, codec: str, dtype: torch.dtype) -> None:
    # Sums of four whole numbers below 2^9, and a fourth of them, are exact in fp16, too; in which
    # FSDP2 divides by 2 before a sum and by 2 after it.
    sharding = Sharding(1, 4, reduce_dtype=None if dtype == torch.float32 else dtype, whole=True)
    native = worlds(4).run(case_native, sharding=sharding, steps=STEPS)
    ours = worlds(4).run(case_train, sharding=sharding, attach={"codec": codec})
    for one, other in zip(native, ours, strict=True):
        assert same(one, other["gradients"])


def case_partly() -> dict[str, Any]:
    sharding = Sharding(1, 2, without=(("blocks.0", "bias"),), whole=True)
    mesh = sharding.mesh()
    models = sharding.model(mesh["shard"]), sharding.model(mesh["shard"])
    state = gradferry.fsdp.attach(models[0], "q4", all_gather="off")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for model in models:
            sharding.backward(model, 0)
    ours, theirs = (model.blocks[0].weight.grad.to_local() for model in models)
    return {
        "equal": torch.equal(ours, theirs),
        "fallbacks": state.stats()["fallbacks"],
        "warned": [str(each.message) for each in warned],
    }


@pytest.mark.torch_core
def test_modules_with_parameters_without_gradients_are_reduced_as_they_are(worlds: Worlds) -> None:
    for answer in worlds(2).run(case_partly):
        assert answer["equal"]
        assert answer["fallbacks"] == 1
        assert "its gradients are sent uncompressed" in answer["warned"][0]


BOTH = {"reduce_scatter": "q4", "scatter_feedback": "worker"}


@pytest.mark.torch_core
def test_both_hooks_go_on_to_the_bit(worlds: Worlds, tmp_path: Path) -> None:
    how = {"sharding": Sharding(), "attach": BOTH, "path": str(tmp_path / "dcp")}
    saved = worlds(4).run(case_save_and_go_on, **how)
    loaded = worlds(4).run(case_load_and_go_on, **how)
    for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
        assert list(one["state"]) == [f"shard_{rank % 2}_of_2", f"group_of_rank_{rank // 2 * 2}"]
        assert same(one["state"], other["state"])
        assert one["values"] == other["values"] == saved[rank % 2]["values"]


def case_refused() -> dict[str, Outcome]:
    mesh = FOUR.mesh()

    def attached(**options: Any) -> Outcome:
        model = FOUR.model(mesh["shard"])
        options = {"codec": "q4", "all_gather": "off", **options}
        return attempt(lambda: gradferry.fsdp.attach(model, **options))

    model = FOUR.model(mesh["shard"])
    found = {
        "owner": attached(scatter_feedback="owner"),
        "feedback of averages": attached(error_feedback="worker"),
        "momentum": attached(momentum=0.9),
        "nothing": attached(reduce_scatter="off"),
        "sign1": attached(codec="sign1"),
        "rule": attached(rules=[{"codec": "topk"}]),
        "auto": attached(codec="auto"),
        "unequal": attached(codec=("q4", "q8", "q4", "q4")[dist.get_rank()]),
        "first": attempt(lambda: gradferry.fsdp.attach(model, "q4", all_gather="off")),
        "second": attempt(lambda: gradferry.fsdp.attach(model, "q4", all_gather="off")),
    }
    model.set_gradient_divide_factor(3.0)
    found["premultiplied"] = attempt(lambda: FOUR.backward(model, 0))
    found["after an error"] = attempt(lambda: FOUR.backward(model, 0))
    return found


TEXTS = {
    "owner": "only 'worker' and 'none' are left",
    "feedback of averages": "error_feedback='worker' is for averages over replicas",
    "momentum": "momentum=0.9 is for averages over replicas: give replicate_group",
    "nothing": "nothing is left to compress",
    "sign1": "needs scatter_feedback='worker' here, which takes 0.1 MiB on every rank",
    "rule": "needs scatter_feedback='worker' here",
    "auto": "codec='auto' tries codecs in the steps of DistributedDataParallel",
    "unequal": "rank 1 differs from rank 0 in reduce_scatter",
    "second": "gradferry is attached to this model already",
    "premultiplied": "call set_force_sum_reduction_for_comms(True)",
    "after an error": "call set_force_sum_reduction_for_comms(True)",
}
KINDS = {
    "unequal": "RankMismatchError",
    "premultiplied": "StateError",
    "after an error": "StateError",
}


@pytest.mark.torch_core
def test_what_cannot_be_hooked_is_refused_with_a_reason(worlds: Worlds) -> None:
    for found in worlds(4).run(case_refused):
        assert found.pop("first").error is None
        assert_refused(found, TEXTS, KINDS)


def case_another_group(after: bool) -> list[Outcome]:
    sharding = Sharding(1, 2)
    model = sharding.model(sharding.mesh()["shard"])
    if not after:
        model.set_separate_reduce_scatter_group()
    gradferry.fsdp.attach(model, "q4", all_gather="off")
    first = attempt(lambda: sharding.backward(model, 0))
    if after:
        model.set_separate_reduce_scatter_group()
    return [first, attempt(lambda: sharding.backward(model, 1))]


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_separate_reduce_scatter_group"),
    reason="this torch reduces in the group of the shards alone",
)
@pytest.mark.parametrize("after", [False, True])
def test_the_group_is_that_at_attach(worlds: Worlds, after: bool) -> None:
    for first, second in worlds(2).run(case_another_group, after=after):
        assert first.error is None
        assert second.error == ("StateError" if after else None)
        assert not after or "'the model' is reduced in process group" in second.text


def case_infinity(rank: int) -> Outcome:
    model = FOUR.model(FOUR.mesh()["shard"])
    gradferry.fsdp.attach(model, "q4", all_gather="off", nonfinite="raise")
    FOUR.backward(model, 0)
    targets = FOUR.targets(1, 0, dist.get_rank())
    if dist.get_rank() == rank:
        targets["blocks.0"]["weight"][0, 0] = float("inf")
    return attempt(lambda: model(targets).backward())


def test_all_ranks_raise_the_error_of_one_owner(worlds: Worlds) -> None:
    outcomes = worlds(4).run(case_infinity, rank=2)
    assert {outcome.headline for outcome in outcomes} == {outcomes[0].headline}
    assert outcomes[0].error == "StateError"
    assert "blocks.0.weight" in outcomes[0].text
