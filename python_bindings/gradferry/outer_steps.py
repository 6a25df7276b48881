"""Outer steps of ranks that train alone: who agrees on one, and how members come and go."""

from __future__ import annotations

import contextlib
import math
import time
import uuid
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from gradferry.core.agreement import (
    Record,
    gather_records,
    meeting_place,
    on_all_ranks,
    raise_first_mismatch,
    record_hash,
)
from gradferry.core.config import CHUNK_BYTES
from gradferry.core.device import CPU
from gradferry.core.meeting import meet, patience, say_failed
from gradferry.core.options import Options, complete
from gradferry.core.warn import warn_or_log
from gradferry.errors import GradferryError, PeerError, ProtocolError, StateError
from gradferry.reducer import Reducer
from gradferry.reduction.common_parameters import CommonParameters
from gradferry.reduction.newcomers import adopt_options, count_of, hand_on, hashes_of, outline

# What makes no sense of changes that are averaged now and then: the outer optimizer has the
# momentum, and a change is in no units of a loss scale.
REFUSED = (
    "momentum",
    "warmup_steps",
    "warmup",
    "grad_scaler",
    "nonfinite",
    "exact_skip",
    "check_every",
)
OUTER_STEP, FINISH = "an outer step", "finish()"  # what a rank has called
OUTER_SHARE = 0.05  # of the time of training that an outer step may take unnoticed


class ReducerOfChanges(Reducer):
    """Averages over a slow link, for which training waits."""

    # A rank whose chunks are all on their way waits for the slowest rank, with an idle link. Large
    # chunks make that wait longer. Over fast links small ones only cost processors' time.
    _CHUNK_BYTES = CHUNK_BYTES // 4
    _kept: dict[str, Any] | None = None  # for its memory: new pages take longer than a copy

    def fade(self, decay: float) -> dict[str, Any]:
        """Multiplies the worker residual of this rank by `decay`. Returns the state of before."""
        kept, self._kept = self._kept, None
        before = self._saved(kept)
        if decay != 1.0:
            slot = f"slot_{self.rank}"
            worker = before[slot]["worker"] * decay
            self.load_state_dict({**before, slot: {**before[slot], "worker": worker}})
        return before

    def give_back(self, before: dict[str, Any] | None) -> None:
        """Takes what `fade` returned, and nobody has or will use: the next call overwrites it."""
        self._kept = before


class _OuterReducer(ReducerOfChanges):
    _RECOVERY_HINT = "DiLoCo goes on with other connections after rejoin()."


class OuterSteps:
    """Averages changes, applies them to the common parameters, and survives lost ranks.

    `_join` finds a rank in one of four places: between outer steps; in one that failed before this
    rank had the average; in one of which it holds the average, but does not know that all do; or
    new, with nothing that others need.
    """

    _common: CommonParameters
    _reducer: _OuterReducer
    _members: weakref.ref[dist.ProcessGroup]
    # Arguments, checked.
    _codec: str
    _bucket_cap_mb: float
    _sync_every: int
    _decay: float
    _options: Options

    def __init__(self) -> None:
        self._steps = self._outer_steps = self._since = 0
        # What the ranks of an outer step have drawn for it: two that have taken as many may have
        # taken others, in groups that did not know of each other.
        self._last = ""  # the last that was applied here
        self._running = ""  # the one that is not over
        # What the Reducer has withheld before an outer step that is not over, and, of a step whose
        # average is here, after it.
        self._before: dict[str, Any] | None = None
        self._after: dict[str, Any] | None = None
        self._holds_average = False
        self._is_due = False  # an outer step has failed, and all are to take it again
        self._failed: str | None = None  # why this rank needs rejoin()
        self._is_new = True
        self._outer_ms = self._period_ms = 0.0
        self._last_end = time.monotonic()

    # --- an outer step ---

    @torch.inference_mode(False)
    def _outer_step(self) -> None:
        begin = time.monotonic()
        group = self._group()
        self._holds_average = False
        try:
            # An error of a rank is raised on all of them here, before anything was sent.
            self._must_repeat = True
            while self._must_repeat:
                self._common.agree(self._measure, self._expect_equal, group)
        except (PeerError, ProtocolError) as error:
            self._fail(error)
        problem: GradferryError | None = None
        try:
            self._average()
        except GradferryError as error:
            # Without an engine the error of a backend has no kind.
            problem = PeerError(str(error)) if isinstance(error, StateError) else error
        except BaseException as error:
            with contextlib.suppress(GradferryError):
                self._fail(PeerError(f"{type(error).__name__}: {error}"), group)
            raise
        try:
            # A rank that hears from all others knows that each of them holds the average: all can
            # end this step, whatever happens now. A rank that does not hear asks in rejoin().
            self._common.agree(dict, lambda _: None, group, problem)
        except GradferryError as error:
            if self._holds_average:
                self._after = withheld_by(self._reducer)
            self._fail(problem or error)
        self._reducer.give_back(self._before)
        self._before = None
        self._end_outer_step()
        end = time.monotonic()
        self._outer_ms, self._period_ms = 1e3 * (end - begin), 1e3 * (begin - self._last_end)
        self._last_end = end

    def _group(self) -> dist.ProcessGroup:
        try:
            return self._reducer._running.group
        except StateError as error:
            self._fail(error)

    def _measure(self) -> Record:
        self._common.measure()
        return {
            "call": OUTER_STEP,
            "outer_steps": self._outer_steps,
            "common parameters": record_hash(self._common.hashes()),
            "outer optimizer": outline(self._common.outer)["groups"],
            "drawn": uuid.uuid4().hex,
        }

    def _expect_equal(self, records: list[Record]) -> None:
        group = self._reducer._running.group
        raise_first_mismatch([{"outer_steps": r.get("outer_steps")} for r in records], group)
        # A rank whose data has ended comes to this outer step with its next record.
        self._must_repeat = any(record.get("call") == FINISH for record in records)
        if self._must_repeat:
            return
        fields = ("call", "outer optimizer")
        raise_first_mismatch([{key: r.get(key) for key in fields} for r in records], group)
        same = [{"common parameters": record.get("common parameters")} for record in records]
        if any(record != same[0] for record in same):
            place = meeting_place(group, self._common.device)
            each = gather_records({"common": self._common.hashes()}, group, place)
            self._common.expect_equal([hashes_of(r) for r in each], group, self._outer_steps)
            raise_first_mismatch(same, group)
        self._running = str(record_hash([r.get("drawn") for r in records]))

    def _average(self) -> None:
        self._before = self._reducer.fade(self._decay)
        self._reducer.all_reduce(self._common.changes)
        settle(self._reducer)
        self._holds_average = True

    def _end_outer_step(self) -> None:
        self._holds_average = False
        try:
            self._common.apply()
        except Exception as error:
            self._failed, self._last = f"the outer optimizer failed: {error}", "applied in part"
            raise StateError(
                f"outer step {self._outer_steps} is applied in part on this rank, where "
                f"{self._failed}; mend outer=, and call diloco.rejoin(group) on every rank, which "
                "gives this one what the others have, or start all from a checkpoint"
            ) from error
        self._outer_steps += 1
        self._last = self._running
        self._since = 0

    def _fail(self, error: GradferryError, group: dist.ProcessGroup | None = None) -> NoReturn:
        """Ends this rank's part in an outer step, so that no other rank waits for it."""
        self._failed, self._is_due = str(error), True
        if self._before is None:
            self._before = withheld_by(self._reducer)
        if group is not None:
            say_failed(group)
        engine = self._reducer._running.engine
        if engine is not None:
            engine.fail(f"rank {self._reducer._running.world_rank}: {error}")
        self._raise_failed(type(error), error)

    def _raise_failed(self, kind: type[GradferryError], cause: Exception | None = None) -> NoReturn:
        raise kind(
            f"outer step {self._outer_steps} is not over, and has changed nothing on this rank: "
            f"{self._failed}; make a process group of the ranks that are left, and call "
            "diloco.rejoin(group) on each, or start all from a checkpoint"
        ) from cause

    # --- members that come and go ---

    @torch.inference_mode(False)
    def _join(self, members: dist.ProcessGroup, problem: Exception | None) -> None:
        place = meeting_place(members, CPU if problem is not None else self._common.device)
        meet(members, patience(members, place), "come to make a DiLoCo or to rejoin")

        def mine() -> Record:
            if problem is not None:
                raise problem
            return {
                "way in": "DiLoCo",
                "sync_every": self._sync_every,
                "residual_decay": self._decay,
                **self._common.record(),
                "outer_steps": self._outer_steps,
                "last": self._last,
            }

        records = on_all_ranks(mine, members, place)
        agreed = ["way in", "sync_every", "residual_decay", *self._common.record()]
        raise_first_mismatch([{key: r.get(key) for key in agreed} for r in records], members)
        if self._holds_average:
            # A rank of this very step has heard from all others, and applied it.
            behind = (self._outer_steps + 1, self._running)
            if any((count_of(r, "outer_steps"), r.get("last")) == behind for r in records):
                self._end_outer_step()
                self._is_due, self._before = False, self._after
            self._holds_average, self._after = False, None
        if self._before is None and not self._is_new:
            self._before = withheld_by(self._reducer)
        # A collective of a failed average may still write to the old ones.
        self._common.make_changes()
        named = list(zip(self._common.names, self._common.tensors, strict=True))
        self._reducer = _OuterReducer(
            named, self._codec, members, bucket_cap_mb=self._bucket_cap_mb, **self._options
        )
        self._members = weakref.ref(members)  # a gloo group must not outlive its destruction
        self._is_due = self._catch_up(members, place)
        on_all_ranks(
            lambda: take_up(self._reducer, self._before, self._outer_steps), members, place
        )
        self._before, self._failed, self._is_new = None, None, False
        if self._is_due:
            self._is_due = False
            self._outer_step()

    def _catch_up(self, members: dist.ProcessGroup, place: torch.device) -> bool:
        """Newcomers get what the others have in common. Whether an outer step has failed before."""
        mine = {
            "outer_steps": self._outer_steps,
            "last": self._last,
            "common": self._common.hashes(),
            "inner_steps": self._steps,
            "since": self._since,
            "is_new": self._is_new,
            "is_due": self._is_due,
            "outer": outline(self._common.outer),
        }
        records = gather_records(mine, members, place)
        pasts = [(count_of(r, "outer_steps"), str(r.get("last"))) for r in records]
        hashes = [hashes_of(record) for record in records]
        is_new = [bool(record.get("is_new")) for record in records]
        many = Counter(past for past, new in zip(pasts, is_new, strict=True) if not new)
        most = max(steps for steps, _ in pasts)
        # The first of those that have taken most outer steps, and of these the most together.
        source = min(
            range(len(records)),
            key=lambda r: (pasts[r][0] != most, is_new[r], -many[pasts[r]], r),
        )
        theirs = records[source]
        same = [p == pasts[source] and not new for p, new in zip(pasts, is_new, strict=True)]
        must_be = [own if one else hashes[source] for own, one in zip(hashes, same, strict=True)]
        self._common.expect_equal(must_be, members, most)
        takes = [
            (past, own) != (pasts[source], hashes[source])
            for past, own in zip(pasts, hashes, strict=True)
        ]
        adopt_options(self._common.outer, theirs.get("outer"))
        me = members.rank()
        inner_steps, since = count_of(theirs, "inner_steps"), count_of(theirs, "since")
        if any(takes):
            hand_on(
                self._common.tensors,
                self._common.outer,
                theirs.get("outer"),
                source,
                members,
                place,
                takes=takes[me],
            )
        if takes[me] and not self._is_new:
            warn_or_log(
                f"this rank has taken {self._outer_steps} outer steps, and others {most} without "
                "it: what it has learnt alone since then, and withheld, is dropped"
            )
        if takes[me] or self._is_new:
            self._steps, self._since, self._before = inner_steps, since, None
            self._outer_steps, self._last = pasts[source]
        if takes[me]:
            self._common.show()
        return any(bool(record.get("is_due")) for record in records)


def hiding_period(outer_s: float, inner_s: float) -> int:
    """The fewest inner steps of a period of which an outer step is `OUTER_SHARE` at most.

    Args:
        outer_s: duration of an outer step.
        inner_s: of an inner step, in the same unit; above 0.
    """
    return math.ceil(outer_s / inner_s / OUTER_SHARE)


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
        reducer.load_state_dict(state, on_resize="fold")
    except StateError as error:
        warn_or_log(f"what this rank has withheld is dropped: {error}")
        reducer.load_state_dict(state, on_resize="drop")
