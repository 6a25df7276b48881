"""What the residuals of all ranks hold back together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from reference import ReferenceEngine, Tile
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
        nodes=scenario.nodes,
    )


def still_missing(states: Sequence[dict], scenario: Scenario) -> list[np.ndarray]:
    """What the averaged gradient misses, in float64: the mean of the workers' plus the owners'.

    `states` are of all ranks, from state_dict(); the result has a flat array per parameter. Workers
    are nodes, of which every rank has the residuals of some tiles.
    """
    engine = reference_of(scenario)
    missing = worker_mean(states, scenario)
    for rank, state in enumerate(states):
        slot = state[f"slot_{rank}"]
        for tile, held in by_tile(slot["owner"], slot["owner_tiles"].tolist(), engine):
            missing[tile.parameter][tile.offset : tile.offset + tile.num_elements] += held
    return missing


def worker_mean(states: Sequence[dict], scenario: Scenario) -> list[np.ndarray]:
    """The mean over nodes of the worker residuals, as `still_missing`."""
    engine = reference_of(scenario)
    total = [np.zeros(parameter.num_elements) for parameter in engine.layout.parameters]
    kept = [residuals[0] is not None for residuals in engine.worker_residual]
    all_tiles = [n for n, tile in enumerate(engine.layout.tiles) if kept[tile.parameter]]
    for rank, state in enumerate(states):
        slot = state[f"slot_{rank}"]
        numbers = slot["worker_tiles"].tolist() if "worker_tiles" in slot else all_tiles
        numbers = numbers if len(slot["worker"]) else []  # nothing is withheld
        for tile, held in by_tile(slot["worker"], numbers, engine):
            total[tile.parameter][tile.offset : tile.offset + tile.num_elements] += held
    return [residual / len(engine.nodes) for residual in total]


def by_tile(
    residual: torch.Tensor, numbers: Sequence[int], engine: ReferenceEngine
) -> Iterator[tuple[Tile, np.ndarray]]:
    """The tiles of a residual with what it holds for them; nothing is left over."""
    begin = 0
    for number in numbers:
        tile = engine.layout.tiles[number]
        yield tile, residual[begin : begin + tile.num_elements].double().numpy()
        begin += aligned(tile.num_elements)
    assert begin == len(residual)


def aligned(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT
