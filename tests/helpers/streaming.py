"""Trainings on the fake device of tests/engine/streams, whatever order its streams run in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from scenario import Scenario, Weight, train_at_once
from watching import expect_no_race

# The least there can be: several chunks per bucket, and more than the four slots per step.
CHUNK_BYTES = 32768
SCENARIO = Scenario(
    (
        Weight("first", (200, 300)),
        Weight("bias", (77,)),
        Weight("second", (310, 211)),
        Weight("third", (100, 120)),
    ),
    2,
    steps=4,
    codec="q8",
    error_feedback="both",
    rules=(("second", "exact"), ("third", "bf16")),
    device="streamed",
    ddp={"bucket_cap_mb": 0.2},
)
# A bucket of more chunks than are in flight, which have tiles of both rails, of one, or of none.
MANY_CHUNKS = dataclasses.replace(
    SCENARIO,
    weights=(Weight("first", (59, 4096)), Weight("bias", (4095,)), Weight("second", (3, 4096))),
    rules=(("second", "q8"),),
    codec="exact",
    ddp={},
    steps=3,
    options={"momentum": 0.9},
)
# For what does not depend on the transport.
DEVICES = ["streamed", pytest.param("staged", marks=pytest.mark.slow)]
# Only collectives that wait for each other take so long.
PATIENCE = 60.0


def small_chunks() -> Any:
    """Over either transport."""
    from gradferry.core import device

    def adapted(transport: Any, config: Any) -> Any:
        return dataclasses.replace(config, chunk_bytes=CHUNK_BYTES, on_streams=transport.streams)

    return mock.patch.object(device.Transport, "adapted", adapted)


def case_train(
    scenario: Scenario,
    seeds: Sequence[int] = (1,),
    beside: Sequence[Scenario] = (),
    small: bool = True,
) -> dict[str, Any] | None:
    """Trains once per seed of the streams' order; what they gave must be the same.

    beside: scenarios of other groups of ranks; small: with the smallest chunks.
    """
    from fake_device import machine

    answers = []
    with small_chunks() if small else contextlib.nullcontext():
        for seed in seeds:
            machine.set_seed(seed * 100 + dist.get_rank())
            answers.append(train_at_once(scenario, *beside))
    first = answers[0]
    for answer in answers[1:]:
        assert answer["hashes"] == first["hashes"]
        for one, other in zip(answer["gradients"], first["gradients"], strict=True):
            for a, b in zip(one, other, strict=True):
                assert a.tobytes() == b.tobytes()
    expect_no_race()
    return first


@contextlib.contextmanager
def one_at_a_time(patience: float) -> Iterator[Any]:
    """Collectives of several communicators proceed one at a time."""
    from fake_device import machine

    machine.set_one_at_a_time(patience)
    try:
        yield machine
    finally:
        machine.synchronize()
        machine.set_one_at_a_time(0)
