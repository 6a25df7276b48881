"""Calls of a Reducer that go wrong half-way, and memory that a call must not miss."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.averaging import tensor_calls
from gradferry.averaging.packing import Packed, Packing
from outcomes import Outcome, attempt
from world import World


def one(**options: Any) -> Any:
    return gradferry.Reducer([("a", torch.zeros(40, 50))], "exact", **options)


def case_empty_tensors() -> tuple[list[list[float]], int]:
    """Tensors without elements, first of their dtype, alone, and among others."""
    rank = float(dist.get_rank())
    named = [
        ("none", torch.zeros(0, 3)),
        ("some", torch.full((2,), rank)),
        ("no double", torch.zeros(0, dtype=torch.float64)),
    ]
    reducer = gradferry.Reducer(named, "exact")
    reducer.all_reduce()
    reducer.all_reduce()
    reducer.state_dict()  # not in the middle of a step
    alone = gradferry.Reducer(named[2:], "exact")
    alone.all_reduce()
    alone.state_dict()
    return [tensor.tolist() for _, tensor in named], reducer.stats()["steps"]


def test_tensors_without_elements_are_part_of_every_step(world_of_2: World) -> None:
    for tensors, steps in world_of_2.run(case_empty_tensors):
        assert tensors == [[], [0.5, 0.5], []]
        assert steps == 2


def case_columns() -> list[list[float]]:
    """The columns of one tensor lie between each other, and share nothing."""
    base = torch.arange(6.0).view(3, 2) * (1 + dist.get_rank())
    named = [("even", base[:, ::2]), ("odd", base[:, 1::2])]
    assert gradferry.Reducer(named, "exact").all_reduce() is None
    return base.tolist()


def test_registered_columns_of_one_tensor_are_averaged(world_of_2: World) -> None:
    for answer in world_of_2.run(case_columns):
        assert answer == [[0.0, 1.5], [3.0, 4.5], [6.0, 7.5]]


def test_memory_that_reaches_beyond_a_tensor_between_is_compared() -> None:
    base = torch.zeros(100)
    tensors = {"far": base[::2], "between": base[1:20:2], "dense": base[50:60]}
    with pytest.raises(gradferry.StateError, match="'far' and 'dense' share memory"):
        tensor_calls.check_memory(list(tensors), list(tensors.values()))
    tensor_calls.check_memory(["far", "between"], [tensors["far"], tensors["between"]])


def case_interrupted() -> tuple[Outcome, Outcome]:
    """Rank 0 is interrupted when its buckets are under way."""
    reducer = one()
    if dist.get_rank() == 0:
        interrupted = mock.patch.object(tensor_calls.Work, "wait", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            reducer.all_reduce()
    else:
        attempt(reducer.all_reduce)  # rank 0 may be interrupted before or after its end
    return attempt(reducer.all_reduce), attempt(reducer.state_dict)


def test_an_interrupted_call_is_the_last_one_on_all_ranks(world_of_2: World) -> None:
    for second, saved in world_of_2.run(case_interrupted):
        assert second.error in ("StateError", "PeerError")
        assert "KeyboardInterrupt" in second.text
        assert "make a new one" in second.text
        assert saved.error in ("StateError", "PeerError")


def case_unpack_fails() -> tuple[Outcome, Outcome, Outcome]:
    reducer = one()
    work = reducer.all_reduce(async_op=True)
    broken = mock.patch.object(Packed, "unpack", side_effect=RuntimeError("no way back"))
    with broken if dist.get_rank() == 0 else contextlib.nullcontext():
        first = attempt(work.wait)
    return first, attempt(work.wait), attempt(reducer.all_reduce)


def test_an_average_that_cannot_be_copied_back_ends_the_reducer(world_of_2: World) -> None:
    (first, again, following), (_, _, of_other) = world_of_2.run(case_unpack_fails)
    assert first.error == again.error == "StateError"
    assert "RuntimeError: no way back" in first.text
    assert first.text == again.text
    for outcome in (following, of_other):
        assert "no way back" in outcome.text


def case_fails_before_it_is_posted() -> tuple[bool, Outcome]:
    reducer = one()
    earlier = reducer.all_reduce(async_op=True)
    earlier.wait()
    with mock.patch.object(Packing, "pack", side_effect=RuntimeError("no memory")):
        failed = attempt(reducer.all_reduce)
    return earlier.wait(), failed


def test_a_call_that_fails_leaves_the_outcome_of_the_one_before(world_of_2: World) -> None:
    for earlier, failed in world_of_2.run(case_fails_before_it_is_posted):
        assert earlier is True
        assert "RuntimeError: no memory" in failed.text


def case_without_engine() -> list[Outcome]:
    reducer = gradferry.Reducer([("a", torch.zeros(3))], "off")
    return [attempt(lambda: reducer.all_reduce([])), attempt(reducer.all_reduce)]


def test_without_an_engine_the_first_error_is_the_last_call_too(world_of_2: World) -> None:
    for first, second in world_of_2.run(case_without_engine):
        assert "0 tensors were passed" in first.text
        assert second.error == "StateError"
        assert "an earlier call failed: 0 tensors" in second.text


def case_let_go() -> list[bool]:
    """Whether an engine is gone when its Reducer is, without a garbage collection; after a call,
    and after an error.
    """
    answers = []
    gc.collect()
    gc.disable()
    try:
        for fails in (False, True):
            reducer = one(bucket_cap_mb=0.001)
            engine = weakref.ref(reducer._running)
            tensor = torch.zeros(40, 50)
            memory = weakref.ref(tensor)
            work = reducer.all_reduce([tensor], async_op=True)
            work.wait()
            del tensor
            assert memory() is None  # a call that is over keeps no tensors
            if fails:
                assert attempt(lambda r=reducer: r.all_reduce([])).error == "StateError"
                assert attempt(reducer.all_reduce).error
            del reducer, work
            answers.append(engine() is None)
    finally:
        gc.enable()
    return answers


def test_a_reducer_is_gone_when_nobody_holds_it_and_tensors_after_a_call(
    world_of_2: World,
) -> None:
    for answer in world_of_2.run(case_let_go):
        assert answer == [True, True]


def case_autograd_notices(bucket_cap_mb: float) -> Outcome:
    factor = torch.ones(40, 50)
    loss = (torch.ones(40, 50, requires_grad=True) * factor).sum()
    reducer = gradferry.Reducer([("a", factor)], "exact", bucket_cap_mb=bucket_cap_mb)
    reducer.all_reduce()
    return attempt(loss.backward)


@pytest.mark.parametrize("bucket_cap_mb", [0.001, 25])
def test_autograd_notices_what_was_averaged(world_of_2: World, bucket_cap_mb: float) -> None:
    for outcome in world_of_2.run(case_autograd_notices, bucket_cap_mb=bucket_cap_mb):
        assert outcome.error == "RuntimeError"
        assert "modified by an inplace operation" in outcome.text


def case_refused_in_background() -> dict[str, Outcome]:
    found = {}
    for name, value in (("check_every", 2), ("grad_scaler", torch.amp.GradScaler("cpu"))):
        named = [("a", torch.nn.Parameter(torch.zeros(3, 5)))]
        reducer = gradferry.Reducer(named, "q4", **{name: value})
        passed = [torch.zeros(3, 5)]
        found[name] = attempt(lambda r=reducer, p=passed: r.all_reduce(p, async_op=True))
    return found


def test_what_a_loop_changes_meanwhile_is_not_read_in_the_background(world_of_2: World) -> None:
    for found in world_of_2.run(case_refused_in_background):
        for name, outcome in found.items():
            assert outcome.error == "StateError"
            assert f"{name}= " in outcome.text
            assert "without async_op" in outcome.text


def case_opposite_memory() -> list[tuple[bool, list[float], list[float]]]:
    """Rank 0 passes views whose memory holds the opposite, rank 1 plain tensors of 1.0 and 1j."""
    results = []
    for view in (True, False):
        z = torch.complex(torch.zeros(2), torch.full((2,), -3.0))
        real, imaginary = torch.ones(2), torch.complex(torch.zeros(2), torch.ones(2))
        if dist.get_rank() == 0 and view:
            real, imaginary = torch._neg_view(torch.full((2,), -3.0)), z.conj()
        elif dist.get_rank() == 0:
            real, imaginary = torch.full((2,), 3.0), z.conj().resolve_conj()
        noted = real.is_neg() or imaginary.is_conj()
        for name, tensor in (("real", real), ("imaginary", imaginary)):
            gradferry.all_reduce(tensor, "exact", name=name)
            gradferry.forget(name)
        results.append((noted, real.tolist(), imaginary.imag.tolist()))
    return results


def test_views_whose_memory_holds_the_opposite_are_averaged_as_they_read(
    world_of_2: World,
) -> None:
    answers = world_of_2.run(case_opposite_memory)
    for rank, results in enumerate(answers):
        assert [noted for noted, *_ in results] == [rank == 0, False]
        for _, real, imaginary in results:
            assert real == imaginary == [2.0, 2.0]
