"""A model under FSDP2 whose gradients are chosen, and what its ranks must have of them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import gradferry
import numpy as np
import torch
import torch.distributed as dist
from reference.layout import Parameter
from reference.scalars import narrow, widen
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

# By module; "" is the root. Rows are uneven over 2 and 3 ranks, or fewer than there are.
SHAPES = {
    "": {"table": (97, 30), "scale": (5,)},
    "blocks.0": {"weight": (61, 70), "bias": (70,)},
    "blocks.1": {"weight": (1, 4500), "deep": (12, 11, 40), "bias": (1,)},
}
RATE = 2.0**-6


class Chosen(nn.Module):
    """Its loss is the sum of all parameters times targets, which are thus its gradients."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))

    def forward(self, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        terms = [(p * targets[name]).sum() for name, p in self.named_parameters(recurse=False)
                 if name in targets]  # fmt: skip
        return torch.stack(terms).sum()


class Model(Chosen):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(SHAPES[""], dtype)
        self.blocks = nn.ModuleList(Chosen(SHAPES[f"blocks.{i}"], dtype) for i in range(2))

    def forward(self, targets: dict[str, dict[str, torch.Tensor]]) -> torch.Tensor:
        used = [(block, targets[f"blocks.{i}"]) for i, block in enumerate(self.blocks)]
        parts = [block(wanted) for block, wanted in used if wanted]
        return super().forward(targets[""]) + torch.stack(parts).sum()


@dataclasses.dataclass(frozen=True)
class Sharding:
    """A world, what it trains and how.

    Attributes:
        replicas, shards: of the mesh; rank = replica * shards + shard.
        dtype: of parameters.
        reduce_dtype: of the mixed precision policy; None: no policy.
        kind: "fully_shard", or "replicate" without shards.
        passes: backward passes per step, all but the last without synchronization.
        accumulates: what is accumulated before the last: "gradients", or "shards", which are
            reduced in every pass.
        without: parameters without a gradient, as (module, name).
        whole: gradients are whole numbers, whose sums have the same bits in every order.
        device: where it is: "streamed" and "staged" mean the fake device of tests/engine/streams.
    """

    replicas: int = 2
    shards: int = 2
    dtype: torch.dtype = torch.float32
    reduce_dtype: torch.dtype | None = None
    kind: str = "fully_shard"
    passes: int = 1
    accumulates: str = "gradients"
    without: tuple[tuple[str, str], ...] = ()
    whole: bool = False
    device: str = "cpu"

    @property
    def world_size(self) -> int:
        return self.replicas * self.shards

    @property
    def reduced_in(self) -> torch.dtype:
        return self.reduce_dtype or self.dtype

    def mesh(self) -> DeviceMesh:
        names = ("replica", "shard")
        if self.device == "cpu":
            return init_device_mesh("cpu", (self.replicas, self.shards), mesh_dim_names=names)
        import fake_device

        ranks = torch.arange(self.world_size).view(self.replicas, self.shards)
        groups = []
        for lines in (ranks.T, ranks):
            of_all = [fake_device.group(self.device, tuple(line.tolist())) for line in lines]
            groups += [group for group in of_all if isinstance(group, dist.ProcessGroup)]
        return DeviceMesh.from_group(
            groups, fake_device.DEVICE.type, mesh=ranks, mesh_dim_names=names
        )

    @property
    def place(self) -> torch.device:
        """Of the model."""
        if self.device == "cpu":
            return torch.device("cpu")
        import fake_device

        return fake_device.DEVICE

    def model(self, mesh: DeviceMesh, seed: int = 5) -> nn.Module:
        """The model over `mesh`: one of one dimension, or of replicas and shards."""
        torch.manual_seed(seed)
        model = Model(self.dtype).to(self.place)
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=self.reduce_dtype)
        wrap = replicate if self.kind == "replicate" else fully_shard
        for module in (*model.blocks, model):
            wrap(module, mesh=mesh, mp_policy=policy)
        return model

    def native(self) -> nn.Module:
        """By FSDP2 alone."""
        mesh = self.mesh()
        if self.kind == "replicate":
            return self.model(mesh["replica"])
        return self.model(mesh if self.replicas > 1 else mesh["shard"])

    def gradient(self, step: int, turn: int, rank: int, module: str, name: str) -> np.ndarray:
        """Of the whole parameter, fp32, exact in `dtype`."""
        keys = [step, turn, rank, *map(ord, module + name)]
        rng = np.random.default_rng(keys)
        values = rng.standard_normal(SHAPES[module][name])
        if self.whole:
            return np.round(16 * values).astype(np.float32)
        values *= np.exp2(rng.integers(-9, 2, values.shape))
        dtype = str(self.dtype).removeprefix("torch.")
        return widen(narrow(values.astype(np.float32), dtype), dtype)

    def targets(self, step: int, turn: int, rank: int) -> dict[str, dict[str, torch.Tensor]]:
        return {
            module: {
                name: torch.from_numpy(self.gradient(step, turn, rank, module, name)).to(
                    self.place, self.dtype
                )
                for name in shapes
                if (module, name) not in self.without
            }
            for module, shapes in SHAPES.items()
        }

    def backward(self, model: Any, step: int) -> None:
        for turn in range(self.passes):
            if self.accumulates == "shards":
                model.set_requires_all_reduce(turn == self.passes - 1)
            else:
                model.set_requires_gradient_sync(turn == self.passes - 1)
            model(self.targets(step, turn, dist.get_rank())).backward()

    def named(self) -> list[tuple[str, str]]:
        """Modules and names of parameters, in the order of ``model.modules()``."""
        return [(module, name) for module, shapes in SHAPES.items() for name in shapes]

    def size(self, module: str, name: str) -> int:
        """Elements of a padded shard."""
        rows, *rest = SHAPES[module][name]
        return -(-rows // self.shards) * int(np.prod(rest, dtype=np.int64))

    def described(self) -> list[Parameter]:
        """Padded shards, for a reference of what one group of replicas does."""
        dtype = str(self.reduced_in).removeprefix("torch.")
        described = []
        for module, name in self.named():
            shape = SHAPES[module][name]
            full = f"{module}.{name}".lstrip(".")
            size = self.size(module, name)
            described.append(Parameter(full, size, dtype, len(shape), whole=math.prod(shape)))
        return described

    def buckets(self) -> list[list[int]]:
        """Indices of parameters by module."""
        modules = [module for module, _ in self.named()]
        return [[i for i, each in enumerate(modules) if each == module] for module in SHAPES]

    def padded(self, whole: np.ndarray, shard: int) -> np.ndarray:
        """A shard of a parameter, with zeros for missing rows, flat."""
        rows = -(-whole.shape[0] // self.shards)
        part = whole[shard * rows : (shard + 1) * rows]
        filled = np.zeros((rows, *whole.shape[1:]), whole.dtype)
        filled[: len(part)] = part
        return filled.reshape(-1)

    def reduced(self, step: int, replica: int, shard: int) -> list[np.ndarray]:
        """What one replica hands on: the mean over two shards, by parameter, in `reduced_in`."""
        assert self.shards == 2  # then no order of the sum changes a bit
        dtype = str(self.reduced_in).removeprefix("torch.")
        parameters = []
        for module, name in self.named():
            of_rank = []
            for rank in range(2 * replica, 2 * replica + 2):
                total = self.gradient(step, 0, rank, module, name)
                for turn in range(1, self.passes):
                    total = total + self.gradient(step, turn, rank, module, name)
                of_rank.append(widen(narrow(self.padded(total, shard), dtype), dtype))
            total = widen(narrow(of_rank[0] + of_rank[1], dtype), dtype)
            parameters.append(narrow(total / np.float32(2), dtype))
        return parameters


def attached(sharding: Sharding, codec: str = "q4", **options: Any) -> tuple[Any, Any]:
    """A model and its state. Gradients are averaged over replicas, or reduce-scattered, without a
    compressed all-gather, where there is one replica.
    """
    model = sharding.native()
    if sharding.replicas == 1:
        options = {"all_gather": "off", **options}
    return model, gradferry.fsdp.attach(model, codec, **options)


def local_gradients(model: nn.Module) -> list[np.ndarray]:
    """This rank's part of every gradient, flat, in fp32, in the order of ``model.modules()``."""
    return [p.grad.to_local().cpu().reshape(-1).float().numpy().copy() for p in in_order(model)]


def in_order(model: nn.Module) -> list[Any]:
    return [p for module in model.modules() for p in module.parameters(recurse=False)]


def bits(model: nn.Module) -> bytes:
    """Of this rank's parameters."""
    return b"".join(p.to_local().detach().cpu().float().numpy().tobytes() for p in in_order(model))
