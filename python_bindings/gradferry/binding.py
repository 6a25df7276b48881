"""Ties a configuration to one DistributedDataParallel: checks, agreement, lanes, engine."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo
from torch.nn.parallel import DistributedDataParallel

from gradferry import _native, device
from gradferry._build_info import GRADFERRY_VERSION
from gradferry.agreement import (
    Record,
    error_record,
    gather_records,
    raise_first_error,
    raise_first_mismatch,
    record_hash,
)
from gradferry.config import Config
from gradferry.errors import ConfigError, StateError
from gradferry.parameters import ParameterLayout, describe_parameters, reduced_parameters

LANES = ("scatter", "gather", "commit")
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Binding:
    """A configuration at work on one model.

    Attributes:
        config: as agreed by all ranks.
        parameters: as agreed by all ranks.
        rank, world_size: in the process group of DDP.
        config_hash, layout_hash: in every message header.
        engine: None when every bucket passes through.
        hook: what DDP's hooks call.
        group_name: DDP's process group.
    """

    config: Config
    parameters: tuple[ParameterLayout, ...]
    rank: int
    world_size: int
    config_hash: int
    layout_hash: int
    engine: _native.BucketEngine | None
    hook: _native.BucketHook
    group_name: str


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
    meeting_place = _meeting_place(ddp, group)
    config: Config | None = None
    parameters: list[ParameterLayout] = []
    try:
        config = make_config()
        _check_hookable(ddp)
        parameters = describe_parameters(ddp, config, exchanges=_exchanges(ddp, group))
        if _streams(ddp, group):
            config = replace(config, chunk_bytes=device.STREAM_CHUNK_BYTES)
        record = _record(ddp, config, parameters)
    except Exception as error:
        record = error_record(error)
    nonce = uuid.uuid4().hex
    envelopes = gather_records({"nonce": nonce, "record": record}, group, meeting_place)
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
    raise_first_error(gather_records(outcome, group, meeting_place))
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


def _meeting_place(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> torch.device:
    """A device on which the ranks can agree: the CPU where the group has a backend for it."""
    types = {kind.type for kind in group._device_types}
    if "cpu" in types:
        return _CPU
    place = _device(ddp)
    if place.type not in types:
        raise ConfigError(
            f"the process group has no backend for tensors on {place.type!r}, only "
            f"{dist.get_backend(group)}; start it with init_process_group('cpu:gloo,cuda:nccl'), "
            "or 'gloo'"
        )
    return place


def _exchanges(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> bool:
    alone = device.EXCHANGE_WHEN_ALONE and _device(ddp).type != "cpu"
    return dist.get_world_size(group) > 1 or alone


def _streams(ddp: DistributedDataParallel, group: dist.ProcessGroup) -> bool:
    """Whether the group's collectives go to streams of the parameters' device."""
    place = _device(ddp)
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
        "warmup_steps": config.warmup_steps,
        "nonfinite": config.nonfinite,
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
    engine = None
    if not config.passes_through:
        options = _native.EngineOptions(
            parameters=[p.native() for p in parameters],
            rank=rank,
            world_size=world_size,
            config_hash=config_hash,
            layout_hash=layout_hash,
            seed=config.seed,
            warmup_steps=config.warmup_steps,
            raise_nonfinite=config.nonfinite == "raise",
            chunk_bytes=config.chunk_bytes,
        )
        engine = _start_engine(ddp, options, group, nonce)
    hook = _native.BucketHook(
        engine=engine,
        parameters=[parameter for _, parameter in reduced_parameters(ddp)],
        group_name=group.group_name,
    )
    return Binding(
        config=config,
        parameters=tuple(parameters),
        rank=rank,
        world_size=world_size,
        config_hash=config_hash,
        layout_hash=layout_hash,
        engine=engine,
        hook=hook,
        group_name=group.group_name,
    )


def _start_engine(
    ddp: DistributedDataParallel,
    options: _native.EngineOptions,
    group: dist.ProcessGroup,
    nonce: str,
) -> _native.BucketEngine:
    # Lanes first: they are collective, and whoever failed before would keep the others waiting.
    place = _device(ddp)
    exchanges = _exchanges(ddp, group)
    if place.type == "cpu":
        lanes = _make_lanes(group, nonce) if exchanges else []
        return _native.Engine(options, lanes=lanes)
    staged = exchanges and not _streams(ddp, group)
    return _native.DeviceEngine(
        options,
        device=place,
        lane=_make_lanes(group, nonce, ("staged",), place)[0] if staged else None,
        group_name=group.group_name if exchanges and not staged else None,
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
