"""Names of hooks for the commands: PyTorch's as `torch:...`, and every gradferry codec.

Options of `attach` may follow a codec: `sign1+momentum=0.9+warmup_steps=100`. `none` does not
communicate, and `sync` sends one element per step; ranks diverge, so both are for timing only.
Sharded models have options of their own, those of `gradferry.fsdp.attach`, and the `param_dtype` of
FSDP2's mixed precision: `q4+all_gather=q8+param_dtype=bf16`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gradferry import _native
from gradferry.core.codec_spec import AUTO, OFF
from gradferry.core.config import Config, make_config
from gradferry.core.names import closest
from gradferry.diagnosis import TORCH_DTYPES
from gradferry.errors import ConfigError

NO_HOOK = "none"  # does not communicate at all
SYNC_HOOK = "sync"  # ranks wait for each other once per step: what no hook can avoid
RULERS = (NO_HOOK, SYNC_HOOK)  # what hooks are compared with; they do not train
# Backend hooks: those that use the all-reduce of DDP's process group, with its dtype.
BACKEND_HOOKS: Mapping[str, torch.dtype] = {**TORCH_DTYPES, OFF: torch.float32}
PLAIN_DDP = "torch:fp32"  # DistributedDataParallel without a hook
POWERSGD = "torch:powersgd"
TORCH_HOOKS = (*TORCH_DTYPES, f"{POWERSGD}:4")
_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "error_feedback": str,
    "momentum": float,
    "warmup_steps": int,
    "warmup": str,
}
PARAM_DTYPE = "param_dtype"
# FSDP2 alone, by the dtype in which it gathers parameters; None: in that of the parameters. It
# reduces gradients in fp32.
SHARDED_NATIVE: Mapping[str, torch.dtype | None] = {PLAIN_DDP: None, "torch:bf16": torch.bfloat16}


def _one_of(choices: Mapping[str, Any]) -> Callable[[str], Any]:
    def chosen(text: str) -> Any:
        if text not in choices:
            raise ValueError(text)
        return choices[text]

    return chosen


_SHARDED_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    **_OPTIONS,
    "reduce_scatter": str,
    "all_gather": str,
    "keep_gathered": _one_of({"True": True, "False": False}),
    PARAM_DTYPE: _one_of({"bf16": torch.bfloat16}),
}


def check_hook(name: str) -> None:
    """Raises ConfigError, with the closest match, when no hook that trains has this name."""
    codecs = [str(codec["name"]) for codec in _native.codecs()]
    if name in TORCH_DTYPES:
        return
    if name.startswith(f"{POWERSGD}:"):
        powersgd_rank(name)
        return
    codec, options = split_options(name)
    if codec.partition(":")[0] in (*codecs, OFF, AUTO):
        make_config(codec, options)
    else:
        choices = (*TORCH_HOOKS, *codecs, OFF, AUTO)
        raise ConfigError(
            f"unknown hook {name!r}; hooks are {', '.join(choices)}{closest(name, choices)}"
        )


def hook_config(name: str) -> Config:
    """The configuration of the gradferry hook with this name. Raises ConfigError."""
    codec, options = split_options(name)
    return make_config(codec, options)


def split_options(name: str, *, sharded: bool = False) -> tuple[str, dict[str, Any]]:
    """`codec+option=value+...` as the codec and the options that follow it.

    sharded: whether it is a hook of sharded models.
    Raises ConfigError for an option that cannot follow a codec, or a value that it cannot have.
    """
    known = _SHARDED_OPTIONS if sharded else _OPTIONS
    codec, *texts = name.split("+")
    options = {}
    for text in texts:
        key, _, value = text.partition("=")
        if key not in known:
            raise ConfigError(
                f"hook {name!r}: {key!r} is no argument of attach that can be given here; choose "
                f"from {', '.join(known)}{closest(key, list(known))}"
            )
        try:
            options[key] = known[key](value)
        except ValueError:
            raise ConfigError(f"hook {name!r}: {key} cannot be {value!r}") from None
    return codec, options


def powersgd_rank(name: str) -> int:
    """The RANK of `torch:powersgd:RANK`. Raises ConfigError when it is not a number from 1."""
    text = name.partition(":powersgd:")[2]
    if not text.isdecimal() or int(text) == 0:
        raise ConfigError(f"hook {name!r}: rank {text!r} must be a whole number from 1, as in 4")
    return int(text)
