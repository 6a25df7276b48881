"""`gradferry.doctor`: does for a user's model what the command of that name does."""

from __future__ import annotations

import copy
import importlib.util
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradferry.ddp.attach import attach
from gradferry.errors import ConfigError
from gradferry.forecast.batch_loss import batch_loss, misfit
from gradferry.forecast.diagnosis import (
    Diagnosis,
    Examination,
    default_hooks,
    examine,
    require_hooks,
)

_TURNS = 3
_SECONDS = 0.3


def doctor(
    ddp: DistributedDataParallel,
    batch_fn: Callable[[], Any],
    *,
    hooks: Sequence[str] | None = None,
    show: bool = True,
) -> Diagnosis:
    """Predicts the model's training step under every hook, and says which to use. Collective.

    Trains two copies of the model for a few steps, measures the link between the ranks and the
    codecs on this machine. The model itself is not changed, and needs no hook.

    Args:
        ddp: on the CPU or a GPU, in a process group of at least two ranks.
        batch_fn: gives this rank's next batch: ``ddp(*batch_fn())``, or ``ddp(**batch_fn())`` for a
            dict, is the loss or has it as ``.loss``.
        hooks: of ``torch:fp32``, ``torch:fp16``, ``torch:bf16`` and codecs; by default all.
        show: whether rank 0 prints what was found.

    Returns:
        What was found, the same on all ranks: ``verdict`` is one sentence, ``predictions`` has a
        step's ``seconds``, ``exposed_s`` and ``wire_bytes`` for every hook.

    Raises:
        ConfigError: the model, the batch or a hook cannot be used, there are no kernels for the
            model's device, or rich is missing and `show` is true.
    """
    if not isinstance(ddp, DistributedDataParallel):
        raise ConfigError(f"ddp must be a DistributedDataParallel, not {type(ddp).__name__}")
    reason = misfit(batch_fn) if callable(batch_fn) else f"{batch_fn!r} cannot be called"
    if reason is not None:
        raise ConfigError(
            "batch_fn must be a function without arguments that returns this rank's next batch, a "
            f"tuple for ddp(*batch) or a dict for ddp(**batch), but: {reason}"
        )
    if show and importlib.util.find_spec("rich") is None:
        raise ConfigError(
            "doctor shows its table with rich, which is not installed: pip install "
            "'gradferry[lab]', or call doctor(..., show=False)"
        )
    wanted = require_hooks(default_hooks() if hooks is None else hooks)
    place = _place(ddp)
    group = ddp.process_group
    if group.size() < 2:
        raise ConfigError("doctor needs two ranks at least: a world of one does not communicate")
    cap = None if ddp.bucket_bytes_cap_default else ddp.bucket_bytes_cap / 2**20
    asked = Examination(wanted, (cap,), _TURNS, _SECONDS)
    found = examine(
        group,
        build_model=lambda: copy.deepcopy(ddp.module),
        make_step=lambda model: _make_step(model, batch_fn()),
        attach=attach,
        asked=asked,
        place=place,
    )
    if show and group.rank() == 0:
        _show(found, type(ddp.module).__name__)
    return found


def _place(ddp: DistributedDataParallel) -> torch.device:
    """The one device of the model."""
    places = {name: parameter.device for name, parameter in ddp.named_parameters()}
    first, place = next(iter(places.items()))
    for name, other in places.items():
        if other != place:
            raise ConfigError(
                f"parameter {name!r} is on {other}, {first!r} on {place}: move the whole model to "
                "one device, then wrap it"
            )
    return place


def _make_step(model: nn.Module, batch: Any) -> Callable[[], None]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def step() -> None:
        optimizer.zero_grad()
        batch_loss("batch_fn", model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _show(found: Diagnosis, model: str) -> None:
    # Imported here, because a training that shows nothing does not need it.
    from gradferry_lab.doctor import show_diagnosis
    from rich.console import Console

    link = os.environ.get("GLOO_SOCKET_IFNAME", "as it is")
    show_diagnosis(Console(), found, model, {"link": link})
