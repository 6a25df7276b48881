"""Training with gradients that the test chooses, and what the reference makes of them.

The loss is the sum of `p * target` over all parameters, so that the gradient of a parameter equals
its target to the bit. A Scenario says everything about a run; `train` runs it on a rank,
`expected_gradients` computes in one process what every rank must have in .grad.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from reference import (
    DTYPES,
    Parameter,
    ReferenceEngine,
    narrow,
    two_level_bytes_per_step,
    widen,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel

REAL_TYPES = {torch.complex64: torch.float32, torch.complex128: torch.float64}
# Exact in every dtype, so that the update adds no question of rounding.
LEARNING_RATE = 2.0**-6


@dataclasses.dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False

    @property
    def real_dtype(self) -> str:
        return str(REAL_TYPES.get(self.dtype, self.dtype)).removeprefix("torch.")

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape)) * (2 if self.dtype.is_complex else 1)

    def describe(self) -> Parameter:
        return Parameter(
            self.name,
            self.num_elements,
            self.real_dtype,
            len(self.shape),
            self.dtype.is_complex,
        )

    def from_flat(self, flat: np.ndarray) -> torch.Tensor:
        """A tensor of this shape whose memory holds `flat`."""
        tensor = torch.from_numpy(flat.copy())
        if self.real_dtype == "bfloat16":
            tensor = tensor.view(torch.bfloat16)
        if self.dtype.is_complex:
            tensor = torch.view_as_complex(tensor.view(-1, 2))
        if self.channels_last:
            n, c, h, w = self.shape
            return tensor.view(n, h, w, c).permute(0, 3, 1, 2)
        return tensor.view(self.shape)

    def to_flat(self, tensor: torch.Tensor) -> np.ndarray:
        """The elements of a tensor of this shape in the order of memory."""
        tensor = tensor.detach().cpu()
        if self.channels_last:
            assert tensor.is_contiguous(memory_format=torch.channels_last)
            tensor = tensor.permute(0, 2, 3, 1)
        assert tensor.is_contiguous()
        if self.dtype.is_complex:
            tensor = torch.view_as_real(tensor)
        flat = tensor.reshape(-1)
        if self.real_dtype == "bfloat16":
            flat = flat.view(torch.uint16)
        return flat.numpy().copy()


@dataclasses.dataclass(frozen=True)
class Scenario:
    weights: tuple[Weight, ...]
    world_size: int = 2
    steps: int = 4
    codec: str = "q4"
    error_feedback: str = "auto"
    rules: tuple[tuple[str, str], ...] = ()
    native: bool = True  # attach(), or the standard signature of a hook
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # further ones of attach()
    seed: int = 0
    passes: int = 1  # backward passes per step, all but the last under no_sync()
    ddp: dict[str, Any] = dataclasses.field(default_factory=dict)
    unused: dict[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # by rank
    poison: dict[tuple[int, int, str], float] = dataclasses.field(default_factory=dict)
    group_ranks: tuple[int, ...] | None = None  # DDP over these ranks of the world only
    nodes: tuple[tuple[int, ...], ...] | None = None  # ranks by node; None: each is alone
    # Where the model is: "streamed" and "staged" mean the fake device of tests/engine/streams.
    device: str = "cpu"

    def gradient(self, step: int, turn: int, rank: int, index: int) -> np.ndarray:
        """Flat, in the dtype of the gradient; spans many powers of two and holds zeros."""
        weight = self.weights[index]
        kind = DTYPES[weight.real_dtype]
        if weight.name in self.unused.get(rank, ()):
            return np.zeros(weight.num_elements, kind.storage)
        rng = np.random.default_rng([self.seed, step, turn, rank, index])
        values = rng.standard_normal(weight.num_elements)
        values *= np.exp2(rng.integers(-12, 3, weight.num_elements))
        values[rng.random(weight.num_elements) < 0.02] = 0
        values = values if weight.real_dtype == "float64" else values.astype(np.float32)
        poison = self.poison.get((step, rank, weight.name))
        if poison is not None:
            values[weight.num_elements // 2] = poison
        return narrow(values, weight.real_dtype)

    def accumulated(self, step: int, rank: int, index: int) -> np.ndarray:
        """What a rank hands to the hook: the sum over its backward passes, in its dtype."""
        dtype = self.weights[index].real_dtype
        total = self.gradient(step, 0, rank, index)
        for turn in range(1, self.passes):
            more = self.gradient(step, turn, rank, index)
            total = narrow(widen(total, dtype) + widen(more, dtype), dtype)
        return total

    def targets(
        self, step: int, rank: int, turn: int = 0, left_out: Sequence[str] = ()
    ) -> dict[str, torch.Tensor]:
        """What ChosenGradients takes, so that these gradients come of it."""
        return {
            weight.name: weight.from_flat(self.gradient(step, turn, rank, index))
            for index, weight in enumerate(self.weights)
            if weight.name not in left_out
        }


class ChosenGradients(nn.Module):
    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        for weight in scenario.weights:
            flat = np.zeros(weight.num_elements, DTYPES[weight.real_dtype].storage)
            self.register_parameter(weight.name, nn.Parameter(weight.from_flat(flat)))

    def forward(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=next(self.parameters()).device)
        for name, target in targets.items():
            parameter = self.get_parameter(name)
            total = total + _product(parameter, target)
        return total


class Lookup(nn.Module):
    """A sparse table beside a layer, whose gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 40, sparse=True)
        self.out = nn.Linear(40, 60)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table(index).sum() + self.out(torch.ones(40)).sum()


def _product(parameter: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if parameter.is_complex():
        parameter, target = torch.view_as_real(parameter), torch.view_as_real(target)
    return (parameter * target).sum().to(torch.float64)


def attach(ddp: DistributedDataParallel, scenario: Scenario) -> Any:
    options = {
        "error_feedback": scenario.error_feedback,
        "rules": [{"name": name, "codec": codec} for name, codec in scenario.rules],
        "seed": scenario.seed,
        **scenario.options,
    }
    if scenario.nodes is not None:
        options["nodes"] = 1
    with on_nodes(scenario.nodes):
        return hooked(ddp, scenario.codec, native=scenario.native, **options)


def hooked(
    ddp: DistributedDataParallel, codec: str = "q4", *, native: bool = True, **options: Any
) -> Any:
    """The state of attach(), or of a hook with the standard signature."""
    import gradferry

    if native:
        return gradferry.attach(ddp, codec, **options)
    state = gradferry.HookState(codec, ddp, **options)
    ddp.register_comm_hook(state, gradferry.hook)
    return state


def on_nodes(members: tuple[tuple[int, ...], ...] | None) -> Any:
    """Ranks that attach seem to be on these nodes; in truth they share their machine."""
    from gradferry.averaging import start
    from gradferry.core.nodes import Nodes

    if members is None:
        return contextlib.nullcontext()
    return mock.patch.object(start, "resolve", return_value=Nodes(members))


def group_of(scenario: Scenario) -> Any:
    """DDP's process group; None: the default one. Every rank of the world must call this, in it or
    not, before any of them runs a scenario of some ranks.
    """
    if scenario.device != "cpu":
        import fake_device

        return fake_device.group(scenario.device, scenario.group_ranks)
    return None if scenario.group_ranks is None else dist.new_group(list(scenario.group_ranks))


def placed(device: str) -> tuple[torch.device, dist.ProcessGroup | None]:
    """Where a model is on "cpu" or a kind of the fake device, and the group of its DDP."""
    if device == "cpu":
        return torch.device("cpu"), None
    import fake_device

    return fake_device.DEVICE, fake_device.group(device)


def hash_of(scenario: Scenario, parameters: Sequence[torch.Tensor]) -> str:
    """A hash of the bytes of parameters in their order."""
    digest = hashlib.blake2b(digest_size=8)
    for weight, p in zip(scenario.weights, parameters, strict=True):
        digest.update(weight.to_flat(p).tobytes())
    return digest.hexdigest()


class Run:
    """One DDP model of a scenario on this rank, stepped by hand.

    `group`: by `group_of`, of a scenario of some ranks.
    """

    def __init__(self, scenario: Scenario, group: dist.ProcessGroup | None = None) -> None:
        self.scenario, self.group = scenario, group
        self.model = ChosenGradients(scenario)
        self.device = torch.device("cpu")
        if scenario.device != "cpu":
            import fake_device

            group, self.device = group or group_of(scenario), fake_device.DEVICE
            self.model = self.model.to(self.device)
        self.rank = dist.get_rank(group)
        self.ddp = DistributedDataParallel(self.model, process_group=group, **scenario.ddp)
        self.state = attach(self.ddp, scenario)
        self.hashes: list[str] = []
        self.buckets: list[list[list[str]]] = []  # names of parameters by bucket, of every step

    def saved_and_loaded(self) -> Run:
        """A new model with this one's parameters and state, which went through a file."""
        file = io.BytesIO()
        model = {name: p.cpu() for name, p in self.model.state_dict().items()}
        torch.save({"model": model, "hook": self.state.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        after = Run(self.scenario, self.group)
        after.model.load_state_dict(saved["model"])
        after.state.load_state_dict(saved["hook"])
        return after

    def step(self, step: int) -> list[np.ndarray | None]:
        """One optimizer step; returns .grad of every parameter, flat."""
        scenario = self.scenario
        self.ddp.zero_grad(set_to_none=not scenario.ddp.get("gradient_as_bucket_view", False))
        for turn in range(scenario.passes):
            last = turn == scenario.passes - 1
            with contextlib.nullcontext() if last else self.ddp.no_sync():
                loss = self.ddp(self.targets(step, turn))
                if last:
                    self.buckets.append(self.bucket_names())
                loss.backward()
        gradients = [
            None if p.grad is None else w.to_flat(p.grad)
            for w, p in zip(scenario.weights, self.model.parameters(), strict=True)
        ]
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None and not scenario.poison:
                    p -= LEARNING_RATE * p.grad
        self.hashes.append(self.parameter_hash())
        return gradients

    def targets(self, step: int, turn: int = 0) -> dict[str, torch.Tensor]:
        unused = self.scenario.unused.get(self.rank, ())
        targets = self.scenario.targets(step, self.rank, turn, unused)
        return {name: target.to(self.device) for name, target in targets.items()}

    def answer(self, gradients: list[list[np.ndarray | None]]) -> dict[str, Any]:
        """What `assert_bit_equal` looks at. `gradients`: of every step."""
        return {
            "gradients": gradients,
            "hashes": self.hashes,
            "final_hash": self.parameter_hash(),
        }

    def parameter_hash(self) -> str:
        return hash_of(self.scenario, list(self.model.parameters()))

    def bucket_names(self) -> list[list[str]]:
        names = {id(p): name for name, p in self.model.named_parameters()}
        buckets = self.ddp.reducer._get_zeros_like_grad_buckets()
        return [[names[id(p)] for p in bucket.parameters()] for bucket in buckets]


def train(scenario: Scenario) -> dict[str, Any] | None:
    """Runs on a rank. None where the rank is not in the scenario's group."""
    return train_at_once(scenario)


def train_at_once(*scenarios: Scenario) -> dict[str, Any] | None:
    """Does what `train` does, for the one scenario, if any, that this rank is in."""
    mine = None
    for scenario in scenarios:
        group = group_of(scenario)
        if scenario.group_ranks is None or dist.get_rank() in scenario.group_ranks:
            mine = scenario, group
    return mine and trained(Run(*mine))


def trained(run: Run) -> dict[str, Any]:
    """All steps of a run that has taken none."""
    scenario = run.scenario
    gradients = [run.step(step) for step in range(scenario.steps)]
    return {
        **run.answer(gradients),
        "buckets": run.buckets,
        "stats": dict(run.state.stats()),
    }


def reference_of(scenario: Scenario) -> ReferenceEngine:
    return ReferenceEngine(
        scenario.world_size,
        [weight.describe() for weight in scenario.weights],
        scenario.codec,
        scenario.error_feedback,
        scenario.rules,
        scenario.seed,
        scenario.options.get("momentum", 0.0),
        scenario.options.get("warmup_steps", 0),
        scenario.options.get("warmup", "exact"),
        scenario.nodes,
    )


def expected_gradients(scenario: Scenario) -> list[list[list[np.ndarray]]]:
    """[step][rank][parameter], flat."""
    engine = reference_of(scenario)
    ranks, count = range(scenario.world_size), len(scenario.weights)
    return [
        engine.step([[scenario.accumulated(s, r, i) for i in range(count)] for r in ranks])
        for s in range(scenario.steps)
    ]


def bytes_sent(
    scenario: Scenario, buckets: Sequence[Sequence[Sequence[str]]], rank: int
) -> tuple[int, int]:
    """Bytes to other nodes, and to the ranks of the own one, in steps with these buckets."""
    layout = reference_of(scenario).layout
    number = {weight.name: index for index, weight in enumerate(scenario.weights)}
    by_step = [
        two_level_bytes_per_step(
            layout.in_warmup() if step < scenario.options.get("warmup_steps", 0) else layout,
            scenario.nodes or layout.nodes,
            [[number[name] for name in bucket] for bucket in of_step],
            rank,
            scenario.ddp.get("find_unused_parameters", False),
        )
        for step, of_step in enumerate(buckets)
    ]
    return sum(wire for wire, _ in by_step), sum(local for _, local in by_step)


def assert_bit_equal(answers: list[dict[str, Any] | None], scenario: Scenario) -> None:
    """Every rank's gradients equal the reference's, and parameters are the same on all ranks."""
    answers = [answer for answer in answers if answer is not None]
    assert len(answers) == scenario.world_size
    expected = expected_gradients(scenario)
    for rank, answer in enumerate(answers):
        assert len(answer["gradients"]) == scenario.steps
        for step, gradients in enumerate(answer["gradients"]):
            for got, want, weight in zip(
                gradients, expected[step][rank], scenario.weights, strict=True
            ):
                where = f"rank {rank}, step {step}, {weight.name}"
                if got is None:  # nobody used it
                    names = (scenario.unused.get(each, ()) for each in range(scenario.world_size))
                    assert all(weight.name in used for used in names), where
                else:
                    assert_same_bits(got, want, weight.real_dtype, where)
    assert_same_parameters(answers)


def assert_same_bits(
    got: np.ndarray | None, want: np.ndarray | None, dtype: str, where: str
) -> None:
    assert (got is None) == (want is None), where
    if got is None or want is None or got.tobytes() == want.tobytes():
        return
    assert got.shape == want.shape, where
    bits = DTYPES[dtype].bits
    wrong = np.flatnonzero(got.view(bits) != want.view(bits))
    first = wrong[0]
    raise AssertionError(
        f"{where}: {len(wrong)} of {len(got)} elements differ, first at {first}: "
        f"got {got[first]!r}, expected {want[first]!r}"
    )


def assert_same_parameters(answers: list[dict[str, Any]]) -> None:
    """Bit-identical on all ranks after every step, and at the end."""
    for step in range(len(answers[0]["hashes"])):
        assert len({answer["hashes"][step] for answer in answers}) == 1, f"step {step}"
    assert len({answer["final_hash"] for answer in answers}) == 1
