"""`gradferry.Reducer`: the engine without DDP. Averages, asynchronous calls, momentum, names."""

from __future__ import annotations

import dataclasses
import math
import os
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gradferry
import numpy as np
import pytest
import torch
import torch.distributed as dist
from reducing import case_reduce, given, make_reducer, reduce, same
from scenario import Run, Scenario, Weight, assert_bit_equal
from stepping import settings_of_steps
from world import World

Worlds = Callable[[int], World]

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
BY_NAME: dict[str, tuple[Scenario, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "small-buckets": (PLAIN, {"async_op": True, "bucket_cap_mb": SMALL}),
    "all-kinds": (like_plain(weights=OF_ALL_KINDS), {"bucket_cap_mb": SMALL}),
    "all-kinds-exact": (like_plain(weights=OF_ALL_KINDS, codec="exact"), {"async_op": True}),
    "three-ranks": (like_plain(world_size=3, codec="sign1"), {}),
    "momentum": (Scenario(WEIGHTS, 3, codec="topk:ratio=0.05", options={"momentum": 0.9}), {}),
    "warm-up": (
        Scenario(WEIGHTS, codec="sign1", options={"warmup_steps": 2, "momentum": 0.9}),
        {"async_op": True},
    ),
    "alone": (like_plain(world_size=1, options={"momentum": 0.9}), {}),
    "nan": (like_plain(poison={(1, 1, "tail"): float("nan")}), {}),
    "2x2": (like_plain(weights=OF_ALL_KINDS, world_size=4, nodes=TWO_BY_TWO), {"async_op": True}),
    "2+1": (Scenario(WEIGHTS, 3, codec="q8", nodes=((0, 1), (2,))), {"bucket_cap_mb": SMALL}),
    "streamed": (like_plain(**ON_DEVICE), {"async_op": True, "bucket_cap_mb": SMALL}),
    "staged": (
        like_plain(**ON_DEVICE | {"device": "staged"}),
        {"bucket_cap_mb": SMALL},
    ),
}
IN_SLOW = {
    "streamed-sync": (like_plain(**ON_DEVICE), {"bucket_cap_mb": SMALL}),
    "staged-async": (like_plain(**ON_DEVICE | {"device": "staged"}), {"async_op": True}),
    **{
        f"2x2-{device}": (like_plain(world_size=4, nodes=TWO_BY_TWO, device=device), {})
        for device in ("streamed", "staged")
    },
}


def cases(table: dict[str, tuple[Scenario, dict[str, Any]]], marks: Any = ()) -> list[Any]:
    """Rows of the test beside this: the device first, by which those are found that need one."""
    return [pytest.param(c[0].device, *c, id=name, marks=marks) for name, c in table.items()]


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("device", "scenario", "how"), [*cases(BY_NAME), *cases(IN_SLOW, pytest.mark.slow)]
)
def test_averages_equal_the_reference(
    worlds_on: Callable[[str], Worlds], device: str, scenario: Scenario, how: dict[str, Any]
) -> None:
    world = worlds_on(device)(scenario.world_size)
    answers = world.run(case_reduce, scenario=scenario, seconds=300, **how)
    assert_bit_equal(answers, scenario)
    assert all(answer["stats"]["steps"] == scenario.steps for answer in answers)


def case_beside_ddp(scenario: Scenario) -> dict[str, Any]:
    """The hook and a Reducer go on from each other's state."""
    run, reducer = Run(scenario), make_reducer(scenario)
    by_hook = [run.step(step) for step in range(2)]
    by_reducer = reduce(scenario, reducer, range(2))
    states = run.state.state_dict(), reducer.state_dict()
    run.state.load_state_dict(states[1])
    reducer.load_state_dict(states[0])
    by_hook.append(run.step(2))
    by_reducer += reduce(scenario, reducer, range(2, 3))
    counts = [
        {name: stats[name] for name in ("gradient_bytes", "residual_bytes", "steps")}
        for stats in (run.state.stats(), reducer.stats())
    ]
    return {
        "equal": [
            all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
            for one, other in zip(by_hook, by_reducer, strict=True)
        ],
        "same_state": same(*states),
        "counts": counts,
    }


@pytest.mark.parametrize("nodes", [None, TWO_BY_TWO])
def test_hook_of_ddp_has_the_same_bits_and_states(
    worlds: Worlds, nodes: tuple[tuple[int, ...], ...] | None
) -> None:
    size = 4 if nodes else 2
    scenario = dataclasses.replace(PLAIN, world_size=size, nodes=nodes)
    for answer in worlds(size).run(case_beside_ddp, scenario=scenario):
        assert answer["equal"] == [True] * 3
        assert answer["same_state"]
        hook, reducer = answer["counts"]
        assert hook == reducer


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


def case_odd_tensors(bucket_cap_mb: float) -> list[bool]:
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
    return [torch.equal(plain[name], odd[name]) for name in SHAPES]


@pytest.mark.parametrize("bucket_cap_mb", [25, 0.001], ids=["together", "alone"])
def test_strides_order_and_buckets_do_not_matter(world_of_2: World, bucket_cap_mb: float) -> None:
    answers = world_of_2.run(case_odd_tensors, bucket_cap_mb=bucket_cap_mb)
    assert answers == [[True] * 3] * 2


def case_memory() -> dict[str, int]:
    large, small = torch.ones(64, 4096), [torch.ones(10, 100) for _ in range(3)]
    named = [("large", large), *((f"small{i}", t) for i, t in enumerate(small))]
    reducer = gradferry.Reducer(named, "q4", bucket_cap_mb=1)
    places = [tensor.data_ptr() for _, tensor in named]
    for _ in range(2):
        reducer.all_reduce()
    assert places == [tensor.data_ptr() for _, tensor in named]
    return reducer.stats()


def test_only_small_tensors_are_copied(world_of_2: World) -> None:
    for stats in world_of_2.run(case_memory):
        assert stats["packing_bytes"] == 3 * 1000 * 4
        assert stats["gradient_bytes"] == 2 * 4 * (64 * 4096 + 3000)
        assert stats["buckets"] == 2 * 2
        assert stats["fallbacks"] == 0


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


def case_lying(codec: str) -> dict[str, tuple[list[bytes], int, bool]]:
    """By way to lie: averages of two calls, the second with residuals, and what was copied."""
    numbers = torch.Generator().manual_seed(dist.get_rank())
    values = [torch.randn(shape, generator=numbers) for shape in SIDE_BY_SIDE]
    values[2] = values[2].t()  # its elements lie in another order
    results = {}
    for name, (put, _) in LYING.items():
        tensors = put(values)
        reducer = gradferry.Reducer([(str(i), value) for i, value in enumerate(values)], codec)
        versions = [each._version for each in tensors]
        for _ in range(2):
            reducer.all_reduce(tensors)
        changed = all(each._version > v for each, v in zip(tensors, versions, strict=True))
        bits = [each.contiguous().numpy().tobytes() for each in tensors]
        results[name] = bits, reducer.stats()["packing_bytes"], changed
    return results


# Through the engine, and by the backend's own all-reduce.
@pytest.mark.parametrize("codec", ["q4", "off"])
def test_tensors_one_behind_the_other_are_averaged_where_they_are(
    world_of_2: World, codec: str
) -> None:
    answers = world_of_2.run(case_lying, codec=codec)
    average = answers[0]["anywhere"][0]
    for answer in answers:
        for name, (bits, copied_bytes, changed) in answer.items():
            assert bits == average, name
            assert copied_bytes == (4 * IN_ALL if LYING[name][1] else 0), name
            assert changed, name


# --- asynchronous calls ---------------------------------------------------------------------------


def case_returns_before_others_call() -> dict[str, Any]:
    """Rank 1 calls only after rank 0 has come back from a call of many more chunks than slots."""
    rank = dist.get_rank()
    tensor = torch.full((500, 1000), float(rank))
    reducer = gradferry.Reducer([("t", tensor)], "exact", workspace_cap_mb=1)
    work = None
    if rank == 0:
        work = reducer.all_reduce(async_op=True)
        assert not work.is_completed()
    dist.barrier()
    if work is None:
        work = reducer.all_reduce(async_op=True)
    assert work.wait()
    slots = reducer._running.engine.workspace()["slots"]
    return {"mean": bool((tensor == 0.5).all()), "more": reducer.stats()["chunks"] > slots}


def test_async_call_returns_while_another_rank_has_not_called(world_of_2: World) -> None:
    assert world_of_2.run(case_returns_before_others_call) == [{"mean": True, "more": True}] * 2


def case_passed_through(disabled: bool) -> dict[str, Any]:
    tensors = given(PLAIN, 0)
    named = [(f"t{i}", torch.empty_like(tensor)) for i, tensor in enumerate(tensors)]
    backends = [tensor / dist.get_world_size() for tensor in tensors]
    for tensor in backends:
        dist.all_reduce(tensor)
    if disabled:
        os.environ["GRADFERRY_DISABLE"] = "1"
    try:
        reducer = gradferry.Reducer(named, "q4" if disabled else "off")
    finally:
        os.environ.pop("GRADFERRY_DISABLE", None)
    work = reducer.all_reduce(tensors, async_op=True)
    work.wait()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reducer.load_state_dict(reducer.state_dict())
    return {
        "equal": all(torch.equal(a, b) for a, b in zip(backends, tensors, strict=True)),
        "passes": reducer.passes_through,
        "fallbacks": reducer.stats()["fallbacks"],
        "warned": ["pass through" in str(warning.message) for warning in caught],
    }


@pytest.mark.parametrize("disabled", [False, True])
def test_off_is_the_backends_own_all_reduce(world_of_2: World, disabled: bool) -> None:
    expected = {"equal": True, "passes": True, "fallbacks": 1, "warned": []}
    assert world_of_2.run(case_passed_through, disabled=disabled) == [expected] * 2


def case_momentum_mode() -> tuple[dict[str, Any], str]:
    model = torch.nn.Linear(40, 50)
    reducer = gradferry.Reducer(model.named_parameters(), "sign1", momentum=0.8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gradferry.optim.momentum_mode(optimizer, reducer)
    with pytest.raises(gradferry.ConfigError, match=r"not a gradferry\.HookState") as refused:
        gradferry.optim.OneBitAdam(model.parameters(), freeze_step=1, state=reducer)
    seen = settings_of_steps(optimizer)
    optimizer.step()
    ((group,),) = seen
    return {"lr": group["lr"], "betas": group["betas"]}, str(refused.value)


def test_momentum_mode_takes_a_reducer_of_parameters(world_of_2: World) -> None:
    for found, _ in world_of_2.run(case_momentum_mode):
        assert found == {"lr": 3e-3 * math.sqrt((1 - 0.8) / (1 + 0.8)), "betas": (0.0, 0.999)}


# --- single tensors by name -----------------------------------------------------------------------


def case_by_name() -> dict[str, Any]:
    rank = dist.get_rank()
    weight = (Weight("t", (9000,)),)
    scenario = Scenario(weight, error_feedback="both", rules=(("*", "q4"),))
    reducer = make_reducer(scenario)
    expected = reduce(scenario, reducer, range(3))
    got = []
    for step in range(3):
        (tensor,) = given(scenario, step)
        work = gradferry.all_reduce(tensor, "q4", name="t", async_op=step == 1)
        if work is not None:
            work.wait()
        got.append(tensor.numpy().copy())
    other = torch.full((3,), float(rank))
    gradferry.all_reduce(other, "exact", name="other")
    gradferry.forget("t")
    (tensor,) = given(scenario, 0)
    gradferry.all_reduce(tensor, "q4", name="t")  # begins anew
    again = np.array_equal(tensor.numpy(), got[0])
    for name in ("t", "other"):
        gradferry.forget(name)
    return {
        "equal": [np.array_equal(a, b[0]) for a, b in zip(got, expected, strict=True)],
        "other": other.tolist(),
        "again": again,
    }


def test_all_reduce_by_name_is_a_reducer_of_one_tensor(world_of_2: World) -> None:
    expected = {"equal": [True] * 3, "other": [0.5] * 3, "again": True}
    assert world_of_2.run(case_by_name) == [expected] * 2
