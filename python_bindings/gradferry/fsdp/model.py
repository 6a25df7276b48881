"""Access to a model under FSDP2. The only file that reads its internals."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradferry.core.names import plain_name
from gradferry.errors import ConfigError


@dataclass(frozen=True)
class Shard:
    """This rank's part of one parameter, as FSDP2 reduces or gathers it.

    Attributes:
        name: of the parameter in the model.
        parameter: as optimizers have it: a DTensor.
        size: of the part, with the padding that makes the parts of all ranks equal.
        dtype: in which gradients are reduced, or the parameter is gathered.
    """

    name: str
    parameter: nn.Parameter
    size: torch.Size
    dtype: torch.dtype

    def placeholder(self, device: torch.device) -> torch.Tensor:
        """A tensor of this size and dtype that takes the memory of one element."""
        return torch.zeros(1, dtype=self.dtype, device=device).expand(self.size)

    @property
    def whole_size(self) -> int:
        """Number of elements of the whole parameter, without padding; equal on all ranks."""
        return self.parameter.numel()

    def values(self) -> torch.Tensor:
        """What this rank has of the parameter now. FSDP2 may replace this tensor."""
        local: torch.Tensor = self.parameter._local_tensor  # type: ignore[attr-defined]
        return local


class ShardedModule:
    """The parameters of one call of ``fully_shard``, which are reduced together.

    Attributes:
        name: of the module in the model.
        shards: of its parameters that require grad; may be none.
        gathered: of all its parameters, in the order in which FSDP2 gathers them.
    """

    def __init__(self, name: str, group: Any, names: dict[int, str]) -> None:
        self.name = name
        self._group = weakref.ref(group)
        # By number among the group's parameters; frozen ones are not reduced.
        self._trained = {
            number: each
            for number, each in enumerate(group.fsdp_params)
            if each.sharded_param.requires_grad
        }
        dtype = _reduce_dtype(list(self._trained.values())) if self._trained else torch.float32

        def shard(each: Any, dtype: torch.dtype) -> Shard:
            size, parameter = each.padded_sharded_param_size, each.sharded_param
            return Shard(_name(each, names), parameter, size, dtype)

        self.shards = [shard(each, dtype) for each in self._trained.values()]
        self.gathered = [shard(each, _gather_dtype(each)) for each in group.fsdp_params]

    @property
    def num_elements(self) -> int:
        """The number of elements that one rank has after the reduce-scatter."""
        return sum(shard.size.numel() for shard in self.shards)

    @property
    def device(self) -> torch.device:
        """The device of the gradients."""
        return torch.device(self._param_group().device)

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks among which parameters are sharded; None: they are not, as under
        ``torch.distributed._composable.replicate_with_fsdp.replicate``.
        """
        return getattr(self._param_group().mesh_info, "shard_process_group", None)

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The group of the ranks that have the same shards; None: there are no replicas."""
        found = self.all_reduce_group
        return getattr(found, "wrapped", found)

    @property
    def all_reduce_group(self) -> dist.ProcessGroup | None:
        """What FSDP2 calls to average over replicas: their group, or what was set instead."""
        return getattr(self._param_group().mesh_info, "replicate_process_group", None)

    @all_reduce_group.setter
    def all_reduce_group(self, group: dist.ProcessGroup) -> None:
        info = copy.copy(self._param_group().mesh_info)  # modules share it
        info.replicate_process_group = group
        self._param_group().mesh_info = info

    def place_in_mesh(self) -> str:
        """This rank's place in what all replicas have alike, if tensor parallelism also divides
        parameters; else empty.
        """
        mesh: Any = self.gathered[0].parameter.device_mesh  # type: ignore[attr-defined]
        place = mesh.get_coordinate()[self.replica_group is not None :]  # they are the first
        return "_at_" + "_".join(map(str, place)) if len(place) > 1 else ""

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The shard group and the replica group, as far as there are."""
        return [group for group in (self.shard_group, self.replica_group) if group is not None]

    @property
    def reduce_scatter_group(self) -> str:
        """The name of the group in which gradients are reduced: that of the shards, or one of the
        same ranks that ``set_separate_reduce_scatter_group`` made.
        """
        return str(self._param_group()._reduce_scatter_process_group.group_name)

    @property
    def reduce_scatter(self) -> Any:
        """What reduces gradients: FSDP2's own, or what ``set_custom_reduce_scatter`` has set."""
        return self._param_group()._reduce_scatter_comm

    @reduce_scatter.setter
    def reduce_scatter(self, comm: Any) -> None:
        self._param_group()._reduce_scatter_comm = comm

    @property
    def all_gather(self) -> Any:
        """What gathers parameters: FSDP2's own, or what ``set_custom_all_gather`` has set."""
        group = self._param_group()
        if not hasattr(group, "_all_gather_comm"):
            raise ConfigError(
                f"torch {torch.__version__} has no FSDPModule.set_custom_all_gather(), which the "
                "all-gather needs; use torch 2.11 or later, or all_gather='off'"
            )
        return group._all_gather_comm

    @all_gather.setter
    def all_gather(self, comm: Any) -> None:
        self._param_group()._all_gather_comm = comm

    @property
    def gathers_for(self) -> str:
        """For what parameters are gathered now: "FORWARD", "PRE_BACKWARD", or "IDLE", by hand."""
        return str(self._param_group()._training_state.name)

    @property
    def gathers_again(self) -> bool:
        """Whether what is gathered now are parts of parameters that were gathered before, as
        ``reshard_after_forward=<int>`` keeps them.
        """
        return bool(self._param_group().is_sharded_post_forward)

    def reshard(self) -> None:
        """Frees gathered parameters, so that the next use gathers them again: also those of a
        gather ahead that nothing has waited for, since the pass left the module out.
        """
        group = self._param_group()
        group.wait_for_unshard()
        group.reshard()

    def fingerprint(self) -> object:
        """Changes when torch replaces the parameters or writes to them, but for some foreach and
        fused kernels and writes through ``.data``.
        """
        parameters = [each.sharded_param for each in self._param_group().fsdp_params]
        return [(id(each), each._version) for each in parameters]

    def expect_gatherable(self) -> None:
        """Raises ConfigError if no codec can take what FSDP2 gathers."""
        for each, shard in zip(self._param_group().fsdp_params, self.gathered, strict=True):
            if hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather"):
                kind = type(each._sharded_local_tensor).__name__
                raise ConfigError(
                    f"parameter {shard.name!r} is a {kind}, a tensor subclass that encodes itself "
                    "for the all-gather (fsdp_pre_all_gather); take plain parameters, or "
                    "all_gather='off'"
                )
            if shard.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ConfigError(
                    f"parameter {shard.name!r} is gathered in {shard.dtype}, and the all-gather "
                    "takes float32, bfloat16 and float16; use such a param_dtype in the mixed "
                    "precision policy, or all_gather='off'"
                )
            first = self.gathered[0]
            if shard.dtype != first.dtype:
                raise ConfigError(
                    f"{self.name!r} gathers {first.name!r} in {first.dtype} and {shard.name!r} in "
                    f"{shard.dtype}, as bytes without boundaries; give both one param_dtype in the "
                    "mixed precision policy, call fully_shard for each part on its own, or use "
                    "all_gather='off'"
                )

    def order(self) -> list[int]:
        """The order of the `shards` in what is reduced, as FSDP2 settles in the first forward."""
        group = self._param_group()
        numbers = list(self._trained)
        settled = getattr(group, "_reduce_scatter_param_indices", None) or numbers
        return [numbers.index(number) for number in settled if number in self._trained]

    def change(self) -> str | None:
        """What makes its gradients others than those that a hook was set for; None: nothing."""
        for number, each in enumerate(self._param_group().fsdp_params):
            if each.sharded_param.requires_grad != (number in self._trained):
                return f"requires_grad of {each._module_info.param_name!r} has changed"
            if (
                number in self._trained
                and each.sharded_param is not self.gathered[number].parameter
            ):
                return (
                    f"parameter {each._module_info.param_name!r} was replaced, as "
                    "load_state_dict(assign=True) does,"
                )
        return None

    def expect_values(self) -> None:
        """Raises ConfigError if its parameters have no values yet."""
        for shard in self.gathered:
            expect_values(shard.name, shard.values())

    def _param_group(self) -> Any:
        group = self._group()
        assert group is not None  # it holds the hook that asks
        return group


def is_own(comm: Any) -> bool:
    """Whether FSDP2 has made it: nobody has set another."""
    return type(comm).__name__ in ("DefaultReduceScatter", "DefaultAllGather")


def expect_values(name: str, parameter: torch.Tensor) -> None:
    """Raises ConfigError if a parameter has no values yet."""
    if parameter.is_meta:
        raise ConfigError(
            f"parameter {name!r} is on the meta device; attach after model.to_empty(device=...) "
            "and the initialization of its values"
        )


def sharded_modules(model: nn.Module) -> list[ShardedModule]:
    """The modules of a model that FSDP2 reduces, in the order of ``model.modules()``.

    Raises:
        ConfigError: there are none, or one that no hook can be set on.
    """
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a module, not {type(model).__name__}")
    found: list[ShardedModule] = []
    seen: set[int] = set()
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    for module in model.modules():
        name = names[id(module)]
        if isinstance(module, FullyShardedDataParallel):
            raise ConfigError(
                f"{name or 'the model'!r} is a FullyShardedDataParallel (FSDP1), whose "
                "communication hooks take no hybrid sharding; shard the model by "
                "torch.distributed.fsdp.fully_shard (FSDP2) instead"
            )
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = _param_groups(state)
        if id(state) in seen or not groups:
            continue
        seen.add(id(state))
        if len(groups) > 1:
            raise ConfigError(
                f"{name or 'the model'!r} has {len(groups)} groups of parameters, sharded over "
                "different meshes by shard_placement_fn, and FSDP2 sets no hook on such a module; "
                "call fully_shard for each part on its own"
            )
        found.append(ShardedModule(name or "the model", groups[0], names))
    if not any(module.shards for module in found):
        raise ConfigError(
            "the model has no parameters under FSDP2 that require grad; call "
            "torch.distributed.fsdp.fully_shard on its blocks and on itself first"
        )
    return found


def unsharded_parameters(model: nn.Module, modules: Sequence[ShardedModule]) -> Iterator[str]:
    """Names of parameters that require grad, and that FSDP2 does not reduce."""
    sharded = {shard.name for module in modules for shard in module.shards}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and plain_name(name) not in sharded:
            yield plain_name(name)


def _param_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _name(parameter: Any, names: dict[int, str]) -> str:
    """Not by the parameter itself: after a forward pass the module may hold another one."""
    info = parameter._module_info
    prefix = names[id(info.module)]
    return f"{prefix}.{info.param_name}" if prefix else str(info.param_name)


def _gather_dtype(parameter: Any) -> torch.dtype:
    """In which FSDP2 gathers a parameter, as it settles in the first forward pass."""
    policy, original = parameter.mp_policy, parameter.sharded_param.dtype
    dtype: torch.dtype | None = policy.param_dtype
    return dtype if dtype is not None and original.is_floating_point else original


def _reduce_dtype(parameters: Sequence[Any]) -> torch.dtype:
    """The dtype of one module's gradients, which FSDP2 settles in the first forward pass."""

    def of(parameter: Any) -> torch.dtype:
        policy, original = parameter.mp_policy, parameter.sharded_param.dtype
        computed = policy.param_dtype if original.is_floating_point else None
        dtype: torch.dtype | None = policy.reduce_dtype
        if dtype is None and hasattr(type(parameter), "unsharded_grad_dtype"):
            # Later versions accumulate in the parameter's own dtype, or in its grad_dtype, which
            # FSDP2 takes over when it settles; None leaves gradients as they come.
            if parameter.sharded_param._has_grad_dtype_override:
                dtype = parameter.sharded_param.grad_dtype
            elif parameter._has_sharded_grad_dtype_override:
                dtype = parameter.sharded_grad_dtype
            else:
                dtype = original
        return dtype or computed or original

    return functools.reduce(torch.promote_types, map(of, parameters))
