"""Ties a configuration to one DistributedDataParallel: checks, agreement, lanes, engine."""

from __future__ import annotations

import functools
import uuid
import warnings
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakIdKeyDictionary

from gradferry import _native, device
from gradferry._build_info import GRADFERRY_VERSION
from gradferry.agreement import (
    Record,
    error_record,
    gather_records,
    meeting_place,
    raise_first_error,
    raise_first_mismatch,
)
from gradferry.choice import Chooser
from gradferry.codec_spec import AUTO
from gradferry.config import Config
from gradferry.engine import CPU, exchanges, loss_scale, streams
from gradferry.errors import ConfigError, StateError
from gradferry.join import JoinHook
from gradferry.meeting import meet, patience
from gradferry.momentum_handover import MomentumHandover
from gradferry.parameters import (
    ParameterLayout,
    check_parameters,
    describe_parameters,
    reduced_parameters,
)
from gradferry.running import Running, note_optimizer_steps, parameter_records


@dataclass(frozen=True)
class Binding:
    """What is at work on one model, and the hook that DDP calls.

    Attributes:
        running: configuration, parameters and engine; with "auto" they change.
        hook: what DDP's hooks call.
        chooser: of the codec; None unless it is "auto" and there is something to choose.
        model: never held: DDP holds its hook, and so this.
        handover: of momentum; None unless the hook has it after warm-up steps and other ranks, too.
    """

    running: Running
    hook: _native.BucketHook
    chooser: Chooser | None
    model: weakref.ref[DistributedDataParallel]
    handover: MomentumHandover | None

    @property
    def config(self) -> Config:
        """As agreed by all ranks."""
        return self.running.config

    @property
    def parameters(self) -> tuple[ParameterLayout, ...]:
        """As agreed by all ranks."""
        return self.running.parameters

    @property
    def engine(self) -> _native.BucketEngine | None:
        """None when every bucket passes through."""
        return self.running.engine

    @property
    def rank(self) -> int:
        """In the process group of DDP."""
        return self.running.rank

    @property
    def world_size(self) -> int:
        """Of the process group of DDP."""
        return self.running.world_size

    @property
    def group_name(self) -> str:
        """Of DDP's process group."""
        return self.running.group_name

    @property
    def index(self) -> WeakIdKeyDictionary:
        """Of each parameter that DDP reduces, in `parameters`."""
        return self.running.index

    def expect_registered(self) -> None:
        """For a hook that DDP calls by the standard signature.

        Raises:
            StateError: the model has no such hook, so another one has called.
        """
        ddp = self.model()
        if ddp is None or not ddp._comm_hooks:
            self.hook.fail(
                "this HookState is bound to another DistributedDataParallel than the one that "
                "calls it; give each its own: "
                "ddp.register_comm_hook(gradferry.HookState(codec, ddp), gradferry.hook)"
            )

    def add_momentum(self, parameter: torch.Tensor, momentum: torch.Tensor, factor: float) -> None:
        """Hands a parameter's momentum to the hook, which delivers it over the next steps.

        Args:
            parameter: of the model.
            momentum: of its shape and on its device, in units of gradients that are not scaled.
            factor: what it has become by the next step.

        Raises:
            StateError: in the middle of a step, or the engine failed before.
        """
        if self.engine is None:
            return
        number = self.index[parameter]
        layout = self.running.parameters[number]
        laid_out = torch.empty_strided(
            layout.shape, layout.strides, dtype=parameter.dtype, device=parameter.device
        ).copy_(momentum)
        real = torch.view_as_real(laid_out) if laid_out.is_complex() else laid_out
        flat = real.as_strided((real.numel(),), (1,))
        share = self.config.momentum_share(layout.codec) if self.running.exchanges else 1.0
        self.engine.add_to_worker_residual(number, flat, factor * share)
        if self.handover is not None:
            self.handover.hand_over(number)


def bind(
    ddp: DistributedDataParallel, make_config: Callable[[], Config], *, native: bool
) -> Binding:
    """Agrees with all ranks of DDP's group and starts the engine. Collective.

    Args:
        ddp: has no communication hook yet.
        make_config: checks the user's arguments; what it raises is raised on all ranks.
        native: also registers the native hook.

    Raises:
        ConfigError, StateError: this or another rank cannot; the same text on every rank.
        RankMismatchError: the ranks differ; the same text on every rank.
        PeerError: a rank did not come, or failed to set up its connections or memory. Nothing was
            changed: all ranks can try again.
    """
    group = _process_group(ddp)
    place = meeting_place(group, _device(ddp))
    longest = patience(group, place)
    meet(group, longest, "come to attach")
    config: Config | None = None
    parameters: list[ParameterLayout] = []
    try:
        config = make_config()
        _check_hookable(ddp)
        check_parameters(ddp)
        _check_memory_formats(ddp)
        _check_options(ddp, config)
        home = _device(ddp)
        parameters = describe_parameters(ddp, config, exchanges=exchanges(home, group))
        if streams(home, group):
            config = replace(config, chunk_bytes=device.STREAM_CHUNK_BYTES)
        record = _record(ddp, config, parameters)
    except Exception as error:
        record = error_record(error)
    nonce = uuid.uuid4().hex
    envelopes = gather_records({"nonce": nonce, "record": record}, group, place)
    records: list[Record] = [envelope["record"] for envelope in envelopes]
    raise_first_error(records)
    raise_first_mismatch(records)
    assert config is not None  # otherwise raise_first_error() has raised this rank's error

    binding: Binding | None = None
    try:
        binding = _start(ddp, config, parameters, record, group, str(envelopes[0]["nonce"]))
        outcome: Record = {}
    except Exception as error:
        outcome = error_record(error)
    try:
        # Who could not connect must not keep the others, who then could, from knowing.
        meet(group, longest, "connect")
        raise_first_error(gather_records(outcome, group, place))
    except BaseException:
        binding = None  # else the traceback would keep its connections
        raise
    assert binding is not None
    _guard(ddp)
    if (
        ddp.find_unused_parameters
        and _device(ddp).type == "cpu"
        and binding.running.exchanges
        and not config.passes_through
    ):
        binding.hook.watch_use(binding.running.tensors(), ddp.reducer)
    if config.exact_skip and config.grad_scaler is None:
        note_optimizer_steps(binding.running)
    if native:
        # Only now: DDP takes a hook for life, so no rank may have one when another has failed.
        binding.hook.attach(ddp.reducer)
    return binding


def _process_group(ddp: DistributedDataParallel) -> dist.ProcessGroup:
    # Without a group there is nobody to agree with: these raise on the spot.
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(
            f"ddp must be a DistributedDataParallel, not {type(ddp).__name__}; wrap the model first"
        )
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


def _device(ddp: DistributedDataParallel) -> torch.device:
    # DDP keeps all parameters of a bucket on one device; describe_parameters() sees to the rest.
    return next((p.device for _, p in reduced_parameters(ddp)), CPU)


def _guard(ddp: DistributedDataParallel) -> None:
    """Against what would lose the hook or mislead it, as long as the model exists."""
    ddp._update_process_group = _refuse_new_group  # type: ignore[method-assign]
    ddp.join_hook = JoinHook(ddp)  # type: ignore[method-assign]
    # What copy and pickle ask for; DDP rebuilds its reducer from it, which then has no hook.
    ddp.__getstate__ = functools.partial(  # type: ignore[method-assign]
        _state_without_hook, weakref.ref(ddp)
    )


def _state_without_hook(model: weakref.ref[DistributedDataParallel]) -> dict[str, Any]:
    ddp = model()
    assert ddp is not None  # it is being asked
    state: dict[str, Any] = type(ddp).__getstate__(ddp)  # type: ignore[no-untyped-call]
    warnings.warn(
        "a copied or pickled DistributedDataParallel has no communication hook and would train "
        "uncompressed: attach again",
        stacklevel=3,
    )
    guards = ("_update_process_group", "join_hook", "__getstate__")
    return {**{key: state[key] for key in state if key not in guards}, "_comm_hooks": []}


def _refuse_new_group(*_: object) -> None:
    raise StateError(
        "gradferry averages over the process group it was attached with; build a new "
        "DistributedDataParallel over the new group and attach again"
    )


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


def _check_memory_formats(ddp: DistributedDataParallel) -> None:
    reordered = _native.reordered_since_buckets_were_made(ddp.reducer)
    for name, parameter in reduced_parameters(ddp):
        if any(parameter is other for other in reordered):
            raise ConfigError(
                f"the memory format of parameter {name!r} has changed since this "
                "DistributedDataParallel was built, which would mix up its gradient (without a "
                "hook, too); build a new one after model.to(memory_format=...)"
            )


def _check_options(ddp: DistributedDataParallel, config: Config) -> None:
    if config.momentum and ddp.find_unused_parameters:
        raise ConfigError(
            f"momentum={config.momentum} does not go with find_unused_parameters=True: DDP drops "
            "the momentum of parameters that no rank used; make every parameter take part, or "
            "leave out momentum"
        )
    if config.needs_every_bucket:
        for name, module in ddp.module.named_modules():
            if getattr(module, "sparse", False) and isinstance(
                module, torch.nn.Embedding | torch.nn.EmbeddingBag
            ):
                raise ConfigError(
                    f"momentum= and exact_skip= cannot handle sparse gradients, which {name!r} "
                    "has; build it with sparse=False, or leave them out"
                )
    place = _device(ddp)
    if (
        place.type != "cpu"
        and ddp.find_unused_parameters
        and not ddp.gradient_as_bucket_view
        and not config.passes_through
    ):
        raise ConfigError(
            f"find_unused_parameters=True on {place.type!r} needs gradient_as_bucket_view=True in "
            "this version: without it DDP hands over the .grad of an earlier pass for a parameter "
            "that no rank used, and drops what comes back; build the DistributedDataParallel with "
            "gradient_as_bucket_view=True"
        )
    if place.type != "cpu" and config.chooses:
        raise ConfigError(
            f"codec='auto' cannot measure gradients on {place.type!r} in this version; name a "
            "codec, and see what `gradferry plan` says"
        )
    scale = loss_scale(config, place)
    if scale is not None and scale.device != place:
        raise ConfigError(
            f"the scale of grad_scaler is on {scale.device}, the model on {place}; make a "
            f"torch.amp.GradScaler({place.type!r})"
        )
    if config.momentum and config.disabled:
        warnings.warn(
            f"GRADFERRY_DISABLE=1: gradients arrive without the momentum that momentum="
            f"{config.momentum} asks for",
            stacklevel=2,
        )


def _record(
    ddp: DistributedDataParallel, config: Config, parameters: list[ParameterLayout]
) -> Record:
    return {
        # These decide how buckets are cut, and so which messages travel.
        "find_unused_parameters": ddp.find_unused_parameters,
        "static_graph": ddp.static_graph,
        "bucket_cap_mb": ddp.bucket_bytes_cap / 2**20,
        "gradferry version": GRADFERRY_VERSION,
        "wire version": _native.WIRE_VERSION,
        "GRADFERRY_DISABLE": config.disabled,
        "codec": AUTO if config.chooses else str(config.codec),
        "rules": [{**asdict(rule), "codec": str(rule.codec)} for rule in config.rules],
        "error_feedback": config.error_feedback,
        "momentum": config.momentum,
        "warmup_steps": config.warmup_steps,
        "grad_scaler": config.grad_scaler is not None,
        "nonfinite": config.nonfinite,
        "exact_skip": config.exact_skip,
        "check_every": config.check_every,
        "seed": config.seed,
        "chunk_bytes": config.chunk_bytes,
        "device": _device(ddp).type,
        "parameters": parameter_records(tuple(parameters)),
    }


def _start(
    ddp: DistributedDataParallel,
    config: Config,
    parameters: list[ParameterLayout],
    record: Record,
    group: dist.ProcessGroup,
    nonce: str,
) -> Binding:
    tensors: list[torch.Tensor] = [parameter for _, parameter in reduced_parameters(ddp)]
    running = Running(
        config=config,
        parameters=tuple(parameters),
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        group_name=group.group_name,
        index=WeakIdKeyDictionary({tensor: index for index, tensor in enumerate(tensors)}),
        exchanges=exchanges(_device(ddp), group),
        agreed={key: record[key] for key in record if key != "parameters"},
    )
    running.start(group, nonce, _device(ddp))
    hook = _native.BucketHook(
        engine=running.engine, parameters=tensors, group_name=running.group_name
    )
    chooser = None
    if config.chooses and not config.disabled and running.world_size > 1:
        chooser = Chooser(running)
        chooser.start(hook)
    handover = None
    if config.momentum and config.warmup_steps and running.engine and running.world_size > 1:
        handover = MomentumHandover(running, meeting_place(group, _device(ddp)))
        handover.start(hook)
    return Binding(running, hook, chooser, weakref.ref(ddp), handover)
