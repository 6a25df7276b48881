"""What `codec="auto"` would choose for the all-reduce of one tensor, by the same forecast."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from gradferry.core.codec_spec import AUTO, OFF
from gradferry.core.config import make_config
from gradferry.core.device import Transport
from gradferry.core.nodes import Exchange
from gradferry.core.options import Options
from gradferry.ddp.auto import candidates
from gradferry.forecast.costs import Parameter, StepProfile
from gradferry.forecast.hook_names import hook_config
from gradferry.forecast.measure import make_probe, measure_costs
from gradferry.forecast.measure_link import spare_cores
from gradferry.forecast.predict import predictors_of
from gradferry.forecast.verdict import most_precise

_SECONDS = 0.5  # approximate time to measure one size of a collective


def choose(
    num_elements: int, group: dist.ProcessGroup, transport: Transport, among: Sequence[Exchange]
) -> tuple[str, Exchange]:
    """Codec and exchange. Collective; the same on all ranks.

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
        (predictor.codec(name, config, [None]), exchange)
        for name, config in configs.items()
        for predictor, exchange in zip(predictors, among, strict=True)
    ]
    found = most_precise([prediction for prediction, _ in predictions])
    number = [prediction for prediction, _ in predictions].index(found)
    prediction, exchange = predictions[probe.of_first_rank(number)]
    return prediction.hook, exchange
