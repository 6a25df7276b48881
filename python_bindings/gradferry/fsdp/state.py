"""`ShardedState`: a user's handle to the hooks on a model under FSDP2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from gradferry.errors import StateError
from gradferry.fsdp.hooks import ModuleHook, synced_passes
from gradferry.reduction import save_load
from gradferry.reduction.averaging import Averaging
from gradferry.reduction.description import as_asked, describe
from gradferry.reduction.running import Running


class ShardedState(Averaging):
    """Compression of the gradients of one model under FSDP2, which `gradferry.fsdp.attach` or
    `gradferry.fsdp.attach_reduce_scatter` returns.

    `parameters` are shards, padded so that those of all ranks are equal: this rank's, or in a
    reduce-scatter those of all ranks. A step is a synced backward pass.

    Attributes:
        part: which of the model this rank's group of ranks has, as the key of its saved state.
    """

    part: str

    def __init__(self, running: Running, hooks: Sequence[ModuleHook], part: str) -> None:
        self._started = running
        self._hooks = hooks
        self.part = part

    @property
    def _running(self) -> Running:
        return self._started

    def _passed_buckets(self) -> int:
        return sum(hook.passed for hook in self._hooks)

    def _passed_steps(self) -> int:
        return synced_passes(self._hooks)

    def _choice(self) -> dict[str, Any]:
        return as_asked(self._started)

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save to continue exactly where it stopped. Not collective.

        Save it on every rank, with the model and the optimizer: by torch.distributed.checkpoint,
        for which this is a ``Stateful``, by `gradferry.checkpoint.save`, or to a file per rank.

        Returns:
            ``{part: state}``, where `state` is as that of `HookState.state_dict`, with a slot for
            each rank of the group. `part` tells the groups apart: ``"shard_0_of_4"``, with tensor
            parallelism also its place in the mesh, or of a reduce-scatter ``"group_of_rank_0"``,
            its lowest rank in the default group.

        Raises:
            StateError: an error has ended the hook, or this is the middle of a step.
        """
        return {self.part: save_load.save(self._started, self._passed_steps())}

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned. Call it on every rank.

        Args:
            state_dict: what this rank saved, or the states of all ranks, merged by
                `gradferry.checkpoint.merge`.
            on_resize: as for `HookState.load_state_dict`, for another number of replicas. The
                number of shards must be the same.

        Raises:
            ConfigError: another ``on_resize``.
            StateError: as for `HookState.load_state_dict`, or the state is of other shards. Nothing
                was changed.
        """
        if not isinstance(state_dict, Mapping) or self.part not in state_dict:
            held = sorted(map(str, state_dict)) if isinstance(state_dict, Mapping) else "no dict"
            raise StateError(
                f"the saved state has nothing of {self.part}, only {held}: what is withheld of a "
                "shard stays with it. Load it with as many shards as saved it, the states of all "
                "ranks merged by gradferry.checkpoint.merge; or go on without, and lose what was "
                "withheld"
            )
        with self._loading():
            steps = save_load.load(self._started, state_dict[self.part], on_resize)
            for hook in self._hooks:
                hook.count = steps

    def skip_step(self) -> NoReturn:
        """Not here: a step that is skipped on all ranks may be known to another shard alone.

        Raises:
            StateError: always.
        """
        raise StateError(
            "steps cannot be taken back under FSDP2, which has no exact_skip: leave out skip_step()"
        )

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a ShardedState is connected to other ranks and cannot be copied or pickled: save its "
            "state_dict(), and attach again"
        )

    def __repr__(self) -> str:
        codec = str(self._started.config.codec)
        return f"ShardedState(codec={codec!r}, modules={len(self._hooks)}, part={self.part!r})"

    def __str__(self) -> str:
        return describe(self._started, self.stats())
