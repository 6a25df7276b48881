"""`gradferry.Reducer`: the engine without DDP. Averages, asynchronous calls, momentum, names."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from on_ranks import of_all, on_ranks
from reducing import case_reduce, given, make_reducer, reduce
from saved import same
from scenario import Run, Scenario, Weight, assert_bit_equal
from stepping import settings_of_steps, warned
from world import Worlds, WorldsOn

WEIGHTS = (Weight("first", (96, 130)), Weight("bias", (130,)), Weight("tail", (3, 4099)))
OF_ALL_KINDS = (
    *WEIGHTS,
    Weight("nothing", (0, 5)),
    Weight("scalar", ()),
    Weight("half", (70, 64), torch.float16),
    Weight("bf16", (90, 50), torch.bfloat16),
    Weight("double", (33, 40), torch.float64),
    Weight("complex", (40, 30), torch.complex64),
    Weight("image", (8, 16, 9, 7), channels_last=True),
)
PLAIN = Scenario(WEIGHTS, error_feedback="both")
TWO_BY_TWO = ((0, 1), (2, 3))
SMALL = 2.0**-5  # MiB: several buckets


# --- averages are those of the reference, to the bit ----------------------------------------------


def like_plain(**changes: Any) -> Scenario:
    return dataclasses.replace(PLAIN, **changes)


# The fake device has no views of complex numbers as real ones.
OF_REAL_KINDS = tuple(weight for weight in OF_ALL_KINDS if not weight.dtype.is_complex)
ON_DEVICE = {"weights": OF_REAL_KINDS, "device": "streamed"}
# What meets in an engine is drawn for the hook; here is what a Reducer does itself.
CASES: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "small-buckets": (PLAIN, {"async_op": True, "bucket_cap_mb": SMALL}),
    "all-kinds": (like_plain(weights=OF_ALL_KINDS), {"bucket_cap_mb": SMALL}),
    "warm-up": (
        Scenario(WEIGHTS, codec="sign1", options={"warmup_steps": 2, "momentum": 0.9}),
        {"async_op": True},
    ),
    "alone": (like_plain(world_size=1, options={"momentum": 0.9}), {}),
    "2x2": (like_plain(weights=OF_ALL_KINDS, world_size=4, nodes=TWO_BY_TWO), {"async_op": True}),
    "streamed": (like_plain(**ON_DEVICE), {"async_op": True, "bucket_cap_mb": SMALL}),
    "staged": (like_plain(**ON_DEVICE | {"device": "staged"}), {"bucket_cap_mb": SMALL}),
}


@pytest.mark.torch_core
@pytest.mark.parametrize(("scenario", "how"), CASES.values(), ids=CASES)
def test_averages_equal_the_reference(
    worlds_on: WorldsOn, scenario: Scenario, how: dict[str, Any]
) -> None:
    world = worlds_on(scenario.device)(scenario.world_size)
    answers = world.run(case_reduce, scenario=scenario, seconds=300, **how)
    assert_bit_equal(answers, scenario)
    assert all(answer["stats"]["steps"] == scenario.steps for answer in answers)


@pytest.mark.parametrize("nodes", [None, TWO_BY_TWO])
def test_hook_of_ddp_has_the_same_bits_and_states(worlds: Worlds, nodes: Any) -> None:
    size = 4 if nodes else 2
    scenario = dataclasses.replace(PLAIN, world_size=size, nodes=nodes)
    worlds(size).run(case_beside_ddp, scenario=scenario)


def case_beside_ddp(scenario: Scenario) -> None:
    """The hook and a Reducer go on from each other's state."""
    run, reducer = Run(scenario), make_reducer(scenario)

    def train(steps: range) -> None:
        for step in steps:
            (by_reducer,) = reduce(scenario, reducer, range(step, step + 1))
            assert all(map(np.array_equal, run.step(step), by_reducer))

    train(range(2))
    states = run.state.state_dict(), reducer.state_dict()
    assert same(*states)
    run.state.load_state_dict(states[1])
    reducer.load_state_dict(states[0])
    train(range(2, 3))
    counts = run.state.stats(), reducer.stats()
    for name in ("gradient_bytes", "residual_bytes", "steps"):
        assert counts[0][name] == counts[1][name]


SHAPES = {"a": (60, 50), "b": (40, 30), "c": (2, 3, 500)}


def odd_tensors(plain: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same numbers in another order, at odd places, and in memory with gaps."""
    odd = {
        "c": plain["c"].permute(2, 0, 1).clone(memory_format=torch.contiguous_format),
        "b": torch.cat([torch.zeros(1), plain["b"].flatten()])[1:].view(SHAPES["b"]),
        "a": torch.zeros(50, 2, 60)[:, 1, :].t(),
    }
    odd["c"] = odd["c"].permute(1, 2, 0)
    odd["a"].copy_(plain["a"])
    return odd


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.001], ids=["together", "alone"])
@on_ranks(2)
def test_strides_order_and_buckets_do_not_matter(bucket_cap_mb: float) -> None:
    numbers = torch.Generator().manual_seed(dist.get_rank())
    plain = {name: torch.randn(shape, generator=numbers) for name, shape in SHAPES.items()}
    odd = odd_tensors(plain)
    named = [(name, torch.empty(shape)) for name, shape in SHAPES.items()]
    reducers = [gradferry.Reducer(named, "q4", bucket_cap_mb=bucket_cap_mb) for _ in range(2)]
    strides = [tensor.stride() for tensor in odd.values()]
    reducers[0].all_reduce(list(plain.values()))
    reducers[1].all_reduce(odd)
    assert strides == [tensor.stride() for tensor in odd.values()]
    assert not odd["a"]._base[:, 0].any()  # the gaps
    assert all(torch.equal(plain[name], odd[name]) for name in SHAPES)


@on_ranks(2)
def test_only_small_tensors_are_copied() -> None:
    large, small = torch.ones(64, 4096), [torch.ones(10, 100) for _ in range(3)]
    named = [("large", large), *((f"small{i}", t) for i, t in enumerate(small))]
    reducer = gradferry.Reducer(named, "q4", bucket_cap_mb=1)
    places = [tensor.data_ptr() for _, tensor in named]
    for _ in range(2):
        reducer.all_reduce()
    assert places == [tensor.data_ptr() for _, tensor in named]
    stats = reducer.stats()
    assert stats["packing_bytes"] == 3 * 1000 * 4
    assert stats["gradient_bytes"] == 2 * 4 * (64 * 4096 + 3000)
    assert (stats["buckets"], stats["fallbacks"]) == (2 * 2, 0)


SIDE_BY_SIDE = ((60, 50), (0,), (4, 6), (7,))
IN_ALL = 60 * 50 + 4 * 6 + 7


def lie(
    values: list[torch.Tensor],
    order: tuple[int, ...] = (0, 1, 2, 3),
    gap: int = 0,
    flat: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Tensors with these values and strides, in this order in one flat tensor, from its third
    element on.
    """
    if flat is None:
        flat = torch.zeros(2 + IN_ALL + 4 * gap)
    found, begin = list(values), 2
    for index in order:
        value = values[index]
        found[index] = flat.as_strided(value.shape, value.stride(), begin).copy_(value)
        begin += value.numel() + gap
    return found


def lie_in_two_storages(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same without a gap, where the first tensor is in a storage that ends with it."""
    memory = bytearray(4 * (2 + IN_ALL))
    found = lie(values, flat=torch.frombuffer(memory, dtype=torch.float32))
    first = torch.frombuffer(memory, dtype=torch.float32, count=2 + values[0].numel())
    return [first[2:].view_as(values[0]), *found[1:]]


# How tensors lie, and whether a Reducer copies them.
LYING: dict[str, tuple[Callable[[list[torch.Tensor]], list[torch.Tensor]], bool]] = {
    "one behind the other": (lie, False),
    "anywhere": (lambda values: [value.clone() for value in values], True),
    "in another order": (partial(lie, order=(0, 1, 3, 2)), True),
    "with gaps": (partial(lie, gap=1), True),
    "in two storages": (lie_in_two_storages, True),
}


# Through the engine, and by the backend's own all-reduce.
@pytest.mark.parametrize("codec", ["q4", "off"])
@on_ranks(2)
def test_tensors_one_behind_the_other_are_averaged_where_they_are(codec: str) -> None:
    """In two calls, the second with residuals."""
    numbers = torch.Generator().manual_seed(dist.get_rank())
    values = [torch.randn(shape, generator=numbers) for shape in SIDE_BY_SIDE]
    values[2] = values[2].t()  # its elements lie in another order
    found = set()
    for name, (put, copies) in LYING.items():
        tensors = put(values)
        reducer = gradferry.Reducer([(str(i), value) for i, value in enumerate(values)], codec)
        versions = [each._version for each in tensors]
        for _ in range(2):
            reducer.all_reduce(tensors)
        assert all(each._version > v for each, v in zip(tensors, versions, strict=True)), name
        assert reducer.stats()["packing_bytes"] == (4 * IN_ALL if copies else 0), name
        found.add(b"".join(each.contiguous().numpy().tobytes() for each in tensors))
    assert of_all(found) == [found] * 2
    assert len(found) == 1


# --- asynchronous calls ---------------------------------------------------------------------------


@on_ranks(2)
def test_async_call_returns_while_another_rank_has_not_called() -> None:
    """Rank 1 calls only after rank 0 has come back from a call of many more chunks than slots."""
    rank = dist.get_rank()
    tensor = torch.full((500, 1000), float(rank))
    reducer = gradferry.Reducer([("t", tensor)], "exact", workspace_cap_mb=1)
    work = None
    if rank == 0:
        work = reducer.all_reduce(async_op=True)
        assert not work.is_completed()
    dist.barrier()
    work = work or reducer.all_reduce(async_op=True)
    assert work.wait()
    assert bool((tensor == 0.5).all())
    assert reducer.stats()["chunks"] > reducer._running.engine.workspace()["slots"]


@pytest.mark.parametrize("disabled", [False, True])
@on_ranks(2)
def test_off_is_the_backends_own_all_reduce(disabled: bool) -> None:
    tensors = given(PLAIN, 0)
    named = [(f"t{i}", torch.empty_like(tensor)) for i, tensor in enumerate(tensors)]
    backends = [tensor / dist.get_world_size() for tensor in tensors]
    for tensor in backends:
        dist.all_reduce(tensor)
    with mock.patch.dict(os.environ, {"GRADFERRY_DISABLE": str(int(disabled))}):
        reducer = gradferry.Reducer(named, "q4" if disabled else "off")
    reducer.all_reduce(tensors, async_op=True).wait()
    with warned() as said:
        reducer.load_state_dict(reducer.state_dict())
    assert said == []
    assert all(map(torch.equal, backends, tensors))
    assert reducer.passes_through
    assert reducer.stats()["fallbacks"] == 1


@on_ranks(2)
def test_momentum_mode_takes_a_reducer_of_parameters() -> None:
    model = torch.nn.Linear(40, 50)
    reducer = gradferry.Reducer(model.named_parameters(), "sign1", momentum=0.8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gradferry.optim.momentum_mode(optimizer, reducer)
    with pytest.raises(gradferry.ConfigError, match=r"not a gradferry\.HookState"):
        gradferry.optim.OneBitAdam(model.parameters(), freeze_step=1, state=reducer)
    seen = settings_of_steps(optimizer)
    optimizer.step()
    ((group,),) = seen
    assert group["lr"] == 3e-3 * math.sqrt((1 - 0.8) / (1 + 0.8))
    assert group["betas"] == (0.0, 0.999)
