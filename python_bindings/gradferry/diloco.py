"""`DiLoCo`: ranks train alone, and average now and then how far they have come."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Unpack

from gradferry.core.agreement import (
    Record,
    raise_first_mismatch,
)
from gradferry.core.options import Options, takes_options
from gradferry.errors import ConfigError, PeerError, StateError
from gradferry.outer_steps import (
    FINISH,
    OUTER_SHARE,
    OUTER_STEP,
    REFUSED,
    OuterSteps,
    hiding_period,
    options_of_changes,
)
from gradferry.reducer import BUCKET_CAP_MB
from gradferry.reduction.common_parameters import (
    CommonParameters,
    checked_decay,
    checked_optimizers,
    checked_period,
    nesterov,
    refuse_others,
)
from gradferry.reduction.start import usable_group
from gradferry.reduction.step_numbers import Stats, call_after_steps

__all__ = ["DiLoCo"]

_counted: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # that have a DiLoCo
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
_FORMAT = 1
_MOST_ALONE = 100  # steps of one of several optimizers, such as that of a critic


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
class DiLoCo(OuterSteps):
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
    each rank's own. The optimizer keeps a DiLoCo until `finish` or `close`.

    The common parameters and the outer momentum are in fp32 (fp64 for a model in fp64), also of a
    model in bf16, and with residuals and messages on `device`: on the host they take nothing from a
    GPU.

    Args:
        model: parameters that require grad are averaged. Under FSDP2 this rank's shards are.
        optimizer: that trains them, or a list of those that do together: an inner step is over when
            each has stepped.
        sync_every: inner steps of a period, 1 or more.
        codec: as for `Reducer`; ``"off"`` averages in fp32 by the backend's own all-reduce.
        outer: of the list of common parameters, an optimizer whose state has tensors of their
            shapes, as Adafactor's has not. None: SGD with rate 0.7 and Nesterov momentum 0.9.
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
        super().__init__()
        self._stepped: Counter[int] = Counter()  # steps of optimizers, in this inner step
        self._is_closed = False
        self._is_shown = False  # the model has the common parameters: common_parameters()
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
            self._common = CommonParameters(model, self._optimizers, device, outer or nesterov)
        except Exception as error:
            problem = error
        self._join(members, problem)
        _counted.update(self._optimizers)
        # torch.compile(optimizer.step) would trace the hook, and cannot trace what ranks agree on.
        after_step = torch.compiler.disable(self._after_step)  # type: ignore[no-untyped-call]
        self._handles = [each.register_step_post_hook(after_step) for each in self._optimizers]
        index = WeakIdKeyDictionary(dict.fromkeys(self._common.parameters))
        refuse = refuse_others(self._optimizers)
        self._handles.append(call_after_steps(refuse, index=index, owner=self))

    # --- inner steps ---

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if self._is_shown:
            raise StateError(
                "an optimizer has stepped within common_parameters(), whose end takes back the "
                "parameters, but not the optimizer's state; load a checkpoint, and train outside"
            )
        self._stepped[id(optimizer)] += 1
        if len(self._stepped) < len(self._optimizers):
            if self._stepped[id(optimizer)] >= _MOST_ALONE:
                raise StateError(
                    f"{type(optimizer).__name__} has stepped {_MOST_ALONE} times, and another of "
                    f"{len(self._optimizers)} optimizers never since the last inner step, which "
                    "is over when each has stepped; give those that train the model"
                )
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

    # --- between steps ---

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
            DivergedError: ranks that have taken the same outer steps have other parameters. Where
                they have taken others, most of them stay, and the rest is warned.
            ConfigError, RankMismatchError, PeerError, StateError: as `DiLoCo`; or it is the process
                group in which an outer step has failed. Then call it again, with another group.
        """
        self._expect_local("rejoin others")
        members = usable_group(group)
        if self._failed is not None and members is self._members():
            raise StateError(
                "a collective of the failed outer step may still be under way in this process "
                "group; make another one of the ranks that are left"
            )
        self._failed = self._failed or "rejoin() has failed"
        self._is_new = False
        self._join(members, None)

    def finish(self) -> None:
        """Ends: an outer step with the inner steps since the last one, if any rank has taken some,
        after which the model has the common parameters. A rank whose data ends early takes part in
        the outer steps of the others until they finish, too. Steps of the optimizer are no longer
        counted. Collective.

        Raises:
            PeerError, StateError: as an outer step does.
        """
        self._expect_local("finish")
        if self._failed is not None:
            self._raise_failed(PeerError)
        if self._stepped:  # some of the optimizers
            self._stepped.clear()
            self._steps, self._since = self._steps + 1, self._since + 1
        left = True

        def position() -> Record:
            return {"call": FINISH, "outer_steps": self._outer_steps, "since": self._since}

        def look(records: list[Record]) -> None:
            nonlocal left
            same = [{"outer_steps": record.get("outer_steps")} for record in records]
            raise_first_mismatch(same, group)
            left = any(r.get("since") or r.get("call") == OUTER_STEP for r in records)

        while left:
            group = self._group()
            self._common.agree(position, look, group)
            if left:
                self._outer_step()
        self.close()

    def close(self) -> None:
        """Ends without an outer step: steps of the optimizer are no longer counted, and it may get
        another DiLoCo. Not collective.
        """
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        for optimizer in self._optimizers:
            _counted.discard(optimizer)

    def _expect_local(self, what: str) -> None:
        if self._is_closed:
            raise StateError(f"cannot {what}: this DiLoCo has ended; make a new one on every rank")
        if self._is_shown:
            raise StateError(f"cannot {what} within common_parameters(); leave it first")

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
        self._expect_local("load a state")
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
        self._last = ""  # ranks that load a checkpoint are one
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

    def _advice(self) -> str:
        """The shortest period of which the last outer step is a small part, if that is longer."""
        inner_ms = self._period_ms / self._sync_every
        enough = hiding_period(self._outer_ms, inner_ms) if inner_ms else 0
        if self._is_closed or enough <= self._sync_every:  # finish() ends a shorter period
            return ""
        return f"; with sync_every={enough} it would be {OUTER_SHARE:.0%} of that"

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
                f"{self._period_ms:.0f} ms of training{self._advice()}"
            )
        return "\n".join([*lines, str(self._reducer)])


# Counts in a saved state, and where they are here.
_COUNTS = {"inner_steps": "_steps", "outer_steps": "_outer_steps", "since": "_since"}
