"""What ranks that train alone have in common: parameters, and the optimizer that moves them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_map_only

from gradferry import _native
from gradferry.core.agreement import (
    Record,
    error_record,
    gather_records,
    meeting_place,
    odd_one,
    on_all_ranks,
    raise_first_error,
)
from gradferry.core.device import CPU
from gradferry.core.meeting import say_failed, world_ranks
from gradferry.errors import ConfigError, DivergedError, GradferryError, StateError
from gradferry.reduction.newcomers import outline

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

_MAKE_ANEW = "the model must stay as it is; make a new DiLoCo on every rank"


def nesterov(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The outer optimizer of arXiv 2311.08105; on the host in one pass through memory."""
    fused = all(p.device == CPU and p.is_floating_point() for p in parameters)
    return torch.optim.SGD(parameters, lr=0.7, momentum=0.9, nesterov=True, fused=fused or None)


class CommonParameters:
    """Copies of a model's parameters as all ranks have them, in fp32 or better, with an optimizer.

    Attributes:
        names: of the parameters of the model that require grad.
        tensors: the common parameters, in this order: of this rank's shards under FSDP2.
        changes: common minus local, and then their average over ranks: of the shapes of `tensors`,
            and in memory one behind the other, so that a Reducer need not copy them.
        outer: the optimizer of `tensors`.
        device: of all these.

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
        self._model = model
        self._parameters = _trained_by(optimizers, model)
        self.names = list(self._parameters)
        self.device = _place(device, self._local())
        self._layout = self._layout_now()
        # Contiguous: fused optimizers go through memory without a look at strides.
        self.tensors = [
            nn.Parameter(
                now.to(
                    self.device,
                    torch.promote_types(now.dtype, torch.float32),
                    copy=True,
                    memory_format=torch.contiguous_format,
                )
            )
            for now in self._local()
        ]
        self.make_changes()
        self.outer = _outer_optimizer(make_outer, self.tensors)
        self._made = {"type": type(self.outer).__name__, "groups": outline(self.outer)["groups"]}

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

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Those of the model."""
        return list(self._parameters.values())

    def agree(
        self,
        act: Callable[[], Record],
        check: Callable[[list[Record]], None],
        group: dist.ProcessGroup,
        problem: GradferryError | None = None,
    ) -> None:
        """Has `check` look at what `act` returned on every rank of the group. Collective.

        Under FSDP2 each shard has such a group: ranks of one model tell each other what was raised
        there, so that none of them goes on with its shard.

        Args:
            act, check: what they raise is raised on all ranks.
            group: of the ranks that average.
            problem: what this rank is to raise; the others need not wait for it.
        """
        try:
            if problem is not None:
                say_failed(group)  # else who has no problem would wait for this rank
            else:
                check(on_all_ranks(act, group, meeting_place(group, self.device)))
        except GradferryError as error:
            problem = error
        for beside, device in self._shard_groups():
            try:
                record = {} if problem is None else error_record(problem)
                records = gather_records(record, beside, meeting_place(beside, device))
                raise_first_error(records, beside)
            except GradferryError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def _shard_groups(self) -> list[tuple[dist.ProcessGroup, torch.device]]:
        """The groups over which FSDP2 spreads the model, and the device of what this rank has."""
        found: dict[str, tuple[dist.ProcessGroup, torch.device]] = {}
        for parameter, local in zip(self.parameters, self._local(), strict=True):
            mesh = getattr(parameter, "device_mesh", None)
            for group in [] if mesh is None else mesh.get_all_groups():
                found[group.group_name] = group, local.device
        return [found[name] for name in sorted(found)]

    def record(self) -> Record:
        """What must be equal on all ranks beside names and shapes."""
        dtypes = sorted({dtype for _, dtype in self._layout})
        shards: list[Any] = [p for p in self.parameters if _is_shard(p)]
        places = {
            str((p.placements, p.device_mesh.shape, p.device_mesh.get_coordinate())) for p in shards
        }
        return {
            "outer optimizer as it was made": self._made,
            "dtypes": ", ".join(dtypes),
            "shard (group= is of ranks with the same one)": ", ".join(sorted(places)),
        }

    def _local(self) -> list[torch.Tensor]:
        """What this rank has of the model's parameters, which FSDP2 spreads over ranks."""
        parameters: list[Any] = self.parameters
        if any(map(_is_shard, parameters)):
            # Not above: it takes longer to import than all the rest.
            from torch.distributed.fsdp import FSDPModule

            # A module that a forward pass has left whole would go on with what it has gathered.
            for module in self._model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        return [p.to_local() if _is_shard(p) else p.detach() for p in parameters]

    def _layout_now(self) -> list[tuple[tuple[int, ...], str]]:
        return [(tuple(now.shape), str(now.dtype)) for now in self._local()]

    # --- an outer step ---

    @torch.no_grad()
    def measure(self) -> None:
        """Sets `changes` to how far this rank has come.

        Raises:
            StateError: the model has other parameters than before, or a change is not finite.
        """
        self._expect_same_model()
        for start, now, change in zip(self.tensors, self._local(), self.changes, strict=True):
            # The model began with the common parameters as its dtype can hold them.
            began = start.to(now.dtype).to(change.dtype)
            torch.sub(began, now.to(change.device, change.dtype), out=change)
        for name, change in zip(self.names, self.changes, strict=True):
            if not _is_finite(change):
                raise StateError(
                    f"{name!r} has come to NaN or infinity, so that no rank takes this outer step; "
                    "look at the loss of this rank, and go on from a checkpoint"
                )

    def _expect_same_model(self) -> None:
        now = dict(self._model.named_parameters())
        for name, parameter in self._parameters.items():
            if now.get(name) is not parameter:
                what = "replaced" if name in now else "removed"
                raise StateError(f"the parameter {name!r} was {what}; {_MAKE_ANEW}")
        for name, parameter in now.items():
            if parameter.requires_grad and name not in self._parameters:
                raise StateError(f"the parameter {name!r} was added or unfrozen; {_MAKE_ANEW}")
        for name, was, is_now in zip(self.names, self._layout, self._layout_now(), strict=True):
            if was != is_now:
                raise StateError(f"the parameter {name!r} is {is_now}, and was {was}; {_MAKE_ANEW}")

    def apply(self) -> None:
        """Steps the outer optimizer with the averages in `changes`, and moves the model there."""
        for start, change in zip(self.tensors, self.changes, strict=True):
            start.grad = change
        self.outer.step()
        self.outer.zero_grad(set_to_none=True)
        self.show()

    @torch.no_grad()
    def show(self) -> None:
        """Moves the model to the common parameters."""
        for start, now in zip(self.tensors, self._local(), strict=True):
            now.copy_(start)

    def local_copy(self) -> list[torch.Tensor]:
        """Where the model is."""
        return [now.clone() for now in self._local()]

    @torch.no_grad()
    def move_back(self, to: Sequence[torch.Tensor]) -> None:
        """Moves the model to what `local_copy` returned."""
        for now, before in zip(self._local(), to, strict=True):
            now.copy_(before)

    def hashes(self) -> list[int]:
        """A hash of the bits of each common parameter."""
        return _native.parameter_hashes([each.detach() for each in self.tensors])

    def expect_equal(
        self, hashes: Sequence[Sequence[int]], group: dist.ProcessGroup, step: int
    ) -> None:
        """Compares the hashes of all ranks of a group.

        Raises:
            DivergedError: naming the first parameter and rank that differ from most others.
        """
        if (found := odd_one(hashes)) is None:
            return
        odd, usual = found
        rows = zip(self.names, hashes[usual], hashes[odd], strict=False)
        name = next((name for name, one, other in rows if one != other), self.names[0])
        ranks = world_ranks(group)
        raise DivergedError(
            f"the common value of {name!r} of rank {ranks[odd]} differs from that of rank "
            f"{ranks[usual]} at outer step {step}; load the same checkpoint on every rank"
        )

    # --- saved ---

    def saved(self) -> dict[str, Any]:
        """Copies, by name, and of what the outer optimizer keeps."""
        return {
            "common": {
                name: start.detach().clone()
                for name, start in zip(self.names, self.tensors, strict=True)
            },
            "outer_type": type(self.outer).__name__,
            "outer": _copied(self.outer.state_dict()),
        }

    @torch.no_grad()
    def load(self, saved: Mapping[str, Any], also: Callable[[], None]) -> None:
        """Restores what `saved` returned, and what `also` does, or nothing.

        Raises:
            StateError: it is of another model, or damaged; or what `also` raises.
        """
        common = saved.get("common")
        if not isinstance(common, Mapping) or list(common) != self.names:
            raise StateError(
                "the saved state has common parameters of another model; load it with the model it "
                "was saved with"
            )
        for name, start in zip(self.names, self.tensors, strict=True):
            value = common[name]
            fits = isinstance(value, torch.Tensor) and value.dtype == start.dtype
            if not fits or value.shape != start.shape or not value.isfinite().all():
                raise StateError(
                    f"the saved common value of {name!r} is no finite tensor of shape "
                    f"{tuple(start.shape)} and {start.dtype}, as this model needs; it was damaged, "
                    "or is of another model"
                )
        before = _copied(self.outer.state_dict())
        try:
            try:
                if saved["outer_type"] != type(self.outer).__name__:
                    raise ValueError(f"{saved['outer_type']}")
                # An optimizer goes on in the tensors that it loads, where they fit as they are.
                self.outer.load_state_dict(_copied(saved["outer"]))
                for tensor, kept in self.outer.state.items():
                    for key, value in kept.items():
                        if isinstance(value, torch.Tensor) and not (
                            value.shape in (tensor.shape, ()) and value.isfinite().all()
                        ):
                            raise ValueError(f"its {key} is not finite, or of another shape")
            except (LookupError, RuntimeError, ValueError, TypeError, AttributeError) as error:
                raise StateError(
                    f"the saved outer optimizer is another one than this: {error}; give outer= as "
                    "it was"
                ) from error
            also()
        except BaseException:
            self.outer.load_state_dict(before)
            raise
        for name, start in zip(self.names, self.tensors, strict=True):
            start.copy_(common[name])


def _copied(state: Any) -> Any:
    """The state of an optimizer with contiguous copies of its tensors, on the same devices."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    return tree_map_only(torch.Tensor, copy, state)


def _is_finite(tensor: torch.Tensor) -> bool:
    """Whether all elements are finite, in one pass and without a boolean tensor."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return not real.numel() or bool(torch.stack(real.aminmax()).isfinite().all())


def _is_shard(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "to_local")


# --- arguments -----------------------------------------------------------------------------------


def checked_optimizers(given: object) -> list[torch.optim.Optimizer]:
    """One optimizer, or a list of them.

    Raises:
        ConfigError: it is neither.
    """
    optimizers: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise ConfigError(
                f"optimizer={type(each).__name__} is no torch.optim.Optimizer, nor a list of them"
            )
    if not optimizers:
        raise ConfigError("optimizer=[] has no optimizer")
    if len(set(map(id, optimizers))) != len(optimizers):
        raise ConfigError("optimizer= has one optimizer twice")
    return optimizers


def checked_period(sync_every: int) -> int:
    """Inner steps of a period. Raises ConfigError."""
    if not isinstance(sync_every, int) or isinstance(sync_every, bool) or sync_every < 1:
        raise ConfigError(f"sync_every={sync_every!r} must be a number of steps, 1 or more")
    return sync_every


def checked_decay(decay: float) -> float:
    """By what a residual is multiplied before an average. Raises ConfigError."""
    is_number = isinstance(decay, float | int) and not isinstance(decay, bool)
    if not is_number or not 0 < decay <= 1:
        raise ConfigError(f"residual_decay={decay!r} must be above 0 and at most 1")
    return float(decay)


def refuse_others(
    optimizers: Iterable[torch.optim.Optimizer],
) -> Callable[[torch.optim.Optimizer], None]:
    """A function for `call_after_steps` that raises StateError for any other optimizer."""
    known = weakref.WeakSet(optimizers)

    def refuse(optimizer: torch.optim.Optimizer) -> None:
        if optimizer not in known:
            raise StateError(
                f"{type(optimizer).__name__} has stepped on parameters of the model, and DiLoCo "
                "counts the steps of other optimizers; give all that train the model, in a list"
            )

    return refuse


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
        held = {id(p) for group in each.param_groups for p in group["params"]}
        if not held <= own:
            raise ConfigError(
                f"{type(each).__name__} has parameters that the model lacks; make it of "
                "model.parameters(), after the model was wrapped"
            )
        trained |= held
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


def _outer_optimizer(make: MakeOptimizer, common: list[nn.Parameter]) -> torch.optim.Optimizer:
    if not callable(make):
        raise ConfigError(
            f"outer={make!r} must be a function of parameters that returns an optimizer, such as "
            "lambda p: torch.optim.SGD(p, lr=0.7, momentum=0.9, nesterov=True)"
        )
    try:
        made = make(common)
    except Exception as error:
        raise ConfigError(f"outer= raised {type(error).__name__}: {error}") from error
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"outer returned {type(made).__name__}, which is no torch.optim.Optimizer"
        )
    held = {id(p) for group in made.param_groups for p in group["params"]}
    if held != {id(each) for each in common}:
        raise ConfigError("outer must return an optimizer of all parameters that it is given")
    return made
