"""Access to a DistributedDataParallel. The only file that reads its internals."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradferry import _native
from gradferry.core.agreement import Record
from gradferry.core.config import Config
from gradferry.core.device import CPU
from gradferry.core.names import first_of, plain_name
from gradferry.core.warn import warn
from gradferry.errors import ConfigError, StateError

Named = list[tuple[str, torch.nn.Parameter]]

# What torch.compile and Lightning Fabric call the module inside.
_INSIDE = ("_orig_mod", "_forward_module")


class Model:
    """A user's DistributedDataParallel, only while a hook is attached to it.

    Do not keep this object: DDP holds its hook, so a strong reference from the hook to the model
    would keep the model alive.

    Attributes:
        ddp: the DistributedDataParallel itself, without wrappers.
        group: the process group that it averages over.
        named: names and parameters that it reduces, each shared parameter once.
        device: of the gradients. DDP keeps all parameters of a bucket on one device;
            `describe_parameters` checks that all buckets are on the same one.
        apart: names of parameters that train although DDP does not reduce them; by `check`.
        record: options that determine the buckets, and so the messages; must be equal on all ranks.
        reference: a weak reference to the model.

    Raises:
        ConfigError, StateError: `ddp` has no usable process group. Raised on this rank alone,
            because without a group it cannot tell the others.
    """

    def __init__(self, ddp: nn.Module) -> None:
        self.ddp = ddp = distributed_in(ddp)
        self.group = _process_group(ddp)
        self.named: Named = reduced_parameters(ddp)
        self.apart: frozenset[str] = frozenset()
        self.device = self.named[0][1].device if self.named else CPU
        self.record: Record = {
            "find_unused_parameters": ddp.find_unused_parameters,
            "static_graph": ddp.static_graph,
            "skip_all_reduce_unused_params": leaves_out_buckets(ddp),
            "bucket_cap_mb": ddp.bucket_bytes_cap / 2**20,
        }
        self.reference = weakref.ref(ddp)

    def check(self, config: Config) -> None:
        """Checks that the hook works on this model, and warns of problems outside the hook.

        Raises:
            ConfigError: this model cannot have a hook, or not with this configuration.
        """
        _check_hookable(self.ddp)
        self.apart = _check_parameters(self.ddp, self.named)
        _check_buckets(self.ddp, self.named)
        _check_options(self.ddp, config, self.device)


def reduced_parameters(ddp: DistributedDataParallel) -> list[tuple[str, nn.Parameter]]:
    """Names and parameters that DDP reduces, each shared parameter once.

    DDP fixed them when it was built; parameters frozen or unfrozen since then do not matter.
    """
    reduced = {id(parameter) for parameter in _native.reducer_parameters(ddp.reducer)}
    named = ddp.module.named_parameters()
    return [(name, parameter) for name, parameter in named if id(parameter) in reduced]


def has_python_hook(ddp: DistributedDataParallel) -> bool:
    """Whether a hook of the standard signature is registered."""
    return bool(ddp._comm_hooks)


def leaves_out_buckets(ddp: DistributedDataParallel) -> bool:
    """Whether DDP hands over no bucket whose parameters no rank used."""
    return getattr(ddp, "skip_all_reduce_unused_params", False)  # torch 2.11 may not have it


def forward_was_local(ddp: DistributedDataParallel) -> bool:
    """Whether the last forward pass was under ``no_sync()``, or without gradients."""
    return not ddp.require_forward_param_sync


def divides_by_joined_ranks(ddp: DistributedDataParallel) -> bool:
    """Whether ``join(divide_by_initial_world_size=False)`` was called."""
    return not getattr(ddp, "_divide_by_initial_world_size", True)


def trained_parameters(
    ddp: DistributedDataParallel, apart: Collection[str] = ()
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Plain names and parameters of the model now that require grad, but for those in `apart` and
    those that DDP was told to ignore.
    """
    for name, parameter in ddp.module.named_parameters():
        if not parameter.requires_grad or name in ddp.parameters_to_ignore:
            continue
        if (plain := plain_name(name)) not in apart:
            yield plain, parameter


def unwrapped(model: Any) -> Any:
    """What torch.compile or Lightning Fabric have wrapped, in whatever order; else the model."""
    while isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel):
        inside = [module for name in _INSIDE if (module := model._modules.get(name)) is not None]
        if not inside:
            break
        model = inside[0]
    return model


def distributed_in(model: Any) -> DistributedDataParallel:
    """The DistributedDataParallel that a user's `model` is or wraps. Raises ConfigError without."""
    inner = unwrapped(model)
    if not isinstance(inner, DistributedDataParallel):
        raise ConfigError(
            f"ddp must be a DistributedDataParallel, not {type(inner).__name__}; wrap the model "
            "first"
        )
    return inner


def _process_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    if not hasattr(ddp, "reducer"):
        raise ConfigError(
            "this DistributedDataParallel delays the all-reduce of all parameters "
            "(delay_all_reduce_named_params) and calls no communication hook; build it without"
        )
    group = ddp.process_group
    if not dist.is_initialized() or group not in dist.distributed_c10d._world.pg_map:
        raise StateError(
            "the process group of this DistributedDataParallel was destroyed; build a new one"
        )
    return group


def _check_hookable(ddp: DistributedDataParallel) -> None:
    logging_data: dict[str, Any] = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    hook_name = logging_data.get("comm_hook", "")
    if hook_name:
        raise ConfigError(
            f"this DistributedDataParallel already has a communication hook ({hook_name}); DDP "
            "takes one for life: wrap the model in a new DistributedDataParallel"
        )
    if ddp.mixed_precision is not None:
        raise ConfigError(
            "DistributedDataParallel with mixed_precision= uses the communication hook itself; "
            "use torch.autocast instead"
        )
    if ddp._use_python_reducer:
        raise ConfigError(
            "DistributedDataParallel runs with the Python reducer, which has no communication "
            "hooks; set torch._dynamo.config.optimize_ddp to another value"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp._module_parameters):
        raise ConfigError(
            "an optimizer runs inside backward and would see gradients before they are averaged; "
            "step the optimizer after backward"
        )


def _check_parameters(ddp: DistributedDataParallel, named: Named) -> frozenset[str]:
    """Compares the parameters that DDP reduces with those that the model has now. Returns the names
    of others that train, after a warning.
    """
    reduced = {id(parameter) for _, parameter in named}
    for parameter in _native.reducer_parameters(ddp.reducer):
        if id(parameter) not in reduced:
            raise ConfigError(
                f"DistributedDataParallel reduces a parameter of shape {tuple(parameter.shape)} "
                "that the model no longer has; wrap the model after the last change to its "
                "parameters"
            )
    apart = [name for name, parameter in trained_parameters(ddp) if id(parameter) not in reduced]
    if apart:
        warn(
            "DistributedDataParallel does not reduce the gradients of "
            f"{first_of(apart)}, frozen or not there yet when it was built: they "
            "will differ from rank to rank; wrap the model after the last change to its parameters"
        )
    return frozenset(apart)


def _check_buckets(ddp: DistributedDataParallel, named: Named) -> None:
    """Compares where and how parameters lie with what they did when DDP made its buckets."""
    moved = {id(each) for each in _native.moved_since_buckets_were_made(ddp.reducer)}
    reordered = {id(each) for each in _native.reordered_since_buckets_were_made(ddp.reducer)}
    for name, parameter in named:
        if id(parameter) in moved:
            raise ConfigError(
                f"parameter {name!r} has moved to {parameter.device} since this "
                "DistributedDataParallel was built, which still expects its gradient where it was: "
                "move the whole model first, then wrap it"
            )
        if id(parameter) in reordered:
            raise ConfigError(
                f"the memory format of parameter {name!r} has changed since this "
                "DistributedDataParallel was built, which would mix up its gradient (without a "
                "hook, too); build a new one after model.to(memory_format=...)"
            )


def _check_options(ddp: DistributedDataParallel, config: Config, device: torch.device) -> None:
    if config.momentum and ddp.find_unused_parameters:
        raise ConfigError(
            f"momentum={config.momentum} does not go with find_unused_parameters=True: DDP drops "
            "the momentum of parameters that no rank used; make every parameter take part, or "
            "leave out momentum"
        )
    on_device = device.type != "cpu" and not config.passes_through
    if on_device and ddp.find_unused_parameters and not ddp.gradient_as_bucket_view:
        raise ConfigError(
            f"find_unused_parameters=True on {device.type!r} needs gradient_as_bucket_view=True in "
            "this version: without it DDP hands over the .grad of an earlier pass for a parameter "
            "that no rank used, and drops what comes back; build the DistributedDataParallel with "
            "gradient_as_bucket_view=True"
        )
