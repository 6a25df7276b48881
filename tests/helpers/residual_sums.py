"""What the residuals of all ranks hold back together, and what other ranks make of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from reference import ReferenceEngine, Tile
from scenario import Scenario, reference_of

ALIGNMENT = 16  # elements: where parameters and owned tiles begin in a residual


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
    for rank, state in enumerate(states):
        slot = state[f"slot_{rank}"]
        for tile, held in by_tile(slot["worker"], slot["worker_tiles"].tolist(), engine):
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


# --- trainings that go on with other ranks


def advance(engine: ReferenceEngine, scenario: Scenario, steps: range) -> list[list[np.ndarray]]:
    count = range(len(scenario.weights))
    return [
        engine.step(
            [[scenario.gradient(s, 0, r, i) for i in count] for r in range(scenario.world_size)]
        )[0]
        for s in steps
    ]


def assert_goes_on(
    answers: list[dict[str, Any]], engine: ReferenceEngine, scenario: Scenario, steps: range
) -> None:
    """Every rank's gradients of these steps are those of the reference, which takes them, too."""
    expected = advance(engine, scenario, steps)
    for answer in answers:
        for got, want in zip(answer["gradients"], expected, strict=True):
            assert all(g.tobytes() == w.tobytes() for g, w in zip(got, want, strict=True))


def resize(old: ReferenceEngine, scenario: Scenario) -> ReferenceEngine:
    new = reference_of(scenario)
    new.num_steps = old.num_steps
    for index, residuals in enumerate(old.worker_residual):
        nothing = np.zeros(scenario.weights[index].num_elements, np.float32)
        worker, owner = nothing, old.owner_residual[index]
        if residuals[0] is not None:
            worker = np.mean([r.astype(np.float64) for r in residuals], axis=0).astype(np.float32)
        owner = nothing if owner is None else owner
        if new.owner_residual[index] is None:
            worker, owner = worker + owner, nothing
        if new.worker_residual[index][0] is None:
            worker, owner = nothing, worker + owner
        if new.worker_residual[index][0] is not None:
            new.worker_residual[index] = [worker.copy() for _ in new.nodes]
        if new.owner_residual[index] is not None:
            new.owner_residual[index] = owner.copy()
    return new
