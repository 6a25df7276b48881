"""Measures all costs of a prediction except the step itself, on all ranks of a group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple

import torch

from gradferry.core.config import Config
from gradferry.forecast.buckets import parameter_codecs
from gradferry.forecast.costs import CastCosts, CodecCosts, Costs, Parameter
from gradferry.forecast.hook_names import BACKEND_HOOKS
from gradferry.forecast.measure_codecs import NUM_ELEMENTS, measure_casts, measure_codec
from gradferry.forecast.measure_link import LinkProbe, Progress


def measure_costs(
    probe: LinkProbe,
    parameters: Sequence[Parameter],
    backend_hooks: Sequence[str],
    configs: Iterable[Config],
    seconds: float,
    emit: Progress = lambda text: None,
) -> Costs:
    """Measures costs. Collective; the result is that of the slowest rank, the same on all.

    backend_hooks: of BACKEND_HOOKS.
    configs: of the codecs to predict.
    seconds: approximate time for each size of a collective.
    """
    dtype = _most_common(parameters)
    largest = sum(parameter.num_elements for parameter in parameters)
    num_elements = min(NUM_ELEMENTS, max(largest, 1))
    wanted = dict.fromkeys(codec for c in configs for codec in parameter_codecs(c, parameters))
    codecs = {}
    for codec in wanted:
        emit(f"codec {codec.codec}")
        costs = measure_codec(codec, dtype, probe.world_size, num_elements)
        codecs[codec] = CodecCosts(*probe.most(astuple(costs)))
    casts = {
        hook: CastCosts(*probe.most(astuple(costs)))
        for hook, costs in measure_casts(backend_hooks, probe.world_size, num_elements).items()
    }
    dtypes = list(dict.fromkeys(BACKEND_HOOKS[hook] for hook in backend_hooks))
    link = probe.measure(dtypes, seconds, emit)
    return Costs(probe.world_size, link, casts, codecs)


def _most_common(parameters: Sequence[Parameter]) -> torch.dtype:
    counts: Counter[torch.dtype] = Counter()
    for parameter in parameters:
        counts[parameter.dtype] += parameter.num_elements
    return counts.most_common(1)[0][0] if counts else torch.float32
