"""A model that all ranks train with a hook: whole on each under DDP, or sharded by FSDP2.

Hybrid sharding, ``hsdp``: the hook averages over replicas of the model, and bytes are those between
replicas. One replica over all ranks, ``fsdp``: the hook gathers parameters and reduces gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from gradferry.core.nodes import Nodes
from gradferry.errors import ConfigError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from gradferry_lab.workloads.hooks import (
    NO_HOOK,
    RULERS,
    SHARDED_NATIVE,
    How,
    ParallelModel,
    apply_hook,
    bucket_caps,
    check_hook,
    split_options,
)
from gradferry_lab.workloads.sharded import sharded
from gradferry_lab.workloads.sharded_bytes import MatrixModule, choice_of

DDP = "ddp"
HSDP = "hsdp"
FSDP = "fsdp"
PARALLEL = (DDP, HSDP, FSDP)
# What is compared of sharded models, unless hooks are named.
SHARDED_HOOKS: Mapping[str, tuple[str, ...]] = {
    HSDP: (*SHARDED_NATIVE, "q8", "q4", "q4+reduce_scatter=q4+all_gather=q8"),
    FSDP: (
        *SHARDED_NATIVE,
        "off+all_gather=bf16",  # what torch:bf16 sends, without its arithmetic in bf16
        "off+all_gather=q8",
        "q4+all_gather=off",
        "q4",
        "q4+keep_gathered=True",
    ),
}

BuildModel = Callable[[], nn.Module]


def check_parallel(parallel: str, hook: str) -> None:
    """Raises ConfigError when the hook is unknown, or cannot be used so."""
    if parallel == DDP:
        if hook not in RULERS:
            check_hook(hook)
        return
    if hook == NO_HOOK or hook in SHARDED_NATIVE:
        return
    if hook in RULERS or hook.startswith("torch:"):
        raise ConfigError(
            f"hook {hook!r} is for DDP; under {parallel} there are {NO_HOOK}, "
            f"{', '.join(SHARDED_NATIVE)} (FSDP2's own collectives), off, and codecs"
        )
    codec, options = split_options(hook, sharded=True)
    check_hook(codec)
    choice_of(hook, [MatrixModule(1)], averages=parallel == HSDP)
    if options.get("momentum") and options.get("warmup_steps"):
        raise ConfigError(
            f"hook {hook!r}: OneBitAdam, which dense steps before momentum mode are for, is for "
            "DDP; leave out warmup_steps, for AdamW behind momentum"
        )


def mesh_for(parallel: str, hosts: Nodes) -> DeviceMesh | None:
    """The mesh over which models are sharded, of replicas and shards; None under DDP. Collective.

    Under ``hsdp`` a host has a replica; where all ranks are on one, half of them have. Raises
    ConfigError where replicas would not have equally many ranks.
    """
    if parallel == DDP:
        return None
    replicas = hosts.members
    if parallel == FSDP:
        replicas = (tuple(range(hosts.world_size)),)
    elif len(replicas) == 1:
        ranks, half = replicas[0], hosts.world_size // 2
        replicas = (ranks[:half], ranks[half:])
    if len(set(map(len, replicas))) != 1:
        raise ConfigError(
            f"--parallel {parallel}: {hosts.describe()} are not replicas of equally many ranks; "
            "start as many ranks on every host, or on one host an even number of them"
        )
    return DeviceMesh("cpu", torch.tensor(replicas), mesh_dim_names=("replica", "shard"))


def parallelize(
    build_model: BuildModel,
    hook: str,
    mesh: DeviceMesh | None,
    how: How,
) -> ParallelModel:
    """Builds a model on every rank, for training with the named hook. Collective.

    Args:
        build_model: gives the same on every rank.
        hook: its name.
        mesh: of `mesh_for`.
        how: it is applied.

    Raises:
        ConfigError: the hook is unknown, or cannot be used so.
    """
    if mesh is None:
        model = build_model()
        (cap,) = bucket_caps(hook, model, [how.bucket_cap_mb])
        ddp = DistributedDataParallel(model, process_group=how.group, bucket_cap_mb=cap)
        return ParallelModel(ddp, apply_hook(ddp, hook, how), lambda: model)
    check_parallel(HSDP if mesh["replica"].size() > 1 else FSDP, hook)
    return sharded(build_model, hook, mesh, how)
