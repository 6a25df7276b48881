"""The device of a rank, and the group in which ranks with devices meet."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from gradferry_lab.ranks.launch import gather_from_ranks

_DEVICES = ("cpu", "cuda")


def add_device(parser: argparse.ArgumentParser) -> None:
    """Declares --device, for `place_of_rank`."""
    parser.add_argument(
        "--device",
        choices=_DEVICES,
        default="cpu",
        help="where the model is. With GPUs for all ranks they meet over NCCL, else over gloo "
        "(default: cpu)",
    )


def place_of_rank(device: str) -> tuple[torch.device, dist.ProcessGroup | None]:
    """This rank's device, and DDP's group; None: the default one. Ranks that share a GPU meet over
    gloo. Collective.
    """
    if device == "cpu":
        return torch.device("cpu"), None
    place = gpu_of_rank(dist.get_rank())
    torch.cuda.set_device(place)
    here = {"gpu": str(torch.cuda.get_device_properties(place).uuid)}
    shared = [record["gpu"] for record in gather_from_ranks(here)]
    alone = len(set(shared)) == len(shared) and dist.is_nccl_available()
    if not alone:
        return place, None
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    assert isinstance(group, dist.ProcessGroup)  # this rank is in it
    return place, group


def gpu_of_rank(rank: int) -> torch.device:
    """One of this machine's GPUs, of which there is at least one; ranks take turns."""
    return torch.device("cuda", rank % torch.cuda.device_count())


def on_device(device: torch.device, batch: Any) -> Any:
    """The tensors of a batch on a device."""
    return pytree.tree_map_only(torch.Tensor, lambda each: each.to(device), batch)
