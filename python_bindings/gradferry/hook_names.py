"""What hooks other than ours are called, wherever hooks are listed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

NO_HOOK = "none"  # does not communicate at all
# PyTorch's own, with the dtype that they all-reduce.
TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "torch:fp32": torch.float32,
    "torch:fp16": torch.float16,
    "torch:bf16": torch.bfloat16,
}
