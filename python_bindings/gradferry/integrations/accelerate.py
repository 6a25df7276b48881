"""gradferry in accelerate.

>>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
>>> state = gradferry.integrations.accelerate.attach(accelerator, model, "q4")
"""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError
from gradferry.integrations import checkpoints
from gradferry.integrations.models import Attachment, Metrics, find_ddp

__all__ = ["attach"]

# By accelerator, and by the folder that each takes in its checkpoints.
_attached: MutableMapping[Any, dict[str, Attachment]] = weakref.WeakKeyDictionary()


def attach(
    accelerator: Any,
    model: object,
    codec: str = "q4",
    *,
    on_resize: str = "strict",
    log_every: int = 0,
    folder: str = checkpoints.FOLDER,
    **options: Any,
) -> HookState | None:
    """Compresses the gradients of a model that ``accelerator.prepare`` returned. Collective.

    ``accelerator.save_state`` and ``load_state`` then include the residuals of every rank, in a
    folder beside accelerate's own files, for as long as the model lives.

    In momentum mode, call ``gradferry.optim.momentum_mode(optimizer.optimizer, state)``.

    Args:
        accelerator: an ``accelerate.Accelerator``. Its GradScaler, if any, becomes ``grad_scaler``.
        model: from ``accelerator.prepare``, compiled or not.
        codec: see `HookState`.
        on_resize: what ``load_state`` does with the checkpoint of another number of ranks, see
            `HookState.load_state_dict`. ``"drop"`` also accepts one that was saved without
            gradferry.
        log_every: after every so many steps ``accelerator.log`` gets the means of some numbers
            (docs/guide/numbers.md) over them, under ``gradferry/``, and the number of finished
            steps as ``step``; 0: never.
        folder: in the checkpoint; models of one accelerator need different ones.
        **options: the other arguments of `gradferry.attach`.

    Returns:
        The hook's state; None, with a warning, if a single process trains.

    Raises:
        ConfigError: accelerator or model are something else; or as `gradferry.attach`.
        StateError: another model with this folder still exists.
        RankMismatchError, PeerError: as `gradferry.attach`.
    """
    if not hasattr(accelerator, "register_save_state_pre_hook"):
        raise ConfigError(
            f"accelerator must be an accelerate.Accelerator, not {type(accelerator).__name__}"
        )
    checkpoints.check_on_resize(on_resize)
    processes: int = accelerator.num_processes
    ddp = find_ddp(model, "accelerate", processes, options.get("momentum"))
    if ddp is None:
        return None
    others = _attached.setdefault(accelerator, {})
    if folder in others and others[folder].model() is not ddp:
        others[folder].expect_gone(
            f"delete it and what refers to it, or give this model another folder than {folder!r}"
        )
    others[folder] = attachment = Attachment(ddp, codec, options, accelerator.scaler)
    state, group = attachment.state, attachment.group

    def save(models: object, weights: object, output_dir: str) -> None:
        checkpoints.save(Path(output_dir) / folder, state, group)

    def load(models: object, input_dir: str) -> None:
        checkpoints.load(Path(input_dir) / folder, state, group, on_resize)

    saving = accelerator.register_save_state_pre_hook(save)
    loading = accelerator.register_load_state_pre_hook(load)
    for forget in (saving.remove, loading.remove, lambda: others.pop(folder, None)):
        weakref.finalize(ddp, forget).atexit = False
    if log_every:
        _log(accelerator, state, log_every)
    return state


def _log(accelerator: Any, state: HookState, every: int) -> None:
    metrics = Metrics(state)
    logged: int | None = None
    weak = weakref.ref(accelerator)  # torch keeps the callback as long as the state exists

    def log(row: dict[str, Any]) -> None:
        nonlocal logged
        done, accelerator = row["step"] + 1, weak()
        before = row["step"] if logged is None else logged
        logged = done
        # Not every number comes: a scaler skips steps.
        if done // every > before // every and accelerator is not None:
            accelerator.log(metrics.take(), step=done)

    state.on_step(log)
