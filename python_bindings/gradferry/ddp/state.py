"""`HookState`: a user's handle to a hook, for options, counters, checkpoints and momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from gradferry.averaging import saved_state
from gradferry.averaging.advice import warn_about_messages, warn_about_rules, watch_optimizer
from gradferry.averaging.description import describe
from gradferry.averaging.handle import Averaging
from gradferry.averaging.running import Running
from gradferry.core.agreement import Record, on_all_ranks
from gradferry.core.config import make_config
from gradferry.core.options import Options, takes_options
from gradferry.core.warn import warn
from gradferry.ddp.auto import Choice, Chooser
from gradferry.ddp.binding import Binding, bind
from gradferry.ddp.model import distributed_in
from gradferry.errors import ConfigError, StateError

_HOW_TO_BIND = (
    "pass the DistributedDataParallel to HookState(codec, ddp), or call state.bind(ddp) before the "
    "first backward pass; where a trainer wraps the model, such as Lightning's DDPStrategy, leave "
    "out ddp_comm_state and ddp_comm_hook and use gradferry.integrations instead "
    "(gradferry.integrations.lightning.GradferryCallback)"
)


@takes_options()
class HookState(Averaging):
    """Compression of one DistributedDataParallel's gradients.

    Args:
        codec: a codec string such as ``"q4"``, or ``"off"`` or ``"auto"``; see `gradferry.attach`.
        ddp: the model. Without it, call `bind` before the first backward pass.
        **options: see `gradferry.Options`.

    Raises:
        ConfigError: an argument or the model cannot be used.
        RankMismatchError: ranks differ in configuration or model.
        PeerError: a rank did not come, or failed to set up its connections or memory.
        StateError: the process group was destroyed.
    """

    def __init__(
        self,
        codec: str = "q4",
        ddp: DistributedDataParallel | None = None,
        **options: Unpack[Options],
    ) -> None:
        self._ask(codec, options)
        if ddp is None:
            make_config(codec, options)
        else:
            self.bind(ddp)

    @classmethod
    def _attached(cls, ddp: DistributedDataParallel, codec: str, options: Options) -> HookState:
        """For `gradferry.attach`: binds a new state and registers the native hook."""
        state = cls.__new__(cls)
        state._ask(codec, options)
        state._bind(ddp, native=True)
        return state

    def _ask(self, codec: str, options: Options) -> None:
        # Nothing is checked here: with a model, all ranks must learn of a wrong option.
        self._codec, self._options = codec, options
        self._binding: Binding | None = None

    def bind(self, ddp: DistributedDataParallel) -> None:
        """Agrees with all ranks of the model's process group and starts the engine. Collective.

        Args:
            ddp: the model whose ``register_comm_hook(state, gradferry.hook)`` gets this state.

        Raises:
            StateError: the state is bound already, or the process group was destroyed.
            ConfigError, RankMismatchError, PeerError: as for the class.
        """
        self._bind(ddp, native=False)

    def _bind(self, ddp: DistributedDataParallel, *, native: bool) -> None:
        if self._binding is not None:
            raise StateError(
                "this HookState is bound to a model already; make one HookState for each model"
            )
        self._binding = bind(ddp, self._codec, self._options, native=native)
        running = self._binding.running
        watch_optimizer(running)
        warn_about_rules([(running, "rules")])
        warn_about_messages(running, distributed_in(ddp).bucket_bytes_cap)

    def _bound(self) -> Binding:
        if self._binding is None:
            raise StateError(f"this HookState is not bound to a model; {_HOW_TO_BIND}")
        return self._binding

    @property
    def _running(self) -> Running:
        return self._bound().running

    def _passed_buckets(self) -> int:
        return self._bound().hook.passed()

    def _passed_steps(self) -> int:
        return self._bound().hook.finished_steps()

    def _choice(self) -> dict[str, Any]:
        bound = self._bound()
        if bound.chooser is None:
            return super()._choice()
        return {**bound.chooser.choice.shown(), "exchange": bound.running.exchange.name}

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save to continue exactly where it stopped. Not collective.

        Save it on every rank, with the model and the optimizer: by ``torch.save`` to a file per
        rank, by `gradferry.checkpoint.save`, or by torch.distributed.checkpoint, for which a
        HookState is a ``Stateful``.

        Returns:
            A dict of numbers and strings, equal on all ranks, and ``slot_<rank>``: a dict of this
            rank's residuals (fp32) and the ids of their tiles (int64), one-dimensional tensors on
            the CPU: of the tiles that it owns, and of those that it sums for its node. Digests
            cover all of it: a state that was changed is refused.

        Raises:
            StateError: the state is not bound, failed, or is in the middle of a step.
        """
        bound = self._bound()
        state = saved_state.save(bound.running, bound.hook.finished_steps())
        if bound.chooser is not None:
            state[saved_state.CHOICE] = bound.chooser.choice.saved()
        return saved_state.signed(state)

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned. Call it on every rank. With ``"auto"`` it also
        restores the choice, and is collective.

        At the same world size and on the same nodes, the training continues bit-identically. Load
        the model and the optimizer that were saved at the same time.

        Args:
            state_dict: what this rank saved, or the states of all ranks, merged by
                `gradferry.checkpoint.merge`.
            on_resize: what to do when another number of ranks saved it, or the same ranks on other
                nodes (in the flat exchange every rank is a node). ``"strict"`` refuses. ``"mean"``
                needs the states of all ranks and keeps what the averaged gradient still lacks:
                every node gets the mean of the nodes' worker residuals, rounded once, and every
                rank the owner residuals of the tiles it owns now (with ``topk`` in momentum mode,
                to and from a world of one, scaled to deliver the same momentum). A world of one
                adds the residuals to its next gradient. ``"fold"`` needs what this rank itself
                saved, in the flat exchange: its worker residual takes up both, in units of the new
                number of ranks; the residuals of ranks that are gone are lost.
                ``"drop"`` begins without residuals (and without momentum), also where the model was
                another one.

        Raises:
            ConfigError: another ``on_resize``.
            StateError: the state is of another codec, model, seed, momentum, world size or nodes,
                lacks a slot, was changed, or is of another format; or the hook is in the middle of
                a step. Nothing was changed.
        """
        bound = self._bound()
        with self._loading():
            _load(bound, state_dict, on_resize)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._binding is not None:
            warn(
                "a copied or pickled HookState is not bound to a model, and a copied "
                "DistributedDataParallel has no communication hook: attach again",
            )
        return (_unbound, (self._codec, self._options))

    def __repr__(self) -> str:
        return f"HookState(codec={self._codec!r}, bound={self._binding is not None})"

    def __str__(self) -> str:
        if self._binding is None:
            return repr(self)
        return describe(self._running, self.stats())


def bound_to(state: object) -> Binding:
    """The binding of a user's `state`.

    Raises:
        ConfigError: it is no HookState.
        StateError: it is not bound.
    """
    if not isinstance(state, HookState):
        raise ConfigError(
            f"the state is {state!r}, not a gradferry.HookState: register "
            "ddp.register_comm_hook(gradferry.HookState('q4', ddp), gradferry.hook), and give "
            "OneBitAdam the state that gradferry.attach() returns"
        )
    return state._bound()


def _load(bound: Binding, saved: Mapping[str, Any], on_resize: str) -> None:
    """See `HookState.load_state_dict`."""
    if bound.chooser is not None:
        _restore_choice(bound, bound.chooser, saved, on_resize)
        if bound.running.engine is None:
            return
    else:
        saved_state.expect_sound(saved, on_resize)
    # A world of one chooses no codec, but may load a state in which others chose one.
    choice = saved.get(saved_state.CHOICE)
    chosen = Choice.restored(choice).codec if choice else None
    bound.resume(saved_state.load(bound.running, saved, on_resize, chosen=chosen))


def _restore_choice(
    bound: Binding, chooser: Chooser, saved: Mapping[str, Any], on_resize: str
) -> None:
    running, choice = bound.running, Choice()

    def check() -> Record:
        nonlocal choice
        saved_state.expect_sound(saved, on_resize)
        saved_state.check(running, saved, on_resize)
        # Where nothing chose, or for a named codec in another world, the measurement begins after
        # loading.
        is_of_here = running.config.chooses or saved["world_size"] == running.world_size
        if is_of_here and (found := saved.get(saved_state.CHOICE)):
            choice = Choice.restored(found)
        return {"choice": choice.saved(), "steps": saved["steps"]}

    on_all_ranks(check, running.group, running.transport.device, alike=True)
    chooser.restore(bound.hook, choice, int(saved["steps"]))


def _unbound(codec: str, options: Options) -> HookState:
    return HookState(codec, **options)
