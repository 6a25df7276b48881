"""gradferry in Lightning.

>>> callback = gradferry.integrations.lightning.GradferryCallback("q4")
>>> trainer = Trainer(strategy="ddp", callbacks=[callback])
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from gradferry.core.warn import warn_or_log
from gradferry.ddp.state import HookState
from gradferry.errors import ConfigError
from gradferry.integrations import checkpoints
from gradferry.integrations.models import Attachment, Metrics, find_ddp, take_momentum

__all__ = ["GradferryCallback"]

_KEY = "gradferry"


def _callback_class() -> Any:
    """Lightning has two names; that which the program has imported already is the right one."""
    names = ("lightning.pytorch", "pytorch_lightning")
    failure: ImportError | None = None
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name).Callback
        except ImportError as error:
            failure = error
    raise ConfigError(
        f'Lightning cannot be imported ({failure}): pip install "gradferry[lightning]"'
    ) from failure


_Callback: Any = _callback_class()


class GradferryCallback(_Callback):
    """Compresses gradients in every ``trainer.fit()`` with a DDP strategy.

    Lightning's checkpoints then include the residuals of every rank, and its loggers get means
    of some numbers of the first rank (docs/guide/numbers.md), under ``gradferry/``, every
    ``log_every_n_steps``. In momentum mode, AdamW, Adam and SGD go through
    `gradferry.optim.momentum_mode`.

    Args:
        codec: see `HookState`.
        on_resize: what to do with the checkpoint of another number of ranks, see
            `HookState.load_state_dict`. ``"drop"`` also accepts one that was saved without
            gradferry.
        **options: the other arguments of `gradferry.attach`; ``grad_scaler`` is the trainer's own.

    Attributes:
        state: of the hook; None before the first training, and with a single process.

    Raises:
        ConfigError: ``on_resize`` is another.
        ConfigError, RankMismatchError, PeerError, StateError: ``fit()`` raises as
            `gradferry.attach` and `HookState.load_state_dict` do.
    """

    def __init__(self, codec: str = "q4", *, on_resize: str = "strict", **options: Any) -> None:
        checkpoints.check_on_resize(on_resize)
        self._codec, self._on_resize, self._options = codec, on_resize, options
        self._attachment: Attachment | None = None
        self._metrics: Metrics | None = None
        self._loaded: dict[str, Any] | None = None  # from a checkpoint, before there is a hook
        self._resumes = False

    @property
    def state(self) -> HookState | None:
        return self._attachment.state if self._attachment else None

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Keeps what was saved, until the model is wrapped."""
        if trainer.state.fn == "fit":
            self._loaded, self._resumes = checkpoint.get(_KEY), True

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Attaches to what the strategy has wrapped by now, and restores the residuals."""
        loaded, self._loaded = self._loaded, None
        resumes, self._resumes = self._resumes, False
        strategy = trainer.strategy
        if isinstance(getattr(strategy, "_ddp_comm_state", None), HookState):
            raise ConfigError(
                "DDPStrategy(ddp_comm_state=HookState(...)) is bound to no model: leave out "
                "ddp_comm_state and ddp_comm_hook, and give the GradferryCallback its arguments"
            )
        momentum = self._options.get("momentum")
        ddp = find_ddp(strategy.model, "Lightning", trainer.world_size, momentum)
        if ddp is None:
            return
        if self._attachment is not None:
            self._attachment.expect_gone("delete it and what refers to it, such as its Trainer")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        hook = self._attachment = Attachment(ddp, self._codec, self._options, scaler)
        self._metrics = Metrics(hook.state)
        if resumes:
            checkpoints.restore(loaded, hook.state, hook.group, self._on_resize, "resuming")
        for optimizer in trainer.optimizers:
            take_momentum(optimizer, hook.state)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        """Logs in the steps in which Lightning logs."""
        if self._metrics is not None and trainer._logger_connector.should_update_logs:
            pl_module.log_dict(self._metrics.take(), on_step=True, on_epoch=False)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Adds the residuals of all ranks to the checkpoint that the first one writes."""
        hook = self._attachment
        if hook is None:
            return
        if trainer.interrupted:  # by an error that other ranks need not have met
            warn_or_log(
                "the training was interrupted, and this checkpoint holds nothing of gradferry: "
                "resuming from it needs on_resize='drop'",
            )
            return
        checkpoint[_KEY] = checkpoints.gather(hook.state, hook.group)
