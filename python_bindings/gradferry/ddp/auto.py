"""`codec="auto"`: dense steps, a measurement, and a choice that all ranks apply at the same step:
of the codec, and of the exchange where ranks share nodes.

The hook calls `Chooser.check` at the first bucket of an agreed step, at the same point on all
ranks. There they measure the link together, predict the step under every codec from equal numbers,
and take the answer of rank 0. Where the forecast leaves several open, they train for a few steps
each, and those decide. A change starts a new engine, whose messages carry another configuration
hash.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from gradferry import _native
from gradferry.core.agreement import meeting_place, most_of_ranks
from gradferry.core.codec_spec import OFF, CodecSpec, parse_codec
from gradferry.core.config import COARSE_BITS, EXACT, Config
from gradferry.core.nodes import FLAT, TWO_LEVEL, Exchange, exchanges_to_choose_from
from gradferry.core.parameters import ParameterLayout
from gradferry.ddp.trial import TRIAL_STEPS, Trial
from gradferry.errors import ConfigError, GradferryError, StateError
from gradferry.forecast.clock import clock_of
from gradferry.forecast.costs import Parameter
from gradferry.forecast.hook_names import codecs_to_choose_from
from gradferry.forecast.measure import Probe, make_probe, measure_costs
from gradferry.forecast.measure_link import spare_cores
from gradferry.forecast.observe import MEASURED_STEPS, ObservedSteps, observe
from gradferry.forecast.predict import Prediction, predictors_of
from gradferry.forecast.verdict import MOST_RIVALS, TOLERANCE, most_precise, precision, rivals
from gradferry.reduction.running import Running
from gradferry.reduction.saved_state import same, shown

_log = logging.getLogger("gradferry")

# DDP arranges its buckets in the first two steps, and the last measured step needs one after it.
FIRST_CHECK = 2 + MEASURED_STEPS + 1
CHECK_EVERY = 1000  # steps; doubled after every change, which limits the number of changes
# A choice is given up if it is slower than the fastest by more than this share, or if the fastest
# has more bits.
SLOWER = 0.10
# By then the first choice is made.
CHOSEN_BY = FIRST_CHECK + MOST_RIVALS * TRIAL_STEPS
_SECONDS = 0.2  # approximate time to measure one size of a collective

_MEASURING = "dense steps, while they are measured"
_TRYING = "it trains for a few steps, which are compared with those of other candidates"


def candidates(config: Config) -> list[str]:
    """The codecs that "auto" may choose; without momentum mode none below 3 bits."""
    codecs = [parse_codec(name) for name in codecs_to_choose_from()]
    precise = [codec for codec in codecs if config.momentum or codec.bits() >= COARSE_BITS]
    names = [str(codec) for codec in precise]  # every option written out, as in the configuration
    # These options need an engine, which the backend's own all-reduce does not have.
    if not (config.momentum or config.check_every or config.nonfinite == "raise"):
        names.append(OFF)
    return names


def decide(predictions: Sequence[Prediction], held: Prediction | None) -> tuple[Prediction, str]:
    """The choice and its reason.

    Args:
        predictions: of every candidate.
        held: of the choice so far, one of them; None: there is none.
    """
    every = list(predictions)
    fastest = min(every, key=lambda prediction: prediction.seconds)
    chosen = most_precise(every)
    within = f"the most precise within {TOLERANCE:.0%} of the fastest, {_figures(fastest)}"
    if chosen is fastest:
        within = f"the fastest, and nothing more precise is within {TOLERANCE:.0%} of it"
    if held is None:
        return chosen, f"{_figures(chosen)} is {within}"
    if held.seconds > fastest.seconds * (1 + SLOWER):
        return chosen, f"{_figures(held)} is slower than {_figures(chosen)}, {within}"
    exact = most_precise(every, tolerance=0.0)
    if precision(exact.hook) > precision(held.hook):
        return exact, f"{_figures(exact)} is the fastest, and more precise than {held.named}"
    return held, f"{_figures(held)} is within {SLOWER:.0%} of the fastest, {_figures(fastest)}"


def _figures(prediction: Prediction) -> str:
    known = "predicted" if prediction.measured_doubt_s is None else "measured"
    return f"{prediction.named} ({prediction.shown} per step {known})"


def of_first_rank(
    probe: Probe, predictions: Sequence[Prediction], chosen: Sequence[Prediction]
) -> list[Prediction]:
    """What rank 0 has chosen, in its order: rounding may differ between machines. Collective."""
    numbers = [predictions.index(each) for each in chosen]
    count = probe.of_first_rank(len(numbers))
    return [
        predictions[probe.of_first_rank(numbers[place] if place < len(numbers) else 0)]
        for place in range(count)
    ]


def _parameter(layout: ParameterLayout) -> Parameter:
    is_real = torch.Size(layout.shape).numel() == layout.num_elements
    # Complex ones travel as `exact`, as those of one dimension do.
    shape = layout.shape if is_real else (layout.num_elements,)
    return Parameter(layout.name, shape, layout.dtype)


def _count(value: object) -> int:
    """Checks what a checkpoint says of steps."""
    if not isinstance(value, int) or not 0 <= value < 2**63:
        raise ValueError(f"{shown(value)} is no count")
    return value


def _exchange(name: object) -> str | None:
    """Checks what a checkpoint says of the exchange."""
    if not any(same(name, known) for known in (None, FLAT, TWO_LEVEL)):
        raise ValueError(f"exchange {shown(name)} is neither {FLAT!r} nor {TWO_LEVEL!r}")
    return None if name is None else str(name)


@dataclass
class Choice:
    """The current choice. The fields in `saved` are equal on all ranks."""

    codec: CodecSpec = EXACT
    exchange: str | None = None  # FLAT or TWO_LEVEL; None: that of `nodes`, as attached
    made: bool = False  # False while dense steps are measured
    reason: str = _MEASURING
    step: int = 0  # the first with this codec and exchange
    next_check: int = FIRST_CHECK
    interval: int = CHECK_EVERY
    predicted_ms: dict[str, float] = field(default_factory=dict)
    measured_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def restored(cls, saved: Any) -> Choice:
        """The choice in a checkpoint.

        Raises:
            StateError: the checkpoint holds something else.
        """
        try:
            if not isinstance(saved, Mapping):
                raise TypeError("it is no dict")
            return cls(
                codec=parse_codec(saved["codec"]),
                exchange=_exchange(saved.get("exchange")),  # states of earlier versions have none
                made=bool(_count(saved["made"])),
                reason="restored from a checkpoint",
                step=_count(saved["step"]),
                next_check=_count(saved["next_check"]),
                interval=_count(saved["interval"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError, ConfigError) as error:
            raise StateError(
                f"the saved state's choice {shown(saved)} is no choice of codec='auto': {error}"
            ) from error

    def saved(self) -> dict[str, Any]:
        """The fields for a checkpoint."""
        return {
            "codec": str(self.codec),
            "exchange": self.exchange,
            "made": self.made,
            "step": self.step,
            "next_check": self.next_check,
            "interval": self.interval,
        }

    def shown(self) -> dict[str, Any]:
        """The fields for `HookState.stats`."""
        return {
            "codec": str(self.codec),
            "reason": self.reason,
            "step": self.step,
            "next_check": self.next_check,
            "predicted_ms": dict(self.predicted_ms),
            "measured_ms": dict(self.measured_ms),
        }


class Chooser:
    """Chooses the codec and the exchange of one hook."""

    def __init__(self, running: Running) -> None:
        self._running = running
        self._exchanges = exchanges_to_choose_from(
            running.config.nodes, running.nodes, on_host=running.transport.on_host
        )
        self._observed: ObservedSteps | None = None
        self._trial: Trial | None = None  # between two checks
        self._spare = 0.0  # on a device, `spare_cores` as last found
        self.choice = Choice()

    def start(self, hook: _native.BucketHook) -> None:
        """Makes the hook call `check` at the next step to check."""
        if isinstance(self._running.engine, _native.DeviceEngine):
            self._running.engine.time_buckets()
        hook.call_at(self.choice.next_check, self.check, "choice")

    def restore(self, hook: _native.BucketHook, choice: Choice, step: int) -> None:
        """Continues from a checkpoint at `step`. Collective."""
        exchange = self._exchange_named(choice.exchange)
        if choice.codec != self._running.config.codec or exchange != self._running.exchange:
            self._running.switch(hook, choice.codec, step, exchange)
        self._observed = self._trial = None
        # There must be enough steps before the next check to measure.
        next_check = max(choice.next_check, step + FIRST_CHECK)
        self.choice = replace(choice, exchange=exchange.name, next_check=next_check)
        hook.resume(step)
        self.start(hook)

    def check(self, hook: _native.BucketHook, step: int) -> None:
        """Measures, chooses and switches, at the first bucket of a step. Collective."""
        running = self._running
        probe = make_probe(running.group, running.transport, self._exchanges)
        self._observe(probe)
        if self._observed is None:
            self._measure_again(hook, step)
            return
        predictions = self._predict(probe, self._observed)
        held = self._held(predictions) if self.choice.made else None
        found, reason = decide(predictions, held)
        tried = [found]
        # In a warm-up all candidates send the same.
        if found is not held and step >= self._running.config.warmup_steps:
            tried = rivals(predictions, found)
        if held is not None and len(tried) > 1:
            # Residuals survive a trial that keeps the choice.
            tried = [p for p in tried if p is found or self._keeps_residuals(p, held)]
            tried += [held] if held not in tried else []
        tried = of_first_rank(probe, predictions, tried)
        predicted_ms = {p.named: 1e3 * p.seconds for p in predictions}
        if len(tried) == 1:
            self._take(hook, step, tried[0], held, reason, predicted_ms)
            return
        self._trial = Trial(tried, held, predicted_ms, clock_of(self._running.transport.device))
        self._try_next(hook, step, self._trial)

    def _keeps_residuals(self, candidate: Prediction, held: Prediction) -> bool:
        """Whether a candidate has a place for what is withheld under the choice so far."""
        theirs, ours = (
            (False, False)
            if each.hook == OFF
            else self._running.config.residuals_of(parse_codec(each.hook))
            for each in (candidate, held)
        )
        return all(there or not here for there, here in zip(theirs, ours, strict=True))

    def _try_next(self, hook: _native.BucketHook, step: int, trial: Trial) -> None:
        """The next candidate trains from this step on. Collective."""
        while (candidate := trial.next()) is not None:
            try:
                codec, exchange = self._switch(hook, step, candidate)
            except GradferryError as error:  # the same on all ranks
                if len(trial.candidates) == 1:
                    raise
                _log.warning("codec='auto' leaves out %s: %s", candidate.named, error)
                trial.drop(candidate)
                continue
            # A checkpoint of these steps holds no choice: who loads it measures anew.
            self.choice = replace(
                self.choice,
                codec=codec,
                exchange=exchange.name,
                made=False,
                reason=_TRYING,
                next_check=step + TRIAL_STEPS,
                predicted_ms=trial.predicted_ms,
                measured_ms={},
            )
            hook.call_at(step + 1, self._note_step, "choice")
            return
        self._trial = None
        group = self._running.group
        place = meeting_place(group, self._running.transport.device)
        measured = trial.outcome(lambda values: most_of_ranks(values, group, place))
        was = next((p for p in measured if trial.held and p.named == trial.held.named), None)
        found, reason = decide(measured, was)
        measured_ms = {p.named: 1e3 * p.seconds for p in measured}
        self._take(hook, step, found, trial.held, reason, trial.predicted_ms, measured_ms)

    def _note_step(self, hook: _native.BucketHook, step: int) -> None:
        assert self._trial is not None
        if self._trial.goes_on():
            hook.call_at(step + 1, self._note_step, "choice")
        else:
            self._try_next(hook, step, self._trial)

    def _take(
        self,
        hook: _native.BucketHook,
        step: int,
        found: Prediction,
        held: Prediction | None,
        reason: str,
        predicted_ms: dict[str, float],
        measured_ms: dict[str, float] | None = None,
    ) -> None:
        """Takes a choice, the same on all ranks. Collective."""
        codec, exchange = self._switch(hook, step, found)
        choice = self.choice
        stays = held is not None and found.named == held.named
        interval = choice.interval if held is None or stays else choice.interval * 2
        self.choice = Choice(
            codec=codec,
            exchange=exchange.name,
            made=True,
            reason=reason,
            step=choice.step if stays else step,
            next_check=step + interval,
            interval=interval,
            predicted_ms=predicted_ms,
            measured_ms=measured_ms or {},
        )
        level = logging.INFO if not stays and self._running.rank == 0 else logging.DEBUG
        _log.log(level, "codec='auto' takes %s from step %d on: %s", found.named, step, reason)
        self.start(hook)

    def _switch(
        self, hook: _native.BucketHook, step: int, wanted: Prediction
    ) -> tuple[CodecSpec, Exchange]:
        codec, exchange = parse_codec(wanted.hook), self._exchange_named(wanted.exchange)
        if codec != self._running.config.codec or exchange != self._running.exchange:
            self._running.switch(hook, codec, step, exchange)
        return codec, exchange

    def _held(self, predictions: Sequence[Prediction]) -> Prediction:
        """That of the current choice. Passing through has the same in every exchange."""
        codec = str(self._running.config.codec)
        alike = [p for p in predictions if p.hook == codec]
        exchange = self._running.exchange.name
        return next((p for p in alike if p.exchange == exchange), alike[0])

    def _exchange_named(self, name: str | None) -> Exchange:
        """Of those to choose from. None, or another name, which a checkpoint may have: as it is."""
        for exchange in self._exchanges:
            if exchange.name == name and len(self._exchanges) > 1:
                return replace(exchange, reason="codec='auto' chose it")
        return self._running.exchange

    def _observe(self, probe: Probe) -> None:
        """Updates the observed steps from the engine; without one, keeps the earlier ones."""
        engine = self._running.engine
        seen = None if engine is None else observe(self._events(engine), engine.stats())
        if probe.most([0.0 if seen else 1.0])[0]:
            return  # a rank has not seen enough
        assert seen is not None
        self._observed = seen.of_slowest(probe.most)

    def _events(self, engine: _native.BucketEngine) -> list[dict[str, Any]]:
        """The times of the last buckets, where they were computed. On a device the hook holds up
        nothing when it takes a bucket.
        """
        if not isinstance(engine, _native.DeviceEngine):
            return engine.events()
        clock_of(self._running.transport.device).wait()
        return [{**times, "encoded_ms": times["begin_ms"]} for times in engine.bucket_times()]

    def _measure_again(self, hook: _native.BucketHook, step: int) -> None:
        if self._running.engine is None:
            self._running.switch(hook, EXACT, step)
        self.choice = Choice(next_check=step + FIRST_CHECK, interval=self.choice.interval)
        self.start(hook)

    def _predict(self, probe: Probe, observed: ObservedSteps) -> list[Prediction]:
        running = self._running
        parameters = [_parameter(p) for p in running.parameters]
        now = running.config
        configs = {
            name: replace(now, codec=parse_codec(name)) for name in candidates(now) if name != OFF
        }
        backend = [OFF] if OFF in candidates(now) else []
        costs = measure_costs(probe, parameters, backend, [now, *configs.values()], _SECONDS)
        spare = spare_cores(running.group) if running.transport.on_host else self._spare
        profile = observed.profile(len(parameters), spare)
        predictors = predictors_of(parameters, profile, costs, observed.buckets)
        if running.engine is not None:
            # Corrects the model by the difference between prediction and observation.
            current = self._exchanges.index(running.exchange)
            calibrated = predictors[current].calibrated(
                str(now.codec), now, None, observed.exposed_s
            )
            profile = calibrated.profile
            self._spare = profile.spare_cores
            predictors = [predictor.with_profile(profile) for predictor in predictors]
        found = [
            predictor.codec(name, config, [None])
            for name, config in configs.items()
            for predictor in predictors
        ]
        return [*found, *(predictors[0].backend_hook(name, [None]) for name in backend)]
