"""Numbers while training: what stats, on_step, events, errors and the profiler say of a run."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any, get_type_hints

import gradferry
import pytest
import torch
from gradferry.averaging import step_numbers
from gradferry.averaging.handle import Averaging
from on_ranks import on_ranks
from outcomes import attempt
from scenario import Lookup, Run, Scenario, Weight, hooked
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WEIGHTS = (Weight("first", (90, 70)), Weight("bias", (50,)), Weight("second", (120, 60)))
SCENARIO = Scenario(WEIGHTS, ddp={"bucket_cap_mb": 0.02})
TIMES = ("encode_ms", "network_ms", "reduce_ms", "decode_ms")
STEP_KEYS = {
    "step", "buckets", "chunks", "gradient_bytes", "wire_bytes", "local_bytes", "ratio",
    "fallbacks",
    "exposed_ms", "worker_residual_ratio", "owner_residual_ratio", *TIMES,
}  # fmt: skip
EVENT_KEYS = {
    "step", "bucket", "chunks", "gradient_bytes", "begin_ms", "encoded_ms", "complete_ms", *TIMES,
}  # fmt: skip


def run_steps(scenario: Scenario, steps: int) -> tuple[Run, float, float]:
    """A run after some steps, and when they began and ended, in ms."""
    run = Run(scenario)
    began = 1000 * time.monotonic()
    for step in range(steps):
        run.step(step)
    return run, began, 1000 * time.monotonic()


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_times_are_those_of_the_parts(native: bool) -> None:
    run, began, ended = run_steps(dataclasses.replace(SCENARIO, native=native), steps=7)
    stats, events, wall = run.state.stats(), run.state.events(), ended - began
    assert len(events) == stats["buckets"] > 5
    for key in ("chunks", "gradient_bytes"):
        assert sum(event[key] for event in events) == stats[key]
    for key in TIMES:
        # Both are sums of the same whole nanoseconds, given in ms as doubles.
        assert sum(event[key] for event in events) == pytest.approx(stats[key], rel=1e-12)
        assert stats[key] > 0
    # One thread does each of the two, one after the other.
    assert stats["encode_ms"] < wall
    assert sum(stats[key] for key in TIMES[1:]) < wall
    assert stats["encode_ms"] < stats["exposed_ms"] < wall
    # The training thread was held up inside the hook, and after its last return.
    assert nanoseconds(stats["exposed_ms"]) == exposed_of(events)


@on_ranks()
def test_events_are_in_order_and_the_last_256() -> None:
    run, began, ended = run_steps(SCENARIO, steps=130)
    events = run.state.events()
    last = run.state.stats()["buckets"] - 1
    assert len(events) == 256
    assert [event["bucket"] for event in events] == list(range(last - 255, last + 1))
    for event in events:
        assert set(event) == EVENT_KEYS
        assert began < event["begin_ms"]
        assert event["begin_ms"] < event["encoded_ms"] < event["complete_ms"] < ended
        assert event["encode_ms"] <= event["encoded_ms"] - event["begin_ms"]
    # DDP hands over a bucket after the hook has returned from the one before.
    for event, following in itertools.pairwise(events):
        assert event["encoded_ms"] <= following["begin_ms"]
    assert events[-1]["step"] == 129


def nanoseconds(milliseconds: float) -> int:
    """Exact: instants are whole nanoseconds, and far fewer than 2^53 since the machine started."""
    return round(1e6 * milliseconds)


def exposed_of(events: list[dict[str, Any]]) -> int:
    """Nanoseconds, per step: inside the hook, and from its last return to the last completion."""
    total = 0
    for step in {event["step"] for event in events}:
        own = [event for event in events if event["step"] == step]
        total += sum(nanoseconds(e["encoded_ms"]) - nanoseconds(e["begin_ms"]) for e in own)
        last_return = max(nanoseconds(event["encoded_ms"]) for event in own)
        total += max(0, max(nanoseconds(event["complete_ms"]) for event in own) - last_return)
    return total


@pytest.mark.torch_core
@pytest.mark.parametrize("codec", ["q4", "off"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_on_step_gets_the_numbers_of_each_step(codec: str, native: bool) -> None:
    ddp = DistributedDataParallel(Lookup())
    state = hooked(ddp, codec, native=native)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    rows: list[dict[str, Any]] = []
    handle = state.on_step(rows.append)
    optimizer.step()  # no gradients yet
    for _ in range(3):
        with ddp.no_sync():
            ddp(torch.tensor([1, 2])).backward()
        optimizer.step()  # nothing was sent
        optimizer.zero_grad()
        ddp(torch.tensor([1, 2])).backward()
        optimizer.step()
    stats = state.stats()
    handle.remove()
    ddp(torch.tensor([1, 2])).backward()
    optimizer.step()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert stats["steps"] == 3  # passes under no_sync() are none
    for row in rows:
        assert set(row) == STEP_KEYS
        # The sparse embedding is a bucket of its own, which passes through.
        assert row["fallbacks"] == (1 if codec == "q4" else 2)
        assert row["buckets"] == (1 if codec == "q4" else 0)
        # The ring of two ranks sends as many bytes as the gradients have.
        sent = row["wire_bytes"]
        assert row["ratio"] == (row["gradient_bytes"] / sent if codec == "q4" else 0)
    for key in STEP_KEYS - {"step", "ratio"}:
        if not key.endswith("ratio"):
            total = sum(row[key] for row in rows)
            assert total == pytest.approx(stats[key], rel=1e-9), key


@pytest.mark.parametrize("fused", [False, True])
@on_ranks()
def test_a_step_that_a_scaler_skips_is_counted_with_the_next(fused: bool) -> None:
    """A GradScaler calls fused optimizers always."""
    ddp = DistributedDataParallel(nn.Linear(64, 64))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    rows: list[dict[str, Any]] = []
    state = hooked(ddp, grad_scaler=scaler)
    state.on_step(rows.append)
    optimizer = torch.optim.AdamW(ddp.parameters(), fused=fused)
    for factor in (1.0, math.inf, 1.0, 1.0, math.inf, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(ddp(torch.ones(2, 64)).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert [row["step"] for row in rows] == [0, 2, 3, 6]
    assert [row["buckets"] for row in rows] == [1, 2, 1, 3]


def test_a_step_whose_buckets_are_in_flight_is_counted_with_the_next() -> None:
    now = {**step_numbers.zeros(), "total_steps": 0, "fallbacks": 0}

    class Counting:
        def stats(self) -> dict[str, Any]:
            return dict(now)

        def _ring_bytes(self) -> float:
            return 0.0

    counting, rows = Counting(), []
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    handle = Averaging.on_step(counting, rows.append)
    for steps, in_flight in ((1, 1), (2, 0)):
        now.update(total_steps=steps, buckets=3 * steps, in_flight=in_flight)
        optimizer.step()
        assert len(rows) == (not in_flight)
    handle.remove()
    assert (rows[0]["step"], rows[0]["buckets"]) == (1, 6)


@pytest.mark.torch_core
@pytest.mark.parametrize(("name", "value"), [("first", 1e39), ("bias", math.nan)])
@on_ranks(3)
def test_every_error_ends_with_the_last_buckets(name: str, value: float) -> None:
    options = {"nonfinite": "raise"}
    run = Run(Scenario(WEIGHTS, 3, options=options, poison={(2, 0, name): value}))
    outcomes = [attempt(lambda step=step: run.step(step)) for step in range(4)]
    assert [outcome.error for outcome in outcomes] == [None] * 2 + ["StateError"] * 2
    assert outcomes[2] == outcomes[3]  # the same error for ever
    first, *lines = outcomes[2].text.splitlines()
    assert f"the averaged gradient of '{name}' is not finite at step 2" in first
    assert "delete this DistributedDataParallel" in lines[0]
    assert lines[1].startswith(f"last buckets of rank {run.rank}")
    events = [line for line in lines if re.match(r"  step \d+, bucket \d+: ", line)]
    assert "step 0, bucket 0" in events[0]
    assert "complete" in events[0]
    assert "never complete" in events[-1]
    assert len({line.partition(":")[0] for line in events}) == len(events)


@pytest.mark.torch_core
@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@on_ranks()
def test_profiler_shows_every_part_by_its_name(native: bool) -> None:
    run = Run(dataclasses.replace(SCENARIO, native=native))
    run.step(0)
    before = run.state.stats()["chunks"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.step(1)
    counts = {event.key: event.count for event in profile.key_averages()}
    chunks = run.state.stats()["chunks"] - before
    for name in ("encode", "reduce", "decode"):
        assert counts[f"gradferry::{name}"] == chunks
    # For every chunk both exchanges, and one commit per bucket: here a chunk is a bucket.
    assert counts["gradferry::network"] == 3 * chunks


@pytest.mark.parametrize("codec", ["q4", "off"])
@on_ranks()
def test_sums_and_averages_are_those_of_the_steps_that_were_taken_here(codec: str) -> None:
    """Whatever step of the training a loaded state is of."""
    before = Run(dataclasses.replace(SCENARIO, codec=codec))
    for step in range(4):
        before.step(step)
    saved = before.state.state_dict()
    assert set(before.state.stats()) <= set(get_type_hints(gradferry.Stats))
    run = Run(dataclasses.replace(SCENARIO, codec=codec))
    assert "mean of" not in str(run.state)
    counts = []
    for step in (4, 5):
        run.state.load_state_dict(saved)
        run.step(step)
        stats = run.state.stats()
        counts.append((stats["steps"], stats["total_steps"]))
    assert counts == [(1, 5), (2, 5)]
    if codec == "q4":
        sent, delay = (stats[key] / 2 for key in ("wire_bytes", "exposed_ms"))
        assert str(run.state).splitlines()[-1] == (
            f"  mean of 2 steps: {sent:,.0f} bytes sent, {stats['ratio']:.2f} times fewer than "
            f"uncompressed, {delay:.1f} ms exposed"
        )


def test_every_key_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "numbers.md").read_text(encoding="utf-8")
    keys = STEP_KEYS | EVENT_KEYS | set(get_type_hints(gradferry.Stats))
    for key in keys:
        assert f"`{key}`" in text, key
    for name in ("encode", "network", "reduce", "decode"):
        assert f"`gradferry::{name}`" in text
