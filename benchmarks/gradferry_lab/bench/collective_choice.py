"""What `codec="auto"` would choose from for the all-reduce of one tensor, by the same forecast."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from gradferry.core.codec_spec import AUTO, OFF
from gradferry.core.config import make_config
from gradferry.core.device import Transport
from gradferry.core.nodes import Exchange
from gradferry.core.options import Options
from gradferry.ddp.auto import candidates, of_first_rank
from gradferry.forecast.costs import Parameter, StepProfile
from gradferry.forecast.hook_names import hook_config
from gradferry.forecast.measure import make_probe, measure_costs
from gradferry.forecast.measure_link import spare_cores
from gradferry.forecast.predict import Prediction, predictors_of
from gradferry.forecast.verdict import most_precise, rivals

_SECONDS = 0.5  # approximate time to measure one size of a collective


def candidates_of_auto(
    num_elements: int, group: dist.ProcessGroup, transport: Transport, among: Sequence[Exchange]
) -> list[Prediction]:
    """Codecs and exchanges that are to be compared, or the one choice. Collective; the same on all
    ranks.

    num_elements: of the fp32 tensor, as if all of it were there at once and nothing followed.
    among: the exchanges.
    """
    probe = make_probe(group, transport, among)
    names = [name for name in candidates(make_config(Options(AUTO))) if name != OFF]
    configs = {name: transport.adapted(hook_config(name)) for name in names}
    parameters = [Parameter("gradient", (1, num_elements))]
    costs = measure_costs(probe, parameters, [], configs.values(), _SECONDS)
    spare = spare_cores(group) if transport.on_host else 0.0
    predictors = predictors_of(parameters, StepProfile(0.0, 0.0, (0.0,), spare), costs, [[0]])
    predictions = [
        predictor.codec(name, config, [None])
        for name, config in configs.items()
        for predictor in predictors
    ]
    return of_first_rank(probe, predictions, rivals(predictions, most_precise(predictions)))
