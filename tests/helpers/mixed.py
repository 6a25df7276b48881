"""One model with a few parameters of every kind for every codec."""

from __future__ import annotations

import torch
from scenario import Scenario, Weight

PER_CODEC = (
    "q8",
    "sign1",
    "topk:ratio=0.05",
    "topk:ratio=0.03,values=q4",
    "rht:bits=4",
    "rht:bits=3",
    "rht:bits=2",
    "topk",
    "topk:ratio=0.2,owner_ratio=0.25,values=q4",
    "q4",
    "bf16",
    "exact",
)
NAMES = [codec.replace(".", "_") for codec in PER_CODEC]
KINDS = (
    ("fp32", (41, 131), torch.float32),
    ("bf16", (19, 67), torch.bfloat16),
    ("fp16", (33, 127), torch.float16),
    ("three", (3,), torch.float32),
    ("one", (1,), torch.float32),
)
MIXED = Scenario(
    tuple(Weight(f"{name}_{kind}", *rest) for name in NAMES for kind, *rest in KINDS),
    rules=tuple((f"{name}_*", codec) for name, codec in zip(NAMES, PER_CODEC, strict=True)),
    codec="exact",
    error_feedback="both",
    steps=3,
    ddp={"bucket_cap_mb": 0.05},
)
