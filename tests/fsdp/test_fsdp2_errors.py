"""What `gradferry.fsdp.attach` refuses, and errors in training, which all ranks must hear of."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import signal
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gathering import ONLY_GATHERS, built, targets_of
from gradferry.averaging import step_numbers
from gradferry.fsdp import hooks
from on_ranks import of_all, on_ranks
from outcomes import Outcome, attempt
from relays import Relays
from sharding import SHAPES, Chosen, Model, Sharding, attached, bits
from stepping import logged, texts
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.optim import SGD
from world import WorldError, Worlds

HYBRID, FOUR = Sharding(), Sharding(1, 4)


# --- at attach ------------------------------------------------------------------------------------


def replicas(mesh: DeviceMesh, model: Any = None, codec: str = "q4", **options: Any) -> None:
    model = HYBRID.model(mesh) if model is None else model
    gradferry.fsdp.attach(model, codec, **options)


def scatter(mesh: DeviceMesh, codec: str = "q4", **options: Any) -> None:
    model = FOUR.model(mesh["shard"])
    gradferry.fsdp.attach(model, codec, **{"all_gather": "off", **options})


def gathers(mesh: DeviceMesh, model: Any = None, **options: Any) -> None:
    """What is refused has changed no bit."""
    model = built("plain") if model is None else model
    before = bits(model) if isinstance(model, Model) else b""
    try:
        gradferry.fsdp.attach(model, **options)
    finally:
        assert not before or before == bits(model)


def of_rank(*values: Any) -> Any:
    return values[dist.get_rank() % len(values)]


def of_fsdp2(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def of_fsdp1() -> Any:
    return FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))


def meta_model(mesh: DeviceMesh) -> Any:
    with torch.device("meta"):
        model = Model()
    return fully_shard(model, mesh=mesh["shard"])


def model_of_two_meshes(mesh: DeviceMesh) -> Any:
    model = Model()
    fully_shard(model.blocks[0], mesh=mesh["replica"])
    return fully_shard(model, mesh=mesh["shard"])


def linear(mesh: DeviceMesh, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return fully_shard(nn.Linear(64, 64).to(dtype), mesh=mesh["shard"], **options)


class _Custom:
    def allocate(self, *size: Any, **options: Any) -> torch.Tensor:
        return torch.empty(*size, **options)

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError


def model_of_custom_gathers(_: DeviceMesh) -> Any:
    model: Any = built("plain")
    model.set_custom_all_gather(_Custom())
    return model


def model_that_allocates(_: DeviceMesh) -> Any:
    model: Any = built("plain")
    model.blocks[0].set_allocate_memory_from_process_group_for_comm(True)
    return model


def encoded_model(mesh: DeviceMesh) -> Any:
    """Of a tensor that encodes itself for the all-gather."""
    model = linear(mesh)
    of_fsdp2(model).fsdp_params[0]._sharded_local_tensor.fsdp_pre_all_gather = None
    return model


def twice(attach: Callable[..., None], mesh: DeviceMesh, **options: Any) -> None:
    model = built("plain") if attach is gathers else HYBRID.model(mesh)
    attach(mesh, model, **options)
    attach(mesh, model, **options)


def replicated(mesh: DeviceMesh, **options: Any) -> None:
    model = dataclasses.replace(HYBRID, kind="replicate").model(mesh["replica"])
    gradferry.fsdp.attach(model, "q4", **options)


def shifted(mesh: DeviceMesh, *, frozen: bool) -> Any:
    model: Any = HYBRID.model(mesh)
    model.table.requires_grad_(not frozen)
    if dist.get_rank() == 2:
        with torch.no_grad():
            model.table.to_local().add_(1.0)
    return model


def premultiplied_scatter(mesh: DeviceMesh) -> None:
    model: Any = FOUR.model(mesh["shard"])
    gradferry.fsdp.attach(model, "q4", all_gather="off")
    model.set_gradient_divide_factor(3.0)
    FOUR.backward(model, 0)


Row = tuple[Callable[[DeviceMesh], None], str]
# By way and kind of error: what is called, and what the error names. Of replicas, shard 0 is on
# ranks 0 and 2 of the world, shard 1 on 1 and 3.
REFUSED: dict[str, dict[str, list[Row]]] = {
    "replicas": {
        "ConfigError": [
            (lambda m: replicas(m, 3), "a module, not int"),
            (lambda m: replicas(m, Model()), "no parameters under FSDP2"),
            (lambda m: replicas(m, of_fsdp1()), "(FSDP1)"),
            (lambda m: replicated(m, reduce_scatter="q4"), "is replicated, not sharded"),
            (lambda m: replicated(m, all_gather="q8"), "which gathers nothing"),
            (lambda m: replicas(m, codec="auto"), "codec='auto'"),
            (lambda m: replicas(m, codec="q5"), "q5"),
            (lambda m: replicas(m, meta_model(m)), "attach after model.to_empty"),
            (lambda m: replicas(m, model_of_two_meshes(m)), "one mesh for all modules"),
            (lambda m: twice(replicas, m), "attached to this model already"),
        ],
        "RankMismatchError": [
            # Of one shard, which the other one hears, too.
            *(
                (lambda m, f=f: replicas(m, shifted(m, frozen=f)), "in values of 'table'")
                for f in (False, True)
            ),
            (
                lambda m: replicas(m, codec=of_rank("q4", "q4", "q8", "q8")),
                "rank 2 differs from rank 0 in codec",
            ),
            (lambda m: replicas(m, seed=of_rank(0, 0, 0, 1)), "rank 3 differs from rank 2 in seed"),
        ],
    },
    "scatter": {
        "ConfigError": [
            (lambda m: scatter(m, scatter_feedback="owner"), "'worker' and 'none'"),
            (lambda m: scatter(m, error_feedback="worker"), "error_feedback='worker'"),
            (lambda m: scatter(m, momentum=0.9), "momentum=0.9"),
            (lambda m: scatter(m, reduce_scatter="off"), "nothing is left to compress"),
            (lambda m: scatter(m, "sign1"), "scatter_feedback='worker'"),
            (lambda m: scatter(m, rules=[{"codec": "topk"}]), "scatter_feedback="),
            (lambda m: scatter(m, "auto"), "codec='auto'"),
        ],
        "RankMismatchError": [
            (
                lambda m: scatter(m, of_rank("q4", "q8", "q4", "q4")),
                "rank 1 differs from rank 0 in reduce_scatter",
            ),
        ],
        "StateError": [(premultiplied_scatter, "set_force_sum_reduction_for_comms(True)")],
    },
    "gathers": {
        "ConfigError": [
            *(
                (lambda m, c=codec: gathers(m, all_gather=c), f"all_gather='{codec}'")
                for codec in ("rht:bits=4", "topk", "sign1", "q9")
            ),
            (
                lambda m: gathers(m, all_gather_rules=[{"codec": "topk"}]),
                "all_gather_rules[0]['codec']='topk",
            ),
            (lambda m: gathers(m, all_gather_rules=[{"kodec": "q4"}]), "'kodec'"),
            (lambda m: gathers(m, codec="q9", **ONLY_GATHERS), "q9"),
            (lambda m: gathers(m, reduce_scatter=None), "None"),
            (lambda m: gathers(m, keep_gathered=1), "keep_gathered=1"),
            (lambda m: gathers(m, all_gather="off", keep_gathered=True), "keep_gathered=True"),
            (
                lambda m: gathers(m, all_gather="off", all_gather_rules=[{"codec": "q4"}]),
                "give all_gather",
            ),
            (
                lambda m: gathers(m, all_gather=of_rank("q8", "q8", "topk", "q8")),
                "rank 2: all_gather='topk'",
            ),
            (lambda m: gathers(m, model_of_custom_gathers(m)), "not FSDP2's own"),
            (lambda m: gathers(m, model_that_allocates(m)), "not FSDP2's own"),
            (lambda m: gathers(m, linear(m, torch.float64), **ONLY_GATHERS), "torch.float64"),
            (lambda m: gathers(m, encoded_model(m)), "encodes itself for the all-gather"),
            (lambda m: twice(gathers, m, **ONLY_GATHERS), "this model already"),
        ],
        "RankMismatchError": [
            (
                lambda m: gathers(m, all_gather=of_rank("q8", "q4", "q8", "q8")),
                "rank 1 differs from rank 0 in all_gather: 'q4' instead of 'q8'",
            ),
            (
                lambda m: gathers(m, keep_gathered=of_rank(False, False, True, False)),
                "rank 2 differs from rank 0 in keep_gathered",
            ),
            (
                lambda m: gathers(m, all_gather_rules=of_rank(None, None, None, [{"codec": "q4"}])),
                "rank 3 differs from rank 0 in rules",
            ),
        ],
    },
}
if hasattr(MixedPrecisionPolicy(), "param_dtype_override_fn"):
    of_two_dtypes = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        param_dtype_override_fn=lambda p: p.dtype if p.ndim == 1 else None,
    )
    REFUSED["gathers"]["ConfigError"].append(
        (lambda m: gathers(m, linear(m, mp_policy=of_two_dtypes)), "'bias' in torch.float32")
    )


@pytest.mark.torch_core
@pytest.mark.parametrize("way", REFUSED)
@on_ranks(4)
def test_what_cannot_be_hooked_is_refused_with_a_reason(way: str) -> None:
    mesh = (HYBRID if way == "replicas" else FOUR).mesh()
    for kind, rows in REFUSED[way].items():
        for call, text in rows:
            outcome = attempt(lambda: call(mesh))  # noqa: B023
            assert outcome.error == kind, (text, outcome)
            assert text in outcome.text, outcome


@pytest.mark.torch_core
@on_ranks(1)
def test_a_rank_alone_gathers_nothing() -> None:
    sharding = Sharding(1, 1)
    models = [sharding.model(sharding.mesh()["shard"]) for _ in range(2)]
    refused = attempt(lambda: gradferry.fsdp.attach(models[0], "q4", all_gather="q8"))
    assert refused.error == "ConfigError"
    assert "one rank, which gathers nothing" in refused.text
    gradferry.fsdp.attach(models[1], "q4")
    sharding.backward(models[1], 0)


# --- what is said ---------------------------------------------------------------------------------


@on_ranks(4)
def test_parameters_outside_are_named() -> None:
    mesh = HYBRID.mesh()
    torch.manual_seed(0)
    model = Model()
    fully_shard(model.blocks[0], mesh=mesh)
    with texts(__file__) as said:
        gradferry.fsdp.attach(model, "q4")
    count = sum(len(shapes) for shapes in SHAPES.values()) - len(SHAPES["blocks.0"])
    (text,) = said
    assert f"'table' and {count - 1} more" in text


@on_ranks(2)
def test_a_warning_that_is_an_error_on_one_rank_is_logged() -> None:
    """On rank 0 warnings are errors: of a parameter without a gradient."""
    sharding, rank = Sharding(2, 1, without=(("blocks.0", "bias"),)), dist.get_rank()
    model, state = attached(sharding)
    with warnings.catch_warnings(), logged() as said:
        warnings.simplefilter("ignore" if rank else "error", gradferry.GradferryWarning)
        for step in range(2):
            sharding.backward(model, step)
    assert state.stats()["fallbacks"] == 2
    assert any("sent uncompressed" in text for text in said) == (rank == 0)


# --- in training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [HYBRID, FOUR], ids=["replicas", "scatter"])
@on_ranks(4)
def test_all_ranks_of_an_exchange_raise_the_error_of_one(sharding: Sharding) -> None:
    model, state = attached(sharding, nonfinite="raise")
    sharding.backward(model, 0)
    targets = sharding.targets(1, 0, dist.get_rank())
    if dist.get_rank() == 2:
        targets["blocks.0"]["weight"][[0, -1], 0] = float("nan")  # of two shards
    outcome = attempt(lambda: model(targets).backward())
    assert outcome.error == "StateError"
    assert "blocks.0.weight" in outcome.text
    headlines = of_all(outcome.headline)
    same = {dist.get_rank() % 2, dist.get_rank() % 2 + 2} if sharding is HYBRID else set(range(4))
    assert {headlines[rank] for rank in same} == {outcome.headline}
    assert attempt(state.state_dict).error == "StateError"


def case_killed(folder: str) -> None:
    model, _ = attached(HYBRID)
    HYBRID.backward(model, 0)
    rank = dist.get_rank()
    loss = model(HYBRID.targets(1, 0, rank))
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    outcome = attempt(loss.backward)
    Path(folder, str(rank)).write_text(f"{outcome.error}: {outcome.headline}")
    if rank == 2:
        os._exit(1)  # as its program would: FSDP2's own reduce-scatter lost rank 3


def test_a_killed_rank_ends_its_shards_and_all_replicas(worlds: Worlds, tmp_path: Path) -> None:
    with pytest.raises(WorldError):
        worlds(4).run(case_killed, folder=str(tmp_path))
    seen = [(tmp_path / str(rank)).read_text() for rank in range(3)]
    for rank in (0, 1):
        assert re.match(rf"PeerError: .*lost contact with rank {rank + 2}\b", seen[rank]), seen
    assert not seen[2].startswith("None"), seen


class Two(Chosen):
    """A sharded module in another one: a backward pass gathers once."""

    def __init__(self) -> None:
        super().__init__({"table": (97, 130)}, torch.float32)
        self.inner = Chosen({"weight": (61, 140)}, torch.float32)

    def forward(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(targets) + self.inner(targets)


def case_damaged(where: str, lane: str, shards: int = 4, **options: Any) -> dict[str, Any]:
    """One bit flips on the way from rank 1 to one other rank."""
    mesh = Sharding(4 // shards, shards).mesh()
    torch.manual_seed(5)
    model: Any = Two()
    for module in (model.inner, model):
        fully_shard(module, mesh=mesh if shards < 4 else mesh["shard"])
    relays = Relays()
    with relays.between() if dist.get_rank() == 1 else contextlib.nullcontext():
        state = gradferry.fsdp.attach(model, "q4", **options)
    targets = {"table": torch.ones(97, 130), "weight": torch.ones(61, 140)}

    def damage(*_: object) -> None:
        if dist.get_rank() == 1:
            relays.damage(lane)

    model(targets).backward()
    if where == "evaluation":  # of the inner module, which is gathered last
        handle = model.register_forward_pre_hook(damage)
        with torch.no_grad():
            outcome = attempt(lambda: model(targets))
        handle.remove()
    elif where == "forward":
        damage()
        outcome = attempt(lambda: model(targets).backward())
    else:
        model.set_requires_gradient_sync(where == "backward")
        loss = model(targets)
        damage()
        outcome = attempt(loss.backward)
    return {
        "outcome": outcome,
        "again": attempt(lambda: model(targets)),
        "in_flight": state.stats()["in_flight"],
    }


@pytest.mark.parametrize(
    ("where", "lane", "options"),
    [
        ("forward", "gather", {}),
        ("evaluation", "gather", {}),
        ("backward", "gather", {"reduce_scatter": "off"}),
        ("accumulation", "gather", {}),
        ("backward", "scatter", {}),
    ],
)
def test_a_flipped_bit_is_one_error_on_all_ranks(
    worlds: Worlds, where: str, lane: str, options: dict[str, Any]
) -> None:
    answers = worlds(4).run(case_damaged, where=where, lane=lane, **options)
    assert len({answer["outcome"].headline for answer in answers}) == 1
    for answer in answers:
        outcome = answer["outcome"]
        assert outcome.error == "ProtocolError"
        assert " a message from rank 1 (" in outcome.text
        assert f", {lane}): checksum" in outcome.text
        assert answer["again"].headline == outcome.headline
        assert answer["in_flight"] == 0


def test_replicas_hear_of_a_gather_that_failed(worlds: Worlds) -> None:
    # Groups of a mesh wait for thirty minutes, and a case has two.
    answers = worlds(4).run(
        case_damaged, where="backward", lane="gather", shards=2, all_gather="q8"
    )
    for rank, answer in enumerate(answers):
        outcome = answer["outcome"]
        assert outcome.error == "ProtocolError" if rank < 2 else "PeerError"
        assert re.search(r"rank 0 \w+ a message from rank 1 ", outcome.text)
        assert answer["again"].error is not None


@pytest.mark.torch_core
@on_ranks(4)
def test_exact_gathers_are_for_whole_passes() -> None:
    model: Any = built("plain")
    state = gradferry.fsdp.attach(model, **ONLY_GATHERS)
    found: list[Outcome] = []

    def enter(*_: object) -> None:
        found.append(attempt(state.exact_gathers().__enter__))

    model.blocks[0].register_forward_pre_hook(enter)
    model(targets_of(model, torch.float32)).backward()
    assert found[0].error == "StateError"
    assert "in the middle of a pass" in found[0].text


@on_ranks(2)
def test_a_rank_that_does_not_enter_is_named_and_its_passes_end() -> None:
    sharding = Sharding(1, 2)
    model: Any = built("plain", sharding=sharding)
    state = gradferry.fsdp.attach(model, **ONLY_GATHERS)
    sharding.backward(model, 0)

    def go_on() -> None:
        with state.exact_gathers() if dist.get_rank() == 1 else contextlib.nullcontext():
            sharding.backward(model, 1)

    with mock.patch.object(hooks, "timeout_of", return_value=timedelta(seconds=2)):
        outcome = attempt(go_on)
    assert outcome.error == "PeerError"
    assert "rank 0 did not enter exact_gathers()" in outcome.text


@on_ranks(2)
def test_comparison_due_in_a_step_of_nothing_but_passes_comes_with_the_next() -> None:
    whole = Sharding(shards=1)
    without = tuple((module, next(iter(shapes))) for module, shapes in SHAPES.items())
    partial = dataclasses.replace(whole, without=without)
    model, _ = attached(whole, check_every=2)
    errors = []
    for step in range(4):
        if step == 2 and dist.get_rank() == 0:
            with torch.no_grad():
                model.table.to_local().add_(1)
        sharding = partial if step == 2 else whole
        errors.append(attempt(lambda: sharding.backward(model, step)).error)  # noqa: B023
    assert errors == [None, None, None, "DivergedError"]


# --- what changes after attach --------------------------------------------------------------------


def gathering() -> Any:
    model = built("plain")
    gradferry.fsdp.attach(model)
    return model


def scattering() -> Any:
    return attached(FOUR, "exact", all_gather="exact")[0]


def averaging() -> Any:
    return attached(HYBRID)[0]


def in_parts() -> Any:
    """Of which the root is not sharded."""
    model: Any = Model()
    for module in model.blocks:
        fully_shard(module, mesh=HYBRID.mesh())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with texts(__file__):
        gradferry.fsdp.attach(model, "q4")
    return model


def with_another_dtype(model: Any) -> None:
    for parameter in of_fsdp2(model.blocks[0]).fsdp_params:
        parameter.param_dtype = torch.bfloat16


def with_another_group(model: Any) -> None:
    of_fsdp2(model.blocks[0]).mesh_info.shard_process_group = dist.new_group()


def with_other_replicas(model: Any) -> None:
    of_fsdp2(model).mesh_info.replicate_process_group = dist.group.WORLD


def assigned(model: Any) -> None:
    other = HYBRID.model(HYBRID.mesh())
    model.load_state_dict(other.state_dict(), assign=True)


def frozen(model: Any) -> None:
    model.blocks[0].weight.requires_grad_(False)


ALL = (0, 1, 2, 3)
# A model and passes that it has taken, what changes, the ranks on which it does, and what is said
# of it.
CHANGES: list[tuple[Callable[[], Any], int, Callable[[Any], Any], tuple[int, ...], str]] = [
    (averaging, 0, frozen, ALL, "requires_grad of 'weight' has changed in 'blocks.0'"),
    (averaging, 0, frozen, (2, 3), "requires_grad of 'weight' has changed in 'blocks.0'"),
    (averaging, 0, assigned, ALL, "was replaced, as load_state_dict(assign=True) does"),
    (averaging, 1, with_other_replicas, (2, 3), "'the model' was given another group of replicas"),
    (gathering, 0, lambda m: m.blocks[1].set_custom_all_gather(_Custom()), ALL,
     "'blocks.1' was given another all-gather"),
    (gathering, 1, with_another_dtype, (3,), "the parameters of 'blocks.0' are gathered in torch"),
    (gathering, 0, with_another_group, ALL, "'blocks.0' is gathered in process group"),
    (scattering, 1, lambda m: m.blocks[1].bfloat16(), (1,),
     "the parameters of 'blocks.1' are gathered in torch.bfloat16"),
    (in_parts, 0, lambda m: fully_shard(m, mesh=HYBRID.mesh()), ALL,
     "fully_shard was called on 'the model' after attach"),
]  # fmt: skip
HAS_GROUPS = hasattr(FSDPModule, "set_separate_reduce_scatter_group")
if HAS_GROUPS:  # else torch reduces in the group of the shards alone
    CHANGES.append((scattering, 1, lambda m: m.set_separate_reduce_scatter_group(), ALL,
                    "'the model' is reduced in process group"))  # fmt: skip


@pytest.mark.torch_core
@on_ranks(4)
def test_what_changes_after_attach_is_one_error_on_all_ranks() -> None:
    rank = dist.get_rank()
    targets = HYBRID.targets(0, 0, rank)
    for make, passes, change, ranks, text in CHANGES:
        model = make()
        for _ in range(passes):
            model(targets).backward()
        if rank in ranks:
            change(model)
        outcomes = [attempt(lambda: model(targets).backward()) for _ in range(2)]  # noqa: B023
        assert outcomes[0].error == ("StateError" if rank in ranks else "PeerError"), outcomes
        said = [text] if rank in ranks else [f"rank {each}: {text}" for each in ranks]
        for outcome in outcomes:
            assert any(each in outcome.text for each in said), outcome


@pytest.mark.skipif(not HAS_GROUPS, reason="this torch reduces in the group of the shards alone")
@on_ranks(2)
def test_the_group_is_that_at_attach() -> None:
    sharding = Sharding(1, 2)
    model: Any = sharding.model(sharding.mesh()["shard"])
    model.set_separate_reduce_scatter_group()
    gradferry.fsdp.attach(model, "q4", all_gather="off")
    sharding.backward(model, 0)


# --- the watch over a sharded model ---------------------------------------------------------------


def train_sharded(sharding: Sharding, model: nn.Module, steps: int) -> None:
    optimizer = SGD(model.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        sharding.backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("every", [0, 1])
@on_ranks(2)
def test_check_names_a_parameter_beside_the_shards(every: int) -> None:
    """The watch ends with the model. Local steps, which keep gradients to themselves, are none."""
    count = len(step_numbers._calls)

    def train() -> tuple[Outcome, weakref.ref[nn.Module]]:
        sharding = Sharding(replicas=2, shards=1)
        model, _ = attached(sharding, check_every=every)
        with texts(__file__) as said:
            train_sharded(sharding, model, 4)
            model.set_requires_gradient_sync(False)
            train_sharded(sharding, model, 4)
            model.set_requires_gradient_sync(True)
        assert said == []
        model.added = nn.Linear(3, 3)
        assert len(step_numbers._calls) > count
        return attempt(lambda: train_sharded(sharding, model, 2)), weakref.ref(model)

    outcome, alive = train()
    gc.collect()
    assert outcome.error == ("StateError" if every else None)
    assert not every or "'added.weight' was added" in outcome.text
    assert every or (alive() is None and len(step_numbers._calls) == count)


@on_ranks(2)
def test_a_parameter_that_was_warned_about_at_attach_ends_no_training() -> None:
    sharding = Sharding(replicas=2, shards=1)
    model: Any = sharding.native()
    model.added = nn.Linear(3, 3)
    with texts(__file__) as said:
        gradferry.fsdp.attach(model, "q4", check_every=1)
    train_sharded(sharding, model, 2)
    assert sum("'added.weight' and 1 more" in text for text in said) == 1
