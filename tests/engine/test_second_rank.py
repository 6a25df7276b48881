"""A rank that knows only protocol.md and wire_format.md of docs/reference, among the library's.

Two real ranks and one of `second`, in one world of DDP: averages equal those of three real ranks
to the bit, and errors are the same on all ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scenario as scenario_module
import torch
import torch.distributed as dist
from gradferry import _build_info
from outcomes import Outcome, attempt
from reference import Header, find_codec
from scenario import ChosenGradients, Scenario, Weight
from second import Options, SecondRank, agree, confirm
from second.exchange import describe
from torch.nn.parallel import DistributedDataParallel
from world import COLLECTIVE_SECONDS, World

WEIGHTS = (
    Weight("first", (90, 70)),
    Weight("bias", (51,), torch.bfloat16),
    Weight("sixteen", (33, 129), torch.float16),
    Weight("hidden", (123, 71)),
    Weight("brain", (65, 64), torch.bfloat16),
    Weight("wide", (5, 7), torch.float64),
    Weight("empty", (0, 3)),
    Weight("one", (1,)),
)
# Chunks of at most 11404 bytes per owner: several in a bucket.
CAP_MB = 0.5


class TorchGroup:
    """The process group as `second` needs it."""

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.timeout_seconds = COLLECTIVE_SECONDS
        c10d = dist.distributed_c10d
        self.store = c10d._get_process_group_store(c10d._get_default_group())

    def all_gather(self, data: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        parts = [torch.empty_like(mine) for _ in range(self.world_size)]
        dist.all_gather(parts, mine)
        return [part.numpy().tobytes() for part in parts]


def options_of(scenario: Scenario) -> Options:
    return Options(
        scenario.codec,
        scenario.error_feedback,
        scenario.rules,
        scenario.options.get("check_every", 0),
        scenario.seed,
        scenario.options.get("workspace_cap_mb", 96.0),
        scenario.ddp.get("find_unused_parameters", False),
    )


def record_of(scenario: Scenario) -> dict[str, Any]:
    """The table of docs/reference/protocol.md."""
    options = options_of(scenario)
    described = describe([weight.describe() for weight in scenario.weights], options)
    model = ChosenGradients(scenario)
    return {
        "find_unused_parameters": options.find_unused_parameters,
        "static_graph": False,
        "bucket_cap_mb": int(scenario.ddp.get("bucket_cap_mb", 25) * 2**20) / 2**20,
        "gradferry version": _build_info.GRADFERRY_VERSION,
        "wire version": 2,
        "GRADFERRY_DISABLE": False,
        "codec": find_codec(scenario.codec).name,
        "rules": [
            {
                "codec": find_codec(codec).name,
                "name": name,
                "min_dims": 0,
                "max_dims": None,
                "min_size": 0,
                "max_size": None,
            }
            for name, codec in scenario.rules
        ],
        "error_feedback": options.error_feedback,
        "momentum": 0.0,
        "warmup_steps": 0,
        "warmup": "exact",
        "grad_scaler": False,
        "nonfinite": "propagate",
        "exact_skip": False,
        "check_every": options.check_every,
        "seed": options.seed,
        "workspace_cap_mb": options.workspace_cap_mb,
        "chunk_bytes": 131072,
        "equal_scatter": False,
        "nodes": "auto",
        "device": "cpu",
        "parameters": [
            {
                "name": name,
                "shape": list(parameter.shape),
                "strides": [
                    stride if size != 1 else 1
                    for stride, size in zip(parameter.stride(), parameter.shape, strict=True)
                ],
                "dtype": str(parameter.dtype),
                **of_codec,
            }
            for (name, parameter), of_codec in zip(model.named_parameters(), described, strict=True)
        ],
    }


def bits_of(parameter: torch.Tensor) -> bytes:
    return parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def storage_of(buffer: torch.Tensor) -> np.ndarray:
    """The memory of a bucket."""
    return (buffer.view(torch.uint16) if buffer.dtype == torch.bfloat16 else buffer).numpy()


class Run(scenario_module.Run):
    """`left_out`: names of parameters that no rank uses now."""

    left_out: tuple[str, ...] = ()

    def targets(self, step: int, turn: int = 0) -> dict[str, torch.Tensor]:
        every = super().targets(step, turn)
        named = {name: target for name, target in every.items() if name not in self.left_out}
        self.named = set(named)
        return named


class SecondRun(Run):
    """A Run whose hook is a SecondRank's."""

    def __init__(self, scenario: Scenario, kind: type[SecondRank] = SecondRank) -> None:
        self.scenario, self.device = scenario, torch.device("cpu")
        self.model = ChosenGradients(scenario)
        self.rank = dist.get_rank()
        self.ddp = DistributedDataParallel(self.model, **scenario.ddp)
        self.hashes: list[str] = []
        self.buckets: list[list[list[str]]] = []
        group = TorchGroup()
        self.second = kind(
            group,
            agree(group, record_of(scenario)),
            [weight.describe() for weight in scenario.weights],
            options_of(scenario),
            lambda: [bits_of(parameter) for parameter in self.model.parameters()],
        )
        confirm(group)
        self.index = {id(parameter): i for i, parameter in enumerate(self.model.parameters())}
        self.futures: list[tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = []
        self.ddp.register_comm_hook(None, self.hook)

    # DDP compares annotations, which are text in this module.
    def hook(self, state, bucket):
        parameters = [self.index[id(parameter)] for parameter in bucket.parameters()]
        used = []
        if self.second.options.find_unused_parameters:
            used = [int(self.scenario.weights[i].name in self.named) for i in parameters]
        self.second.begin(parameters, storage_of(bucket.buffer()), used)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self.futures.append((future, bucket.buffer()))
        if bucket.is_last():
            self.second.finish()
            for each, buffer in self.futures:
                each.set_result(buffer)
            self.futures = []
        return future


def case_mixed(scenario: Scenario, second: int, left_out: str | None = None) -> dict[str, Any]:
    """All steps, with a rank of `second` as that rank; -1: as none.

    left_out: a parameter that nobody uses in step 1, in which old gradients stay.
    """
    run = SecondRun(scenario) if dist.get_rank() == second else Run(scenario)
    gradients = []
    for step in range(scenario.steps):
        leaves_out = left_out is not None and step == 1
        run.left_out = (left_out,) if leaves_out else ()
        keep = mock.patch.object(run.ddp, "zero_grad")
        with keep if leaves_out else contextlib.nullcontext():
            gradients.append(run.step(step))
    if isinstance(run, SecondRun):
        run.second.close()
    return {"gradients": gradients, "hashes": run.hashes}


def assert_same_as_real_ranks(
    world: World, scenario: Scenario, second: int, left_out: str | None = None
) -> None:
    arguments = {"scenario": scenario, "left_out": left_out}
    mixed, real = (world.run(case_mixed, second=rank, **arguments) for rank in (second, -1))
    for rank in range(3):
        assert mixed[rank]["hashes"] == real[rank]["hashes"], f"rank {rank}"
        for step in range(scenario.steps):
            pairs = zip(mixed[rank]["gradients"][step], real[rank]["gradients"][step], strict=True)
            for weight, (one, other) in zip(scenario.weights, pairs, strict=True):
                assert (one is None) == (other is None)
                assert one is None or one.tobytes() == other.tobytes(), (rank, step, weight.name)


def scenario_of(codec: str, **more: Any) -> Scenario:
    options = {"check_every": 2, "workspace_cap_mb": CAP_MB}
    usual = {"steps": 3, "seed": 5, "options": options, "ddp": {"bucket_cap_mb": 0.03}}
    return Scenario(WEIGHTS, 3, codec=codec, **{**usual, **more})


@pytest.mark.parametrize(
    ("codec", "second", "changes"),
    [
        ("q4", 1, {}),
        ("topk:ratio=0.05", 0, {"rules": (("hid*", "q8"), ("one", "rht"))}),
        ("sign1", 2, {}),
        *(
            pytest.param(codec, second, {"steps": 7}, marks=pytest.mark.slow)
            for codec in ("exact", "bf16", "q8", "sign1", "topk", "rht:bits=3")
            for second in range(3)
        ),
    ],
)
def test_averages_equal_those_of_real_ranks(
    world_of_3: World, codec: str, second: int, changes: dict[str, Any]
) -> None:
    assert_same_as_real_ranks(world_of_3, scenario_of(codec, **changes), second)


def test_maps_of_used_parameters_are_understood_on_both_sides(world_of_3: World) -> None:
    # "hidden" is used by real ranks alone, "one" by the second alone. DDP hands over the old
    # gradient of "first" in step 1: residuals must be as if it had not.
    scenario = scenario_of(
        "topk:ratio=0.05",
        unused={0: ("one",), 1: ("hidden",), 2: ("one",)},
        ddp={"bucket_cap_mb": 0.03, "find_unused_parameters": True},
        options={"workspace_cap_mb": CAP_MB},
    )
    assert_same_as_real_ranks(world_of_3, scenario, second=1, left_out="first")


# --- errors


class Forger(SecondRank):
    """Changes headers that it sends in step 1."""

    phase: int
    field: str
    value: int

    def header(self, phase: int, chunk: int, step: int, tiles: Sequence[int] = ()) -> Header:
        lawful = super().header(phase, chunk, step, tiles)
        if step != 1 or phase != self.phase:
            return lawful
        return dataclasses.replace(lawful, **{self.field: self.value})


class Deaf(SecondRank):
    """Hears a bit of the first scatter message of rank 0 in step 1 that nobody sent."""

    deaf = False

    def hear(self, lane: str, rank: int, size: int) -> bytes:
        message = super().hear(lane, rank, size)
        if (self.step, rank, lane) != (1, 0, "scatter") or self.deaf:
            return message
        self.deaf = True
        return message[:-1] + bytes([message[-1] ^ 1])


class Failing(SecondRank):
    """Cannot encode in step 1."""

    def encode(self, bucket: Any, number: int) -> np.ndarray:
        if self.step == 1:
            raise FloatingPointError
        return super().encode(bucket, number)


class Corrupting(SecondRank):
    """Sends q4 tiles with an exponent byte that no encoder writes, in step 1."""

    def encode(self, bucket: Any, number: int) -> np.ndarray:
        payload = super().encode(bucket, number)
        if self.step == 1 and self.layout.tiles[number].codec == "q4":
            n = self.layout.tiles[number].num_elements
            payload[17 * -(-n // 32)] = 3
        return payload


def case_failing(scenario: Scenario, kind: str, forged: dict[str, Any]) -> list[Outcome]:
    """Steps until one fails."""
    if dist.get_rank() == 1:
        run: Run = SecondRun(scenario, type(kind, (globals()[kind],), forged))
    else:
        run = Run(scenario)
    outcomes: list[Outcome] = []
    while len(outcomes) < 4 and not (outcomes and outcomes[-1].error):
        outcomes.append(attempt(functools.partial(run.step, len(outcomes))))
    return outcomes


@pytest.mark.parametrize(
    ("kind", "forged", "error", "said"),
    [
        pytest.param(
            "Forger",
            {"phase": 1, "field": "config_hash", "value": 11},
            "ProtocolError",
            r"rank 0 refused a message from rank 1 .*, scatter\): configuration hash is 11, ",
            id="scatter",
        ),
        pytest.param(
            "Forger",
            {"phase": 2, "field": "layout_hash", "value": 12},
            "ProtocolError",
            r"rank 0 refused a message from rank 1 .*, gather\): layout hash is 12, expected",
            id="gather",
        ),
        pytest.param(
            "Deaf",
            {},
            "ProtocolError",
            r"rank 1 refused a message from rank 0 .*, scatter\): checksum is ",
            id="deaf",
        ),
        pytest.param(
            "Failing", {}, "PeerError", "rank 1 failed while it compressed gradients", id="failing"
        ),
        pytest.param(
            "Corrupting",
            {},
            "ProtocolError",
            "rank . refused a message from rank 1 .*number of corrupt tiles is",
            id="corrupting",
        ),
    ],
)
def test_faults_of_and_for_the_second_rank_are_the_same_error_on_all(
    world_of_3: World, kind: str, forged: dict[str, Any], error: str, said: str
) -> None:
    arguments = {"scenario": scenario_of("q4"), "kind": kind, "forged": forged}
    first, second, third = world_of_3.run(case_failing, **arguments)
    assert [len(outcomes) for outcomes in (first, second, third)] == [2] * 3
    assert (first[1].error, first[1].headline) == (third[1].error, third[1].headline)
    assert first[1].error == error
    assert re.match(said, first[1].headline), first[1].headline
    assert "(step 1, chunk " in first[1].headline
    assert first[1].headline.startswith(second[1].text)


class Drifting(SecondRun):
    """Its parameters differ from step 1 on."""

    def step(self, step: int) -> Any:
        if step == 1:
            self.model.get_parameter("hidden").data.view(torch.int32)[3, 3] ^= 1
        return super().step(step)


def case_drifting(scenario: Scenario) -> Outcome:
    run = Drifting(scenario) if dist.get_rank() == 1 else Run(scenario)
    run.step(0)
    return attempt(lambda: run.step(1))


def test_parameters_that_differ_are_named_by_both_kinds(world_of_3: World) -> None:
    scenario = scenario_of("q4", options={"check_every": 1})
    outcomes = world_of_3.run(case_drifting, scenario=scenario)
    text = "parameter 'hidden' of rank 1 differs from that of rank 0 at step 1"
    assert [o.error for o in outcomes] == ["DivergedError", "ExchangeError", "DivergedError"]
    assert all(text in o.text for o in outcomes)


def case_other_record(scenario: Scenario, second: int) -> Outcome:
    if dist.get_rank() == second:
        other = dataclasses.replace(scenario, seed=6)
        return attempt(lambda: SecondRun(other))
    return attempt(lambda: Run(scenario))


@pytest.mark.parametrize("second", [0, 2])
def test_record_that_differs_is_refused_by_all_ranks(world_of_3: World, second: int) -> None:
    outcomes = world_of_3.run(case_other_record, scenario=scenario_of("q4"), second=second)
    kinds = ["RankMismatchError"] * 3
    kinds[second] = "AttachError"
    assert [o.error for o in outcomes] == kinds
    # Every rank is compared with rank 0.
    differing = second or 1
    assert all(f"rank {differing} differs from rank 0 in seed" in o.text for o in outcomes)
