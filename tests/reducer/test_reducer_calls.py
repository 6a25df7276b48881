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
from gradferry.reducer import Packed, Packing, Work, check_memory
from on_ranks import on_ranks
from outcomes import attempt


def one(**options: Any) -> Any:
    return gradferry.Reducer([("a", torch.zeros(40, 50))], "exact", **options)


@on_ranks(2)
def test_tensors_without_elements_are_part_of_every_step() -> None:
    """First of their dtype, alone, and among others."""
    named = [
        ("none", torch.zeros(0, 3)),
        ("some", torch.full((2,), float(dist.get_rank()))),
        ("no double", torch.zeros(0, dtype=torch.float64)),
    ]
    for tensors in (named, named[2:]):
        reducer = gradferry.Reducer(tensors, "exact")
        reducer.all_reduce()
        reducer.all_reduce()
        reducer.state_dict()  # not in the middle of a step
        assert reducer.stats()["steps"] == 2
    assert [tensor.tolist() for _, tensor in named] == [[], [0.5, 0.5], []]


@on_ranks(2)
def test_registered_columns_of_one_tensor_are_averaged() -> None:
    """They lie between each other, and share nothing."""
    base = torch.arange(6.0).view(3, 2) * (1 + dist.get_rank())
    named = [("even", base[:, ::2]), ("odd", base[:, 1::2])]
    assert gradferry.Reducer(named, "exact").all_reduce() is None
    assert base.tolist() == [[0.0, 1.5], [3.0, 4.5], [6.0, 7.5]]


def test_memory_that_reaches_beyond_a_tensor_between_is_compared() -> None:
    base = torch.zeros(100)
    tensors = {"far": base[::2], "between": base[1:20:2], "dense": base[50:60]}
    with pytest.raises(gradferry.StateError, match="'far' and 'dense' share memory"):
        check_memory(list(tensors), list(tensors.values()))
    check_memory(["far", "between"], [tensors["far"], tensors["between"]])


@on_ranks(2)
def test_an_interrupted_call_is_the_last_one_on_all_ranks() -> None:
    """Rank 0 is interrupted when its buckets are under way."""
    reducer = one()
    if dist.get_rank() == 0:
        interrupted = mock.patch.object(Work, "wait", side_effect=KeyboardInterrupt)
        with interrupted, pytest.raises(KeyboardInterrupt):
            reducer.all_reduce()
    else:
        attempt(reducer.all_reduce)  # rank 0 may be interrupted before or after its end
    second, saved = attempt(reducer.all_reduce), attempt(reducer.state_dict)
    assert {second.error, saved.error} <= {"StateError", "PeerError"}
    assert "KeyboardInterrupt" in second.text
    assert "make a new one" in second.text


@on_ranks(2)
def test_an_average_that_cannot_be_copied_back_ends_the_reducer() -> None:
    reducer, fails = one(), dist.get_rank() == 0
    work = reducer.all_reduce(async_op=True)
    broken = mock.patch.object(Packed, "unpack", side_effect=RuntimeError("no way back"))
    with broken if fails else contextlib.nullcontext():
        first = attempt(work.wait)
    assert first.error == ("StateError" if fails else None)
    assert not fails or "RuntimeError: no way back" in first.text
    assert attempt(work.wait) == first
    assert "no way back" in attempt(reducer.all_reduce).text


@on_ranks(2)
def test_a_call_that_fails_leaves_the_outcome_of_the_one_before() -> None:
    reducer = one()
    earlier = reducer.all_reduce(async_op=True)
    earlier.wait()
    with mock.patch.object(Packing, "pack", side_effect=RuntimeError("no memory")):
        assert "RuntimeError: no memory" in attempt(reducer.all_reduce).text
    assert earlier.wait() is True


@on_ranks(2)
def test_without_an_engine_the_first_error_is_the_last_call_too() -> None:
    reducer = gradferry.Reducer([("a", torch.zeros(3))], "off")
    assert "0 tensors were passed" in attempt(lambda: reducer.all_reduce([])).text
    second = attempt(reducer.all_reduce)
    assert second.error == "StateError"
    assert "0 tensors" in second.text


@pytest.mark.parametrize("fails", [False, True])
@on_ranks(2)
def test_a_reducer_is_gone_when_nobody_holds_it_and_tensors_after_a_call(fails: bool) -> None:
    """Without a garbage collection."""
    gc.collect()
    gc.disable()
    try:
        reducer = one(bucket_cap_mb=0.001)
        engine = weakref.ref(reducer._running)
        tensor = torch.zeros(40, 50)
        memory = weakref.ref(tensor)
        work = reducer.all_reduce([tensor], async_op=True)
        work.wait()
        del tensor
        assert memory() is None
        if fails:
            assert attempt(lambda r=reducer: r.all_reduce([])).error == "StateError"
            assert attempt(reducer.all_reduce).error
        del reducer, work
        assert engine() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("bucket_cap_mb", [0.001, 25])
@on_ranks(2)
def test_autograd_notices_what_was_averaged(bucket_cap_mb: float) -> None:
    factor = torch.ones(40, 50)
    loss = (torch.ones(40, 50, requires_grad=True) * factor).sum()
    gradferry.Reducer([("a", factor)], "exact", bucket_cap_mb=bucket_cap_mb).all_reduce()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_what_a_loop_changes_meanwhile_is_not_read_in_the_background() -> None:
    for name, value in (("check_every", 2), ("grad_scaler", torch.amp.GradScaler("cpu"))):
        named = [("a", torch.nn.Parameter(torch.zeros(3, 5)))]
        reducer = gradferry.Reducer(named, "q4", **{name: value})
        passed = [torch.zeros(3, 5)]
        outcome = attempt(lambda r=reducer, p=passed: r.all_reduce(p, async_op=True))
        assert outcome.error == "StateError"
        assert f"{name}= " in outcome.text
        assert "without async_op" in outcome.text


@pytest.mark.parametrize("view", [True, False])
@on_ranks(2)
def test_views_whose_memory_holds_the_opposite_are_averaged_as_they_read(view: bool) -> None:
    """Rank 0 passes such views, rank 1 plain tensors of 1.0 and 1j."""
    z = torch.complex(torch.zeros(2), torch.full((2,), -3.0))
    real, imaginary = torch.ones(2), torch.complex(torch.zeros(2), torch.ones(2))
    if dist.get_rank() == 0 and view:
        real, imaginary = torch._neg_view(torch.full((2,), -3.0)), z.conj()
        assert real.is_neg()
        assert imaginary.is_conj()
    elif dist.get_rank() == 0:
        real, imaginary = torch.full((2,), 3.0), z.conj().resolve_conj()
    for name, tensor in (("real", real), ("imaginary", imaginary)):
        gradferry.all_reduce(tensor, "exact", name=name)
        gradferry.forget(name)
    assert real.tolist() == imaginary.imag.tolist() == [2.0, 2.0]
