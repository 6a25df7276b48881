"""What a model's parameters may be: their names, order in memory and codecs, and which of them a
pass uses; also those that change after DDP took them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import random
import warnings
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.averaging.saved_state import signed
from gradferry.core.codec_spec import parse_codec
from gradferry.core.config import make_config
from gradferry.core.names import plain_name
from gradferry.core.parameters import describe_parameters
from gradferry.errors import GradferryWarning
from on_ranks import on_ranks
from outcomes import attempt
from reference import Parameter
from reference.layout import resolve_codecs
from scenario import ChosenGradients, Lookup, Run, Scenario, Weight, assert_bit_equal, hooked, train
from sharding import Sharding
from stepping import slot, warned
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training_alone import make
from world import World

# --- names ----------------------------------------------------------------------------------------


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


@on_ranks()
def test_states_and_rules_know_parameters_by_their_plain_names() -> None:
    """A state of every wrapper is loaded by a hook of the plain model."""
    rules = [{"name": "_orig_mod.1.weight", "codec": "q8"}]
    rank, codecs = dist.get_rank(), ("q4", "exact", "q8", "exact")
    layouts = set()
    for wrap in WRAPPERS.values():
        plain = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        ddp = DistributedDataParallel(wrap(plain))
        state = gradferry.attach(ddp, "q4", rules=rules)
        names = ("0.weight", "0.bias", "1.weight", "1.bias")
        assert [(p.name, str(p.codec)) for p in state.parameters] == list(
            zip(names, codecs, strict=True)
        )
        ddp(torch.full((8, 64), 0.1)).square().mean().backward()
        saved = state.state_dict()
        layouts.add(saved["layout"])
        assert saved[f"slot_{rank}"]["worker"].any()
        other = gradferry.HookState("q4", DistributedDataParallel(plain), rules=rules)
        renamed = saved["layout"].replace('"0.weight"', '"other"')
        other.load_state_dict(signed({**saved, "layout": renamed}), on_resize="drop")
        assert not other.state_dict()[f"slot_{rank}"]["worker"].any()
        other.load_state_dict(saved)
        kept = other.state_dict()
        assert kept["steps"] == 1
        assert torch.equal(kept[f"slot_{rank}"]["worker"], saved[f"slot_{rank}"]["worker"])
    assert len(layouts) == 1


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

    fabric = FabricModule(ddp(), model)
    for state in (
        gradferry.attach(compiled(ddp()), "q4"),
        gradferry.attach(FabricModule(compiled(ddp()), model), "q4"),
        gradferry.HookState("q4", compiled(ddp())),
        bind(FabricModule(ddp(), model)),
        gradferry.attach(fabric, "q4"),
    ):
        assert [p.name for p in state.parameters] == ["weight", "bias"]
    fabric(torch.ones(2, 64)).sum().backward()
    assert state.stats()["steps"] == 1
    refused = attempt(lambda: gradferry.attach(compiled(model), "q4"))
    assert refused.error == "ConfigError"
    assert "must be a DistributedDataParallel, not Linear" in refused.text


@pytest.mark.torch_core
@on_ranks()
def test_shards_have_plain_names_as_well() -> None:
    found = []
    for wrap in (lambda model: model, compiled):
        sharding = Sharding(2, 1)
        mesh = sharding.mesh()
        model = wrap(sharding.model(mesh))
        state = gradferry.fsdp.attach(model, "q4")
        layout = state.state_dict()["shard_0_of_1"]["layout"]
        found.append(([p.name for p in state.parameters], layout))
    assert found[0] == found[1]


# --- order in memory ------------------------------------------------------------------------------

LAYOUTS = {
    "plain": lambda: torch.zeros(48, 40),
    "columns with gaps": lambda: torch.zeros(2000).as_strided((48, 40), (1, 50)),
    "expanded and cloned": lambda: torch.zeros(1, 40).expand(48, 40).clone(),
    "transposed": lambda: torch.zeros(40, 48).t(),
    "strided": lambda: torch.zeros(48, 80)[:, ::2],
    "strided and transposed": lambda: torch.zeros(40, 96)[:, ::2].t(),
    "channels last": lambda: torch.zeros(16, 8, 3, 5).to(memory_format=torch.channels_last),
    "3d": lambda: torch.zeros(8, 4, 3, 5, 4).to(memory_format=torch.channels_last_3d),
    "complex": lambda: torch.zeros(40, 48, dtype=torch.complex64).t(),
}


class OneParameter(nn.Module):
    def __init__(self, values: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, target: torch.Tensor) -> torch.Tensor:
        """The gradient of the parameter is `target`."""
        product = self.weight * target.conj()
        return product.real.sum() if product.is_complex() else product.sum()


def counting(like: torch.Tensor) -> torch.Tensor:
    """0, 1, 2, ... in row-major order: every element has its own number."""
    return torch.arange(like.numel()).view(like.shape).to(like.dtype)


@pytest.mark.torch_core
@on_ranks()
def test_momentum_is_handed_over_in_the_order_of_buckets() -> None:
    for name, layout in LAYOUTS.items():
        model = OneParameter(layout())
        target = counting(model.weight)
        ddp = DistributedDataParallel(model)
        state = gradferry.attach(ddp, "exact", momentum=0.5, warmup_steps=1)
        optimizer = gradferry.optim.OneBitAdam(
            ddp.parameters(), lr=0.0, betas=(0.5, 0.999), freeze_step=1, state=state
        )
        for scale in (1, 0):
            optimizer.zero_grad()
            ddp(target * scale).backward()
            optimizer.step()
        # Half of a gradient is its momentum, and half of that is left by the next step: exact.
        assert torch.equal(model.weight.grad, target / 4), name


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("when", "options", "error"),
    [
        ("before DDP", {}, None),
        ("before DDP", {"gradient_as_bucket_view": True}, None),
        ("before attach", {}, "ConfigError"),
        ("before attach", {"gradient_as_bucket_view": True}, "ConfigError"),
        ("before attach", {"find_unused_parameters": True}, "ConfigError"),
        ("before step 0", {}, "StateError"),
        ("before step 1", {}, "StateError"),  # between the buckets' first making and their second
        ("before step 2", {"static_graph": True}, "StateError"),
    ],
)
@on_ranks()
def test_a_memory_format_that_changes_under_ddp_is_refused(
    when: str, options: dict[str, Any], error: str | None
) -> None:
    """By the next step, or by attach."""
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 8, 3))
    inputs = torch.ones(1, 8, 4, 4)
    convert = functools.partial(model.to, memory_format=torch.channels_last)
    if when == "before DDP":
        convert()
    ddp = DistributedDataParallel(model, **options)
    if when == "before attach":
        convert()
    outcome = attempt(lambda: hooked(ddp))
    for step in range(0 if outcome.error else 3):
        if when == f"before step {step}":
            convert()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of DDP: gradients in another order than its buckets
            outcome = attempt(lambda: ddp(inputs).sum().backward())
        if outcome.error:
            break
    assert outcome.error == error, outcome
    if error:
        # The other convolution's weight has 1 x 1 elements: its order stays as it was.
        assert "the memory format of parameter '1.weight' has changed since" in outcome.text


def test_hundreds_of_parameters(world_of_2: World) -> None:
    # Every fiftieth is large enough to be compressed.
    shapes = ((33, 32) if i % 50 == 0 else (1 + i % 7,) for i in range(700))
    weights = tuple(Weight(f"w{i}", shape) for i, shape in enumerate(shapes))
    scenario = Scenario(weights, error_feedback="both", steps=1)
    assert_bit_equal(world_of_2.run(train, scenario=scenario), scenario)


# --- codecs: the smallest matrices travel with q4 under a codec below 3 bits per element ----------

TOPK = "topk:ratio=0.05"
# "first" and "last" have 2,400 of 100,070 elements. With "middle" it would be 6,400.
WEIGHTS = (
    Weight("first", (12, 100)),
    Weight("bias", (70,)),
    Weight("large", (468, 200)),
    Weight("middle", (80, 50)),
    Weight("last", (30, 40)),
)


CODECS = [*(str(row["name"]) for row in _native.codecs()), "rht:bits=2", "rht:bits=3"]
# Some of these are 3 % of others exactly.
SIZES = (60, 1_023, 1_024, 1_500, 2_999, 3_000, 97_000, 194_000)


@pytest.mark.parametrize("codec", CODECS)
def test_codecs_are_those_of_the_reference(codec: str) -> None:
    """Of drawn models, also with rules, and with what is sent as it is."""
    draw = random.Random(5)
    found = set()
    for _ in range(1000):
        parameters = [
            Parameter(
                name,
                draw.choice(SIZES),
                draw.choice(("float32",) * 5 + ("float64",)),
                draw.choice((1, 2, 2, 2, 2)),
            )
            for name in "abcdef"[: draw.randrange(7)]
        ]
        ruled = draw.choice(("a", "[ab]", "*")), draw.choice(("sign1", "q8", "exact"))
        rules = [ruled] * draw.randrange(2)
        options = {"rules": [{"name": name, "codec": each} for name, each in rules]}
        named = [
            (
                p.name,
                torch.zeros(1, dtype=getattr(torch, p.dtype)).expand(
                    *[1] * (p.ndim - 1), p.num_elements
                ),
            )
            for p in parameters
        ]
        chosen = describe_parameters(named, make_config(codec, options), exchanges=True)
        wanted, _ = resolve_codecs(parameters, codec, rules)
        assert [each.codec for each in chosen] == [*map(parse_codec, wanted)], parameters
        for each in chosen:
            assert each.is_small == (str(each.codec) == "q4" != codec)
            found.add(each.is_small)
    assert (True in found) == (codec in ("sign1", "topk", "rht:bits=2"))


class Sharded(nn.Module):
    """Of the two smallest, "rows" has more elements on a rank, with padding, and fewer in all."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Parameter(torch.zeros(500, 200))
        self.wide = nn.Parameter(torch.zeros(10, 290))
        self.rows = nn.Parameter(torch.zeros(1, 2_000))
        self.tiny = nn.Parameter(torch.zeros(20, 100))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((p * x).sum() for p in self.parameters())


def codecs_of(state: Any) -> dict[str, str]:
    return {p.name: str(p.codec) for p in state.parameters}


@on_ranks()
def test_every_way_in_has_small_matrices() -> None:
    named = {w.name: torch.zeros(w.shape) for w in WEIGHTS}
    hook = Run(Scenario(WEIGHTS, codec="sign1")).state
    _, diloco = make(ChosenGradients(Scenario(WEIGHTS)), "sign1")
    for state, text in (
        (hook, str(hook)),
        (reducer := gradferry.Reducer(named, "sign1"), str(reducer)),
        (diloco._reducer, str(diloco)),
    ):
        small = {name: codec for name, codec in codecs_of(state).items() if codec == "q4"}
        assert small == {"first": "q4", "last": "q4"}
        assert (
            "q4 instead of sign1, as the smallest matrices (at most 3 % of all elements): "
            "first, last"
        ) in text
    assert "  q4: 2 parameters, 2,400 elements (2.4%), 4.28 bits/element" in str(hook)


@on_ranks(4)
def test_whole_parameters_decide_under_fsdp2() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model = Sharded()
    fully_shard(model, mesh=mesh)
    state = gradferry.fsdp.attach(
        model,
        "sign1",
        reduce_scatter=TOPK,
        scatter_feedback="worker",
        all_gather="q8",
    )
    topk = str(parse_codec(TOPK))
    for each, coarse, gathered in zip(state._attached, ("sign1", topk, "q8"), "001", strict=True):
        small = "q8" if gathered == "1" else "q4"
        expected = {"large": coarse, "wide": coarse, "rows": small, "tiny": "exact"}
        assert codecs_of(each.running) == expected
    lines = [line for line in str(state).splitlines() if "smallest matrices" in line]
    assert [line.split(": ")[-1] for line in lines] == ["rows", "rows"]
    # q4 has the largest number of a block exactly if it is 6 times a number of E4M3.
    model(torch.tensor(6.0 + 12.0 * (dist.get_rank() // 2))).backward()
    rows = model.rows.grad.to_local()
    assert torch.equal(rows, torch.full_like(rows, 12.0))


# --- which parameters a pass uses, and which there are --------------------------------------------


class Ignoring(ChosenGradients):
    """DDP leaves its last parameter to itself."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        # DDP knows a parameter of the outermost module by both names.
        name = scenario.weights[-1].name
        self._ddp_params_and_buffers_to_ignore = [name, f".{name}"]


def case_ignored(scenario: Scenario) -> dict[str, Any]:
    with mock.patch("scenario.ChosenGradients", Ignoring), warnings.catch_warnings():
        warnings.simplefilter("error", GradferryWarning)
        run = Run(scenario)
    gradients = [run.step(step) for step in range(scenario.steps)]
    run.state.load_state_dict(run.state.state_dict())
    # Ranks do not share the ignored parameter, so that hashes of all differ.
    return {"gradients": gradients, "hashes": [], "final_hash": ""}


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_ignored_parameter_keeps_its_own_gradient(world_of_2: World, native: bool) -> None:
    weights = (Weight("matrix", (40, 30)), Weight("bias", (50,)), Weight("ignored", (60, 50)))
    # Ranks compare their parameters after every second step.
    scenario = Scenario(weights, native=native, options={"check_every": 2})
    answers = world_of_2.run(case_ignored, scenario=scenario)
    for rank, answer in enumerate(answers):
        for step, gradients in enumerate(answer["gradients"]):
            assert gradients.pop().tobytes() == scenario.gradient(step, 0, rank, 2).tobytes()
    assert_bit_equal(answers, dataclasses.replace(scenario, weights=weights[:-1]))


@on_ranks()
def test_an_infinity_in_what_no_rank_used_is_no_reason_to_raise() -> None:
    """Nor to touch what is withheld."""
    scenario = Scenario(
        (Weight("first", (90, 70)), Weight("bias", (50,))),
        codec=TOPK,
        error_feedback="both",
        options={"nonfinite": "raise"},
        ddp={"find_unused_parameters": True},
    )
    run = Run(scenario)
    run.step(0)
    held = slot(run.state)["worker"]
    assert held[:6300].abs().max() > 0.1
    run.model.first.grad[7, 7] = math.inf
    run.ddp(scenario.targets(1, run.rank, 0, ("first",))).backward()
    assert run.model.first.grad[7, 7] == math.inf
    assert torch.equal(slot(run.state)["worker"], held)


# Looked up on two ranks.
ROWS = {"all": ([1, 2, 2], [1, 2, 3]), "one rank": ([1, 2, 2], []), "none": ([], [])}


@pytest.mark.torch_core
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_sparse_gradients_pass_through_averaged(native: bool, rows: str) -> None:
    ddp = DistributedDataParallel(Lookup())
    state = hooked(ddp, native=native)
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.tensor(ROWS[rows][dist.get_rank()], dtype=torch.int64)).sum().backward()
    expected = torch.zeros(50, 40)
    for row in itertools.chain(*ROWS[rows]):
        expected[row] += 0.5  # halves are exact
    gradient = ddp.module.table.weight.grad
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense(), expected)
    assert state.stats()["buckets"] > 0  # the dense ones were compressed


class Branches(nn.Module):
    """Layers, of which a pass uses some; each is a bucket of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(40, 40) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int], nested: bool = False) -> torch.Tensor:
        for number in used:
            layer = self.layers[number]
            x = checkpoint(layer, x, use_reentrant=True) if nested else layer(x)
        return x


SKIPS = "skip_all_reduce_unused_params"
needs_skips = pytest.mark.skipif(
    SKIPS not in inspect.signature(DistributedDataParallel).parameters,
    reason="this torch hands over every bucket",
)


def branches(**options: bool) -> DistributedDataParallel:
    options = {"find_unused_parameters": True, **options}
    return DistributedDataParallel(Branches(), bucket_cap_mb=0.001, **options)


def train_branches(native: bool, *, skips: bool, reload: bool) -> list[tuple[Any, ...]]:
    """Steps, residuals and parameters after each of some steps, which use other layers."""
    ddp = branches(**{SKIPS: True} if skips else {})
    model = ddp.module
    state = hooked(ddp, native=native, error_feedback="both", check_every=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rng = np.random.default_rng(7)
    seen = []
    for number in range(12):
        used = [layer for layer in range(4) if rng.random() < 0.4] or [number % 4]
        generator = torch.Generator().manual_seed(2 * number + dist.get_rank())
        optimizer.zero_grad()
        ddp(torch.randn(4, 40, generator=generator), used).square().mean().backward()
        optimizer.step()
        saved = state.state_dict()
        tensors = [*slot(state).values(), *model.parameters()]
        seen.append((saved["steps"], [each.detach().numpy().tobytes() for each in tensors]))
        if reload:
            state.load_state_dict(saved)
    return seen


@needs_skips
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_a_step_without_all_buckets_ends_with_its_pass(native: bool) -> None:
    """What DDP leaves out would be zeros, which nobody applies: all is as if they were sent."""
    every = train_branches(native, skips=False, reload=False)
    for reload in (False, True):
        assert train_branches(native, skips=True, reload=reload) == every


@needs_skips
@on_ranks()
def test_passes_within_a_pass_end_no_step() -> None:
    """Reentrant checkpoints run a backward pass of their own for each layer."""
    ddp = branches(find_unused_parameters=False, static_graph=True, **{SKIPS: True})
    state = hooked(ddp)
    for step in range(5):
        ddp(torch.ones(2, 40, requires_grad=True), [0, 1, 3], nested=True).sum().backward()
        assert state.stats()["total_steps"] == step + 1


@needs_skips
@on_ranks()
def test_a_pass_that_was_abandoned_leaves_its_step_open() -> None:
    ddp = branches(**{SKIPS: True})
    state = hooked(ddp)
    for _ in range(2):
        ddp(torch.ones(2, 40), [0, 1, 2, 3]).sum().backward()

    def interrupt(_: object) -> None:
        raise ValueError("enough")

    ddp.module.layers[0].weight.register_hook(interrupt)
    with pytest.raises(ValueError, match="enough"):
        ddp(torch.ones(2, 40), [0, 1, 2, 3]).sum().backward()
    with pytest.raises(gradferry.StateError, match="in the middle of step 2"):
        state.state_dict()


@on_ranks()
def test_unfrozen_layer_is_warned_about_and_left_to_itself() -> None:
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40))
    nn.init.constant_(model[1].weight, 0.5)
    model[0].requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].requires_grad_(True)
    with warned() as caught:
        state = hooked(ddp)
    for _ in range(2):
        ddp.zero_grad()
        ddp(torch.full((2, 40), 1.0 + dist.get_rank())).sum().backward()
    state.load_state_dict(state.state_dict())
    (text,) = [str(w.message) for w in caught if "does not reduce" in str(w.message)]
    assert "the gradients of '0.weight' and 1 more" in text
    assert state.stats()["steps"] == 2
    # Two samples of 1 + rank, through 40 weights of 1/2.
    gradients = [p.grad for p in model.parameters()]
    assert torch.equal(gradients[0], torch.full((40, 40), 2 * (1.0 + dist.get_rank()) * 20))
    assert torch.equal(gradients[3], torch.full((40,), 2.0))


@on_ranks()
def test_replaced_parameter_is_refused_on_all_ranks() -> None:
    ddp = DistributedDataParallel(nn.Linear(40, 40))
    if dist.get_rank() == 1:
        ddp.module.weight = nn.Parameter(torch.zeros(40, 40))
    outcome = attempt(lambda: hooked(ddp))
    assert outcome.error == "ConfigError"
    told = "rank 1: DistributedDataParallel reduces a parameter of shape (40, 40)"
    assert told in outcome.text
