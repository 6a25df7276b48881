"""The hook beside what divides a model or its optimizer: ZeroRedundancyOptimizer, parts of
tensors, and stages of a pipeline.
"""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.averaging import start
from gradferry.core.nodes import Identity
from on_ranks import on_ranks
from outcomes import attempt
from stepping import bits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from world import Worlds

# --- ZeroRedundancyOptimizer: the numbers of one optimizer per rank, to the bit -------------------


class Training:
    """Two layers behind DDP and a hook, stepped by AdamW or by shards of it."""

    def __init__(
        self, make: Callable[..., Any], attach: dict[str, Any], scaled: bool = False
    ) -> None:
        torch.manual_seed(3)
        self.make = make
        self.ddp = DistributedDataParallel(
            nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 40)), bucket_cap_mb=0.01
        )
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        if self.scaler.is_enabled():
            attach = {**attach, "grad_scaler": self.scaler}
        self.state = gradferry.attach(self.ddp, **attach)
        matrices = [p for p in self.ddp.parameters() if p.dim() > 1]
        vectors = [p for p in self.ddp.parameters() if p.dim() == 1]
        self.optimizer = make(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], self.state
        )
        self.numbers: list[dict[str, Any]] = []
        self.state.on_step(self.numbers.append)

    def step(self, step: int) -> None:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        x = torch.randn(4, 60, generator=generator)
        if self.scaler.is_enabled() and step == 2 and dist.get_rank() == 1:
            x[0, 0] = float("inf")
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.9  # as a schedule
        self.optimizer.zero_grad()
        self.scaler.scale(self.ddp(x).square().mean()).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def bits(self) -> list[bytes]:
        return bits(self.ddp.parameters())

    def resumed(self, attach: dict[str, Any]) -> Training:
        """A new training that begins with what this one has."""
        self.optimizer.consolidate_state_dict(to=0)
        content = [self.optimizer.state_dict() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(content)
        # On the CPU a consolidated state shares memory with the optimizer until it is copied.
        model, hook, shards, scaler = copy.deepcopy(
            (self.ddp.module.state_dict(), self.state.state_dict(), content[0], self.scaler)
        )
        other = Training(self.make, attach, self.scaler.is_enabled())
        other.ddp.module.load_state_dict(model)
        other.state.load_state_dict(hook)
        other.optimizer.load_state_dict(shards)
        other.scaler.load_state_dict(scaler.state_dict())
        return other


def adamw(groups: Any) -> Any:
    return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)


def sharded(views: bool) -> Callable[..., Any]:
    return functools.partial(
        ZeroRedundancyOptimizer,
        optimizer_class=torch.optim.AdamW,
        parameters_as_bucket_view=views,
        lr=0.01,
        weight_decay=0.1,
    )


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("codec", "views", "scaled"),
    [
        ("q4", False, True),
        ("q4", True, False),
        # In momentum mode. Behind topk, parameters of one group arrive with several momenta.
        ("sign1", False, False),
        ("topk:ratio=0.04", True, False),
    ],
)
@on_ranks()
def test_sharded_adamw_gives_the_parameters_of_adamw_and_resumes(
    codec: str, views: bool, scaled: bool
) -> None:
    by_codec = {"q4": {"check_every": 1}}
    attach = {"codec": codec, **by_codec.get(codec, {"momentum": 0.8})}

    def make_with(optimizer: Callable[..., Any]) -> Callable[..., Any]:
        def make(groups: Any, state: Any) -> Any:
            made = optimizer(groups)
            return gradferry.optim.momentum_mode(made, state) if codec != "q4" else made

        return make

    plain, zero = (Training(make_with(each), attach, scaled) for each in (adamw, sharded(views)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradferry.GradferryWarning)
        for step in range(6):
            if step == 3:
                assert len(zero.numbers) == (2 if scaled else 3)
                zero = zero.resumed(attach)
            plain.step(step)
            zero.step(step)
            assert zero.bits() == plain.bits(), step
    # The infinity of rank 1 was seen everywhere.
    assert not scaled or zero.scaler.get_scale() == 2.0**9
    for ours, theirs in zip(zero.optimizer.param_groups, plain.optimizer.param_groups, strict=True):
        for setting in ("lr", "betas", "weight_decay"):
            assert ours[setting] == theirs[setting]
        assert ours["betas"] == (0.9, 0.999)  # as given
    overlapping = ZeroRedundancyOptimizer(
        zero.ddp.parameters(), optimizer_class=torch.optim.AdamW, overlap_with_ddp=True
    )
    refused = attempt(lambda: gradferry.optim.momentum_mode(overlapping, zero.state))
    assert refused.error == "ConfigError"
    assert attempt(overlapping.step).error == "ConfigError"  # which would do nothing


# --- parts of a model, each trained by a data-parallel group of its own ---------------------------

# Whatever its ranks exchange with those of other parts during the step, averages are those of the
# group alone.

WIDTH = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def inputs(step: int, replica: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1000 * step + replica))


class TensorParallel:
    """Matrices divided by columns and rows: an all-reduce in every forward and backward pass."""

    def __init__(self, mesh: DeviceMesh) -> None:
        model = nn.Sequential(Block(), Block(), Block())
        plan = {}
        for number in range(len(model)):
            plan.update({f"{number}.up": ColwiseParallel(), f"{number}.down": RowwiseParallel()})
        parallelize_module(model, mesh["part"], plan)
        self.ddp = DistributedDataParallel(model, device_mesh=mesh["replica"], bucket_cap_mb=0.01)

    def backward(self, step: int, replica: int) -> None:
        self.ddp(inputs(step, replica)).square().mean().backward()


class Pipeline:
    """Stages: activations travel forward, their gradients back, two microbatches at a time."""

    def __init__(self, mesh: DeviceMesh) -> None:
        group = mesh["part"].get_group()
        self.stage, stages = dist.get_rank(group), dist.get_world_size(group)
        self.is_last = self.stage == stages - 1
        self.ddp = DistributedDataParallel(
            nn.Sequential(*(Block() for _ in range(stages - self.stage))),
            process_group=mesh["replica"].get_group(),
            bucket_cap_mb=0.01,
            find_unused_parameters=True,  # else DDP itself fails with several microbatches
        )
        self.schedule = ScheduleGPipe(
            PipelineStage(self.ddp, self.stage, stages, torch.device("cpu"), group=group),
            n_microbatches=2,
            loss_fn=lambda output, target: (output - target).square().mean(),
            scale_grads=False,
        )

    def backward(self, step: int, replica: int) -> None:
        x = inputs(step, replica)
        given = (x,) if self.stage == 0 else ()
        self.schedule.step(*given, target=torch.ones_like(x) if self.is_last else None)


KINDS = {"tensor": TensorParallel, "pipeline": Pipeline}


def trained_parts(kind: str, hosts: str, attach: dict[str, Any] | None) -> tuple[Any, Any]:
    """The bits of gradients and parameters after each step, with a hook or without; its state."""
    mesh = init_device_mesh("cpu", (len(hosts) // 2, 2), mesh_dim_names=("replica", "part"))
    replica, part = mesh.get_coordinate()
    torch.manual_seed(part if kind == "pipeline" else 0)
    training, state = KINDS[kind](mesh), None
    parameters = list(training.ddp.parameters())
    rank = dist.get_rank()
    with (
        mock.patch.object(start, "identity", return_value=Identity(hosts[rank], 1)),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2)),
    ):
        if attach is not None:
            state = gradferry.attach(training.ddp, **attach)
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        training.backward(step, replica)
        gradients = bits(p.grad for p in parameters)
        optimizer.step()
        seen.append((gradients, bits(parameters)))
    return seen, state


def case_parts(kind: str, hosts: str, options: dict[str, Any]) -> dict[str, Any]:
    plain, _ = trained_parts(kind, hosts, None)
    exact, _ = trained_parts(kind, hosts, {"codec": "exact", **options})
    part = dist.get_rank() % 2
    coarse, state = trained_parts(kind, hosts, {"codec": ("q4", "q8")[part], **options})
    return {
        "same": plain == exact,
        "final": coarse[-1][1],
        "members": state.nodes.members,
        "local_bytes": state.stats()["local_bytes"],
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("hosts", "options", "members"),
    [
        ("AABB", {}, ((0,), (1,))),  # flat
        ("AAAABB", {}, ((0, 1), (2,))),  # two levels
        ("AAAA", {"nodes": 2}, ((0, 1),)),  # one node
    ],
)
def test_every_part_is_averaged_as_if_it_were_alone(
    worlds: Worlds, kind: str, hosts: str, options: dict[str, Any], members: Any
) -> None:
    """`hosts`: of every rank; `members`: ranks of a data-parallel group by node."""
    answers = worlds(len(hosts)).run(case_parts, kind=kind, hosts=hosts, options=options)
    for part in range(2):
        group = answers[part::2]
        assert len({b"".join(answer["final"]) for answer in group}) == 1
        for answer in group:
            # Of three ranks, plain DDP adds in another order.
            assert answer["same"] or len(group) == 3
            assert answer["members"] == members
        local = sum(answer["local_bytes"] for answer in group)
        assert (local > 0) == (len(members) < len(group))
    assert answers[0]["final"] != answers[1]["final"]
