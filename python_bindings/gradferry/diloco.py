"""`DiLoCo`: ranks train alone, and now and then average their pseudo-gradients.

Where a rank can be in this protocol, and how it gets from one place to another, is in `_NEXT`.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from enum import Enum
from functools import partial
from traceback import walk_stack
from typing import Any, NamedTuple, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Unpack

from gradferry.averaging.global_parameters import (
    GlobalParameters,
    checked_decay,
    checked_optimizers,
    checked_period,
    described,
    nesterov,
    refuse_average_of_every_step,
)
from gradferry.averaging.saved_state import signed
from gradferry.averaging.start import usable_group
from gradferry.averaging.step_numbers import Stats, call_after_steps
from gradferry.core.agreement import (
    Record,
    content_of,
    gather_records,
    odd_one,
    on_all_ranks,
    raise_first_mismatch,
    record_hash,
    rendezvous_place,
    value_on_all_ranks,
)
from gradferry.core.config import CHUNK_BYTES
from gradferry.core.device import CPU
from gradferry.core.options import Options, complete, takes_options
from gradferry.core.rendezvous import meet, patience, say_failed, world_ranks
from gradferry.core.warn import warn_or_log
from gradferry.errors import (
    ConfigError,
    DivergedError,
    GradferryError,
    PeerError,
    ProtocolError,
    StateError,
)
from gradferry.reducer import BUCKET_CAP_MB, Reducer

__all__ = ["DiLoCo"]

# What makes no sense of pseudo-gradients: the outer optimizer has the momentum, and they are in no
# units of a loss scale.
REFUSED = ("momentum", "warmup_steps", "warmup", "grad_scaler", "nonfinite", "check_every")
_FORMAT = 1
# Where a rank alone has loaded parameters, which other ranks have as their global ones.
_STATES = "parameters with an outer momentum (load the same on every rank)"
_MOST_ALONE = 100  # steps of one of several optimizers, such as that of a critic
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_counted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have a DiLoCo


class Place(Enum):
    """Where a rank is. From the places of `_NEEDS_REJOIN` only `DiLoCo.rejoin` leads back."""

    NEW = "it has nothing that others need"
    TRAINING = "all outer steps that have begun are over"
    AVERAGING = "all ranks take an outer step"
    BEHIND = "an outer step failed: to be taken again, unless others have ended it"
    BROKEN = "it has applied an average in part: to take what others have"
    APART = "it has no group to average in"
    ENDED = "it counts no steps"


_NEXT = {
    (Place.TRAINING, "all agree"): Place.AVERAGING,
    (Place.AVERAGING, "applied"): Place.TRAINING,
    # What interrupts an outer step, on this rank or another:
    (Place.TRAINING, "failed"): Place.BEHIND,
    (Place.AVERAGING, "failed"): Place.BEHIND,
    **{(place, "applied in part"): Place.BROKEN for place in Place},
    # In rejoin(), or where finish() has lost the others with nothing left:
    (Place.TRAINING, "left"): Place.APART,
    **{(place, "has what others have"): Place.APART for place in Place},
    **{(place, "joined"): Place.TRAINING for place in Place},
    **{(place, "ended"): Place.ENDED for place in Place},
}
_NEEDS_REJOIN = (Place.BEHIND, Place.BROKEN, Place.APART)


class ReducerOfChanges(Reducer):
    """Averages over a slow link, for which training waits."""

    # A rank whose chunks are all on their way waits for the slowest rank, with an idle link. Large
    # chunks make that wait longer. Over fast links small ones only cost processors' time.
    _CHUNK_BYTES = CHUNK_BYTES // 4
    spare: dict[str, Any] | None = None  # for its memory: new pages take longer than a copy

    def before_average(self) -> dict[str, Any]:
        """The state, in the memory of `spare`, one that nobody needs."""
        spare, self.spare = self.spare, None
        return self._saved(spare)


class _OuterReducer(ReducerOfChanges):
    _RECOVERY_HINT = "DiLoCo goes on with other connections after rejoin()."


class DiLoCoStats(TypedDict):
    """What `DiLoCo.stats` returns.

    Attributes:
        inner_steps: of this rank, so far.
        outer_steps: that all ranks have taken.
        outer_ms: duration of the last outer step, with the time that slower ranks took to come.
        period_ms: from the end of the outer step before to the beginning of the last.
        reducer: what `Reducer.stats` returns; since the last `rejoin`.
    """

    inner_steps: int
    outer_steps: int
    outer_ms: float
    period_ms: float
    reducer: Stats


@takes_options(without=REFUSED)
class DiLoCo:
    """Ranks train alone; every `sync_every` steps they average their pseudo-gradients, and apply
    them with an outer optimizer (arXiv 2311.08105). Collective.

    >>> diloco = gradferry.DiLoCo(model, optimizer, sync_every=30, codec="q4")
    >>> for batch in batches:
    ...     optimizer.zero_grad()
    ...     model(batch).backward()
    ...     optimizer.step()  # every 30th: an outer step
    >>> diloco.finish()

    An outer step sends the pseudo-gradients, *global - local*, through a `Reducer` with error
    feedback at both ends; then the outer optimizer steps on the global parameters, which are equal
    on all ranks to the bit, and the model begins the next period with them. Ranks that begin with
    other parameters than rank 0 get those of rank 0; frozen ones must be the same. Buffers, such as
    those of BatchNorm, stay each rank's own. The optimizer keeps a DiLoCo until `finish` or
    `close`.

    Whatever changes the model within a period is part of the pseudo-gradient, and a parameter that
    is frozen later still moves with the outer momentum. Before the first step of a period, what all
    ranks have loaded alike becomes the global parameters; the outer momentum and the residuals
    begin anew. Copies of parameters in the state of an optimizer, such as fp32 master weights, move
    with the outer step.

    The global parameters and the outer momentum are in fp32 (fp64 for a model in fp64), also of a
    model in bf16, and with residuals and messages on `device`: on the host they take nothing from a
    GPU.

    Args:
        model: parameters that require grad are averaged. Under FSDP2 this rank's shards are.
        optimizer: that trains them, or a list of those that do together: an inner step is over when
            each has stepped.
        sync_every: inner steps of a period, 1 or more.
        codec: as for `Reducer`; ``"off"`` averages in fp32 by the backend's own all-reduce.
        outer: makes an optimizer of the list of global parameters. None: SGD with rate 0.7 and
            Nesterov momentum 0.9.
        residual_decay: above 0, at most 1: by which residuals are multiplied before an outer step.
            Below 1 what was withheld fades instead of waiting for its turn.
        device: of global parameters, residuals and messages: ``"cpu"``, or the model's. The group
            needs a backend for it.
        group: of the ranks that average; the default group if None. Where several ranks are one
            worker: under FSDP2 those with the same shard, ``mesh.get_group("worker")``; under
            DistributedDataParallel of a worker's ranks all, with ``nodes=`` ranks per worker.
        bucket_cap_mb: as for `Reducer`.
        **options: see `gradferry.Options`. Error feedback ``"auto"`` is ``"both"`` here.

    Raises:
        ConfigError: an argument cannot be used; on all ranks.
        RankMismatchError: ranks differ in them, or in the model.
        PeerError: a rank did not come, or failed.
        StateError: there is no process group.

    An optimizer's ``step()`` raises what an outer step meets:

    - StateError: a pseudo-gradient is NaN or infinite, named with its rank on all ranks; parameters
      of the model were replaced, added, removed or unfrozen; or an optimizer that was not given has
      stepped. No rank has changed anything.
    - PeerError, ProtocolError: a rank was lost. The ranks that are left have changed nothing, or
      have all that they need to end the step: see `rejoin`.
    - RankMismatchError: ranks are at different outer steps.
    - DivergedError: the global parameters differ, or what ranks have loaded.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        sync_every: int = 30,
        codec: str = "q4",
        *,
        outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
        residual_decay: float = 1.0,
        device: str | torch.device = "cpu",
        group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = BUCKET_CAP_MB,
        **options: Unpack[Options],
    ) -> None:
        members = usable_group(group)
        self._model = model
        self._reducer: _OuterReducer
        self._members: weakref.ref[dist.ProcessGroup]
        self._place, self._why = Place.NEW, ""  # why this rank needs rejoin()
        self._steps = self._outer_steps = 0
        self._stepped: Counter[int] = Counter()  # steps of optimizers, in this inner step
        # The state of the Reducer before an outer step that is not over, and, where its average is
        # here, after it.
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        self._outer_ms = self._period_ms = 0.0
        self._last_end = time.monotonic()
        problem: Exception | None = None
        try:  # what is wrong here must be said on all ranks
            self._codec, self._bucket_cap_mb = codec, bucket_cap_mb
            self._sync_every = checked_period(sync_every)
            self._decay = checked_decay(residual_decay)
            self._options = options_of_changes(options)
            self._optimizers = checked_optimizers(optimizer)
            if any(each in _counted for each in self._optimizers):
                raise ConfigError(
                    "the optimizer has a DiLoCo already, which would count its steps, too; call "
                    "close() or finish() of that first"
                )
            self._global = GlobalParameters(model, self._optimizers, device, outer or nesterov)
        except Exception as error:
            problem = error
        self._join(members, problem)
        _counted.update(self._optimizers)
        # torch.compile(optimizer.step) would trace hooks, and cannot trace what ranks agree on.
        before, after = map(torch.compiler.disable, (self._before_step, self._after_step))
        self._handles = [each.register_step_pre_hook(before) for each in self._optimizers]
        self._handles += [each.register_step_post_hook(after) for each in self._optimizers]
        self._handles.append(
            call_after_steps(
                partial(GlobalParameters.expect_known, weakref.proxy(self._global)), owner=self
            )
        )

    # --- inner steps ---

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if _is_inner_call(optimizer):
            return
        self._expect_local("step an optimizer")
        self._expect_together(PeerError)  # nobody trains on alone unseen
        self._begin_period()

    def _begin_period(self) -> None:
        """Where it begins, the global parameters are those that the model has been given."""
        is_under_way = self._global.since or self._stepped
        if not is_under_way and self._global.begin_with_model() and self._outer_steps:
            self._reducer.scale_residuals(0.0)
            warn_or_log(
                f"the model's parameters were changed after outer step {self._outer_steps}: they "
                "become the global ones, and the outer momentum and the residuals begin anew; "
                "where weights are clipped or normalized, do it in a step hook of the optimizer "
                "that was registered before DiLoCo was made"
            )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if _is_inner_call(optimizer):
            return
        found = getattr(optimizer, "found_inf", None)  # GradScaler has fused optimizers skip a step
        if isinstance(found, torch.Tensor) and found.item():
            return
        self._stepped[id(optimizer)] += 1
        if len(self._stepped) == len(self._optimizers):
            self._end_inner_step()
            if self._global.since >= self._sync_every:
                self._outer_step()
        elif self._stepped[id(optimizer)] >= _MOST_ALONE:
            raise StateError(
                f"{type(optimizer).__name__} has stepped {_MOST_ALONE} times, and another of "
                f"{len(self._optimizers)} optimizers never since the last inner step, which "
                "is over when each has stepped; give those that train the model"
            )

    def _end_inner_step(self) -> None:
        self._stepped.clear()
        self._steps += 1
        self._global.since += 1

    @property
    def outer(self) -> torch.optim.Optimizer:
        """The outer optimizer, for example for a schedule of its rate."""
        return self._global.outer

    # --- an outer step ---

    @torch.inference_mode(False)
    def _outer_step(self, *, finishes: bool = False) -> bool:
        """Whether one was taken: none is where all ranks finish, and nothing is left."""
        begin = time.monotonic()
        try:
            group = self._reducer._running.group
            # An error of a rank is raised on all of them here, before anything was sent.
            if not self._tell_shards(lambda: self._all_take_it(finishes, group)):
                return False
            self._go("all agree")
            self._before = self._reducer.before_average()
            self._tell_shards(lambda: self._average(group))
            self._apply()
        except BaseException as error:
            self._fail(error)
            raise
        end = time.monotonic()
        self._outer_ms, self._period_ms = 1e3 * (end - begin), 1e3 * (begin - self._last_end)
        self._last_end = end
        return True

    def _go(self, event: str) -> None:
        self._place = _NEXT[self._place, event]

    def _tell_shards(self, act: Callable[[], bool | None]) -> bool | None:
        """Does what the ranks with one shard do together. Under FSDP2 each shard has such a group:
        ranks of one model tell each other what was raised there, so that none of them goes on with
        its shard. Collective.
        """
        for beside, device in self._global.shard_groups():
            act = partial(value_on_all_ranks, act, beside, device)
        return act()

    def _measured(self, finishes: bool) -> Record:
        self._global.measure()
        return {
            "outer_steps": self._outer_steps,
            "outer optimizer": described(self._global.outer),
            _STATES: len(self._global.outer.state),
            "global parameters": record_hash(self._global.hashes()),
            "has more": not finishes or self._global.since > 0,
        }

    def _all_take_it(self, finishes: bool, group: dist.ProcessGroup) -> bool:
        """Compares what ranks have measured."""
        device = self._global.device
        records = on_all_ranks(lambda: self._measured(finishes), group, device)

        def compare(*fields: str) -> None:
            raise_first_mismatch([{key: r.get(key) for key in fields} for r in records], group)

        compare("outer_steps", "outer optimizer")
        if len({record["global parameters"] for record in records}) > 1:
            self._name_odd_one(group)
        compare(_STATES)
        return any(record["has more"] for record in records)

    def _average(self, group: dist.ProcessGroup) -> None:
        """Averages the pseudo-gradients, and hears that all ranks have the average."""
        try:
            if self._decay != 1.0:
                self._reducer.scale_residuals(self._decay)
            self._reducer.all_reduce(self._global.changes)
            settle(self._reducer)
        except GradferryError as error:
            say_failed(group)  # else who has the average would wait for this rank
            if isinstance(error, StateError):  # without an engine that of a backend has no kind
                raise PeerError(str(error)) from error
            raise
        # A rank that hears from all others knows that each of them holds the average: all can
        # end this step, whatever happens now. A rank that does not hear asks in rejoin().
        try:
            on_all_ranks(dict, group, self._global.device)
        except BaseException:
            self._after = withheld_by(self._reducer)
            raise

    def _apply(self) -> None:
        """Ends the outer step with the average."""
        try:
            self._global.apply()
            self._outer_steps += 1
            self._reducer.spare, self._before = self._before, None
            self._go("applied")
        except BaseException as error:
            self._after = withheld_by(self._reducer)
            self._go("applied in part")
            self._why = f"the outer optimizer failed: {type(error).__name__}: {error}"
            if isinstance(error, Exception):
                self._raise_apart(StateError, error)
            raise

    # --- failures ---

    def _fail(self, error: BaseException) -> None:
        """What ends this rank's part in an outer step ends it for all: no other rank waits."""
        is_loss = isinstance(error, PeerError | ProtocolError)
        if isinstance(error, GradferryError) and not is_loss and self._place is Place.TRAINING:
            return  # all ranks raise it, before anything was sent
        group = self._members()
        if not is_loss and group is not None:
            for each in (group, *(beside for beside, _ in self._global.shard_groups())):
                say_failed(each)
        if self._place is Place.BROKEN:
            return
        is_over = self._place is Place.TRAINING and not self._global.since
        why = str(error) if is_loss else f"{type(error).__name__}: {error}"
        self._leave("left" if is_over else "failed", why)
        engine = self._reducer._running.engine
        if engine is not None:
            with suppress(GradferryError):
                engine.fail(f"rank {self._reducer._running.world_rank}: {self._why}")
        if isinstance(error, GradferryError):
            self._raise_apart(type(error), error)

    def _leave(self, event: str, why: str) -> None:
        self._before = self._before or withheld_by(self._reducer)
        self._go(event)
        self._why = why

    def _expect_together(self, kind: type[GradferryError]) -> None:
        if self._place in _NEEDS_REJOIN:
            self._raise_apart(kind)

    def _raise_apart(self, kind: type[GradferryError], cause: Exception | None = None) -> NoReturn:
        states = {
            Place.BROKEN: f"outer step {self._outer_steps} is applied in part on this rank",
            Place.APART: "this rank has left its process group",
        }
        step = f"outer step {self._outer_steps} is not over, and has changed nothing on this rank"
        raise kind(
            f"{states.get(self._place, step)}: {self._why}; make a process group of the ranks "
            "that are left, and call diloco.rejoin(group) on each, or start all from a checkpoint"
        ) from cause

    # --- members that come and go ---

    def rejoin(self, group: dist.ProcessGroup | None = None) -> None:
        """Goes on in another process group, after ranks were lost, or where others come. Collective
        with the `DiLoCo` that a newcomer makes.

        An outer step that failed ends here, for all ranks: where one of them has it behind it, the
        others get what that has; else all take it again, with the pseudo-gradients that they had.
        Newcomers get the global parameters and the outer momentum, and take part without a
        pseudo-gradient. So do ranks that have taken fewer outer steps than others, or that have
        other global parameters than most; they are warned. In the flat exchange ranks keep their
        residuals, as ``on_resize="fold"`` says; those of ranks that are gone are lost. With two
        levels they are dropped, with a warning.

        Args:
            group: of the ranks that are left, and of those that come; the default group if None.

        Raises:
            ConfigError, RankMismatchError, PeerError, StateError: as `DiLoCo`; or it is the process
                group in which an outer step has failed. Then call it again, with another group.
        """
        self._expect_local("rejoin others")
        members = usable_group(group)
        if self._place not in _NEEDS_REJOIN:
            self._leave("left", "rejoin() has failed")
        elif members is self._members():
            raise StateError(
                "a collective of the failed outer step may still be under way in this process "
                "group; make another one of the ranks that are left"
            )
        self._join(members, None)

    @torch.inference_mode(False)
    def _join(self, members: dist.ProcessGroup, problem: Exception | None) -> None:
        device = CPU if problem is not None else self._global.device
        longest = patience(members, rendezvous_place(members, device))
        meet(members, longest, "make a DiLoCo or rejoin")
        try:
            is_due = self._meet_members(members, device, problem)
        except BaseException as error:
            if not isinstance(error, GradferryError):
                say_failed(members)
            raise
        self._go("joined")
        self._before = self._after = None
        # A collective of a failed average may still write to the old ones.
        self._global.make_changes()
        if is_due:
            self._outer_step()

    def _meet_members(
        self, members: dist.ProcessGroup, device: torch.device, problem: Exception | None
    ) -> bool:
        """Whether an outer step is to be taken again."""

        def propose() -> Record:
            if problem is not None:
                raise problem
            refuse_average_of_every_step(self._model, members)
            alike = {"sync_every": self._sync_every, "residual_decay": self._decay}
            return {"way in": "DiLoCo", **alike, **self._global.record(), "past": self._past()}

        records = on_all_ranks(propose, members, device)
        received = [record.pop("past", ()) for record in records]
        raise_first_mismatch(records, members)
        pasts, me = [_Past(*each) for each in received], members.rank()
        source = min(range(len(pasts)), key=lambda rank: (*_rank_of(pasts[rank], pasts), rank))
        theirs, takes = pasts[source], pasts[me].takes(pasts[source])
        named = list(zip(self._global.names, self._global.tensors, strict=True))
        self._reducer = _OuterReducer(
            named, self._codec, members, bucket_cap_mb=self._bucket_cap_mb, **self._options
        )
        self._members = weakref.ref(members)  # a gloo group must not outlive its destruction
        handed: Any = None
        if any(p.takes(theirs) for p in pasts):
            mine = self._global.saved() if me == source else None
            handed = content_of(mine, source, members, device)

        def go_on() -> None:
            if takes:
                self._global.load(handed)
                self._global.go_on_from_here()
            is_new = self._place is Place.NEW
            if takes and self._after and self._outer_steps + 1 == theirs.outer_steps:
                self._before = self._after  # their last step is that of which it has the average
            elif takes and not is_new:
                self._before = None
                warn_or_log(
                    f"this rank has taken {self._outer_steps} outer steps, and others "
                    f"{theirs.outer_steps} without it, or with other parameters: what it has "
                    "learnt since then, and its residuals, are dropped"
                )
            if takes or is_new:
                self._go("has what others have")
                self._outer_steps, self._steps = theirs.outer_steps, theirs.inner_steps
                self._global.since = theirs.since
            take_up(self._reducer, self._before, self._outer_steps)

        on_all_ranks(go_on, members, device)
        return any(p.place == Place.BEHIND.name and not p.takes(theirs) for p in pasts)

    def _name_odd_one(self, group: dist.ProcessGroup) -> None:
        """Raises DivergedError, naming the first global parameter and rank that differ from most
        others. Collective.
        """
        records = gather_records({"hashes": self._global.hashes()}, group, self._global.device)
        hashes, names = [record["hashes"] for record in records], self._global.names
        odd, usual = odd_one(hashes) or (0, 0)
        rows = zip(names, hashes[usual], hashes[odd], strict=True)
        name = next((name for name, one, other in rows if one != other), names[0])
        ranks = world_ranks(group)
        raise DivergedError(
            f"the global parameter {name!r} of rank {ranks[odd]} differs from that of rank "
            f"{ranks[usual]} at outer step {self._outer_steps}; load the same checkpoint, with "
            "DiLoCo's state, on every rank, or make a new DiLoCo there; a model that is loaded or "
            "changed before the first step of a period must be on all ranks, and alike"
        )

    def _past(self) -> _Past:
        return _Past(
            self._place.name,
            self._outer_steps,
            self._global.hashes(),
            self._steps,
            self._global.since,
        )

    # --- between steps ---

    def finish(self) -> None:
        """Ends: an outer step with the inner steps since the last one, if any rank has taken some,
        after which the model has the global parameters. A rank whose data ends early takes part in
        the outer steps of the others until they finish, too. Steps of the optimizer are no longer
        counted. Collective.

        Raises:
            PeerError, StateError: as an outer step does.
        """
        self._expect_local("finish")
        self._expect_together(PeerError)
        self._begin_period()
        if self._stepped:  # some of the optimizers
            self._end_inner_step()
        while self._outer_step(finishes=True):
            pass
        self.close()

    def close(self) -> None:
        """Ends without an outer step: steps of the optimizer are no longer counted, and it may get
        another DiLoCo. Not collective.
        """
        self._go("ended")
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            _counted.discard(optimizer)

    def _expect_local(self, what: str) -> None:
        if self._place is Place.ENDED:
            raise StateError(f"cannot {what}: this DiLoCo has ended; make a new one on every rank")
        if self._global.is_shown:
            raise StateError(
                f"cannot {what} within global_parameters(), whose end takes back the parameters; "
                "leave it first"
            )

    def global_parameters(self) -> AbstractContextManager[None]:
        """The model has the global parameters, which are equal on all ranks, within the ``with``:
        for evaluation, or to save what others will use. Not collective; no optimizer may step.

        Raises:
            StateError: parameters of the model were replaced.
        """
        return self._global.shown()

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save, beside its model and optimizer, to continue with the same bits,
        between any two inner steps. Not collective.

        Returns:
            A dict of tensors on `device`, numbers and strings: counts of steps, the global
            parameters by name, the state of the outer optimizer, and ``reducer``, which alone
            differs between ranks. After a failed outer step, those of before it.
        """
        return {
            "format": _FORMAT,
            "inner_steps": self._steps,
            "outer_steps": self._outer_steps,
            **self._global.saved(),
            "reducer": signed(self._before) if self._before else self._reducer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned on this rank. Load model and optimizer, too, before
        or after it: in the middle of a period nothing tells that the model is missing. Call it on
        every rank; the next outer step compares what they have loaded.

        Args:
            state_dict: what this rank saved. With fewer ranks than saved, each loads one of these;
                with more, a newcomer loads any with ``"drop"``.
            on_resize: as for `HookState.load_state_dict`: ``"fold"`` where the number of ranks has
                changed.

        Raises:
            ConfigError: another ``on_resize``.
            StateError: it is of another model, codec or number of ranks, or damaged. Nothing was
                changed.
        """
        self._expect_local("load a state")
        self._expect_together(StateError)
        try:
            counts = [state_dict[key] for key in ("format", "inner_steps", "outer_steps", "since")]
            if counts[0] != _FORMAT or any(type(count) is not int for count in counts):
                raise ValueError(f"its format and counts are {counts}")
            residuals = state_dict["reducer"]
            self._global.load(
                state_dict, lambda: self._reducer.load_state_dict(residuals, on_resize)
            )
        except GradferryError:
            raise
        except Exception as error:
            raise StateError(
                f"the saved state cannot be loaded: {type(error).__name__}: {error}; it was "
                "damaged, or saved with another model or other arguments: load what "
                "diloco.state_dict() returned where these are the same"
            ) from error
        _, self._steps, self._outer_steps, _ = counts
        self._stepped.clear()

    def stats(self) -> DiLoCoStats:
        """Counts of steps, and times of the last outer step. See `DiLoCoStats`."""
        return {
            "inner_steps": self._steps,
            "outer_steps": self._outer_steps,
            "outer_ms": self._outer_ms,
            "period_ms": self._period_ms,
            "reducer": self._reducer.stats(),
        }

    def __str__(self) -> str:
        elements = sum(each.numel() for each in self._global.tensors)
        last = ""
        if self._outer_ms:
            last = (
                f"  the last outer step took {self._outer_ms:.0f} ms, after "
                f"{self._period_ms:.0f} ms of training\n"
            )
        return (
            f"gradferry DiLoCo: {elements:,} elements, an outer step every {self._sync_every} "
            f"inner steps, outer optimizer {type(self.outer).__name__} on {self._global.device}\n"
            f"  {self._steps} inner steps, {self._outer_steps} outer steps\n{last}{self._reducer}"
        )


_STEP = torch.optim.Optimizer.profile_hook_step(lambda *_: None).__code__


def _is_inner_call(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the ``step()`` whose hook asks was called by that of a subclass. torch wraps the
    methods of both classes, so that hooks are called twice. A counter would be wrong for ever once
    a ``step()`` has raised.
    """
    frames = (frame for frame, _ in walk_stack(sys._getframe(1)))
    return sum(f.f_code is _STEP and f.f_locals.get("self") is optimizer for f in frames) > 1


# --- what other ranks have sent -------------------------------------------------------------------


class _Past(NamedTuple):
    """What a rank has behind it when it meets others."""

    place: str
    outer_steps: int
    hashes: list[int]  # of the global parameters
    inner_steps: int
    since: int

    def takes(self, theirs: _Past) -> bool:
        """Whether it lacks what another rank has."""
        is_there = (self.outer_steps, self.hashes) == (theirs.outer_steps, theirs.hashes)
        return not is_there or self.place == Place.BROKEN.name


def _rank_of(past: _Past, pasts: Sequence[_Past]) -> tuple[int, ...]:
    """The least is what the others follow: most outer steps, and of these the most together."""
    last_choice = (Place.NEW.name, Place.BROKEN.name)
    together = [p for p in pasts if not p.takes(past) and p.place not in last_choice]
    return -past.outer_steps, past.place in last_choice, -len(together)


# --- averages of changes, by a Reducer ----------------------------------------------------------


def options_of_changes(options: Mapping[str, Any]) -> Options:
    """The options of a Reducer of changes, with defaults for those that are not given.

    Raises:
        ConfigError: there is no such option, or it is one of `REFUSED`.
    """
    chosen = complete(options, REFUSED)
    if chosen["error_feedback"] == "auto":
        chosen["error_feedback"] = "both"
    return chosen


def settle(reducer: Reducer) -> None:
    """Waits until the last average has ended: a device has only been told to average.

    Raises:
        PeerError, ProtocolError: it has failed.
    """
    running = reducer._running
    if running.engine is not None:
        running.engine.settle()
    elif running.transport.device.type != "cpu":
        torch.accelerator.synchronize(running.transport.device)


def withheld_by(reducer: Reducer) -> dict[str, Any] | None:
    """The state of a Reducer; with a warning None, where an error has ended it."""
    try:
        return reducer.state_dict()
    except GradferryError as error:
        warn_or_log(f"what this rank has withheld is lost: {error}")
        return None


def take_up(reducer: Reducer, withheld: Mapping[str, Any] | None, outer_steps: int) -> None:
    """Has a new Reducer go on with what another one of this rank has withheld.

    Args:
        reducer: of any number of ranks.
        withheld: a state; None: nothing.
        outer_steps: that were taken before, equal on all ranks: messages have this number.
    """
    if not outer_steps:
        return
    state = {**(withheld or reducer.state_dict()), "steps": outer_steps}
    try:
        reducer._resume(state, on_resize="fold")
    except StateError as error:
        warn_or_log(f"what this rank has withheld is dropped: {error}")
        reducer._resume(state, on_resize="drop")
