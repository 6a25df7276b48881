"""`gradferry.fsdp.attach`: averages over replicas of an FSDP2 model, residuals, states, errors."""

from __future__ import annotations

import dataclasses
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
from reference import ReferenceEngine
from reference.layout import wire_bytes_per_step
from reference.scalars import narrow, widen
from sharded_training import Training, case_load_and_go_on, case_native, case_save_and_go_on
from sharding import RATE, SHAPES, Sharding, attached, bits, in_order, local_gradients, same
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from world import World

Worlds = Callable[[int], World]

STEPS = 4


def case_train(sharding: Sharding, attach: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    model, state = attached(sharding, **attach)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gradients, values, calls = [], [], []
    state.on_step(calls.append)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(steps):
            sharding.backward(model, step)
            gradients.append(local_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            values.append(bits(model))
    return {
        "gradients": gradients,
        "values": values,
        "stats": state.stats(),
        "calls": len(calls),
        "state": state.state_dict(),
        "text": str(state),
        "warned": [str(each.message) for each in warned],
    }


def reference_of(sharding: Sharding, attach: dict[str, Any]) -> ReferenceEngine:
    taken = ("momentum", "warmup_steps", "error_feedback", "seed")
    options = {name: attach[name] for name in taken if name in attach}
    return ReferenceEngine(
        sharding.replicas,
        sharding.described(),
        attach["codec"],
        **{"error_feedback": "auto", **options},
    )


def assert_equals_reference(
    members: Sequence[dict[str, Any]], shard: int, sharding: Sharding, attach: dict[str, Any]
) -> ReferenceEngine:
    """Compares the answers of `case_train` of both replicas of a shard; returns what they equal."""
    engine = reference_of(sharding, attach)
    dtype = str(sharding.reduced_in).removeprefix("torch.")
    for step in range(len(members[0]["gradients"])):
        given = [sharding.reduced(step, replica, shard) for replica in range(2)]
        expected = engine.step(given)[0]
        for answer in members:
            for index, (module, name) in enumerate(sharding.named()):
                got = answer["gradients"][step][index]
                # What lies beyond the last row is padding.
                wanted = widen(expected[index], dtype)[: got.size]
                if sharding.dtype != torch.float32:  # in which .grad is
                    wanted = widen(narrow(wanted, "bfloat16"), "bfloat16")
                assert np.array_equal(got, wanted), (shard, step, module, name)
        assert members[0]["values"][step] == members[1]["values"][step]
    return engine


BF16 = {"dtype": torch.bfloat16}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("sharding", "attach"),
    [
        (Sharding(), {"codec": "q4", "check_every": 1}),
        (Sharding(), {"codec": "sign1", "momentum": 0.9, "warmup_steps": 2}),
        (Sharding(passes=2), {"codec": "topk:ratio=0.05", "error_feedback": "both"}),
        (Sharding(reduce_dtype=torch.bfloat16), {"codec": "q8", "seed": 3}),
        (Sharding(**BF16), {"codec": "rht:bits=3"}),
        (Sharding(**BF16, reduce_dtype=torch.float32), {"codec": "q4"}),
    ],
    ids=["q4", "momentum", "topk", "bf16 reduced", "bf16", "bf16 reduced in fp32"],
)
def test_averages_equal_the_reference(
    worlds: Worlds, sharding: Sharding, attach: dict[str, Any]
) -> None:
    answers = worlds(4).run(case_train, sharding=sharding, attach=attach)
    for shard in range(2):
        members = [answers[shard], answers[2 + shard]]
        engine = assert_equals_reference(members, shard, sharding, attach)
        # Every check sends a header and 8 bytes per parameter, to one other replica.
        checks = (STEPS - 1) * (64 + 8 * len(engine.layout.parameters))
        for rank, answer in enumerate(members):
            sent = STEPS * wire_bytes_per_step(engine.layout, sharding.buckets(), rank)
            sent += checks if "check_every" in attach else 0
            if "warmup_steps" not in attach:
                assert answer["stats"]["wire_bytes"] == sent
    assert all(answer["calls"] == STEPS for answer in answers)
    assert not any(answer["warned"] for answer in answers)


@pytest.mark.torch_core
def test_off_is_what_fsdp2_averages_itself(worlds: Worlds) -> None:
    # Sums of whole numbers below 2^24, divided by 4: exact in fp32 in any order. Kinds of models
    # are compared so behind `exact`.
    sharding = Sharding(whole=True)
    native = worlds(4).run(case_native, sharding=sharding, steps=STEPS)
    ours = worlds(4).run(case_train, sharding=sharding, attach={"codec": "off"})
    for one, other in zip(native, ours, strict=True):
        assert same(one, other["gradients"])


@pytest.mark.torch_core
def test_modules_with_parameters_without_gradients_are_averaged_as_they_are(worlds: Worlds) -> None:
    sharding = Sharding(without=(("blocks.0", "bias"),), whole=True)
    answers = worlds(4).run(case_partly, sharding=sharding)
    for shard in range(2):
        assert answers[shard]["values"] == answers[2 + shard]["values"]
    for answer in answers:
        assert answer["equal"]
        assert answer["fallbacks"] == STEPS
        assert [text for text in answer["warned"] if "sent uncompressed" in text] != []
        assert "momentum= needs that of every parameter" in answer["refused"].text


def case_partly(sharding: Sharding) -> dict[str, Any]:
    ours, state = attached(sharding)
    models = ours, sharding.model(sharding.mesh())
    equal = True
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for step in range(STEPS):
            for model in models:
                model.zero_grad()
                sharding.backward(model, step)
            weights = [model.blocks[0].weight for model in models]
            equal &= torch.equal(*(weight.grad.to_local() for weight in weights))
            equal &= models[0].blocks[0].bias.grad is None
    third, _ = attached(sharding, momentum=0.9)
    return {
        "equal": equal,
        "fallbacks": state.stats()["fallbacks"],
        "values": bits(models[0]),
        "warned": [str(each.message) for each in warned],
        "refused": attempt(lambda: sharding.backward(third, 0)),
    }


IDLE = tuple(("blocks.1", name) for name in SHAPES["blocks.1"])


def case_idle_module() -> dict[str, Any]:
    sharding = Sharding(without=IDLE)
    model, state = attached(sharding)
    steps = []
    for step in range(3):
        sharding.backward(model, step)
        steps.append(next(iter(state.state_dict().values()))["steps"])
    other, _ = attached(sharding, momentum=0.9)
    return {"steps": steps, "refused": attempt(lambda: sharding.backward(other, 0))}


@pytest.mark.torch_core
def test_a_module_without_any_gradient_does_not_keep_a_step_open(worlds: Worlds) -> None:
    for answer in worlds(4).run(case_idle_module):
        assert answer["steps"] == [1, 2, 3]
        assert answer["refused"].error == "StateError"
        assert "'blocks.1' has no gradient, and momentum= needs" in answer["refused"].text


def case_no_root(momentum: float | None, checkpointed: bool) -> list[int]:
    """Steps, as saved after each pass."""
    from torch.utils.checkpoint import checkpoint

    mesh = Sharding().mesh()
    torch.manual_seed(3)
    model = nn.Sequential(*(fully_shard(nn.Linear(40, 40), mesh=mesh["shard"]) for _ in range(3)))
    state = gradferry.fsdp.attach(model, "q4", mesh["replica"], momentum=momentum)
    steps = []
    for _ in range(3):
        x = torch.ones(2, 40, requires_grad=checkpointed)
        for part in model:
            x = checkpoint(part, x, use_reentrant=True) if checkpointed else part(x)
        x.sum().backward()
        steps.append(next(iter(state.state_dict().values()))["steps"])
    return steps


@pytest.mark.torch_core
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("momentum", [None, 0.9])
def test_a_pass_of_several_sharded_parts_is_one_step(
    worlds: Worlds, momentum: float | None, checkpointed: bool
) -> None:
    answers = worlds(4).run(case_no_root, momentum=momentum, checkpointed=checkpointed)
    assert answers == [[1, 2, 3]] * 4


SCALES = (8.0, 2.0, 2.0, 16.0, 16.0, 4.0)


def case_scaled(
    hook: str, without: tuple[tuple[str, str], ...], scales: Sequence[float], device: str = "cpu"
) -> list[list[np.ndarray]]:
    """Averages in units of the loss; in every second step some parameters have no gradient."""
    sharding = Sharding(device=device)
    scaler = torch.amp.GradScaler(sharding.place.type, init_scale=scales[0])
    options = {"codec": "q4", "grad_scaler": scaler}
    if hook == "scatter":
        model = sharding.model(sharding.mesh()["shard"])
        gradferry.fsdp.attach(model, all_gather="off", scatter_feedback="worker", **options)
    else:
        model, _ = attached(sharding, error_feedback="both", **options)
    averages = []
    for step, scale in enumerate(scales):
        scaler.update(scale)
        used = dataclasses.replace(sharding, without=without if step % 2 else ())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is sent uncompressed
            targets = used.targets(step, 0, dist.get_rank())
            scaler.scale(model(targets)).backward()
        gradients = [p.grad.to_local() for p in in_order(model) if p.grad is not None]
        averages.append([gradient.cpu().numpy() / np.float32(scale) for gradient in gradients])
        model.zero_grad()
    return averages


def assert_scales_change_no_bit(world: World, **case: Any) -> None:
    """All are powers of two, and no number is near the smallest or the largest."""
    plain = world.run(case_scaled, scales=(1.0,) * len(SCALES), **case)
    scaled = world.run(case_scaled, scales=SCALES, **case)
    assert same(plain, scaled)


@pytest.mark.torch_core
@pytest.mark.parametrize("without", [IDLE, IDLE[:1]], ids=["module", "parameter"])
@pytest.mark.parametrize("hook", ["replicas", "scatter"])
def test_residuals_follow_the_loss_scale_while_modules_have_no_gradient(
    worlds: Worlds, hook: str, without: tuple[tuple[str, str], ...]
) -> None:
    assert_scales_change_no_bit(worlds(4), hook=hook, without=without)


def case_factor(native: bool) -> list[np.ndarray]:
    sharding = Sharding(whole=True)
    model = sharding.model(sharding.mesh()) if native else attached(sharding, "exact")[0]
    model.set_gradient_divide_factor(2.0)  # gloo has no other than the number of shards
    sharding.backward(model, 0)
    return local_gradients(model)


@pytest.mark.torch_core
def test_a_factor_divides_the_sum_over_all_ranks(worlds: Worlds) -> None:
    ours, theirs = (worlds(4).run(case_factor, native=native) for native in (False, True))
    assert same(ours, theirs)


# --- kinds of models -----------------------------------------------------------------------------


# Gradients are small whole numbers: sums and their quarter are exact in fp32 in any order.
WIDTH = 24


class Layer(nn.Module):
    """Two matrices, each times a number of the batch: these numbers are their gradients."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(37, WIDTH))
        self.bias = nn.Parameter(torch.ones(WIDTH))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mine = (self.weight * x).sum() + 3 * (self.bias * x).sum()
        return mine if self.inner is None else mine + self.inner(2 * x)


def plain(mesh: DeviceMesh, **options: Any) -> nn.Module:
    model = Layer(Layer())
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh, **options)
    return model


def offloaded(mesh: DeviceMesh) -> nn.Module:
    return plain(mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))


def nested(mesh: DeviceMesh) -> nn.Module:
    """Sharded modules in a sharded module, and one between them that is not."""
    model = Layer(Layer(Layer(Layer())))
    for module in (model.inner.inner.inner, model.inner, model):
        fully_shard(module, mesh=mesh)
    return model


def tied(mesh: DeviceMesh) -> nn.Module:
    model = Layer(Layer(Layer()))
    model.inner.weight = model.weight
    fully_shard(model.inner.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def compiled(mesh: DeviceMesh) -> nn.Module:
    model = plain(mesh)
    model.compile(backend="eager")
    return model


def compiled_parts(mesh: DeviceMesh) -> nn.Module:
    model = Layer(Layer())
    model.inner.compile(backend="eager")
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh)
    return model


KINDS = (plain, offloaded, nested, tied, compiled, compiled_parts)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of two passes, the second one on top of changed parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = {}
    for step in range(2):
        optimizer.zero_grad()
        model(torch.full((WIDTH,), 1.0 + step + dist.get_rank())).backward()
        optimizer.step()
        for name, parameter in model.named_parameters():
            found[f"{name} {step}"] = parameter.grad.to_local().clone()
    return found


def case_kinds() -> dict[str, str]:
    """What is wrong, by kind."""
    torch._dynamo.reset()
    mesh = Sharding().mesh()
    wrong = {}
    for kind in KINDS:
        expected = gradients(kind(mesh))
        model = kind(mesh["shard"])
        state = gradferry.fsdp.attach(model, "exact", mesh["replica"])
        found: dict[str, torch.Tensor] = {}
        outcome = attempt(lambda m=model, f=found: f.update(gradients(m)))
        counts = state.stats()["steps"], state.stats()["fallbacks"]
        if outcome.error or not same(found, expected) or counts != (2, 0):
            wrong[kind.__name__] = f"{outcome} {counts} {found}"
    return wrong


@pytest.mark.torch_core
def test_kinds_of_models_have_the_gradients_of_fsdp2(worlds: Worlds) -> None:
    assert worlds(4).run(case_kinds) == [{}] * 4


# --- states ---------------------------------------------------------------------------------------


MODES = [
    {"codec": "q4", "error_feedback": "both"},
    {"codec": "sign1", "momentum": 0.9},
]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("attach", "in_background"),
    [(MODES[0], False), (MODES[0], True), (MODES[1], False)],
    ids=["q4", "q4 async_save", "sign1 momentum"],
)
def test_training_goes_on_to_the_bit(
    worlds: Worlds, attach: dict[str, Any], in_background: bool, tmp_path: Path
) -> None:
    how = {"sharding": Sharding(), "attach": attach, "path": str(tmp_path / "dcp")}
    saved = worlds(4).run(case_save_and_go_on, **how, in_background=in_background)
    for resized in (False, True):
        loaded = worlds(4).run(case_load_and_go_on, resized=resized, **how)
        for one, other in zip(saved, loaded, strict=True):
            assert one["values"] == other["values"]
            assert same(one["state"], other["state"])


@pytest.mark.torch_core
@pytest.mark.parametrize(("replicas", "mode"), [(1, 0), (1, 1), (3, 1)])
def test_other_numbers_of_replicas_keep_what_is_missing(
    worlds: Worlds, replicas: int, mode: int, tmp_path: Path
) -> None:
    how = {"attach": MODES[mode], "path": str(tmp_path / "dcp")}
    saved = worlds(4).run(case_save_and_go_on, sharding=Sharding(), **how)
    sharding = Sharding(replicas=replicas)
    loaded = worlds(sharding.world_size).run(
        case_load_and_go_on, sharding=sharding, resized=True, **how
    )
    for shard in range(2):
        part = f"shard_{shard}_of_2"
        before = missing([saved[rank]["state"][part] for rank in (shard, 2 + shard)])
        mine = range(shard, sharding.world_size, 2)
        after = missing([loaded[rank]["state"][part] for rank in mine])
        assert before != 0
        # Residuals are fp32 and their mean is rounded once; sums are in fp64, of about 12,000
        # elements, whose rounding errors add up like those of a random walk at most: 2^-24 * 110.
        assert abs(after - before) <= 2**-17 * abs(before) + 2**-17
        values = {loaded[rank]["values"] for rank in mine}
        assert len(values) == 1


def missing(states: Sequence[dict[str, Any]]) -> float:
    """The sum of what averages still lack: the mean of worker residuals, and owner residuals."""
    slots = [state[f"slot_{rank}"] for rank, state in enumerate(states)]
    worker = sum(slot["worker"].double().sum() for slot in slots) / len(slots)
    return float(worker + sum(slot["owner"].double().sum() for slot in slots))


def case_other_shards(saved: dict[str, Any], attach: dict[str, Any]) -> tuple[list[Outcome], int]:
    training = Training(Sharding(1, 4), attach)
    state = training.state
    outcomes = [
        attempt(lambda: state.load_state_dict(saved, on_resize="mean")),
        attempt(lambda: state.load_state_dict(saved, on_resize="drop")),
        attempt(lambda: state.load_state_dict([])),
    ]
    training.train(range(1))
    return outcomes, next(iter(state.state_dict().values()))["steps"]


@pytest.mark.parametrize("feedback", ["both", "none"])
def test_states_of_other_shards_are_refused_where_something_would_be_lost(
    worlds: Worlds, tmp_path: Path, feedback: str
) -> None:
    from gradferry.checkpoint import merge

    attach = {"codec": "q4", "error_feedback": feedback}
    how = {"sharding": Sharding(), "attach": attach, "path": str(tmp_path / "dcp")}
    saved = merge(each["state"] for each in worlds(4).run(case_save_and_go_on, **how))
    assert sorted(saved["shard_1_of_2"]) == sorted(saved["shard_0_of_2"])
    assert {"slot_0", "slot_1"} <= set(saved["shard_1_of_2"])
    for outcomes, steps in worlds(4).run(case_other_shards, saved=saved, attach=attach):
        refused = "StateError" if feedback == "both" else None
        assert [outcome.error for outcome in outcomes] == [refused, None, "StateError"]
        assert feedback == "none" or "on_resize='drop'" in outcomes[0].text
        assert steps == saved["shard_0_of_2"]["steps"] + 1
