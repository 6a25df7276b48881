"""Measures all costs of a prediction except the step itself, on all ranks of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from typing import Protocol

import torch
import torch.distributed as dist

from gradferry.core.config import Config
from gradferry.core.device import Transport
from gradferry.core.nodes import Exchange, Nodes
from gradferry.forecast.buckets import parameter_codecs
from gradferry.forecast.costs import (
    CastCosts,
    CodecCosts,
    Costs,
    LinkCosts,
    NodeCosts,
    Parameter,
)
from gradferry.forecast.hook_names import BACKEND_HOOKS
from gradferry.forecast.measure_codecs import (
    NUM_ELEMENTS,
    measure_casts,
    measure_codec,
    measure_node,
)
from gradferry.forecast.measure_device_codecs import NUM_ELEMENTS as DEVICE_ELEMENTS
from gradferry.forecast.measure_device_codecs import measure_codec_on, measure_node_on
from gradferry.forecast.measure_device_link import DeviceLinkProbe
from gradferry.forecast.measure_link import LinkProbe, Progress, on_all_ranks


class Probe(Protocol):
    """What measures the link between the ranks. Its methods are collective."""

    transport: Transport
    exchanges: tuple[Exchange, ...]  # that it measures

    def measure(
        self, dtypes: Sequence[torch.dtype], seconds: float, emit: Progress = ...
    ) -> list[LinkCosts]:
        """The costs of all collectives of every exchange, the same on all ranks."""

    def most(self, values: Sequence[float]) -> list[float]:
        """The elementwise maximum over all ranks."""

    def of_first_rank(self, value: int) -> int:
        """Rank 0's value."""


def make_probe(
    group: dist.ProcessGroup, transport: Transport, exchanges: Sequence[Exchange]
) -> Probe:
    """A probe of the link that gradients would take. Collective; `exchanges`: those to measure,
    equal on all ranks, of which at most one has two levels.
    """
    if transport.on_host:
        return LinkProbe(group, exchanges)
    return DeviceLinkProbe(group, transport, exchanges)


def measure_costs(
    probe: Probe,
    parameters: Sequence[Parameter],
    backend_hooks: Sequence[str],
    configs: Iterable[Config],
    seconds: float,
    emit: Progress = lambda text: None,
) -> list[Costs]:
    """Measures the costs of every exchange of the probe. Collective; the result is that of the
    slowest rank, the same on all.

    backend_hooks: of BACKEND_HOOKS.
    configs: of the codecs to predict.
    seconds: approximate time for each size of a collective.

    Raises:
        PeerError: on all ranks; one of them cannot measure codecs or the link, most likely for want
            of memory.
    """
    dtype = _most_common(parameters)
    largest = sum(parameter.num_elements for parameter in parameters)
    place, on_host = probe.transport.device, probe.transport.on_host
    num_elements = min(NUM_ELEMENTS if on_host else DEVICE_ELEMENTS, max(largest, 1))
    wanted = dict.fromkeys(codec for c in configs for codec in parameter_codecs(c, parameters))

    def measure_exchange(nodes: Nodes) -> tuple[list[CodecCosts], NodeCosts | None]:
        codecs = []
        for codec in wanted:
            emit(f"codec {codec.codec}, {len(nodes.members)} messages to reduce")
            arguments = (codec, dtype, len(nodes.members), num_elements)
            measured = measure_codec(*arguments) if on_host else measure_codec_on(place, *arguments)
            codecs.append(measured)
        if nodes.is_flat:
            return codecs, None
        of_node = (dtype, max(nodes.ranks_per_node), num_elements)
        return codecs, measure_node(*of_node) if on_host else measure_node_on(place, *of_node)

    def measure() -> tuple[list[tuple[list[CodecCosts], NodeCosts | None]], dict[str, CastCosts]]:
        world_size = probe.exchanges[0].nodes.world_size
        casts = measure_casts(backend_hooks, world_size, num_elements, place)
        return [measure_exchange(exchange.nodes) for exchange in probe.exchanges], casts

    own, own_casts = on_all_ranks(probe.most, "codecs", measure)
    casts = {hook: CastCosts(*probe.most(astuple(cost))) for hook, cost in own_casts.items()}
    dtypes = list(dict.fromkeys(BACKEND_HOOKS[hook] for hook in backend_hooks))
    links = probe.measure(dtypes, seconds, emit)
    found = []
    for exchange, link, (costs, node) in zip(probe.exchanges, links, own, strict=True):
        slowest = [CodecCosts(*probe.most(astuple(cost))) for cost in costs]
        codecs = dict(zip(wanted, slowest, strict=True))
        local = None if node is None else NodeCosts(*probe.most(astuple(node)))
        found.append(Costs(exchange.nodes, link, casts, codecs, local))
    return found


def _most_common(parameters: Sequence[Parameter]) -> torch.dtype:
    counts: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        counts[parameter.dtype] += parameter.num_elements
    return counts.most_common(1)[0][0] if counts else torch.float32
