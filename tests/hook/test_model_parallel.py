"""The hook beside model parallelism: DDP along one dimension of a mesh, more along another.

A part of the model is trained by its own data-parallel group. Whatever its ranks exchange with
those of other parts during the step, averages must be those of that group alone, as the reference
computes them from the gradients that its ranks had.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from gradferry.averaging import start
from gradferry.core.nodes import Identity
from products import rows
from reference import ReferenceEngine
from scenario import Weight
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from world import World

Worlds = Callable[[int], World]
STEPS = 4
WIDTH = 48
CODECS = ("q4", "q8")  # by part


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


def case_parts(
    kind: str, replicas: int, hosts: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    """A training in which every rank also keeps the gradients that it had."""
    mesh = init_device_mesh("cpu", (replicas, 2), mesh_dim_names=("replica", "part"))
    replica, part = mesh.get_coordinate()
    torch.manual_seed(part if kind == "pipeline" else 0)
    training = KINDS[kind](mesh)
    parameters = dict(training.ddp.module.named_parameters())
    here = Identity(hosts[dist.get_rank()], 1)
    with (
        mock.patch.object(start, "identity", return_value=here),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(dist.get_rank() % 2)),
    ):
        state = gradferry.attach(training.ddp, CODECS[part], error_feedback="both", **options)
    optimizer = torch.optim.AdamW(parameters.values(), lr=0.01)

    own: dict[str, list[np.ndarray]] = {name: [] for name in parameters}
    for name, parameter in parameters.items():
        parameter.register_hook(lambda gradient, name=name: own[name].append(flat(gradient)))
    had, got = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        training.backward(step, replica)
        had.append(list(zip(*own.values(), strict=True)))
        for gradients in own.values():
            gradients.clear()
        got.append([flat(parameter.grad) for parameter in parameters.values()])
        optimizer.step()
    return {
        "part": part,
        "members": state.nodes.members,
        "weights": tuple(Weight(name, tuple(p.shape)) for name, p in parameters.items()),
        "had": had,
        "got": got,
        "final": b"".join(flat(p).tobytes() for p in parameters.values()),
        "local_bytes": state.stats()["local_bytes"],
    }


def flat(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().reshape(-1).numpy().copy()


def averaged(engine: ReferenceEngine, step: int, had: list[Any]) -> list[list[np.ndarray]]:
    """What every rank must have in .grad: [rank][parameter].

    Args:
        engine: of the data-parallel group.
        step: number of the step.
        had: [rank][backward pass][parameter], gradients of that pass alone.
    """
    grads: list[Any] = [[np.float32(0)] * len(had[0][0]) for _ in had]
    passes = len(had[0])
    for turn in range(passes):
        grads = [
            [grad + more for grad, more in zip(grads[rank], had[rank][turn], strict=True)]
            for rank in range(len(had))
        ]
        # In its first step, torch's pipeline has DDP reduce in the pass of every microbatch.
        if step == 0 or turn == passes - 1:
            grads = engine.step(grads)
    return grads


@pytest.mark.parametrize(
    ("kind", "layout"),
    rows(
        tuple(KINDS),
        (
            ("AABB", {}, ((0,), (1,))),  # flat
            ("AAAABB", {}, ((0, 1), (2,))),  # two levels
            ("AAAA", {"nodes": 2}, ((0, 1),)),  # one node
        ),
    ),
)
def test_every_part_is_averaged_as_if_it_were_alone(
    worlds: Worlds, kind: str, layout: tuple[str, dict[str, Any], Any]
) -> None:
    """`layout`: the host of every rank, options of attach, and nodes of a data-parallel group."""
    hosts, options, members = layout
    replicas = len(hosts) // 2
    answers = worlds(len(hosts)).run(
        case_parts, kind=kind, replicas=replicas, hosts=list(hosts), options=options
    )
    for part in range(2):
        group = [answer for answer in answers if answer["part"] == part]
        assert len(group) == replicas
        weights = group[0]["weights"]
        engine = ReferenceEngine(
            replicas,
            [weight.describe() for weight in weights],
            CODECS[part],
            "both",
            nodes=None if len(members) == replicas else members,
        )
        for step in range(STEPS):
            expected = averaged(engine, step, [answer["had"][step] for answer in group])
            for rank, answer in enumerate(group):
                for index, weight in enumerate(weights):
                    same = answer["got"][step][index].tobytes() == expected[rank][index].tobytes()
                    assert same, (part, rank, step, weight.name)
        assert len({answer["final"] for answer in group}) == 1
        assert all(answer["members"] == members for answer in group)
        assert (sum(answer["local_bytes"] for answer in group) > 0) == (len(members) < replicas)
    assert answers[0]["final"] != answers[1]["final"]


def case_infinity_in_one_part() -> dict[str, Any]:
    """Part 1 of replica 0 overflows in the second step, and the parts tell each other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    replica, part = mesh.get_coordinate()
    training = TensorParallel(mesh)
    parameters = list(training.ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    gradferry.attach(training.ddp, "q4", error_feedback="both", grad_scaler=scaler)
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    found_by_step, seen = [], []
    for step in range(3):
        optimizer.zero_grad()
        factor = float("inf") if step == 1 and (replica, part) == (0, 1) else 1.0
        poisoned = parameters[0].register_hook(lambda gradient, factor=factor: gradient * factor)
        scaler.scale(training.ddp(inputs(step, replica)).square().mean()).backward()
        poisoned.remove()
        scaler.unscale_(optimizer)
        (found,) = scaler._found_inf_per_device(optimizer).values()
        mine = bool(found)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh["part"].get_group())
        scaler.step(optimizer)
        scaler.update()
        found_by_step.append((mine, bool(found)))
        seen.append(b"".join(flat(p).tobytes() for p in parameters))
    return {
        "part": part,
        "found": found_by_step,
        "scale": scaler.get_scale(),
        "kept": seen[0] == seen[1],
        "moved": seen[1] != seen[2],
        "final": seen[2],
    }


def test_an_infinity_in_one_part_skips_the_step_of_all(worlds: Worlds) -> None:
    answers = worlds(4).run(case_infinity_in_one_part)
    for answer in answers:
        mine = answer["part"] == 1
        assert answer["found"] == [(False, False), (mine, True), (False, False)]
        assert answer["scale"] == 2.0**9
        assert answer["kept"]
        assert answer["moved"]
    assert [a["final"] for a in answers[:2]] == [a["final"] for a in answers[2:]]
