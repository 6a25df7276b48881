"""gradferry in the Trainer of transformers.

>>> trainer = Trainer(model, TrainingArguments(..., ddp_find_unused_parameters=False))
>>> gradferry.integrations.transformers.attach(trainer, "q4")
>>> trainer.train()
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError
from gradferry.integrations import checkpoints
from gradferry.integrations.models import Attachment, Metrics, find_ddp, take_momentum

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ImportError as error:
    raise ConfigError(
        f'transformers cannot be imported ({error}): pip install "gradferry[transformers]"'
    ) from error

__all__ = ["GradferryCallback", "attach"]


def attach(
    trainer: Trainer, codec: str = "q4", *, on_resize: str = "strict", **options: Any
) -> GradferryCallback:
    """Has every ``trainer.train()`` compress gradients.

    Its checkpoints then include the residuals of every rank, and its log means of some numbers
    (docs/guide/numbers.md), under ``gradferry/``. In momentum mode, AdamW, Adam or SGD goes
    through `gradferry.optim.momentum_mode`.

    Args:
        trainer: made already. ``TrainingArguments`` needs ``ddp_find_unused_parameters=False`` in
            momentum mode, and on GPUs.
        codec: see `HookState`.
        on_resize: what to do with the checkpoint of another number of ranks, see
            `HookState.load_state_dict`. ``"drop"`` also accepts one that was saved without
            gradferry.
        **options: the other arguments of `gradferry.attach`; ``grad_scaler`` is the trainer's own.

    Returns:
        The callback, with the hook's ``state`` during and after a training.

    Raises:
        ConfigError: it is no Trainer, has gradferry already, or ``on_resize`` is another.
        ConfigError, RankMismatchError, PeerError, StateError: ``train()`` raises as
            `gradferry.attach` and `HookState.load_state_dict` do.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(f"trainer must be a transformers.Trainer, not {type(trainer).__name__}")
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(other, GradferryCallback) for other in callbacks):
        raise ConfigError("this Trainer has gradferry already: attach once, before train()")
    callback = GradferryCallback(trainer, codec, on_resize, options)
    callbacks.insert(0, callback)  # so that its numbers are in the log before others report it
    return callback


class GradferryCallback(TrainerCallback):
    """What `attach` adds to a Trainer.

    Attributes:
        state: of the hook; None before the first training, and with a single process.
    """

    def __init__(
        self, trainer: Trainer, codec: str, on_resize: str, options: dict[str, Any]
    ) -> None:
        checkpoints.check_on_resize(on_resize)
        self._trainer, self._codec = trainer, codec
        self._on_resize, self._options = on_resize, options
        self._attachment: Attachment | None = None
        self._metrics: Metrics | None = None
        self._resume_from: str | None = None
        # Callbacks are not told where a training resumes from.
        trainer.train = _noting(trainer, self)

    @property
    def state(self) -> HookState | None:
        return self._attachment.state if self._attachment else None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Attaches to what the Trainer has wrapped by now, unless a training before did."""
        trainer, momentum = self._trainer, self._options.get("momentum")
        ddp = find_ddp(trainer.model_wrapped, "the Trainer", args.world_size, momentum)
        if ddp is None:
            return
        if self._attachment is None or self._attachment.model() is not ddp:
            if self._attachment is not None:
                self._attachment.expect_gone("delete it and what refers to it")
            scaler = trainer.accelerator.scaler
            try:
                self._attachment = Attachment(ddp, self._codec, self._options, scaler)
            except ConfigError as error:
                if ddp.find_unused_parameters and "find_unused_parameters" in str(error):
                    raise ConfigError(
                        f"{error}. The Trainer asks for it unless told not to: "
                        "TrainingArguments(ddp_find_unused_parameters=False)"
                    ) from error
                raise
            self._metrics = Metrics(self._attachment.state)
        hook = self._attachment
        if self._resume_from:
            folder = Path(self._resume_from) / checkpoints.FOLDER
            checkpoints.load(folder, hook.state, hook.group, self._on_resize)
        optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
        take_momentum(optimizer, hook.state)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes beside what the Trainer has just saved."""
        hook = self._attachment
        # A model alone cannot be resumed, and a search of hyperparameters begins anew.
        if hook is None or args.save_only_model or state.is_hyper_param_search:
            return
        folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
        checkpoints.save(folder / checkpoints.FOLDER, hook.state, hook.group)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Adds numbers to a row of the training, for all that report it."""
        if self._metrics is not None and logs is not None and "loss" in logs:
            numbers = self._metrics.take()
            logs.update(numbers)
            state.log_history[-1].update(numbers)


def _noting(trainer: Trainer, callback: GradferryCallback) -> Any:
    """`Trainer.train` of one trainer, which tells the callback where it resumes from."""
    train = trainer.train

    @functools.wraps(train)
    def noting(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(trainer.args.output_dir)  # or None, which train() refuses
        callback._resume_from = folder or None
        return train(resume_from_checkpoint, *args, **kwargs)

    return noting
