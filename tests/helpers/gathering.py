"""What modules under FSDP2 compute with, and what a codec must make of their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from reference import find_codec, gathered_bytes_per_step, narrow, widen
from reference.engine import cut_into_tiles, encode_tiles
from reference.layout import Parameter, resolve_codec
from sharding import Chosen, Model, Sharding
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

FOUR = Sharding(replicas=1, shards=4)
ONLY_GATHERS = {"reduce_scatter": "off"}
KINDS = ("frozen", "tied", "offloaded", "columns", "few", "stays", "checkpointed", "compiled")


def built(
    kind: str = "plain", dtype: torch.dtype | None = None, sharding: Sharding = FOUR
) -> nn.Module:
    """A model over shards. Its rows are uneven, and fewer than four ranks."""
    torch.manual_seed(5)
    model: Any = Model().to(sharding.place)
    options: dict[str, Any] = {}
    if dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    if kind == "wide":  # the root, too, has a parameter that is compressed
        model.table = nn.Parameter(torch.randn(97, 130))
    if kind == "frozen":
        model.blocks[0].weight.requires_grad_(False)
    if kind == "tied":
        model.register_parameter("again", model.table)
    if kind == "offloaded":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if kind == "columns":
        model.blocks[0] = Chosen({"weight": (37, 128), "bias": (70,)}, torch.float32)
        options["shard_placement_fn"] = _columns
    if kind == "few":
        options["reshard_after_forward"] = 2
    if kind == "stays":
        options["reshard_after_forward"] = False
    if kind == "compiled parts":
        model.blocks[0].compile(backend="eager")
    mesh = sharding.mesh()
    # The parameters of blocks that are not sharded themselves are of the root's group.
    for module in (*([] if kind == "one group" else model.blocks), model):
        fully_shard(module, mesh=mesh if sharding.replicas > 1 else mesh["shard"], **options)
    if kind == "checkpointed":
        inner = model.blocks[0].forward
        model.blocks[0].forward = lambda x: checkpoint(inner, x, use_reentrant=False)
    if kind.startswith("compiled"):
        torch._dynamo.reset()
    if kind == "compiled":
        model.compile(backend="eager")
    return model


def _columns(parameter: nn.Parameter) -> Shard:
    return Shard(1) if parameter.shape == (37, 128) else Shard(0)


def targets_of(model: Any, dtype: torch.dtype) -> dict[str, dict[str, torch.Tensor]]:
    """Ones, whose gradients are the parameters with which backward computes."""
    return {
        prefix: {
            name: torch.ones(p.shape, dtype=dtype, device=p.device, requires_grad=True)
            for name, p in module.named_parameters(recurse=False)
            if name != "again"
        }
        for prefix, module in (
            ("", model),
            *((f"blocks.{i}", b) for i, b in enumerate(model.blocks)),
        )
    }


def used_in_backward(targets: dict[str, dict[str, torch.Tensor]]) -> dict[str, np.ndarray]:
    return {
        f"{module}.{name}".lstrip("."): target.grad.cpu().float().numpy()
        for module, each in targets.items()
        for name, target in each.items()
    }


def round_trip(flat: np.ndarray, codec: str, dtype: str) -> np.ndarray:
    """decode(encode(numbers of `dtype`)), in fp32."""
    pieces = [np.zeros(0, np.float32)]
    for tiles in cut_into_tiles(flat):
        payloads = encode_tiles(codec, dtype, tiles, hold=False)
        decoded = find_codec(codec).decode(payloads, tiles.shape[1], dtype)
        pieces.append(widen(narrow(decoded, dtype), dtype).reshape(-1))
    return np.concatenate(pieces)


def as_gathered(
    whole: torch.Tensor, codec: str, shards: int, dtype: torch.dtype, dim: int = 0
) -> np.ndarray:
    """A parameter as every rank must get it, in fp32: of each rank's shard what its message says.

    dtype: in which it is gathered. dim: that is sharded.
    """
    kind = str(dtype).removeprefix("torch.")
    values = whole.detach().to(dtype).float().numpy().swapaxes(0, dim)
    rows = -(-values.shape[0] // shards)
    padded = np.zeros((rows * shards, *values.shape[1:]), np.float32)
    padded[: values.shape[0]] = values
    size = padded.size // shards
    used = resolve_codec(Parameter("", size, kind, whole.ndim), codec)
    parts = []
    for shard in np.split(padded, shards):
        shape = shard.swapaxes(0, dim).shape
        flat = np.ascontiguousarray(shard.swapaxes(0, dim)).reshape(-1)
        parts.append(round_trip(flat, used, kind).reshape(shape).swapaxes(0, dim))
    return np.concatenate(parts)[: values.shape[0]].swapaxes(0, dim)


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Whole parameters, as optimizers step them, by name."""
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


class Watch:
    """Keeps what every sharded module has for parameters when its forward begins."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, np.ndarray] = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(
                    lambda module, _, name=name: self._keep(module, name)
                )

    def _keep(self, module: nn.Module, prefix: str) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            if not hasattr(parameter, "_local_tensor"):
                full = f"{prefix}.{name}".lstrip(".")
                self.seen[full] = parameter.detach().cpu().float().clone().numpy()


def differing(
    found: dict[str, np.ndarray],
    wholes: dict[str, torch.Tensor],
    codec: str,
    dtype: torch.dtype,
    dims: dict[str, int],
) -> list[str]:
    """Names of parameters that are not what their shards' messages say."""
    world_size = dist.get_world_size()
    return [
        name
        for name, values in found.items()
        if not np.array_equal(
            values, as_gathered(wholes[name], codec, world_size, dtype, dims.get(name, 0))
        )
    ]


def gathered_bytes(
    shapes: dict[str, dict[str, tuple[int, ...]]],
    modules: Sequence[str],
    codec: str,
    shards: int,
    dtype: str = "float32",
) -> list[int]:
    """What each rank sends when these modules are gathered once, commits included."""
    sizes, codecs, owners, buckets = [], [], [], []
    for module in modules:
        first = len(sizes)
        for owner in range(shards):
            for shape in shapes[module].values():
                rows, *rest = shape
                sizes.append(-(-rows // shards) * int(np.prod(rest, dtype=np.int64)))
                codecs.append(resolve_codec(Parameter("", sizes[-1], dtype, len(shape)), codec))
                owners.append(owner)
        buckets.append(list(range(first, len(sizes))))
    return gathered_bytes_per_step(sizes, codecs, owners, buckets, shards, dtype=dtype)
