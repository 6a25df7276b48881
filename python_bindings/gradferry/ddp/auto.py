"""A trial in the training itself, whose outcome all ranks apply at the same step: `codec="auto"`
chooses the codec, and the exchange where ranks share nodes. On a device, where those differ most,
`nodes="auto"` chooses the exchange of a named codec, too, but only once.

The hook calls the `Chooser` at the first bucket of an agreed step, at the same point on all ranks.
From there on candidates train for a few steps each (`Trial`), and the times of the slowest rank
decide. Every change starts a new engine, whose messages carry another configuration hash.

A change loses no residuals. Where the next candidate keeps fewer of them, an engine that delivers
(`Running.switch`) comes between: it sends gradients as they are, with all residuals.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gradferry import _native
from gradferry.averaging.running import Running
from gradferry.core.agreement import most_of_ranks
from gradferry.core.codec_spec import OFF, CodecSpec, parse_codec
from gradferry.core.config import COARSE_BITS, EXACT, FIRST_OF_AUTO, Config
from gradferry.core.nodes import Exchange, exchanges_to_choose_from
from gradferry.ddp.trial import (
    CODECS,
    Candidate,
    Clock,
    Trial,
    most_precise,
)
from gradferry.errors import GradferryError, StateError

_log = logging.getLogger("gradferry")

FIRST_TRIAL = 2  # DDP arranges its buckets in the steps before
_NEVER = 2**63 - 1
TRY_AGAIN_AFTER = 1000  # steps; doubled after every change, which limits the number of changes
_IN_MOMENTUM_MODE = "rht:bits=3"  # beside codecs below 3 bits
# The residuals of a parameter are delivered in the next step that uses it. A candidate for which
# that takes longer is left out.
_DELIVERING_STEPS = 10


def candidates(config: Config, exchanges: list[Exchange]) -> list[Candidate]:
    """What "auto" may choose: the exchange of a named codec, else

    `CODECS`, and ``off``, or ``exact`` where an option needs an engine. In momentum mode instead of
    ``off`` and ``exact`` coarser codecs.
    """
    if not config.chooses:
        return [Candidate(str(config.codec), config.codec.bits(), each.name) for each in exchanges]
    codecs = [parse_codec(name) for name in CODECS]
    backend = []
    if config.momentum:
        every = [parse_codec(str(row["name"])) for row in _native.codecs()]
        codecs.append(parse_codec(_IN_MOMENTUM_MODE))
        codecs += [codec for codec in every if codec.bits() < COARSE_BITS]
    elif config.check_every or config.nonfinite == "raise":
        codecs.append(EXACT)
    else:
        off = CodecSpec(OFF)
        backend.append(Candidate(OFF, off.bits(), needs_memory=False))
    names = [exchange.name for exchange in exchanges] if len(exchanges) > 1 else [None]
    return backend + [
        Candidate(str(codec), codec.bits(), name) for codec in codecs for name in names
    ]


def first_trial(config: Config) -> int:
    """The step in which it begins: in warm-up steps all candidates send the same."""
    return max(FIRST_TRIAL, config.warmup_steps)


def chooses(running: Running) -> bool:
    """Whether there is a trial: of codecs, or on a device of the exchanges of a named one."""
    config, on_host = running.config, running.transport.on_host
    exchanges = exchanges_to_choose_from(config.nodes, running.nodes, on_host=on_host)
    is_open = config.chooses or (not on_host and len(exchanges) > 1)
    return is_open and running.world_size > 1 and not config.passes_through


@dataclass
class Choice:
    """The current choice. The fields in `saved` are equal on all ranks."""

    codec: CodecSpec = FIRST_OF_AUTO
    exchange: str | None = None  # FLAT or TWO_LEVEL; None: that of `nodes`, as attached
    made: bool = False  # False before the first trial and during every trial
    reason: str = "no trial yet"
    step: int = 0  # the first with this codec and exchange
    next_check: int = FIRST_TRIAL  # 0: there is none, as the codec is named
    interval: int = TRY_AGAIN_AFTER
    measured_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> Choice:
        """The choice in a state that was found sound. Raises ConfigError for an unknown codec."""
        codec = parse_codec(saved["codec"])
        return cls(**{**saved, "codec": codec, "reason": "restored from a checkpoint"})

    def saved(self) -> dict[str, Any]:
        """The fields for a checkpoint."""
        fields = ("exchange", "made", "step", "next_check", "interval")
        return {"codec": str(self.codec), **{name: getattr(self, name) for name in fields}}

    def shown(self) -> dict[str, Any]:
        """The fields for `HookState.stats`."""
        fields = ("reason", "step", "next_check")
        shown = {"codec": str(self.codec), **{name: getattr(self, name) for name in fields}}
        return {**shown, "measured_ms": dict(self.measured_ms)}


class Chooser:
    """Chooses the codec and the exchange of one hook, or the exchange alone (`chooses`)."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._exchanges = exchanges_to_choose_from(
            running.config.nodes, running.nodes, on_host=running.transport.on_host
        )
        self._trial: Trial | None = None
        self._before: tuple[CodecSpec, str | None] | None = None  # in use before this trial
        self._delivered_since = 0  # the step in which an engine began to deliver
        self._by = "codec='auto'" if running.config.chooses else "nodes='auto'"
        self.choice = Choice(running.config.codec, next_check=first_trial(running.config))

    def start(self, hook: _native.BucketHook) -> None:
        """Makes the hook begin a trial when it is time, in place of what it would have begun."""
        hook.call_at(self.choice.next_check or _NEVER, self._begin, "choice")

    def restore(self, hook: _native.BucketHook, choice: Choice, step: int) -> None:
        """Continues from a checkpoint at `step`. Collective."""
        exchange = self._exchange_named(choice.exchange)
        config = self._running.config
        codec = choice.codec if config.chooses else config.codec
        self._switch(hook, step, codec, exchange)
        self._trial = None
        # DDP arranges its buckets anew.
        earliest = max(step + FIRST_TRIAL, config.warmup_steps)
        next_check = choice.next_check and max(choice.next_check, earliest)
        self.choice = replace(choice, codec=codec, exchange=exchange.name, next_check=next_check)
        hook.resume(step)
        self.start(hook)

    def _begin(self, hook: _native.BucketHook, step: int) -> None:
        """Begins a trial, at the first bucket of a step. Collective, as all that follows."""
        running = self._running
        every = candidates(running.config, self._exchanges)
        self._trial = Trial(every, Clock(running.transport.device), self._slowest)
        self._before = self._in_use() if self.choice.made else None
        self._go_on(hook, step)

    def _go_on(self, hook: _native.BucketHook, step: int) -> None:
        """Turns to the next candidate, or, after the last one, to that which is chosen."""
        assert self._trial is not None
        running, trial = self._running, self._trial
        wanted = trial.current
        if wanted is None and trial.outcomes:
            wanted = most_precise(trial.outcomes).candidate
        if wanted is None:  # what runs now has room for everything
            self._take(hook, step, str(running.config.codec), "no candidate can run")
            return
        try:
            arrived = self._turn_to(hook, step, wanted)
        except GradferryError as error:  # the same on all ranks
            _log.warning("%s leaves out %s: %s", self._by, wanted.name, error)
            trial.leave_out(wanted)
            self._go_on(hook, step)
            return
        if not arrived:
            hook.call_at(step + 1, self._go_on, "choice")
        elif trial.current is None:
            shown = ", ".join(outcome.shown for outcome in trial.outcomes)
            best = "the most precise of the fastest" if running.config.chooses else "the faster one"
            self._take(hook, step, wanted.name, f"{best}: {shown}")
        else:
            self._note_step(hook, step)

    def _note_step(self, hook: _native.BucketHook, step: int) -> None:
        assert self._trial is not None
        if self._trial.step_begins():
            self._go_on(hook, step)
        else:
            hook.call_at(step + 1, self._note_step, "choice")

    def _turn_to(self, hook: _native.BucketHook, step: int, wanted: Candidate) -> bool:
        """Switches to a candidate, or to an engine that delivers what the candidate has no place
        for; returns whether that was not necessary.

        Raises:
            GradferryError: on all ranks, see `Running.switch`.
        """
        running = self._running
        codec, exchange = parse_codec(wanted.hook), self._exchange_named(wanted.exchange)
        if running.loses_under(codec):
            if not running.delivers:
                running.switch(hook, running.config.codec, step, delivers=True)
                self._delivered_since = step
                self._note(step, "delivers residuals, before the next candidate")
                return False
            left = int(self._slowest([running.undelivered()])[0])
            if left and step - self._delivered_since < _DELIVERING_STEPS:
                return False
            if left:
                raise StateError(
                    f"the residuals of {left} parameters could not be delivered in "
                    f"{_DELIVERING_STEPS} steps, which did not use them, or were not finite"
                )
        self._switch(hook, step, codec, exchange)
        self._note(step, "trains for a few steps, to be compared with other candidates")
        return True

    def _note(self, step: int, reason: str) -> None:
        """A checkpoint of these steps holds no choice: who loads it tries anew."""
        running = self._running
        self.choice = replace(
            self.choice,
            codec=running.config.codec,
            exchange=running.exchange.name,
            made=False,
            reason=reason,
            next_check=step + 1,
            measured_ms={},
        )

    def _take(self, hook: _native.BucketHook, step: int, name: str, reason: str) -> None:
        assert self._trial is not None
        running, choice = self._running, self.choice
        stays = self._in_use() == self._before
        interval = choice.interval if stays or self._before is None else choice.interval * 2
        self.choice = Choice(
            codec=running.config.codec,
            exchange=running.exchange.name,
            made=True,
            reason=reason,
            step=choice.step if stays else step,
            next_check=step + interval if running.config.chooses else 0,
            interval=interval,
            measured_ms={o.candidate.name: 1e3 * o.seconds for o in self._trial.outcomes},
        )
        self._trial = None
        level = logging.INFO if running.rank == 0 and not stays else logging.DEBUG
        _log.log(level, "%s takes %s from step %d on: %s", self._by, name, step, reason)
        self.start(hook)

    def _switch(
        self, hook: _native.BucketHook, step: int, codec: CodecSpec, exchange: Exchange
    ) -> None:
        running = self._running
        if codec != running.config.codec or exchange != running.exchange or running.delivers:
            running.switch(hook, codec, step, exchange)

    def _slowest(self, values: Sequence[float]) -> list[float]:
        """By place the greatest of what all ranks pass. Collective."""
        return most_of_ranks(values, self._running.group, self._running.transport.device)

    def _in_use(self) -> tuple[CodecSpec, str | None]:
        """The codec and the exchange that run now. Passing through is the same in every one."""
        config = self._running.config
        return config.codec, None if config.passes_through else self._running.exchange.name

    def _exchange_named(self, name: str | None) -> Exchange:
        """The candidate of this name; the exchange in use for None, or for a name that is no
        candidate, which a checkpoint may have.
        """
        for exchange in self._exchanges:
            if exchange.name == name and len(self._exchanges) > 1:
                return replace(exchange, reason=f"{self._by} chose it")
        return self._running.exchange
