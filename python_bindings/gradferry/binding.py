"""Ties a configuration to one DistributedDataParallel: checks, agreement, lanes, engine."""

from __future__ import annotations

import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
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
    record_hash,
)
from gradferry.config import Config
from gradferry.errors import ConfigError, StateError
from gradferry.parameters import ParameterLayout, describe_parameters, reduced_parameters

LANES = ("scatter", "gather", "commit")
# One thread posts everything in one order, so one lane will do.
STAGED_LANES = ("staged",)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Binding:
    """A configuration at work on one model.

    Attributes:
        config: as agreed by all ranks.
        parameters: as agreed by all ranks.
        rank, world_size: in the process group of DDP.
        config_hash, layout_hash: in every message header.
        tensors: the parameters themselves, for `check_every`.
        saved_layout_hash: in checkpoints; does not depend on the number of ranks.
        engine: None when every bucket passes through.
        hook: what DDP's hooks call.
        group_name: DDP's process group.
        index: of each parameter that DDP reduces, in `parameters`.
    """

    config: Config
    parameters: tuple[ParameterLayout, ...]
    rank: int
    world_size: int
    config_hash: int
    layout_hash: int
    saved_layout_hash: int
    engine: _native.BucketEngine | None
    hook: _native.BucketHook
    group_name: str
    index: WeakIdKeyDictionary

    def add_to_residual(self, parameter: torch.Tensor, values: torch.Tensor, factor: float) -> None:
        """Adds to a parameter's worker residual, which carries its momentum.

        Args:
            parameter: of the model.
            values: of its shape and on its device, in units of gradients that are not scaled.
            factor: what values are multiplied with.

        Raises:
            StateError: in the middle of a step, or the engine failed before.
        """
        if self.engine is None:
            return
        # In the order of the parameter's memory, as its gradient lies in a bucket.
        laid_out = torch.empty_like(parameter, memory_format=torch.preserve_format).copy_(values)
        real = torch.view_as_real(laid_out) if laid_out.is_complex() else laid_out
        flat = real.as_strided((real.numel(),), (1,))
        self.engine.add_to_worker_residual(self.index[parameter], flat, factor)


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
        PeerError: a rank failed to set up its connections or memory.
    """
    group = _process_group(ddp)
    place = meeting_place(group, _device(ddp))
    config: Config | None = None
    parameters: list[ParameterLayout] = []
    try:
        config = make_config()
        _check_hookable(ddp)
        _check_options(ddp, config)
        home = _device(ddp)
        parameters = describe_parameters(ddp, config, exchanges=_exchanges(home, group))
        if _streams(home, group):
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
    raise_first_error(gather_records(outcome, group, place))
    assert binding is not None
    ddp._update_process_group = _refuse_new_group  # type: ignore[method-assign]
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
    group = ddp.process_group
    if not dist.is_initialized() or group not in dist.distributed_c10d._world.pg_map:
        raise StateError(
            "the process group of this DistributedDataParallel was destroyed; build a new one"
        )
    return group


def _device(ddp: DistributedDataParallel) -> torch.device:
    # DDP keeps all parameters of a bucket on one device; describe_parameters() sees to the rest.
    return next((p.device for _, p in reduced_parameters(ddp)), _CPU)


def _exchanges(place: torch.device, group: dist.ProcessGroup) -> bool:
    alone = device.EXCHANGE_WHEN_ALONE and place.type != "cpu"
    return dist.get_world_size(group) > 1 or alone


def _streams(place: torch.device, group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives for the device go to its streams."""
    return place.type != "cpu" and not device.is_staged(group, place)


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
    scale = _loss_scale(config, place)
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


def _loss_scale(config: Config, place: torch.device) -> torch.Tensor | None:
    """The tensor in which the GradScaler keeps its scale, for as long as it lives."""
    scaler = config.grad_scaler
    if scaler is None:
        return None
    if scaler._scale is None:  # it makes the tensor when it is first used
        scaler._lazy_init_scale_growth_tracker(place)
    return scaler._scale


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
        "codec": str(config.codec),
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
        "parameters": [
            {
                "name": p.name,
                "shape": list(p.shape),
                "strides": list(p.strides),
                "dtype": str(p.dtype),
                "codec": str(p.codec),
                "residuals": list(p.residuals),
            }
            for p in parameters
        ],
    }


def _start(
    ddp: DistributedDataParallel,
    config: Config,
    parameters: list[ParameterLayout],
    record: Record,
    group: dist.ProcessGroup,
    nonce: str,
) -> Binding:
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    layout_hash = record_hash(record["parameters"])
    config_hash = record_hash({key: record[key] for key in record if key != "parameters"})
    tensors: list[torch.Tensor] = [parameter for _, parameter in reduced_parameters(ddp)]
    engine = None
    if not config.passes_through:
        engine = start_engine(
            config, parameters, group, nonce, config_hash, layout_hash, tensors, _device(ddp)
        )
    hook = _native.BucketHook(
        engine=engine,
        parameters=tensors,
        group_name=group.group_name,
    )
    return Binding(
        config=config,
        parameters=tuple(parameters),
        rank=rank,
        world_size=world_size,
        config_hash=config_hash,
        layout_hash=layout_hash,
        saved_layout_hash=record_hash(
            [{k: p[k] for k in p if k != "residuals"} for p in record["parameters"]]
        ),
        engine=engine,
        hook=hook,
        group_name=group.group_name,
        index=WeakIdKeyDictionary({tensor: index for index, tensor in enumerate(tensors)}),
    )


def start_engine(
    config: Config,
    parameters: Sequence[ParameterLayout],
    group: dist.ProcessGroup,
    nonce: str,
    config_hash: int = 0,
    layout_hash: int = 0,
    tensors: Sequence[torch.Tensor] = (),
    place: torch.device = _CPU,
) -> _native.BucketEngine:
    """An engine on lanes of its own. Collective; the arguments are equal on all ranks.

    Args:
        nonce: unlike that of any other engine of the group.
        config_hash, layout_hash: in every message header.
        tensors: the parameters themselves, for `check_every`.
        place: where the gradients are.
    """
    exchanges, streams = _exchanges(place, group), _streams(place, group)
    lanes: list[ProcessGroupGloo] = []
    if exchanges and not streams:
        # First: it is collective, and whoever failed before would keep the others waiting.
        lanes = _make_lanes(group, nonce, LANES if place.type == "cpu" else STAGED_LANES, place)
    options = _native.EngineOptions(
        parameters=[p.native() for p in parameters],
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        config_hash=config_hash,
        layout_hash=layout_hash,
        seed=config.seed,
        warmup_steps=config.warmup_steps,
        momentum=config.momentum,
        raise_nonfinite=config.nonfinite == "raise",
        exact_skip=config.exact_skip,
        loss_scale=_loss_scale(config, place),
        check_every=config.check_every,
        chunk_bytes=config.chunk_bytes,
    )
    if place.type == "cpu":
        return _native.Engine(options, tensors=list(tensors), lanes=lanes)
    return _native.DeviceEngine(
        options,
        device=place,
        tensors=list(tensors),
        lane=lanes[0] if lanes else None,
        group_name=group.group_name if exchanges and streams else None,
    )


def _make_lanes(
    group: dist.ProcessGroup,
    nonce: str,
    names: tuple[str, ...] = LANES,
    place: torch.device = _CPU,
) -> list[ProcessGroupGloo]:
    # Built directly, never by new_group(): its names clash for overlapping groups and after a
    # group was destroyed and made again.
    store = dist.distributed_c10d._world.pg_map[group][1]
    timeout = group._get_backend(place).options._timeout
    return [
        ProcessGroupGloo(
            PrefixStore(f"gradferry/{nonce}/{lane}", store),
            dist.get_rank(group),
            dist.get_world_size(group),
            timeout,
        )
        for lane in names
    ]
