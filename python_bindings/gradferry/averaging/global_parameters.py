"""What ranks that train alone have in common: the global parameters, and their outer optimizer."""

from __future__ import annotations

import numbers
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only

from gradferry import _native
from gradferry.core.agreement import Record, record_hash
from gradferry.core.device import CPU
from gradferry.core.rendezvous import is_known, world_ranks
from gradferry.core.values import as_whole
from gradferry.errors import ConfigError, StateError

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_PLAIN = (bool, int, float, str, list, tuple, torch.Tensor, type(None))  # options, of all ranks


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer of arXiv 2311.08105; on the host in one pass through memory."""
    fused = all(p.device == CPU and p.is_floating_point() for p in parameters)
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, fused=fused or None)


class GlobalParameters:
    """Copies of a model's parameters as all ranks have them, in fp32 or better, with an optimizer.

    Attributes:
        names: of the parameters of the model that require grad.
        tensors: the global parameters, in this order: of this rank's shards under FSDP2.
        changes: the pseudo-gradients, global minus local, and then their average over ranks: of the
            shapes of `tensors`, and in memory one behind the other, so that a Reducer need not copy
            them.
        outer: the optimizer of `tensors`.
        device: of all these.
        since: inner steps of this period.
        is_shown: whether the model is at the global parameters, within `shown`.

    Args:
        model: whose parameters they are.
        optimizers: that train it.
        device: ``"cpu"``, or that of the model.
        make_outer: makes the outer optimizer.

    Raises:
        ConfigError: an argument cannot be used.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        device: str | torch.device,
        make_outer: MakeOptimizer,
    ) -> None:
        self._model, self._optimizers = model, optimizers
        self._parameters = _trained_by(optimizers, model)
        self._frozen = {n: p for n, p in model.named_parameters() if n not in self._parameters}
        self.names = list(self._parameters)
        self.device = _place(device, self._local())
        self.tensors: list[nn.Parameter] = []
        for now in self._local():
            dtype = torch.promote_types(now.dtype, torch.float32)
            # Fused optimizers take memory as it comes, whatever strides.
            start = now.to(self.device, dtype, copy=True, memory_format=torch.contiguous_format)
            self.tensors.append(nn.Parameter(start))
        self.make_changes()
        self.outer = _outer_optimizer(make_outer, self.tensors)
        self._made = [type(self.outer).__name__, *described(self.outer)]
        self.since = 0
        self.is_shown = False
        # Where the parameters of the model were in memory, and of which version, when they were
        # last seen to be the global ones.
        self._places: list[tuple[int, int]] = []

    def make_changes(self) -> None:
        """Zeros in new memory: for each dtype, views of one flat tensor."""
        self.changes: list[torch.Tensor] = []
        flats: dict[torch.dtype, torch.Tensor] = {}  # what is left of each
        for dtype in {each.dtype for each in self.tensors}:
            size = sum(each.numel() for each in self.tensors if each.dtype == dtype)
            flats[dtype] = torch.zeros(size, dtype=dtype, device=self.device)
        for each in self.tensors:
            flat = flats[each.dtype]
            self.changes.append(flat[: each.numel()].view(each.shape))
            flats[each.dtype] = flat[each.numel() :]

    def shard_groups(self) -> list[tuple[dist.ProcessGroup, torch.device]]:
        """The groups over which FSDP2 spreads the model, and the device of what this rank has."""
        found: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}
        for parameter in self._parameters.values():
            mesh = getattr(parameter, "device_mesh", None)
            for group in [] if mesh is None else mesh.get_all_groups():
                found[group.group_name] = group, _own_part(parameter).device
        return [found[name] for name in sorted(found)]

    def record(self) -> Record:
        """What must be equal on all ranks."""
        shards: list[Any] = [p for p in self._parameters.values() if _is_shard(p)]
        places = {
            str((p.placements, p.device_mesh.shape, p.device_mesh.get_coordinate())) for p in shards
        }
        return {
            "shard (group= is of ranks with the same one)": ", ".join(sorted(places)),
            "parameters": [
                {
                    "name": name,
                    "shape": list(_own_part(each).shape),
                    "dtype": str(each.dtype),
                    "frozen": name in self._frozen,
                }
                for name, each in [*self._parameters.items(), *self._frozen.items()]
            ],
            "values of frozen parameters": record_hash(
                _native.parameter_hashes([_own_part(each) for each in self._frozen.values()])
            ),
            "outer optimizer as it was made": self._made,
        }

    def _local(self) -> list[torch.Tensor]:
        """What this rank has of the model's parameters, which FSDP2 spreads over ranks."""
        parameters = list(self._parameters.values())
        if any(map(_is_shard, parameters)):
            # Not above: it takes longer to import than all the rest.
            from torch.distributed.fsdp import FSDPModule

            # A module that a forward pass has left whole would go on with what it has gathered.
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return [_own_part(parameter) for parameter in parameters]

    # --- what happens between two steps ---

    def expect_same_model(self) -> None:
        """Raises StateError where a parameter was replaced, removed, added or unfrozen."""
        self._local()  # has FSDP2 put the shards into the modules
        now, own = dict(self._model.named_parameters()), {**self._parameters, **self._frozen}
        changes = {
            name: "replaced" if name in now else "removed"
            for name, parameter in own.items()
            if now.get(name) is not parameter
        }
        for name, parameter in now.items():
            if parameter.requires_grad and name not in self._parameters:
                changes[name] = "added or unfrozen"
        for name, change in changes.items():
            raise StateError(
                f"the parameter {name!r} was {change}; the model must stay as it is: make a new "
                "DiLoCo on every rank"
            )

    def expect_known(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises StateError where an optimizer has stepped on the model that was not given."""
        own = set(map(id, self._model.parameters()))
        if not any(optimizer is each for each in self._optimizers) and own & _held_by(optimizer):
            raise StateError(
                f"{type(optimizer).__name__} has stepped on parameters of the model, and DiLoCo "
                "counts the steps of other optimizers; give all that train the model, in a list"
            )

    @torch.no_grad()
    def begin_with_model(self) -> bool:
        """At the beginning of a period: where the model is not at the global parameters, it becomes
        those, with an outer optimizer that begins anew. Whether it was elsewhere.

        On a device only versions of tensors tell where to look, and writes through ``.data`` leave
        none: the global parameters may be on the host, and a copy of the model takes long.
        """
        places, own = self._places_now(), self._local()
        if places == self._places and own[0].device != CPU:
            return False
        self._places, pairs = places, list(zip(self.tensors, own, strict=True))
        if all(torch.equal(start.to(now.device, now.dtype), now) for start, now in pairs):
            return False
        for start, now in pairs:
            start.copy_(now)
        self.outer.state.clear()
        return True

    def _copies_in_optimizers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Which tensors in the state of optimizers are the model's parameters, such as master
        weights, each with the global parameter: by key, if all round to them and not all are zero.
        """
        found = defaultdict(list)
        for parameter, local, start in zip(
            self._parameters.values(), self._local(), self.tensors, strict=True
        ):
            for optimizer in self._optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[key].append((_own_part(value), local, start))
        return [
            (copy, start)
            for kept in found.values()
            if all(torch.equal(copy.to(now.device, now.dtype), now) for copy, now, _ in kept)
            and any(copy.any() for copy, _, _ in kept)
            for copy, _, start in kept
        ]

    # --- an outer step ---

    @torch.no_grad()
    def measure(self) -> None:
        """Sets `changes` to the pseudo-gradients of this rank.

        Raises:
            StateError: the model has other parameters than before, or one is not finite.
        """
        self.expect_same_model()
        for name, start, now, change in zip(
            self.names, self.tensors, self._local(), self.changes, strict=True
        ):
            # The model began with the global parameters as its dtype can hold them.
            began = start.to(now.dtype).to(change.dtype)
            torch.sub(began, now.to(change.device, change.dtype), out=change)
            if not _is_finite(change):
                raise StateError(
                    f"{name!r} has come to NaN or infinity, so that no rank takes this outer step; "
                    "look at the loss of this rank, and go on from a checkpoint"
                )

    def apply(self) -> None:
        """Steps the outer optimizer with the averages in `changes`, and moves the model there."""
        for start, change in zip(self.tensors, self.changes, strict=True):
            start.grad = change
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)
        self.go_on_from_here()

    @torch.no_grad()
    def go_on_from_here(self) -> None:
        """Moves the model, and the copies of it that optimizers keep, to the global parameters."""
        copies = self._copies_in_optimizers()
        self._move(self.tensors)
        for copy, start in copies:
            copy.copy_(start)
        self.since, self._places = 0, self._places_now()

    def _places_now(self) -> list[tuple[int, int]]:
        own = map(_own_part, self._parameters.values())
        return [(each.data_ptr(), each._version) for each in own]

    @torch.no_grad()
    def _move(self, to: Sequence[torch.Tensor]) -> None:
        for now, there in zip(self._local(), to, strict=True):
            now.copy_(there)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """See `DiLoCo.global_parameters`."""
        self.expect_same_model()
        kept, was_shown = [now.clone() for now in self._local()], self.is_shown
        self._move(self.tensors)
        self.is_shown = True
        try:
            yield
        finally:
            self._move(kept)
            self.is_shown = was_shown

    def hashes(self) -> list[int]:
        """A hash of the bits of each global parameter."""
        return _native.parameter_hashes([each.detach() for each in self.tensors])

    # --- saved ---

    def saved(self) -> dict[str, Any]:
        """Copies of the global parameters, by name, and of what the outer optimizer keeps."""
        return {
            "since": self.since,
            "global": {
                name: start.detach().clone()
                for name, start in zip(self.names, self.tensors, strict=True)
            },
            "outer_type": type(self.outer).__name__,
            "outer": _copied(self.outer.state_dict()),
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any], also: Callable[[], None] = lambda: None) -> None:
        """Restores what `saved` returned, and what `also` does, or nothing.

        Raises:
            LookupError, TypeError, ValueError and others: it is of another model or outer
                optimizer, or damaged; or what `also` raises.
        """
        values, kind, before = saved["global"], type(self.outer).__name__, self.outer.state_dict()
        named = dict(zip(self.names, self.tensors, strict=True))
        here, there = (
            {name: (p.shape, p.dtype) for name, p in each.items()} for each in (named, values)
        )
        if here != there or saved["outer_type"] != kind:
            raise ValueError(f"it is not of these parameters and an outer {kind}")
        try:
            # An optimizer goes on in the tensors that it loads, where they fit as they are.
            self.outer.load_state_dict(_copied(saved["outer"]))
            also()
        except BaseException:
            self.outer.load_state_dict(before)
            raise
        for name, start in named.items():
            start.copy_(values[name])
        self.since, self._places = saved["since"], []


def _copied(state: Any) -> Any:
    """A state with contiguous copies of its tensors, on the same devices."""
    kept = torch.contiguous_format
    return tree_map_only(torch.Tensor, lambda each: each.detach().clone(memory_format=kept), state)


# --- tensors --------------------------------------------------------------------------------------


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite, in one pass and without a boolean tensor."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return not real.numel() or bool(torch.stack(real.aminmax()).isfinite().all())


def _is_shard(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "to_local")


def _own_part(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    part: torch.Tensor = tensor._local_tensor if _is_shard(tensor) else tensor
    return part.detach()


# --- optimizers -----------------------------------------------------------------------------------


def _held_by(optimizer: torch.optim.Optimizer) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def described(optimizer: torch.optim.Optimizer) -> list[dict[str, str]]:
    """The options of an optimizer's groups, for comparison with those of other ranks."""
    return [
        {
            key: repr(value.tolist() if isinstance(value, torch.Tensor) else value)
            for key, value in group.items()
            if key != "params" and isinstance(value, _PLAIN)
        }
        for group in optimizer.param_groups
    ]


# --- arguments -----------------------------------------------------------------------------------


def checked_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer, or a list of them. Raises ConfigError where it is neither."""
    optimizers: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer={type(each).__name__} is no torch.optim.Optimizer, nor a list of them"
            )
        if not hasattr(each, "_optimizer_step_pre_hooks"):
            raise ConfigError(
                f"optimizer={type(each).__name__} was made without Optimizer.__init__ and has no "
                "hooks; give the one that it wraps, such as optimizer.optimizer"
            )
    if not optimizers or len(set(map(id, optimizers))) != len(optimizers):
        raise ConfigError("optimizer= has no optimizer, or one twice; give each that steps once")
    return optimizers


def checked_period(sync_every: Any) -> int:
    """Inner steps of a period. Raises ConfigError."""
    steps = as_whole(sync_every)
    if steps is None or steps < 1:
        raise ConfigError(f"sync_every={sync_every!r} must be a number of steps, 1 or more")
    return steps


def checked_decay(decay: Any) -> float:
    """By what a residual is multiplied before an average. Raises ConfigError."""
    is_number = isinstance(decay, numbers.Real) and not isinstance(decay, bool)
    if not is_number or not 0 < decay <= 1:
        raise ConfigError(f"residual_decay={decay!r} must be above 0 and at most 1")
    return float(decay)


def refuse_average_of_every_step(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Raises ConfigError where DistributedDataParallel averages gradients of these ranks, too."""
    ranks = set(world_ranks(group))
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) and is_known(group):
            averaged = set(world_ranks(module.process_group))
            if len(ranks) > 1 and ranks <= averaged:
                raise ConfigError(
                    "DistributedDataParallel averages every step over all ranks of group=, so that "
                    "DiLoCo has nothing to save; give DiLoCo the model without it, or make it of "
                    "the ranks of one worker: DistributedDataParallel(model, process_group=...)"
                )


def _trained_by(
    optimizers: Iterable[torch.optim.Optimizer], model: nn.Module
) -> dict[str, nn.Parameter]:
    """The parameters of the model that require grad, which these optimizers have."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model={type(model).__name__} is no torch.nn.Module")
    named = dict(model.named_parameters())
    own = {id(parameter) for parameter in named.values()}
    trained: set[int] = set()
    for each in optimizers:
        if not _held_by(each) <= own:
            raise ConfigError(
                f"{type(each).__name__} has parameters that the model lacks; make it of "
                "model.parameters(), after the model was wrapped"
            )
        trained |= _held_by(each)
    parameters = {name: p for name, p in named.items() if p.requires_grad}
    for name, parameter in parameters.items():
        if id(parameter) not in trained:
            raise ConfigError(
                f"no optimizer has the parameter {name!r}; give all optimizers that train the "
                "model, in a list, or freeze it with requires_grad_(False)"
            )
    if not parameters:
        raise ConfigError("the model has no parameters that require grad")
    return parameters


def _place(device: str | torch.device, local: Sequence[torch.Tensor]) -> torch.device:
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r} is no device: {error}") from None
    own = local[0].device
    if wanted.type == "cpu":
        return CPU
    if wanted.type != own.type or wanted.index not in (None, own.index):
        raise ConfigError(f"device={device!r} must be 'cpu' or that of the model, {str(own)!r}")
    return own


def _outer_optimizer(make: MakeOptimizer, tensors: list[nn.Parameter]) -> torch.optim.Optimizer:
    try:
        made = make(tensors)
    except Exception as error:
        raise ConfigError(
            f"outer={make!r} raised {type(error).__name__}: {error}; give a function of parameters "
            "such as lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)"
        ) from error
    is_optimizer = isinstance(made, torch.optim.Optimizer)
    if not is_optimizer or _held_by(made) != {id(each) for each in tensors}:
        raise ConfigError(
            f"outer= returned {type(made).__name__}, which is no torch.optim.Optimizer of all "
            "parameters that it is given"
        )
    return made
