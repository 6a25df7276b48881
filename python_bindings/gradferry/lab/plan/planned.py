"""Predicts a step on a hypothetical cluster, with gradferry's exchange and with a hierarchical one
that does not exist yet.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradferry.core import device
from gradferry.core.config import Config
from gradferry.forecast.diagnosis import needs_momentum
from gradferry.forecast.hook_names import BACKEND_HOOKS, NO_HOOK, hook_config
from gradferry.forecast.predict import Prediction, Predictor
from gradferry.forecast.verdict import TOLERANCE, advise, most_precise, suppose
from gradferry.lab.output.speedups import NOT_YET, Speedups
from gradferry.lab.plan.cluster import (
    Cluster,
    flat_costs,
    hierarchical_costs,
    inside_node_s,
)

FLAT, HIERARCHICAL = "flat", "hierarchical"
_SEARCH_PASSES = 20


@dataclass(frozen=True)
class Exchange:
    """How packed bytes move between ranks. `exists`: whether gradferry has it."""

    name: str
    exists: bool


def exchanges_of(cluster: Cluster) -> list[Exchange]:
    """Where no node has several GPUs, they are all the same."""
    found = [Exchange(FLAT, exists=True)]
    if cluster.gpus_per_node > 1:
        found.append(Exchange(HIERARCHICAL, exists=False))
    return found


class Plan:
    """Predictions for one cluster and one kind of exchange."""

    def __init__(
        self, cluster: Cluster, exchange: Exchange, hooks: Sequence[str], cap_mb: float
    ) -> None:
        self.exchange = exchange
        self._cluster = cluster
        self._is_flat = exchange.name == FLAT
        self._cap_mb = cap_mb
        self._backend = [hook for hook in hooks if hook in BACKEND_HOOKS]
        self._configs = {
            h: device.on_streams(hook_config(h)) for h in hooks if h not in BACKEND_HOOKS
        }
        configs = list(self._configs.values())
        # The backend's all-reduce moves the whole model whatever the exchange.
        self._whole = Predictor(cluster.model(), cluster.profile(), flat_costs(cluster, configs))
        self._codecs = self._whole
        if not self._is_flat:
            costs = hierarchical_costs(cluster, configs)
            share = cluster.model(cluster.gpus_per_node)
            self._codecs = Predictor(share, cluster.profile(), costs)

    @functools.cached_property
    def predictions(self) -> list[Prediction]:
        """For the link that was asked for."""
        return self.predict(self._cluster.link)

    def predict(self, link: float) -> list[Prediction]:
        """Of every hook, `none` first. `link`: bytes per second of a node's card."""
        cluster = self._cluster.at(link)
        configs: list[Config] = []
        whole = self._whole.over(flat_costs(cluster, configs).link)
        found = [whole.without()]
        found += [whole.backend_hook(hook, [self._cap_mb]) for hook in self._backend]
        if self._is_flat:
            return found + [whole.codec(h, c, [self._cap_mb]) for h, c in self._configs.items()]
        codecs = self._codecs.over(hierarchical_costs(cluster, configs).link)
        cap = self._cap_mb / cluster.gpus_per_node  # a GPU's share of a bucket
        inside = inside_node_s(cluster, self._cap_mb * 2**20)
        for hook, config in self._configs.items():
            found.append(_later(codecs.codec(hook, config, [cap]), inside))
        return found

    def verdict(self) -> str:
        """A sentence for the link that was asked for, after the exchange's name: what to use, or,
        with an exchange that does not exist, what it would give.
        """
        name = self.exchange.name
        if self.exchange.exists:
            return f"{name}: {advise(self.predictions, needs_momentum)}"
        return f"{name}, which {NOT_YET}: {suppose(self.predictions, needs_momentum)}"

    def verdict_row(self) -> dict[str, Any]:
        """Row of kind `verdict` of the JSON file."""
        return {"kind": "verdict", **self._place(), "text": self.verdict()}

    def _place(self) -> dict[str, Any]:
        return {"exchange": self.exchange.name, "exists": self.exchange.exists}

    def rows(self, link: str) -> list[dict[str, Any]]:
        """Rows of the JSON file; docs/forecast.md defines every key."""
        best = self._best_of_backend(self.predictions)
        return [
            {
                "kind": "plan",
                **self._place(),
                "hook": prediction.hook,
                "ms": 1e3 * prediction.seconds,
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

    def speedups(self, gbits: Sequence[float]) -> Speedups:
        """Of the best codec over the best backend hook, by link speed."""
        return Speedups(
            title=self.exchange.name,
            exists=self.exchange.exists,
            gbits=tuple(gbits),
            speedups=tuple(self._speedup(gbit) for gbit in gbits),
            crossover_gbit=self._crossover(gbits[0], gbits[-1]),
        )

    def _speedup(self, gbit: float) -> float:
        predictions = self.predict(gbit * 1e9 / 8)
        codecs = [
            p
            for p in predictions
            if p.hook not in BACKEND_HOOKS and p.hook != NO_HOOK and not needs_momentum(p.hook)
        ]
        chosen = most_precise(codecs)
        return self._best_of_backend(predictions).seconds / chosen.seconds

    def _crossover(self, low: float, high: float) -> float | None:
        """The fastest link on which a codec still gains more than the tolerance."""
        gain = 1 + TOLERANCE
        if self._speedup(low) < gain or self._speedup(high) >= gain:
            return None
        for _ in range(_SEARCH_PASSES):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._speedup(middle) >= gain else (low, middle)
        return low

    def _best_of_backend(self, predictions: Sequence[Prediction]) -> Prediction:
        return min((p for p in predictions if p.hook in BACKEND_HOOKS), key=lambda p: p.seconds)


def _later(prediction: Prediction, seconds: float) -> Prediction:
    return Prediction(
        prediction.hook,
        prediction.bucket_cap_mb,
        prediction.seconds + seconds,
        prediction.exposed_s + seconds,
        prediction.wire_bytes,
    )
