"""`DiLoCo`: ranks train alone, and average now and then how far they have come."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Unpack

from gradferry.core.agreement import (
    Record,
    gather_records,
    meeting_place,
    on_all_ranks,
    raise_first_mismatch,
)
from gradferry.core.device import CPU
from gradferry.core.meeting import meet, patience
from gradferry.core.options import Options, complete, takes_options
from gradferry.core.warn import warn
from gradferry.errors import GradferryError, PeerError, ProtocolError, StateError
from gradferry.reducer import BUCKET_CAP_MB, Reducer
from gradferry.reduction.common_parameters import (
    CommonParameters,
    checked_optimizers,
    checked_period,
    nesterov,
    refuse_others,
)
from gradferry.reduction.newcomers import count_of, hand_on, hashes_of, outline
from gradferry.reduction.start import usable_group
from gradferry.reduction.step_numbers import Stats, call_after_steps

__all__ = ["DiLoCo"]

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_FORMAT = 1
# What makes no sense of changes that are averaged now and then: the outer optimizer has the
# momentum, and a change is in no units of a loss scale.
_REFUSED = (
    "momentum",
    "warmup_steps",
    "warmup",
    "grad_scaler",
    "nonfinite",
    "exact_skip",
    "check_every",
)


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


class _OuterReducer(Reducer):
    _RECOVERY_HINT = "DiLoCo goes on with other connections."


@takes_options(without=_REFUSED)
class DiLoCo:
    """Ranks train alone; every `sync_every` steps they average how far they have come, and apply
    that as one gradient of an outer optimizer (arXiv 2311.08105). Collective.

    >>> diloco = gradferry.DiLoCo(model, optimizer, sync_every=30, codec="q4")
    >>> for batch in batches:
    ...     optimizer.zero_grad()
    ...     model(batch).backward()
    ...     optimizer.step()  # every 30th: an outer step
    >>> diloco.finish()

    An outer step sends the change since the last one, *common - local*, through a `Reducer` with
    error feedback at both ends; then the outer optimizer steps on the common parameters, which are
    equal on all ranks to the bit, and the model begins the next period with them. Ranks that begin
    with other parameters than rank 0 get those of rank 0. Buffers, such as those of BatchNorm, stay
    each rank's own.

    The common parameters and the outer momentum are in fp32 (fp64 for a model in fp64), also of a
    model in bf16, and with residuals and messages on `device`: on the host they take nothing from a
    GPU.

    Args:
        model: parameters that require grad are averaged. Under FSDP2 this rank's shards are.
        optimizer: that trains them, or a list of those that do together: an inner step is over when
            each has stepped.
        sync_every: inner steps of a period, 1 or more.
        codec: as for `Reducer`; ``"off"`` averages in fp32 by the backend's own all-reduce.
        outer: of the list of common parameters, an optimizer. None: SGD with rate 0.7 and Nesterov
            momentum 0.9.
        residual_decay: above 0, at most 1: by which this rank's worker residual is multiplied
            before an outer step. Below 1 what was withheld fades instead of waiting for its turn.
        device: of common parameters, residuals and messages: ``"cpu"``, or the model's. The group
            needs a backend for it.
        group: of the ranks that average; the default group if None. Where several ranks are one
            worker: under FSDP2 those with the same shard, ``mesh.get_group("worker")``; under
            DistributedDataParallel all, with ``nodes=`` ranks per worker.
        bucket_cap_mb: as for `Reducer`.
        **options: see `gradferry.Options`. Error feedback ``"auto"`` is ``"both"`` here.

    Raises:
        ConfigError: an argument cannot be used; on all ranks.
        RankMismatchError: ranks differ in them, or in the model.
        PeerError: a rank did not come, or failed.
        StateError: there is no process group.

    An optimizer's ``step()`` raises what an outer step meets:

    - StateError: a change is NaN or infinite, named with its rank on all ranks; parameters of the
      model were replaced, added, removed or converted; or an optimizer that was not given has
      stepped. No rank has changed anything.
    - PeerError, ProtocolError: a rank was lost. The ranks that are left have changed nothing, or
      have all that they need to end the step: see `rejoin`.
    - RankMismatchError: ranks are at different outer steps.
    - DivergedError: the common parameters differ.
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
        self._steps = self._outer_steps = self._since = 0
        self._stepped: set[int] = set()  # optimizers, in this inner step
        # What the Reducer has withheld before an outer step that is not over, and, of a step whose
        # average is here, after it.
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        self._holds_average = False
        self._failed: str | None = None  # why an outer step is not over
        self._is_shown = False  # the model has the common parameters: common_parameters()
        self._is_new = True
        self._outer_ms = self._period_ms = 0.0
        self._last_end = time.monotonic()
        problem: Exception | None = None
        try:  # what is wrong here must be said on all ranks
            self._codec, self._bucket_cap_mb = codec, bucket_cap_mb
            self._sync_every, self._decay = checked_period(sync_every, residual_decay)
            self._options = complete(options, _REFUSED)
            if self._options["error_feedback"] == "auto":
                self._options["error_feedback"] = "both"
            self._optimizers = checked_optimizers(optimizer)
            self._common = CommonParameters(model, self._optimizers, device, outer or nesterov)
        except Exception as error:
            problem = error
        self._join(members, problem)
        self._handles = [o.register_step_post_hook(self._after_step) for o in self._optimizers]
        index = WeakIdKeyDictionary(dict.fromkeys(self._common.parameters))
        refuse = refuse_others(self._optimizers)
        self._handles.append(call_after_steps(refuse, index=index, owner=self))

    # --- inner steps ---

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_shown:
            raise StateError(
                "an optimizer has stepped within common_parameters(), whose end takes that back; "
                "train outside of it"
            )
        self._stepped.add(id(optimizer))
        if len(self._stepped) < len(self._optimizers):
            return
        self._stepped.clear()
        if self._failed is not None:
            self._raise_failed(PeerError)
        self._steps += 1
        self._since += 1
        if self._since >= self._sync_every:
            self._outer_step()

    @property
    def outer(self) -> torch.optim.Optimizer:
        """The outer optimizer, for example for a schedule of its rate."""
        return self._common.outer

    # --- an outer step ---

    def _outer_step(self) -> None:
        begin = time.monotonic()
        try:
            group = self._reducer._running.group
        except Exception:
            self._fail(StateError("the process group was destroyed"))
        try:
            # An error of a rank is raised on all of them here, before anything was sent.
            self._common.agree(self._measure, self._expect_equal, group)
        except (PeerError, ProtocolError) as error:
            self._fail(error)
        problem: GradferryError | None = None
        try:
            self._before = self._reducer.state_dict()
            if self._decay != 1.0:
                self._decay_residual(self._before)
            self._reducer.all_reduce(self._common.changes)
            self._holds_average = True
        except GradferryError as error:
            problem = error
        try:
            # Who hears from all others knows that each of them has the average, so that all can end
            # this step, whatever happens now; who does not asks them in rejoin().
            self._common.agree(dict, lambda _: None, group, problem)
        except GradferryError as error:
            if self._holds_average:
                self._after = self._withheld()
            self._fail(problem or error)
        self._before = None
        self._end_outer_step()
        end = time.monotonic()
        self._outer_ms, self._period_ms = 1e3 * (end - begin), 1e3 * (begin - self._last_end)
        self._last_end = end

    def _measure(self) -> Record:
        self._common.measure()
        return {"call": "an outer step", **self._position()}

    def _expect_equal(self, records: list[Record]) -> None:
        group = self._reducer._running.group
        agreed = [{key: r.get(key) for key in ("call", "outer_steps")} for r in records]
        raise_first_mismatch(agreed, group)
        self._common.expect_equal([hashes_of(r) for r in records], group, self._outer_steps)

    def _position(self) -> Record:
        return {"outer_steps": self._outer_steps, "common": self._common.hashes()}

    def _decay_residual(self, state: dict[str, Any]) -> None:
        slot = f"slot_{self._reducer.rank}"
        worker = state[slot]["worker"] * self._decay
        self._reducer.load_state_dict({**state, slot: {**state[slot], "worker": worker}})

    def _withheld(self) -> dict[str, Any] | None:
        try:
            return self._reducer.state_dict()
        except GradferryError as error:
            warn(f"what this rank has withheld is lost: {error}")
            return None

    def _end_outer_step(self) -> None:
        self._common.apply()
        self._outer_steps += 1
        self._since = 0
        self._holds_average = False

    def _fail(self, error: GradferryError) -> NoReturn:
        self._failed = str(error)
        self._raise_failed(type(error), error)

    def _raise_failed(self, kind: type[GradferryError], cause: Exception | None = None) -> NoReturn:
        raise kind(
            f"outer step {self._outer_steps} is not over, and has changed nothing on this rank: "
            f"{self._failed}; make a process group of the ranks that are left, and call "
            "diloco.rejoin(group) on each, or start all from a checkpoint"
        ) from cause

    # --- members that come and go ---

    def rejoin(self, group: dist.ProcessGroup | None = None) -> None:
        """Goes on in another process group, after ranks were lost, or where others come. Collective
        with the `DiLoCo` that a newcomer makes.

        An outer step that failed ends here, for all ranks: where one of them has it behind it, the
        others have the average and apply it; else all take it again, with the changes that they
        had. Newcomers get the common parameters and the outer momentum, and take part without a
        change. In the flat exchange ranks keep what they have withheld, as ``on_resize="fold"``
        says; that of ranks that are gone is lost. With two levels it is dropped, with a warning.

        Args:
            group: of the ranks that are left, and of those that come; the default group if None.

        Raises:
            DivergedError: ranks that have taken the same outer steps have other parameters.
            ConfigError, RankMismatchError, PeerError, StateError: as `DiLoCo`; or it is the process
                group in which an outer step has failed. Then call it again, with another group.
        """
        members = usable_group(group)
        if self._failed is not None and members is self._members():
            raise StateError(
                "a collective of the failed outer step may still be under way in this process "
                "group; make another one of the ranks that are left"
            )
        self._is_new = False
        self._join(members, None)

    def _join(self, members: dist.ProcessGroup, problem: Exception | None) -> None:
        def mine() -> Record:
            if problem is not None:
                raise problem
            return {
                "way in": "DiLoCo",
                "sync_every": self._sync_every,
                "residual_decay": self._decay,
                **self._common.record(),
                "outer_steps": self._outer_steps,
            }

        place = meeting_place(members, CPU if problem is not None else self._common.device)
        meet(members, patience(members, place), "come to make a DiLoCo or to rejoin")
        records = on_all_ranks(mine, members, place)
        most = max(count_of(record, "outer_steps") for record in records)
        raise_first_mismatch([{**record, "outer_steps": most} for record in records], members)
        if self._holds_average:
            if most > self._outer_steps:  # on a rank that has heard from all others
                self._end_outer_step()
                self._failed, self._before = None, self._after
            self._holds_average, self._after = False, None
        if self._before is None and not self._is_new:
            self._before = self._withheld()
        self._reducer = self._new_reducer(members)
        self._members = weakref.ref(members)  # a gloo group must not outlive its destruction
        is_due = self._catch_up(members, place)
        if self._outer_steps:  # messages have the number of their outer step
            withheld = {**(self._before or self._reducer.state_dict()), "steps": self._outer_steps}
            try:
                self._reducer.load_state_dict(withheld, on_resize="fold")
            except StateError as error:
                warn(f"what this rank has withheld is dropped: {error}")
                self._reducer.load_state_dict(withheld, on_resize="drop")
        self._before, self._failed, self._is_new = None, None, False
        if is_due:
            self._outer_step()

    def _new_reducer(self, members: dist.ProcessGroup) -> Reducer:
        named = list(zip(self._common.names, self._common.tensors, strict=True))
        return _OuterReducer(
            named, self._codec, members, bucket_cap_mb=self._bucket_cap_mb, **self._options
        )

    def _catch_up(self, members: dist.ProcessGroup, place: torch.device) -> bool:
        """Newcomers get what the others have in common. Whether an outer step has failed before."""
        mine = {
            **self._position(),
            "inner_steps": self._steps,
            "since": self._since,
            "is_new": self._is_new,
            "failed": self._failed is not None,
            "outer": outline(self.outer),
        }
        records = gather_records(mine, members, place)
        places = [(count_of(record, "outer_steps"), hashes_of(record)) for record in records]
        is_new = [bool(record.get("is_new")) for record in records]
        most = max(steps for steps, _ in places)
        # The first that has been at it for longest.
        source = min(range(len(records)), key=lambda r: (places[r][0] != most, is_new[r]))
        theirs, common_place = records[source], places[source]
        hashes = [
            own if steps == most and not new else common_place[1]
            for (steps, own), new in zip(places, is_new, strict=True)
        ]
        self._common.expect_equal(hashes, members, most)
        if any(each != common_place for each in places):
            takes = places[dist.get_rank(members)] != common_place
            tensors, outlined = self._common.tensors, theirs.get("outer")
            hand_on(tensors, self.outer, outlined, source, members, place, takes=takes)
            if takes:
                self._take_place(theirs)
        return any(bool(record.get("failed")) for record in records)

    def _take_place(self, theirs: Record) -> None:
        outer_steps = count_of(theirs, "outer_steps")
        if not self._is_new:
            warn(
                f"this rank was {outer_steps - self._outer_steps} outer steps behind: what it has "
                "learnt alone since then is dropped"
            )
        self._steps, self._since = count_of(theirs, "inner_steps"), count_of(theirs, "since")
        self._outer_steps = outer_steps
        self._before = None
        self._common.show()

    # --- between steps ---

    def finish(self) -> None:
        """Ends: an outer step with the inner steps since the last one, if there were any, after
        which the model has the common parameters. Steps of the optimizer are no longer counted.
        Collective.

        Raises:
            PeerError, StateError: as an outer step does.
        """
        if self._failed is not None:
            self._raise_failed(PeerError)
        group, left = self._reducer._running.group, False

        def position() -> Record:
            return {"call": "finish()", "outer_steps": self._outer_steps, "since": self._since}

        def look(records: list[Record]) -> None:
            nonlocal left
            raise_first_mismatch([{**record, "since": 0} for record in records], group)
            left = any(record.get("since") for record in records)

        self._common.agree(position, look, group)
        if left:
            self._outer_step()
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def common_parameters(self) -> Iterator[None]:
        """The model has the common parameters, which are equal on all ranks, within the ``with``:
        for evaluation, or to save what others will use. Not collective; no optimizer may step.
        """
        kept, was_shown = self._common.local_copy(), self._is_shown
        self._common.show()
        self._is_shown = True
        try:
            yield
        finally:
            self._is_shown = was_shown
            self._common.move_back(kept)

    def state_dict(self) -> dict[str, Any]:
        """What this rank must save, beside its model and optimizer, to continue with the same bits,
        between any two inner steps. Not collective.

        Returns:
            A dict of tensors on `device`, numbers and strings: counts of steps, the common
            parameters by name, the state of the outer optimizer, and ``reducer``, which alone
            differs between ranks. After a failed outer step, those of before it.
        """
        return {
            "format": _FORMAT,
            **{key: getattr(self, field) for key, field in _COUNTS.items()},
            **self._common.saved(),
            "reducer": self._before or self._reducer.state_dict(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any], on_resize: str = "strict") -> None:
        """Restores what `state_dict` returned on this rank. Load model and optimizer, too. Call it
        on every rank; the next outer step compares what they have loaded.

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
        if self._failed is not None:
            self._raise_failed(StateError)
        if not isinstance(state_dict, Mapping) or state_dict.get("format") != _FORMAT:
            raise StateError(
                f"the saved state is none of DiLoCo in format {_FORMAT}; load what "
                "diloco.state_dict() returned"
            )
        counts = {key: state_dict.get(key) for key in _COUNTS}
        if any(type(count) is not int or count < 0 for count in counts.values()):
            raise StateError(f"the saved state counts {counts}; it was damaged")

        def load_residuals() -> None:
            self._reducer.load_state_dict(state_dict.get("reducer", {}), on_resize)

        self._common.load(state_dict, load_residuals)
        for key, field in _COUNTS.items():
            setattr(self, field, counts[key])

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
        elements = sum(each.numel() for each in self._common.tensors)
        lines = [
            f"gradferry DiLoCo: {elements:,} elements, an outer step every {self._sync_every} "
            f"inner steps, outer optimizer {type(self.outer).__name__} on {self._common.device}",
            f"  {self._steps} inner steps, {self._outer_steps} outer steps",
        ]
        if self._outer_ms:
            lines.append(
                f"  the last outer step took {self._outer_ms:.0f} ms, after "
                f"{self._period_ms:.0f} ms of training"
            )
        return "\n".join([*lines, str(self._reducer)])


# Counts in a saved state, and where they are here.
_COUNTS = {"inner_steps": "_steps", "outer_steps": "_outer_steps", "since": "_since"}
