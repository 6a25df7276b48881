"""What the residuals of all ranks hold back together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from reference import ReferenceEngine
from scenario import Scenario

ALIGNMENT = 16  # elements: where parameters and owned tiles begin in a residual


def reference_of(scenario: Scenario) -> ReferenceEngine:
    return ReferenceEngine(
        scenario.world_size,
        [w.describe() for w in scenario.weights],
        scenario.codec,
        scenario.error_feedback,
        momentum=scenario.options.get("momentum", 0.0),
        warmup_steps=scenario.options.get("warmup_steps", 0),
        warmup=scenario.options.get("warmup", "exact"),
    )


def still_missing(states: Sequence[dict], scenario: Scenario) -> list[np.ndarray]:
    """What the averaged gradient misses, in float64: the mean of the workers' plus the owners'.

    `states` are of all ranks, from state_dict(); the result has a flat array per parameter.
    """
    engine = reference_of(scenario)
    slots = [state[f"slot_{rank}"] for rank, state in enumerate(states)]
    mean = np.mean([slot["worker"].double().numpy() for slot in slots], axis=0)
    missing, offset = [], 0
    for index, parameter in enumerate(engine.layout.parameters):
        n = parameter.num_elements
        if engine.worker_residual[index][0] is None:
            missing.append(np.zeros(n))
        else:
            missing.append(mean[offset : offset + n].copy())
            offset += aligned(n)
    for slot in slots:
        at = 0
        for number in slot["owner_tiles"].tolist():
            tile = engine.layout.tiles[number]
            held = slot["owner"][at : at + tile.num_elements].double().numpy()
            missing[tile.parameter][tile.offset : tile.offset + tile.num_elements] += held
            at += aligned(tile.num_elements)
    return missing


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
