"""gradferry in torchft's DiLoCo, whose replicas come and go.

>>> diloco = torchft.local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=30)
>>> gradferry.integrations.torchft.compress(diloco, "q4")
>>> with diloco:
...     for batch in batches:
...         train(model, inner, batch)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from importlib import metadata
from typing import Any

from typing_extensions import Unpack

from gradferry.averaging.global_parameters import checked_decay
from gradferry.core.config import make_config
from gradferry.core.options import Options, takes_options
from gradferry.core.warn import warn_or_log
from gradferry.diloco import (
    REFUSED,
    ReducerOfChanges,
    options_of_changes,
    settle,
    take_up,
    withheld_by,
)
from gradferry.errors import ConfigError, PeerError, ProtocolError, StateError
from gradferry.reducer import BUCKET_CAP_MB, Work, bucket_cap, check_config

_INSTALL = 'pip install "gradferry[torchft]"'
try:
    from torchft import ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    _version = metadata.version("torchft")
except ImportError as error:
    raise ConfigError(f"torchft cannot be imported ({error}): {_INSTALL}") from error
if [int(part) for part in _version.split(".")[:2]] < [0, 2]:
    raise ConfigError(f"torchft {_version} is too old: {_INSTALL}")

__all__ = ["FragmentAverages", "compress"]


@takes_options(without=REFUSED)
def compress(
    diloco: DiLoCo,
    codec: str = "q4",
    *,
    residual_decay: float = 1.0,
    bucket_cap_mb: float = BUCKET_CAP_MB,
    **options: Unpack[Options],
) -> list[FragmentAverages]:
    """Has torchft's DiLoCo average through a codec, with error feedback at both ends. Call it
    before ``with diloco:``, with the same arguments in every replica.

    Each of its `model_fragments` is averaged by a `Reducer`, and by another one in each quorum.
    Where an average fails, or torchft does not commit its step, replicas go on with the parameters
    of before, as torchft does, and with the residuals of before. A replica that is lost takes with
    it what it has withheld, and one that torchft heals begins without. No checkpoint has it.

    The process group of the manager waits for at most half of the manager's timeout from now on:
    other ranks of a replica must not give up before an average does.

    Args:
        diloco: of a manager with a ``torchft.ProcessGroupGloo``, without ``should_quantize`` and
            ``use_bucketization``. Replicas that torchft keeps as spares take part with zeros.
        codec: as for `gradferry.Reducer`.
        residual_decay: as for `gradferry.DiLoCo`.
        bucket_cap_mb: as for `gradferry.Reducer`.
        **options: see `gradferry.Options`. Error feedback ``"auto"`` is ``"both"`` here.

    Returns:
        By `model_fragments`, their averages.

    Raises:
        ConfigError: an argument cannot be used, or `diloco` was given before. Nothing was changed.
        ConfigError, RankMismatchError: the inner optimizer's ``step()`` raises these where replicas
            differ in their arguments, or cannot average such parameters, on all replicas.
    """
    if not isinstance(diloco, DiLoCo):
        raise ConfigError(f"diloco must be torchft's DiLoCo, not {type(diloco).__name__}")
    manager: Any = diloco._manager
    if not isinstance(manager._pg, ProcessGroupGloo):
        raise ConfigError(
            f"the manager averages over {type(manager._pg).__name__}; compressed averages travel "
            "by gloo, also those of GPUs: Manager(pg=torchft.ProcessGroupGloo(), ...)"
        )
    for fragment in diloco._fragments:
        if "_average_grads" in vars(fragment):
            raise ConfigError("this DiLoCo averages through a codec already: call compress() once")
        for name in ("should_quantize", "use_bucketization"):
            if getattr(fragment, name):
                raise ConfigError(
                    f"torchft's {name} is set, in place of which codec and bucket_cap_mb stand "
                    "here; leave it out, and TORCHFT_USE_BUCKETIZATION, too"
                )
    chosen = options_of_changes(options)
    check_config(make_config(codec, chosen), [])
    decay, cap = checked_decay(residual_decay), bucket_cap(bucket_cap_mb)
    make = functools.partial(_FragmentReducer, codec=codec, bucket_cap_mb=cap, **chosen)
    averages = [FragmentAverages(fragment, manager, make, decay) for fragment in diloco._fragments]

    def begin_anew(_: object) -> None:
        for each in averages:
            each._forget()

    manager.register_state_dict_fn("gradferry", begin_anew, dict)  # called where torchft heals
    manager._pg.set_timeout(min(manager._pg._timeout, manager._timeout / 2))
    return averages


class _FragmentReducer(ReducerOfChanges):
    _RECOVERY_HINT = "torchft drops this step; the next average goes over other connections."


class FragmentAverages:
    """The averages of one of the `model_fragments`, in place of torchft's own.

    Attributes:
        reducer: of this quorum; None before its first average, and after one that was not applied.
    """

    def __init__(
        self, fragment: Any, manager: Any, make: Callable[..., ReducerOfChanges], decay: float
    ) -> None:
        self.reducer: ReducerOfChanges | None = None
        self._fragment, self._manager, self._make, self._decay = fragment, manager, make, decay
        self._quorum: int | None = None  # of the reducer
        # What this replica has withheld, where `reducer` has not that: before an average that is
        # not applied yet, or by the Reducer of an earlier quorum.
        self._withheld: dict[str, Any] | None = None
        self._work: Work | None = None
        self._perform_sync = fragment.perform_sync
        fragment._average_grads, fragment.perform_sync = self._begin, self._end

    def _begin(self) -> None:
        """In place of ``_average_grads``: begins to average what ``_grads`` hold."""
        self._fragment._allreduce_work.append(self)  # for which torchft waits
        if not self._manager.errored():
            self._report_failure_of(self._post)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Returns when the average is there, or the manager knows that it failed. Called by
        torchft, without `timeout`.
        """
        if self._work is not None:
            self._report_failure_of(self._finish)
        return True

    def _end(self) -> bool:
        """In place of ``perform_sync``: without a commit the residuals are those of before."""
        committed = False
        try:
            committed = bool(self._perform_sync())
        finally:
            if committed:
                if self.reducer is not None:
                    self.reducer.spare = self._withheld
                self._withheld = None
            else:
                self._let_go()
        return committed

    def _report_failure_of(self, act: Callable[[], None]) -> None:
        try:
            act()
        except (PeerError, ProtocolError, StateError) as error:
            number = self._fragment._fragment_id
            warn_or_log(
                f"an average of model_fragments[{number}] failed, and is not applied: {error}"
            )
            self._manager.report_error(error)

    def _post(self) -> None:
        changes: dict[str, Any] = dict(self._fragment._grads)
        reducer = self._reducer_of_quorum(changes)
        self._withheld = reducer.before_average()
        if self._decay != 1.0:
            reducer.scale_residuals(self._decay)
        # Spares add zeros, and torchft divides the sum by the number of participants.
        takes_part = self._manager.is_participating()
        share = reducer.world_size / self._manager.num_participants() if takes_part else 0.0
        if share != 1:
            for change in changes.values():
                change.mul_(share)
        self._work = reducer.all_reduce(changes, async_op=True)

    def _finish(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        assert self.reducer is not None
        work.wait()
        settle(self.reducer)

    def _reducer_of_quorum(self, changes: dict[str, Any]) -> ReducerOfChanges:
        quorum: int = self._manager._quorum_id
        if self.reducer is None or self._quorum != quorum:
            self._let_go()
            made = self._make(changes, group=self._manager._pg.parent)
            take_up(made, self._withheld, self._manager.current_step())
            self.reducer, self._quorum = made, quorum
        return self.reducer

    def _let_go(self) -> None:
        """Ends the Reducer. What it withholds stays, or what was withheld before its average."""
        if self.reducer is not None and self._withheld is None:
            self._withheld = withheld_by(self.reducer)
        self.reducer = None

    def _forget(self) -> None:
        self.reducer = self._withheld = None
