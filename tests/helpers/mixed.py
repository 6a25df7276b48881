"""A model with parameters for every codec and of every dtype, so that one training shows what an
exchange makes of each; and the nodes on which its ranks are.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from scenario import Run, Scenario, Weight

CODECS = {
    "exact": "exact",
    "bf16": "bf16",
    "q8": "q8",
    "q4": "q4",
    "sign1": "sign1",
    "topk": "topk:ratio=0.05",
    "topk_default": "topk",
    "topk_q4": "topk:ratio=0.2,owner_ratio=0.25,values=q4",
    "topk_few_q4": "topk:ratio=0.03,values=q4",
    "rht4": "rht:bits=4",
    "rht3": "rht:bits=3",
    "rht2": "rht:bits=2",
}
NAMES = list(CODECS)
# Two tiles, of which the second is short; one short tile; a part of a block; a single element.
KINDS = (
    ("fp32", (41, 101), torch.float32),
    ("bf16", (19, 67), torch.bfloat16),
    ("fp16", (33, 127), torch.float16),
    ("three", (3,), torch.float32),
    ("one", (1,), torch.float32),
)
# Parameters of these kinds are exact, whatever the codec.
UNCOMPRESSED = (
    Weight("bias", (50,), torch.bfloat16),
    Weight("fp64", (80, 60), torch.float64),
)
COMPLEX = (
    Weight("complex64", (40, 60), torch.complex64),
    Weight("complex128", (5, 6), torch.complex128),
)
EVERY_DTYPE = (
    Weight("fp32", (50, 100)),
    Weight("bf16", (90, 50), torch.bfloat16),
    Weight("bf16_bias", (50,), torch.bfloat16),
    Weight("fp16", (64, 65), torch.float16),
    Weight("fp64", (80, 60), torch.float64),
    *COMPLEX,
)
MIXED = Scenario(
    (*(Weight(f"{name}_{kind}", *rest) for name in CODECS for kind, *rest in KINDS), *UNCOMPRESSED),
    rules=tuple((f"{name}_*", codec) for name, codec in reversed(CODECS.items())),
    codec="exact",
    error_feedback="both",
    steps=3,
    ddp={"bucket_cap_mb": 0.05},
)
MOMENTUM: dict[str, Any] = {"error_feedback": "auto", "options": {"momentum": 0.9}}


def mixed(world_size: int, **changes: Any) -> Scenario:
    return dataclasses.replace(MIXED, world_size=world_size, **changes)


NODES = {
    "2x2": ((0, 1), (2, 3)),
    "interleaved": ((0, 3), (1, 2)),
    "1x4": ((0, 1, 2, 3),),
    "2+1": ((0, 1), (2,)),
    "1+2": ((0,), (1, 2)),
    "3x2": ((0, 1), (2, 3), (4, 5)),
}
WEIGHTS = (
    Weight("first", (96, 130)),
    Weight("bias", (130,)),
    Weight("second", (130, 200)),
    Weight("last", (40000,)),
)


def scenario_on(nodes: str, scenario: Scenario | None = None, **changes: Any) -> Scenario:
    """`scenario`, or a plain one of WEIGHTS, with its ranks on these nodes."""
    members = NODES[nodes]
    place = {"world_size": sum(map(len, members)), "nodes": members}
    return dataclasses.replace(scenario or Scenario(WEIGHTS), **place, **changes)


def groups_at_once(**changes: Any) -> list[Scenario]:
    """Two groups of ranks of a world of 6, in each of which nodes are other ranks than in it."""
    return [
        scenario_on("2+1", group_ranks=(0, 3, 5), **changes),
        scenario_on("1+2", group_ranks=(1, 2, 4), seed=1, **changes),
    ]


# --- what the ranks of a node share


def local_stage(run: Run) -> str:
    """What the ranks of a node exchange through."""
    from gradferry.ddp.state import bound_to

    return bound_to(run.state).running.engine.local_stage()


def mapped_bytes() -> int:
    """Bytes of shared memory in this process."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "memfd:gradferry" in line:
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
            total += end - begin
    return total
