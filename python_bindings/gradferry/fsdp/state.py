"""`ShardedState`: a user's handle to the hooks on a model under FSDP2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, cast

from gradferry.averaging import saved_state, step_numbers
from gradferry.averaging.description import as_asked, describe
from gradferry.averaging.handle import Averaging
from gradferry.averaging.running import Running
from gradferry.averaging.step_numbers import Stats
from gradferry.errors import StateError
from gradferry.fsdp.hooks import AllGather, Exchange, Gradients
from gradferry.fsdp.model import ShardedModule

# Counters of stats() that add up over exchanges.
_ADDED = (
    *step_numbers.SUMS,
    "residual_bytes",
    "workspace_bytes",
    "workspace_allocations",
    "in_flight",
    "host_waits",
)


class ShardedState(Averaging):
    """Compression of what one model under FSDP2 exchanges, which `gradferry.fsdp.attach` returns.

    Up to three exchanges: averages over replicas, the reduce-scatter, the all-gather. Options,
    `parameters`, `nodes` and `rank` are those of the first of these that is attached. `parameters`
    are shards, padded so that those of all ranks are equal: this rank's, or in a reduce-scatter and
    an all-gather those of all ranks. A step is a synced backward pass; where only parameters are
    gathered, a pass that gathers them.
    """

    def __init__(self, attached: Sequence[Exchange], modules: Sequence[ShardedModule]) -> None:
        self._attached = tuple(attached)
        self._modules = modules
        self._first = self._attached[0]

    @property
    def parts(self) -> tuple[str, ...]:  # type: ignore[override]
        """Which of the model this rank's groups of ranks have, as the keys of its saved state."""
        return tuple(self._saved())

    @property
    def _running(self) -> Running:
        return self._first.running

    def _passed_buckets(self) -> int:
        return sum(each.passed for each in self._attached)

    def _passed_steps(self) -> int:
        return self._first.passes()

    def _ring_bytes(self) -> float:
        runnings = [each.running for each in self._attached]
        return sum(each.ring_share * float(each.stats()["gradient_bytes"]) for each in runnings)

    @property
    def passes_through(self) -> bool:
        """Whether everything currently takes the backend's own collectives."""
        return all(each.running.engine is None for each in self._attached)

    def stats(self) -> Stats:
        """Counters of this rank, as `HookState.stats`, summed over the exchanges.

        ``exchanges`` has those of each by name: ``"replicas"``, ``"reduce_scatter"`` and
        ``"all_gather"``, as far as they are attached. ``steps``, ``choice``, ``step_buckets`` and
        the ratios of residuals are those of the first one. In an all-gather ``gradient_bytes`` are
        those of gathered parameters, also where ``keep_gathered`` has sent none, and ``exposed_ms``
        is not all that FSDP2 has waited for.
        """
        stats = cast("dict[str, Any]", super().stats())
        exchanges = {each.name: _stats_of(each) for each in self._attached}
        stats |= {key: sum(each[key] for each in exchanges.values()) for key in _ADDED}
        stats["ratio"] = step_numbers.ratio(self._ring_bytes(), stats["wire_bytes"])
        return cast(Stats, {**stats, "exchanges": exchanges})

    def events(self) -> list[dict[str, Any]]:
        """The events of all exchanges, as `HookState.events` has them. Each has one more key,
        ``exchange``: its name.
        """
        events = [
            {"exchange": each.name, **event}
            for each in self._attached
            if each.running.engine is not None
            for event in each.running.engine.events()
        ]
        return sorted(events, key=lambda event: float(event["begin_ms"]))

    @contextmanager
    def exact_gathers(self) -> Iterator[None]:
        """Parameters are gathered by FSDP2 itself, as they are, while this lasts: for evaluation.

        >>> with state.exact_gathers():
        ...     evaluate(model)

        Call it on all ranks, outside of forward and backward passes; they wait for each other. What
        was gathered before, and within, is freed, so that the next pass gathers it again: a
        backward pass after it gathers anew, compressed. Without a compressed all-gather it does
        nothing.

        Raises:
            StateError: this is the middle of a pass.
            PeerError: a rank does not call it. The hooks of all ranks have ended.
        """
        gathers = next((each for each in self._attached if isinstance(each, AllGather)), None)
        if gathers is None:
            yield
            return
        self._expect_outside_of_passes()
        gathers.meet("enter exact_gathers()", "enter it on all ranks, or on none")
        self._reshard()
        before, gathers.exact = gathers.exact, True
        try:
            yield
            self._expect_outside_of_passes()
        finally:
            gathers.exact = before
            self._reshard()

    def _expect_outside_of_passes(self) -> None:
        for module in self._modules:
            if module.gathers_for in ("FORWARD", "PRE_BACKWARD"):
                raise StateError(
                    f"{module.name!r} is in the middle of a pass; enter and leave exact_gathers() "
                    "before forward() or after backward()"
                )

    def _reshard(self) -> None:
        for module in self._modules:
            module.reshard()

    def scale_residuals(self, factor: float) -> None:
        """Multiplies the residuals of all exchanges, as `HookState.scale_residuals` does."""
        self._end_pass()
        super().scale_residuals(factor)
        for each in self._attached[1:]:
            if each.averages and each.running.engine is not None:
                each.running.engine.scale_residuals(factor)

    def state_dict(self) -> dict[str, Any]:
        """The state that this rank must save to continue exactly where it stopped. Not collective.

        Save it on every rank, with the model and the optimizer: by torch.distributed.checkpoint,
        for which this is a ``Stateful``, by `gradferry.checkpoint.save`, or to a file per rank.

        Returns:
            ``{part: state}``, with the keys `parts`, where `state` is as that of
            `HookState.state_dict`, with a slot for each rank of the group. A part tells the groups
            apart: ``"shard_0_of_4"``, with tensor parallelism also its place in the mesh, or of a
            reduce-scatter ``"group_of_rank_0"``,
            its lowest rank in the default group. Gathers have no state.

        Raises:
            StateError: an error has ended the hook, or this is the middle of a step.
        """
        for each in self._attached:
            if isinstance(each, AllGather):
                each.settle(on_device=True)
        self._end_pass()
        return {
            part: saved_state.signed(saved_state.save(each.running, each.passes()))
            for part, each in self._saved().items()
        }

    def _end_pass(self) -> None:
        for each in self._attached:
            if isinstance(each, Gradients):
                each.end_pass()

    def _saved(self) -> dict[str, Exchange]:
        """The exchanges that have a state, by its key."""
        return {each.part: each for each in self._attached if each.part is not None}

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned. Call it on every rank.

        Args:
            state_dict: what this rank saved, or the states of all ranks, merged by
                `gradferry.checkpoint.merge`.
            on_resize: as for `HookState.load_state_dict`, for another number of replicas. With
                another number of shards the residuals of a shard have no place: take ``"drop"``,
                which loses nothing where none are kept, as by default.

        Raises:
            ConfigError: another ``on_resize``.
            StateError: as for `HookState.load_state_dict`, or without ``"drop"`` the state is of
                other shards. Nothing was changed.
        """
        held = state_dict if isinstance(state_dict, Mapping) else {}
        found = {part: self._found(part, held, on_resize) for part in self._saved()}
        for key in found.values():
            saved_state.expect_sound(held[key], on_resize)
        self._end_pass()
        with self._loading():
            for part, each in self._saved().items():
                key = found[part]
                steps = saved_state.load(each.running, held[key], on_resize, is_own=key == part)
                each.counts = [steps] * len(each.counts)

    def _found(self, part: str, held: Mapping[str, Any], on_resize: str) -> str:
        """The key of a part's state, or, where residuals are dropped, of one of another part."""
        drops = isinstance(on_resize, str) and on_resize == "drop"
        kind = part.partition("_")[0]
        others = [key for key in held if drops and str(key).startswith(f"{kind}_")]
        if part not in held and not others:
            raise StateError(
                f"the saved state has nothing of {part}, only {sorted(map(str, held))}: load what "
                "this state's state_dict() returned, or the states of all ranks merged by "
                "gradferry.checkpoint.merge; with other shards, whose residuals stay with them, "
                "on_resize='drop'"
            )
        return part if part in held else others[0]

    def __reduce__(self) -> NoReturn:
        raise StateError(
            "a ShardedState is connected to other ranks and cannot be copied or pickled: save its "
            "state_dict(), and attach again"
        )

    def __repr__(self) -> str:
        codecs = {each.name: str(each.running.config.codec) for each in self._attached}
        shown = ", ".join(f"{name}={codec!r}" for name, codec in codecs.items())
        return f"ShardedState({shown}, modules={len(self._modules)})"

    def __str__(self) -> str:
        stats = self.stats()
        texts = []
        for each in self._attached:
            own = {**stats, **stats["exchanges"][each.name]}
            if each is self._first:
                own["steps"] = stats["steps"]  # without those before a loaded state
            texts.append(f"{each.name}: {describe(each.running, cast(Stats, own))}")
        return "\n".join(texts)


def _stats_of(exchange: Exchange) -> dict[str, Any]:
    running = exchange.running
    stats = {**running.stats(), "fallbacks": exchange.passed, "choice": as_asked(running)}
    ring_bytes = running.ring_share * float(stats["gradient_bytes"])
    return {**stats, "ratio": step_numbers.ratio(ring_bytes, stats["wire_bytes"])}
