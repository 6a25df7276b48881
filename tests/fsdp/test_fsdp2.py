"""`gradferry.fsdp.attach`: gradients that are averaged over replicas, or reduce-scattered, on hosts
and on the fake device; kinds of models, and states.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gathering import KINDS, built, targets_of
from on_ranks import on_ranks
from outcomes import Outcome, attempt
from reference import ReferenceEngine, ReferenceReduceScatter, scattered_bytes_per_step
from reference.layout import resolve_codecs, wire_bytes_per_step
from reference.scalars import narrow, widen
from saved import same
from sharded_training import Training, case_load_and_go_on, case_save_and_go_on, gradients_of
from sharding import RATE, SHAPES, Sharding, attached, bits, in_order, local_gradients
from stepping import warned
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from watching import in_two_orders
from world import Worlds, WorldsOn

STEPS = 4
FOUR = Sharding(1, 4)


# --- gradients are those of the reference, to the bit ---------------------------------------------


def trained(sharding: Sharding, attach: dict[str, Any]) -> dict[str, Any]:
    model, state = attached(sharding, **attach)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    gradients, values = [], []
    rows: list[dict[str, Any]] = []
    state.on_step(rows.append)
    with warned() as said:
        for step in range(STEPS):
            sharding.backward(model, step)
            gradients.append(local_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
            values.append(bits(model))
    stats = state.stats()
    return {"gradients": gradients, "values": values, "stats": stats,
            "rows": len(rows), "warned": [str(each.message) for each in said]}  # fmt: skip


def case_trained(sharding: Sharding, attach: dict[str, Any]) -> list[dict[str, Any]]:
    def train() -> dict[str, Any]:
        return trained(sharding, attach)

    return [train()] if sharding.device == "cpu" else in_two_orders(train)


def replicas_reference(sharding: Sharding, attach: dict[str, Any]) -> ReferenceEngine:
    taken = ("momentum", "warmup_steps", "error_feedback", "seed")
    options = {name: attach[name] for name in taken if name in attach}
    options = {"error_feedback": "auto", **options}
    return ReferenceEngine(sharding.replicas, sharding.described(), attach["codec"], **options)


def parts(sharding: Sharding) -> list[tuple[str, str, int]]:
    """(module, name, owner) of what a reduce-scatter takes for parameters, in its order."""
    owners = range(sharding.shards)
    return [(m, n, o) for m, shapes in SHAPES.items() for o in owners for n in shapes]


def codecs_of_parts(sharding: Sharding, codec: str) -> list[str]:
    described = dict(zip(sharding.named(), sharding.described(), strict=True))
    return resolve_codecs([described[m, n] for m, n, _ in parts(sharding)], codec)[0]


def expected(sharding: Sharding, attach: dict[str, Any]) -> list[list[list[np.ndarray]]]:
    """[rank][step][parameter]."""
    dtype = str(sharding.reduced_in).removeprefix("torch.")
    wanted: list[list[list[np.ndarray]]] = [[] for _ in range(sharding.world_size)]
    if sharding.replicas > 1:
        for shard in range(sharding.shards):
            engine = replicas_reference(sharding, attach)
            for step in range(STEPS):
                given = [sharding.reduced(step, replica, shard) for replica in range(2)]
                for rank, averages in zip((shard, 2 + shard), engine.step(given), strict=True):
                    wanted[rank].append(averages)
        return wanted
    codecs = codecs_of_parts(sharding, attach["codec"])
    reference = ReferenceReduceScatter(
        sharding.shards,
        [sharding.size(module, name) for module, name, _ in parts(sharding)],
        codecs,
        dtype,
        keeps=[attach.get("scatter_feedback") == "worker" and codec != "exact" for codec in codecs],
        seed=attach.get("seed", 0),
    )
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
        warms_up = step < attach.get("warmup_steps", 0)
        warmup = attach.get("warmup", "exact") if warms_up else None
        means = reference.step(step, gradients, warmup=warmup)
        for rank in range(sharding.shards):
            of_rank = zip(parts(sharding), means, strict=True)
            wanted[rank].append([mean for (_, _, owner), mean in of_rank if owner == rank])
    return wanted


def sent(sharding: Sharding, attach: dict[str, Any]) -> list[int]:
    """Bytes of all steps without warm-up, by rank."""
    if sharding.replicas > 1:
        layout = replicas_reference(sharding, attach).layout
        # Every check sends a header and 8 bytes per parameter, to one other replica.
        checks = (STEPS - 1) * (64 + 8 * len(layout.parameters)) if "check_every" in attach else 0
        buckets = sharding.buckets()
        return [checks + STEPS * wire_bytes_per_step(layout, buckets, rank // 2)
                for rank in range(4)]  # fmt: skip
    by_rank = scattered_bytes_per_step(
        [sharding.size(module, name) for module, name, _ in parts(sharding)],
        codecs_of_parts(sharding, attach["codec"]),
        [owner for _, _, owner in parts(sharding)],
        [[i for i, part in enumerate(parts(sharding)) if part[0] == module] for module in SHAPES],
        sharding.shards,
        dtype=str(sharding.reduced_in).removeprefix("torch."),
    )
    # A commit for each module on a host; on a device one for the step before.
    missing = 0 if sharding.device == "cpu" else STEPS * len(SHAPES) - (STEPS - 1)
    return [STEPS * each - 64 * missing * (sharding.shards - 1) for each in by_rank]


BF16 = {"dtype": torch.bfloat16}
TOPK = {"codec": "topk:ratio=0.05", "scatter_feedback": "worker"}
SIGN1 = {"codec": "sign1", "scatter_feedback": "worker"}
MOMENTUM = {"codec": "sign1", "momentum": 0.9, "warmup_steps": 2}
SMALL = {"workspace_cap_mb": 0.15}  # several chunks per module
ON_DEVICE = {"device": "streamed"}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("sharding", "attach"),
    [
        pytest.param(Sharding(), {"codec": "q4", "check_every": 1}, id="replicas"),
        pytest.param(Sharding(), MOMENTUM, id="momentum"),
        pytest.param(
            Sharding(passes=2), {"codec": "topk:ratio=0.05", "error_feedback": "both"}, id="topk"
        ),
        pytest.param(
            Sharding(reduce_dtype=torch.bfloat16), {"codec": "q8", "seed": 3}, id="bf16 reduced"
        ),
        pytest.param(
            Sharding(**BF16, reduce_dtype=torch.float32), {"codec": "q4"}, id="reduced in fp32"
        ),
        pytest.param(Sharding(**ON_DEVICE), MOMENTUM, id="streamed momentum"),
        pytest.param(FOUR, {"codec": "q4"}, id="scatter"),
        pytest.param(FOUR, {"codec": "exact", **SMALL}, id="scatter in chunks"),
        pytest.param(FOUR, {**SIGN1, "warmup_steps": 1}, id="scatter sign1"),
        pytest.param(
            Sharding(1, 2), {**SIGN1, "warmup_steps": 2, "warmup": "q8"}, id="scatter after q8"
        ),
        pytest.param(Sharding(1, 2, passes=2), TOPK, id="scatter topk"),
        pytest.param(Sharding(1, 3, **BF16), {"codec": "rht:bits=3", "seed": 3}, id="scatter bf16"),
        pytest.param(Sharding(1, 2, passes=2, **ON_DEVICE), TOPK, id="streamed scatter topk"),
        pytest.param(
            Sharding(1, 2, reduce_dtype=torch.bfloat16, **ON_DEVICE),
            {"codec": "q8", **SMALL},
            id="streamed scatter bf16 reduced",
        ),
    ],
)
def test_gradients_equal_the_reference(
    worlds_on: WorldsOn, sharding: Sharding, attach: dict[str, Any]
) -> None:
    ranks = worlds_on(sharding.device)(sharding.world_size).run(
        case_trained, sharding=sharding, attach=attach
    )
    wanted = expected(sharding, attach)
    for answers in zip(*ranks, strict=True):
        for rank, answer in enumerate(answers):
            for step, gradients in enumerate(answer["gradients"]):
                for got, want, place in zip(
                    gradients, wanted[rank][step], sharding.named(), strict=True
                ):
                    # What lies beyond the last row is padding.
                    dtype = str(sharding.reduced_in).removeprefix("torch.")
                    flat = widen(want, dtype)[: got.size]
                    if sharding.dtype != torch.float32:  # in which .grad is
                        flat = widen(narrow(flat, "bfloat16"), "bfloat16")
                    assert np.array_equal(got, flat), (rank, step, place)
            if sharding.replicas > 1:
                assert answer["values"] == answers[rank % 2]["values"]
            assert answer["rows"] == STEPS
            assert answer["warned"] == []
            stats = answer["stats"]
            assert (stats["chunks"] > stats["buckets"]) == ("workspace_cap_mb" in attach)
            assert stats["fallbacks"] == 0
            if sharding.device == "streamed":
                assert stats["host_waits"] == 0
    if {"warmup_steps", "workspace_cap_mb"} & attach.keys():
        return
    if sharding.replicas > 1 and sharding.device != "cpu":
        return
    for stats, total in zip((a["stats"] for a in answers), sent(sharding, attach), strict=True):
        assert stats["wire_bytes"] == total
        if sharding.replicas == 1:  # a ring passes all shards but this rank's own on, once
            ring = stats["gradient_bytes"] * (sharding.shards - 1) / sharding.shards
            assert stats["ratio"] == pytest.approx(ring / stats["wire_bytes"], rel=1e-12)


def case_gradients(
    sharding: Sharding, codec: str | None, factor: float | None
) -> list[list[np.ndarray]]:
    """codec: None: by FSDP2 alone."""
    model = attached(sharding, codec)[0] if codec else sharding.native()
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    return gradients_of(model, sharding, 3)


REPLICATED = Sharding(4, 1, kind="replicate", passes=2, accumulates="shards", whole=True)
WITHOUT_CODEC: dict[str, tuple[Sharding, str, float | None]] = {
    "replicas": (Sharding(whole=True), "exact", None),
    "replicas off": (Sharding(whole=True), "off", None),
    "passes": (Sharding(passes=2, whole=True), "exact", None),
    "shards of passes": (Sharding(passes=3, accumulates="shards", whole=True), "exact", None),
    "replicate": (REPLICATED, "exact", None),
    "sum of replicas": (Sharding(reduce_dtype=torch.float16, whole=True), "exact", None),
    "factor": (Sharding(whole=True), "exact", 2.0),  # gloo has no other than the number of shards
    "average": (Sharding(1, 4, whole=True), "exact", None),
    "sum": (Sharding(1, 4, reduce_dtype=torch.float16, whole=True), "exact", None),
    "scatter off": (Sharding(1, 4, reduce_dtype=torch.float16, whole=True), "off", None),
}


@pytest.mark.torch_core
@pytest.mark.parametrize(("sharding", "codec", "factor"), WITHOUT_CODEC.values(), ids=WITHOUT_CODEC)
def test_without_a_codec_gradients_are_those_of_fsdp2(
    worlds: Worlds, sharding: Sharding, codec: str, factor: float | None
) -> None:
    # Sums of four whole numbers below 2^9, and a fourth of them, are exact in fp16, too; in which
    # FSDP2 divides by 2 before a sum and by 2 after it.
    ours, theirs = (
        worlds(4).run(case_gradients, sharding=sharding, codec=each, factor=factor)
        for each in (codec, None)
    )
    assert same(ours, theirs)


# --- modules and parameters without gradients -----------------------------------------------------


@pytest.mark.torch_core
@pytest.mark.parametrize("replicas", [2, 1])
@on_ranks(4)
def test_modules_with_parameters_without_gradients_are_averaged_as_they_are(replicas: int) -> None:
    sharding = Sharding(replicas, 4 // replicas, without=(("blocks.0", "bias"),), whole=True)
    ours, state = attached(sharding)
    models = ours, sharding.native()
    with warned() as said:
        for step in range(STEPS):
            for model in models:
                model.zero_grad()
                sharding.backward(model, step)
            weights = [model.blocks[0].weight.grad.to_local() for model in models]
            assert torch.equal(*weights)
            assert ours.blocks[0].bias.grad is None
    assert state.stats()["fallbacks"] == STEPS
    assert any("sent uncompressed" in str(each.message) for each in said)


IDLE = tuple(("blocks.1", name) for name in SHAPES["blocks.1"])


@pytest.mark.torch_core
@on_ranks(4)
def test_a_module_without_any_gradient_does_not_keep_a_step_open() -> None:
    sharding = Sharding(without=IDLE)
    model, state = attached(sharding)
    for step in range(3):
        sharding.backward(model, step)
        assert next(iter(state.state_dict().values()))["steps"] == 1 + step
    for without, text in (
        (IDLE, "'blocks.1' has no gradient, and momentum= needs"),
        (IDLE[:1], "momentum= needs that of every parameter"),
    ):
        wrong = Sharding(without=without)
        model, _ = attached(wrong, momentum=0.9)
        # A module without any is missed when the next pass begins.
        outcome = attempt(lambda: [wrong.backward(model, step) for step in range(2)])  # noqa: B023
        assert outcome.error == "StateError"
        assert text in outcome.text


@pytest.mark.torch_core
@pytest.mark.parametrize(("momentum", "checkpointed"), [(None, True), (0.9, False), (0.9, True)])
@on_ranks(4)
def test_a_pass_of_several_sharded_parts_is_one_step(
    momentum: float | None, checkpointed: bool
) -> None:
    from torch.utils.checkpoint import checkpoint

    mesh = Sharding().mesh()
    torch.manual_seed(3)
    model = nn.Sequential(*(fully_shard(nn.Linear(40, 40), mesh=mesh) for _ in range(3)))
    state = gradferry.fsdp.attach(model, "q4", momentum=momentum)
    for step in range(3):
        x = torch.ones(2, 40, requires_grad=checkpointed)
        for part in model:
            x = checkpoint(part, x, use_reentrant=True) if checkpointed else part(x)
        x.sum().backward()
        assert next(iter(state.state_dict().values()))["steps"] == 1 + step


# --- kinds of models -----------------------------------------------------------------------------


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Of two passes: small whole numbers, whose means are exact."""
    found = {}
    for step in range(2):
        model.zero_grad()
        targets = {
            part: {name: (1 + step + dist.get_rank()) * each.detach() for name, each in of.items()}
            for part, of in targets_of(model, torch.float32).items()
        }
        model(targets).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found[f"{name} {step}"] = parameter.grad.to_local().clone()
    return found


@pytest.mark.torch_core
@pytest.mark.parametrize("kind", [*KINDS, "one group", "compiled parts"])
@on_ranks(4)
def test_kinds_of_models_have_the_gradients_of_fsdp2(kind: str) -> None:
    ours, theirs = (built(kind, sharding=Sharding()) for _ in range(2))
    state = gradferry.fsdp.attach(ours, "exact")
    assert same(gradients(ours), gradients(theirs))
    assert (state.stats()["steps"], state.stats()["fallbacks"]) == (2, 0)


# --- models that are moved, gradients of other dtypes, passes that are broken off -----------------

TWO = Sharding(1, 2, whole=True)
MOVES: list[Callable[[Any], object]] = [
    lambda model: model.cpu(),
    lambda model: model.to("cpu"),
    lambda model: model.double().float(),
    lambda model: model.load_state_dict(model.state_dict()),
    lambda model: model.blocks[1].bfloat16().float(),
]


@pytest.mark.torch_core
@pytest.mark.parametrize("seed", range(2))
@on_ranks(2)
def test_a_model_that_is_moved_and_comes_back_goes_on(seed: int) -> None:
    """Between steps."""
    rng, models = random.Random(seed), [attached(TWO, "exact", all_gather="exact")[0], TWO.native()]
    optimizers = [torch.optim.SGD(each.parameters(), 0.125, momentum=0.5) for each in models]
    for step in range(5):
        move = rng.choice(MOVES)
        for model, optimizer in zip(models, optimizers, strict=True):
            move(model)
            TWO.backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
    assert bits(models[0]) == bits(models[1])


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 48, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).abs().sum()


def settled(kind: str, *, compressed: bool) -> list[tuple[str, np.ndarray]]:
    """Gradients of two passes, with their dtypes, or the error of FSDP2: torch 2.11 has some for
    another grad_dtype than that of the gradients. `kind`: complex, or what parameters get.
    """
    sharding = dataclasses.replace(TWO, dtype=torch.bfloat16)
    if kind == "complex":
        model: Any = fully_shard(Complex(), mesh=TWO.mesh()["shard"])
        batch: Any = torch.full((48,), 2.0 + dist.get_rank(), dtype=torch.complex64)
    else:
        model, batch = sharding.native(), sharding.targets(0, 0, dist.get_rank())
        for parameter in model.parameters():
            parameter.grad_dtype = None if kind == "any" else getattr(torch, kind)
    if compressed:
        gradferry.fsdp.attach(model, "exact", all_gather="off")
    found = []
    for _ in range(2):
        model.zero_grad()
        try:
            model(batch).backward()
        except RuntimeError as error:
            return [(str(error), np.zeros(0))]
        for grad in (p.grad.to_local() for p in in_order(model)):
            values = torch.view_as_real(grad.to(torch.complex64)).numpy().copy()
            found.append((str(grad.dtype), values))
    return found


GRAD_DTYPES = ("float32", "bfloat16", "any") if hasattr(torch.Tensor, "grad_dtype") else ()


@pytest.mark.torch_core
@pytest.mark.parametrize("kind", ["complex", *GRAD_DTYPES])
@on_ranks(2)
def test_gradients_have_the_dtype_that_fsdp2_settles(kind: str) -> None:
    assert same(settled(kind, compressed=True), settled(kind, compressed=False))


@pytest.mark.skipif(
    not hasattr(FSDPModule, "reset_iter_state"), reason="this torch does not recover"
)
@pytest.mark.parametrize("seed", range(3))
@on_ranks(2)
def test_a_state_can_be_saved_after_fsdp2s_own_recovery(seed: int) -> None:
    """From an exception in a drawn module."""
    rng = random.Random(seed)
    model, state = attached(TWO, "q4", all_gather="exact", scatter_feedback="worker")

    def stop(_: torch.Tensor) -> None:
        raise ArithmeticError

    TWO.backward(model, 0)
    targets = TWO.targets(1, 0, dist.get_rank())
    part = targets[rng.choice(list(targets))]
    name = rng.choice(list(part))
    part[name] = part[name].requires_grad_()
    part[name].register_hook(stop)
    with pytest.raises(ArithmeticError):
        model(targets).backward()
    model.reset_iter_state()
    before = next(iter(state.state_dict().values()))["steps"]
    assert before in (1, 2)
    state.load_state_dict(state.state_dict())
    TWO.backward(model, 2)
    assert next(iter(state.state_dict().values()))["steps"] == before + 1


# --- states ---------------------------------------------------------------------------------------


BOTH = {"codec": "q4", "error_feedback": "both"}
SCATTERS = {"reduce_scatter": "q4", "scatter_feedback": "worker"}


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("attach", "in_background"),
    [(BOTH, True), ({"codec": "sign1", "momentum": 0.9}, False), (SCATTERS, False)],
    ids=["async_save", "momentum", "both hooks"],
)
def test_training_goes_on_to_the_bit(
    worlds: Worlds, attach: dict[str, Any], in_background: bool, tmp_path: Path
) -> None:
    how = {"sharding": Sharding(), "attach": attach, "path": str(tmp_path / "dcp")}
    saved = worlds(4).run(case_save_and_go_on, **how, in_background=in_background)
    for resized in (False, True) if attach is not SCATTERS else (False,):
        loaded = worlds(4).run(case_load_and_go_on, resized=resized, **how)
        for rank, (one, other) in enumerate(zip(saved, loaded, strict=True)):
            assert one["values"] == other["values"] == saved[rank % 2]["values"]
            assert same(one["state"], other["state"])
            scatters = [f"group_of_rank_{rank // 2 * 2}"] * (attach is SCATTERS)
            assert list(one["state"]) == [f"shard_{rank % 2}_of_2", *scatters]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("replicas", "attach"), [(1, BOTH), (3, {"codec": "sign1", "momentum": 0.9})]
)
def test_other_numbers_of_replicas_keep_what_is_missing(
    worlds: Worlds, replicas: int, attach: dict[str, Any], tmp_path: Path
) -> None:
    how = {"attach": attach, "path": str(tmp_path / "dcp")}
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
        assert len({loaded[rank]["values"] for rank in mine}) == 1


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


def test_states_of_other_shards_are_loaded_without_residuals_or_refused(
    worlds: Worlds, tmp_path: Path
) -> None:
    from gradferry.checkpoint import merge

    attach = {"codec": "q4", "error_feedback": "both"}
    how = {"sharding": Sharding(), "attach": attach, "path": str(tmp_path / "dcp")}
    saved = merge(each["state"] for each in worlds(4).run(case_save_and_go_on, **how))
    for outcomes, steps in worlds(4).run(case_other_shards, saved=saved, attach=attach):
        assert [outcome.error for outcome in outcomes] == ["StateError", None, "StateError"]
        assert "on_resize='drop'" in outcomes[0].text
        assert steps == saved["shard_0_of_2"]["steps"] + 1


def case_resumed_without_a_scaler(device: str) -> list[np.ndarray]:
    """What comes after a state of another loss scale, if a module has no gradient at first."""
    sharding = Sharding(device=device)
    scaler = torch.amp.GradScaler(sharding.place.type, init_scale=2.0**10)
    model, saved = attached(sharding, error_feedback="both", grad_scaler=scaler)
    scaler.scale(model(sharding.targets(0, 0, dist.get_rank()))).backward()
    model, state = attached(sharding, error_feedback="both")
    state.load_state_dict(saved.state_dict())
    dataclasses.replace(sharding, without=IDLE).backward(model, 1)
    model.zero_grad()
    sharding.backward(model, 2)
    return local_gradients(model)


@pytest.mark.torch_core
def test_a_state_with_a_loss_scale_goes_on_without_one(worlds_on: WorldsOn) -> None:
    host, device = (
        worlds_on(each)(4).run(case_resumed_without_a_scaler, device=each)
        for each in ("cpu", "streamed")
    )
    assert same(host, device)
    # Not 2^10 times what was withheld: gradients are below 2^4 in size.
    assert all(np.abs(each).max(initial=0.0) < 2**5 for gradients in host for each in gradients)


# --- everything together --------------------------------------------------------------------------


def case_all(
    device: str, keep: bool, feedback: dict[str, str]
) -> list[tuple[Any, dict[str, Any], list[Any]]]:
    """Gradients and parameters after steps of hybrid sharding with all three exchanges compressed,
    whose state goes on in another model; and what is counted.
    """
    sharding = Sharding(device=device)
    mesh = sharding.mesh()

    def made() -> tuple[Any, Any]:
        model = sharding.model(mesh)
        options = {"reduce_scatter": "q4", "all_gather": "q8", "keep_gathered": keep, **feedback}
        return model, gradferry.fsdp.attach(model, "q4", **options)

    def train() -> tuple[Any, dict[str, Any], list[Any]]:
        model, state = made()
        rows: list[Any] = []
        state.on_step(rows.append)
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        found: list[Any] = []
        for step in range(3):
            sharding.backward(model, step)
            found += local_gradients(model)
            optimizer.step()
            optimizer.zero_grad()
        again, other = made()
        other.load_state_dict(state.state_dict())
        sharding.backward(again, 3)
        stats, events = state.stats(), {event["exchange"] for event in state.events()}
        counted = {**stats, "events": events, "text": str(state)}
        return [*found, *local_gradients(again), bits(model)], counted, rows

    return [train()] if device == "cpu" else in_two_orders(train)


FEEDBACK = {"scatter_feedback": "worker", "error_feedback": "worker"}


@pytest.mark.torch_core
@pytest.mark.parametrize("keep", [False, True], ids=["twice", "kept"])
def test_all_three_exchanges_of_hybrid_sharding(worlds_on: WorldsOn, keep: bool) -> None:
    host = worlds_on("cpu")(4).run(case_all, device="cpu", keep=keep, feedback=FEEDBACK)
    for rank, ((values, stats, rows),) in enumerate(host):
        assert values[-1] == host[rank % 2][0][0][-1]
        parts = stats["exchanges"]
        chosen = {name: str(each["choice"]["codec"]) for name, each in parts.items()}
        assert chosen == {"replicas": "q4", "reduce_scatter": "q4", "all_gather": "q8"}
        assert stats["steps"] == 3
        assert stats["wire_bytes"] == sum(part["wire_bytes"] for part in parts.values())
        assert stats["wire_bytes"] == sum(row["wire_bytes"] for row in rows)
        assert [row["step"] for row in rows] == [0, 1, 2]
        assert stats["events"] == set(parts)
        assert all(f"{name}: gradferry: " in stats["text"] for name in parts)
    device = "staged" if keep else "streamed"
    found = worlds_on(device)(4).run(case_all, device=device, keep=keep, feedback=FEEDBACK)
    for ((wanted, _, _),), answers in zip(host, found, strict=True):
        for values, stats, _ in answers:
            assert same(values, wanted)
            assert all((each["chunks"] > 0, each["fallbacks"]) == (True, 0)
                       for each in stats["exchanges"].values())  # fmt: skip
