"""Predicts a step on a hypothetical cluster, with every exchange."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from gradferry.core import device
from gradferry.core.nodes import exchange_between, flat
from gradferry.forecast.diagnosis import needs_momentum
from gradferry.forecast.hook_names import BACKEND_HOOKS, NO_HOOK, hook_config
from gradferry.forecast.predict import Prediction, predictors_of
from gradferry.forecast.verdict import TOLERANCE, advise, most_precise

from gradferry_lab.output.speedups import Speedups
from gradferry_lab.plan.cluster import Cluster, costs_of, link_costs

_SEARCH_PASSES = 20


class Plan:
    """Predictions for one cluster. Where no node has several GPUs, all exchanges are the same."""

    def __init__(self, cluster: Cluster, hooks: Sequence[str], cap_mb: float) -> None:
        self._cluster = cluster
        self._cap_mb = cap_mb
        self._backend = [hook for hook in hooks if hook in BACKEND_HOOKS]
        self._configs = {
            h: device.on_streams(hook_config(h)) for h in hooks if h not in BACKEND_HOOKS
        }
        self._nodes = [flat(cluster.world)]
        if cluster.gpus_per_node > 1:
            self._nodes.append(cluster.nodes)
        costs = [costs_of(cluster, nodes, list(self._configs.values())) for nodes in self._nodes]
        self._predictors = predictors_of(cluster.model(), cluster.profile(), costs)

    @property
    def exchanges(self) -> list[str]:
        """The names of the exchanges."""
        return [exchange_between(nodes) for nodes in self._nodes]

    @functools.cached_property
    def predictions(self) -> list[Prediction]:
        """Of every hook, `none` first, for the link that was asked for."""
        found = [self._predictors[0].without(), *self._of_backend(self._cluster.link)]
        for exchange in self.exchanges:
            found += self._of_codecs(exchange, self._cluster.link)
        return found

    def _of_backend(self, link: float) -> list[Prediction]:
        """link: bytes per second of a node's card."""
        predictor = self._predictors[0].over(link_costs(self._cluster.at(link), self._nodes[0]))
        return [predictor.backend_hook(hook, [self._cap_mb]) for hook in self._backend]

    def _of_codecs(self, exchange: str, link: float) -> list[Prediction]:
        number = self.exchanges.index(exchange)
        links = link_costs(self._cluster.at(link), self._nodes[number])
        predictor = self._predictors[number].over(links)
        return [predictor.codec(h, config, [self._cap_mb]) for h, config in self._configs.items()]

    def verdict(self) -> str:
        """A sentence for the link that was asked for: what to use."""
        return advise(self.predictions, needs_momentum)

    def verdict_row(self) -> dict[str, Any]:
        """Row of kind `verdict` of the JSON file."""
        return {"kind": "verdict", "text": self.verdict()}

    def rows(self, link: str) -> list[dict[str, Any]]:
        """Rows of the JSON file; docs/design/forecast.md defines every key."""
        best = min((p for p in self.predictions if p.hook in BACKEND_HOOKS), key=_seconds)
        ours = {p.hook for p in self.predictions} - {NO_HOOK, *BACKEND_HOOKS}
        only = self.exchanges[0]
        return [
            {
                "kind": "plan",
                "exchange": prediction.exchange or (only if prediction.hook in ours else None),
                "hook": prediction.hook,
                "ms": 1e3 * prediction.seconds,
                "doubt_ms": 1e3 * prediction.doubt_s,
                "exposed_ms": 1e3 * prediction.exposed_s,
                "ratio_to_none": prediction.ratio_to_none,
                "speedup": best.seconds / prediction.seconds,
                "wire_bytes": prediction.wire_bytes,
                "needs_momentum": prediction.hook != NO_HOOK and needs_momentum(prediction.hook),
                "link": link,
                "world": self._cluster.world,
                "gpus_per_node": self._cluster.gpus_per_node,
                "params": self._cluster.parameters,
                "tokens": self._cluster.tokens,
            }
            for prediction in self.predictions
        ]

    def speedups(self, gbits: Sequence[float]) -> list[Speedups]:
        """Of the best codec over the best backend hook, by link speed, for every exchange."""
        return [
            Speedups(
                title=exchange,
                gbits=tuple(gbits),
                speedups=tuple(self._speedup(exchange, gbit) for gbit in gbits),
                crossover_gbit=self._crossover(exchange, gbits[0], gbits[-1]),
            )
            for exchange in self.exchanges
        ]

    def _speedup(self, exchange: str, gbit: float) -> float:
        link = gbit * 1e9 / 8
        codecs = [p for p in self._of_codecs(exchange, link) if not needs_momentum(p.hook)]
        best = min(self._of_backend(link), key=_seconds)
        return best.seconds / most_precise(codecs).seconds

    def _crossover(self, exchange: str, low: float, high: float) -> float | None:
        """The fastest link on which a codec still gains more than the tolerance."""
        gain = 1 + TOLERANCE
        if self._speedup(exchange, low) < gain or self._speedup(exchange, high) >= gain:
            return None
        for _ in range(_SEARCH_PASSES):
            middle = (low * high) ** 0.5
            gains = self._speedup(exchange, middle) >= gain
            low, high = (middle, high) if gains else (low, middle)
        return low


def _seconds(prediction: Prediction) -> float:
    return prediction.seconds
