"""Predicts the time of a training step under every hook, from the costs of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from gradferry.core.config import Config
from gradferry.core.nodes import exchange_between
from gradferry.forecast.buckets import CodecTraffic, ddp_buckets
from gradferry.forecast.chunks import all_reduce_bytes
from gradferry.forecast.costs import Costs, Engine, LinkCosts, Parameter, StepProfile
from gradferry.forecast.hook_names import BACKEND_HOOKS, NO_HOOK, SYNC_HOOK
from gradferry.forecast.simulate import (
    Backward,
    ChunkCost,
    PlayedStep,
    ReducedBucket,
    play_all_reduce,
    play_codec,
)
from gradferry.forecast.simulate_streams import play_on_streams

# By this share the time that a prediction exposes may be off; four in five were within it
# (docs/results/when_to_use.md).
DOUBT = 0.3
_CALIBRATION_PASSES = 4  # each adds (almost) the remaining difference
_SHARE_PASSES = 10  # each halves an interval of length 1


@dataclass(frozen=True)
class Prediction:
    """A training step under a hook.

    Attributes:
        hook: as in `gradferry bench train`.
        exchange: FLAT or TWO_LEVEL; None: not of a codec, or there is only one.
        bucket_cap_mb: the fastest of the given bucket sizes; None: DDP's default.
        seconds: of the step.
        exposed_s: seconds more than without communication.
        wire_bytes: bytes that a rank sends.
        measured_doubt_s: where seconds were measured after all, how far from it the steps were.
    """

    hook: str
    bucket_cap_mb: float | None
    seconds: float
    exposed_s: float
    wire_bytes: int
    exchange: str | None = None
    measured_doubt_s: float | None = None

    def took(self, seconds: float, doubt_s: float) -> Prediction:
        """The same step with its measured length."""
        exposed = self.exposed_s + seconds - self.seconds
        return replace(self, seconds=seconds, exposed_s=exposed, measured_doubt_s=doubt_s)

    @property
    def doubt_s(self) -> float:
        """By how much `seconds` may be wrong, up or down."""
        return DOUBT * self.exposed_s if self.measured_doubt_s is None else self.measured_doubt_s

    @property
    def shown(self) -> str:
        """The length of the step, for people."""
        return f"{1e3 * self.seconds:.1f} ± {1e3 * self.doubt_s:.1f} ms"

    @property
    def named(self) -> str:
        """The hook, with its exchange where there is a choice."""
        return self.hook if self.exchange is None else f"{self.hook} ({self.exchange})"

    @property
    def ratio_to_none(self) -> float:
        return self.seconds / (self.seconds - self.exposed_s)


# Chunks of every bucket, and the bytes that a rank sends in all of them.
_Cut = tuple[list[list[ChunkCost]], int]


class Predictor:
    """Predicts steps of one model on one cluster."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        profile: StepProfile,
        costs: Costs,
        seen_buckets: Sequence[Sequence[int]] | None = None,
        *,
        exchange: str | None = None,
    ) -> None:
        """`seen_buckets`: those of DDP; None: as DDP would arrange them for each bucket size.
        exchange: of the predictions of codecs.
        """
        self._exchange = exchange
        self._parameters = parameters
        self._profile = profile
        self._costs = costs
        self._seen_buckets = seen_buckets
        self._cut: dict[tuple[str, float | None], _Cut] = {}  # by hook and bucket size

    def without(self) -> Prediction:
        """The step without communication."""
        return Prediction(NO_HOOK, None, self._profile.total_s, 0.0, 0)

    def sync(self) -> Prediction:
        """The step with an all-reduce of one fp32 element as it ends."""
        one = self._costs.link.all_reduce[torch.float32]
        exposed = self._profile.waiting_s + one.latency_s
        num_bytes = all_reduce_bytes(1, torch.float32.itemsize, self._costs.world_size)
        return Prediction(SYNC_HOOK, None, self._profile.total_s + exposed, exposed, num_bytes)

    def backend_hook(self, hook: str, caps_mb: Sequence[float | None]) -> Prediction:
        """Predicts one of BACKEND_HOOKS at the fastest bucket size."""
        dtype, cast = BACKEND_HOOKS[hook], self._costs.casts[hook]

        def predict(cap: float | None) -> Prediction:
            buckets, backward = self._buckets(cap)
            sent = 0
            reduced = []
            for bucket in buckets:
                elements = sum(self._parameters[index].num_elements for index in bucket)
                before = elements * cast.before_per_element
                after = elements * cast.after_per_element
                reduced.append(ReducedBucket(before, elements * dtype.itemsize, after))
                sent += elements
            played = play_all_reduce(backward, reduced, self._costs.link.all_reduce[dtype])
            num_bytes = all_reduce_bytes(sent, dtype.itemsize, self._costs.world_size)
            return self._prediction(hook, cap, played, num_bytes)

        return min(map(predict, caps_mb), key=lambda prediction: prediction.seconds)

    def codec(self, hook: str, config: Config, caps_mb: Sequence[float | None]) -> Prediction:
        """Predicts a gradferry codec with this configuration at the fastest bucket size."""

        def predict(cap: float | None) -> Prediction:
            _, backward = self._buckets(cap)
            chunks, sent = self._chunks(hook, config, cap)
            link = self._costs.link
            play = play_codec if link.engine is Engine.HOST else play_on_streams
            played = play(backward, chunks, link)
            return self._prediction(hook, cap, played, sent, self._exchange)

        return min(map(predict, caps_mb), key=lambda prediction: prediction.seconds)

    def _chunks(self, hook: str, config: Config, cap: float | None) -> _Cut:
        if (hook, cap) not in self._cut:
            traffic = CodecTraffic(config, self._parameters, self._costs.nodes)
            cut = traffic.cut(self._buckets(cap)[0])
            self._cut[hook, cap] = traffic.cost(cut, self._costs), traffic.sent_bytes(cut)
        return self._cut[hook, cap]

    def over(self, link: LinkCosts) -> Predictor:
        """A predictor for another link between the same nodes."""
        return self._with(self._profile, replace(self._costs, link=link))

    def with_profile(self, profile: StepProfile) -> Predictor:
        """A predictor of other steps with the same costs."""
        return self._with(profile)

    def calibrated(
        self, hook: str, config: Config, cap_mb: float | None, exposed_s: float
    ) -> Predictor:
        """A predictor with a `waiting_s` for which the predicted exposed time of this codec equals
        the measured one, `exposed_s`. On a device, that first decides how much of the time of the
        engine's kernels the backward pass loses, between nothing and all.
        """
        known = self
        if self._costs.link.engine is not Engine.HOST:
            known = self._sharing_the_device(hook, config, cap_mb, exposed_s)
        for _ in range(_CALIBRATION_PASSES):
            predicted = known.codec(hook, config, [cap_mb]).exposed_s
            waiting = max(0.0, known._profile.waiting_s + exposed_s - predicted)
            known = known._with(replace(known._profile, waiting_s=waiting))
        return known

    def _sharing_the_device(
        self, hook: str, config: Config, cap_mb: float | None, exposed_s: float
    ) -> Predictor:
        def sharing(spare: float) -> Predictor:
            return self._with(replace(self._profile, spare_cores=spare))

        low, high = 0.0, 1.0
        for spare in (low, high):
            exceeds = sharing(spare).codec(hook, config, [cap_mb]).exposed_s > exposed_s
            if exceeds == (spare == high):  # even the most, or the least, explains it
                return sharing(spare)
        for _ in range(_SHARE_PASSES):
            middle = (low + high) / 2
            if sharing(middle).codec(hook, config, [cap_mb]).exposed_s > exposed_s:
                low = middle
            else:
                high = middle
        return sharing(high)

    def _with(self, profile: StepProfile, costs: Costs | None = None) -> Predictor:
        other = Predictor(
            self._parameters,
            profile,
            costs or self._costs,
            self._seen_buckets,
            exchange=self._exchange,
        )
        other._cut = self._cut
        return other

    @property
    def profile(self) -> StepProfile:
        """Of the step without communication."""
        return self._profile

    def _buckets(self, cap_mb: float | None) -> tuple[Sequence[Sequence[int]], Backward]:
        ready_s = self._profile.ready_s
        buckets = self._seen_buckets or ddp_buckets(self._parameters, ready_s, cap_mb)
        end = self._profile.backward_end_s
        # Ranks wait for the slowest one: its gradients are ready later, the last ones most.
        slower = 1 + self._profile.waiting_s / end if end else 1.0
        ready = tuple(slower * max(ready_s[index] for index in bucket) for bucket in buckets)
        return buckets, Backward(ready, slower * end, self._profile.spare_cores)

    def _prediction(
        self,
        hook: str,
        cap: float | None,
        played: PlayedStep,
        wire_bytes: int,
        exchange: str | None = None,
    ) -> Prediction:
        exposed = max(0.0, played.end_s - self._profile.backward_end_s)
        seconds = self._profile.total_s + exposed
        return Prediction(hook, cap, seconds, exposed, wire_bytes, exchange)


def predictors_of(
    parameters: Sequence[Parameter],
    profile: StepProfile,
    costs: Sequence[Costs],
    seen_buckets: Sequence[Sequence[int]] | None = None,
) -> list[Predictor]:
    """One for the costs of every exchange, which predictions name where there are several."""
    exchanges = [exchange_between(cost.nodes) if len(costs) > 1 else None for cost in costs]
    return [
        Predictor(parameters, profile, cost, seen_buckets, exchange=exchange)
        for cost, exchange in zip(costs, exchanges, strict=True)
    ]
