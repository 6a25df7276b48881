"""What a Reducer refuses, on every rank, and that nobody waits for a rank that was refused."""

from __future__ import annotations

import contextlib
import copy
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry.reducer import Packed, Packing, Work
from on_ranks import of_all, on_ranks
from outcomes import Outcome, attempt
from stepping import flip_last_bit
from world import World, Worlds


def named(**changes: Any) -> list[tuple[str, Any]]:
    tensors = {"a": torch.zeros(40, 50), "b": torch.zeros(30, 60), "c": torch.zeros(7)}
    return list({**tensors, **changes}.items())


# --- making one -----------------------------------------------------------------------------------


def frozen_names() -> Any:
    yield "a", torch.zeros(3)
    raise ValueError("no more")


BAD_NAMED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "none": (list, {}, "named_tensors is empty"),
    "number": (lambda: 7, {}, "named_tensors=7 must be pairs"),
    "no_names": (lambda: [torch.zeros(3)], {}, "no pair of a name and a tensor"),
    "no_tensor": (lambda: [("a", 3.0)], {}, "no pair of a name and a tensor"),
    "twice": (lambda: [*named(), ("a", torch.zeros(2))], {}, "two tensors are called 'a'"),
    "sparse": (lambda: named(b=torch.eye(3).to_sparse()), {}, "'b' has layout torch.sparse_coo"),
    "lazy": (lambda: torch.nn.LazyLinear(3).named_parameters(), {}, "'weight' has no shape yet"),
    "nested": (
        lambda: named(b=torch.nested.nested_tensor([torch.ones(3), torch.ones(4)])),
        {},
        "'b' is nested; only dense",
    ),
    "rules": (named, {"rules": 3}, "rules=3 must be a list of dicts"),
    "integers": (lambda: named(b=torch.zeros(3, dtype=torch.int64)), {}, "torch.int64, which no"),
    "shared": (
        lambda: [("a", (t := torch.zeros(9, 9))), ("b", t[3:])],
        {},
        "'a' and 'b' share memory",
    ),
    "expanded": (lambda: named(b=torch.zeros(3, 1).expand(3, 5)), {}, "'b' share memory"),
    "meta": (lambda: [("a", torch.zeros(3, device="meta"))], {}, "no backend for tensors on"),
    "places": (lambda: named(b=torch.zeros(3, device="meta")), {}, "'b' is on meta and 'a' on cpu"),
    "generator": (frozen_names, {}, "ValueError: no more"),
    "auto": (named, {"codec": "auto"}, "a Reducer sees nothing"),
    "codec": (named, {"codec": "q5"}, "codec 'q5' is none of"),
    "cap": (named, {"bucket_cap_mb": 0}, "bucket_cap_mb=0 must be"),
    "check": (named, {"check_every": 2}, "check_every=2 compares what was registered"),
}


@on_ranks(2)
def test_what_cannot_be_averaged_is_refused_with_one_text() -> None:
    for name, (make, options, text) in BAD_NAMED.items():
        outcome = attempt(lambda: gradferry.Reducer(make(), **options))  # noqa: B023
        assert outcome.error == ("PeerError" if name == "generator" else "ConfigError"), name
        assert text in outcome.text, name
        assert of_all(outcome) == [outcome] * 2, name


@on_ranks(2)
def test_group_must_exist_and_hold_this_rank() -> None:
    first, other = dist.new_group([0]), dist.new_group([0, 1])
    alone = attempt(lambda: gradferry.Reducer(named(), "q4", first))
    assert alone.error == (None if dist.get_rank() == 0 else "ConfigError")
    assert dist.get_rank() == 0 or "no process group that this rank is in" in alone.text
    dist.destroy_process_group(other)
    gone = attempt(lambda: gradferry.Reducer(named(), "q4", other))
    assert gone.error == "StateError"
    assert "was destroyed" in gone.text
    assert attempt(lambda: gradferry.Reducer(named(), "q4", "world")).error == "ConfigError"


# --- calls ----------------------------------------------------------------------------------------


def passed(**changes: Any) -> list[Any]:
    return [tensor for _, tensor in named(**changes)]


def in_inference() -> list[Any]:
    with torch.inference_mode():
        return passed()


class Spread(torch.Tensor):
    """As a DTensor says that it is one."""

    def to_local(self) -> torch.Tensor:
        raise AssertionError


BAD_TENSORS: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: passed(b=torch.zeros(60, 30)), "'b' has shape (60, 30), and (30, 60)"),
    "dtype": (lambda: passed(b=torch.zeros(30, 60).half()), "'b' has dtype torch.float16, and"),
    "device": (
        lambda: passed(b=torch.zeros(30, 60, device="meta")),
        "'b' has device meta, and cpu",
    ),
    "layout": (lambda: passed(b=torch.zeros(30, 60).to_sparse()), "'b' has layout torch.sparse"),
    "none": (lambda: passed(b=None), "'b' is None, not a tensor; where a parameter has no"),
    "grad": (lambda: passed(b=torch.zeros(30, 60).requires_grad_()), "'b' requires grad"),
    "few": (lambda: passed()[:2], "2 tensors were passed and 3 registered"),
    "one": (lambda: torch.zeros(3), "a single tensor was passed"),
    "missing": (lambda: dict(named()[:2]), "the tensors lack 'c': every call averages all"),
    "unknown": (lambda: dict(named(d=torch.zeros(3))), "the tensors have 'd', which was not"),
    "expanded": (lambda: passed(b=torch.zeros(30, 1).expand(30, 60)), "elements of 'b' share"),
    "shared": (
        lambda: passed(a=(t := torch.zeros(80, 60))[:40, :50], b=t[50:], c=t[50, :7]),
        "'c' and 'b' share memory",
    ),
    "inference": (in_inference, "RuntimeError: Inplace update to inference tensor outside"),
    "spread": (
        lambda: passed(b=torch.zeros(30, 60).as_subclass(Spread)),
        "'b' is a Spread, whose parts are on several ranks",
    ),
    "no_list": (lambda: 7, "TypeError: 'int' object is not iterable"),
}


def case_bad_tensors(names: Sequence[str]) -> dict[str, list[Outcome]]:
    """The last rank alone passes what it must not; then everybody calls once more."""
    faulty = dist.get_rank() == dist.get_world_size() - 1
    answers = {}
    for name in names:
        reducer = gradferry.Reducer(named(), "q4")
        tensors = BAD_TENSORS[name][0]() if faulty else None
        first = attempt(lambda r=reducer, t=tensors: r.all_reduce(t))
        # Wrong again, but it is the first error that matters.
        answers[name] = [first, attempt(lambda r=reducer: r.all_reduce([]))]
    return answers


def test_wrong_tensors_are_named_and_end_the_reducer(worlds: Worlds) -> None:
    (answers,) = worlds(1).run(case_bad_tensors, names=list(BAD_TENSORS))
    for name, (_, text) in BAD_TENSORS.items():
        first, second = answers[name]
        assert first.error == second.error == "StateError", name
        assert first.text.startswith(text), name
        assert f"rank 0: {text}" in second.text, name
        assert "make a new one on every rank" in second.text, name


def test_wrong_tensors_on_one_rank_end_the_call_on_all(world_of_2: World) -> None:
    names = ["shape", "missing"]
    other, faulty = world_of_2.run(case_bad_tensors, names=names)
    for name in names:
        text = BAD_TENSORS[name][1]
        assert faulty[name][0].text.startswith(text), name
        for outcome in (*other[name], faulty[name][1]):
            assert outcome.is_ours, name
            assert f"rank 1: {text}" in outcome.text, name
            assert "make a new one on every rank" in outcome.text, name


@on_ranks(2)
def test_the_next_call_and_states_wait_for_the_last_call() -> None:
    tensor = torch.full((3, 1000), float(dist.get_rank()))
    reducer = gradferry.Reducer([("t", tensor)], "exact")
    for call in (reducer.state_dict, reducer.all_reduce, lambda: reducer.scale_residuals(2.0)):
        work = reducer.all_reduce(async_op=True)
        call()
        assert work.is_completed()
        assert bool((tensor == 0.5).all())
    assert reducer.state_dict()["steps"] == 4


@on_ranks(2)
def test_second_thread_is_refused() -> None:
    reducer = gradferry.Reducer([("t", torch.zeros(3, 1000))], "q4")
    text = "another thread is in all_reduce()"
    if dist.get_rank() == 1:
        dist.barrier()  # rank 0 has called twice
        outcome = attempt(reducer.all_reduce)
        assert f"rank 0: {text}" in outcome.text
    else:
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.append(attempt(reducer.all_reduce)))
        thread.start()
        while not reducer.stats()["in_flight"]:  # its half of the call has been handed over
            assert thread.is_alive()
        outcome = attempt(reducer.all_reduce)
        dist.barrier()
        thread.join()
        assert "another thread" in outcomes[0].text
        assert outcome.text.startswith(text)
    assert outcome.error in ("StateError", "PeerError")


@on_ranks(2)
def test_destroyed_group_is_named() -> None:
    group = dist.new_group([0, 1])
    reducer = gradferry.Reducer(named(), "q4", group)
    reducer.all_reduce()
    dist.barrier()
    dist.destroy_process_group(group)
    for _ in range(2):
        outcome = attempt(reducer.all_reduce)
        assert outcome.is_ours
        assert "was destroyed; make a Reducer over a new one" in outcome.text


@on_ranks(2)
def test_registered_parameters_are_compared() -> None:
    model = torch.nn.Linear(40, 50)
    reducer = gradferry.Reducer(model.named_parameters(), "q4", check_every=2)
    for step in range(3):
        if step == 2 and dist.get_rank() == 1:
            flip_last_bit(model.weight)
        tensors = [torch.ones_like(p) for p in model.parameters()]
        outcome = attempt(lambda t=tensors: reducer.all_reduce(t))
        assert outcome.error == ("DivergedError" if step == 2 else None)
    assert "'weight'" in outcome.headline
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(reducer)


# --- calls that go wrong half-way, and memory that a call must not miss ---------------------------


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
    """They lie between each other; the second one is averaged once, though another has it, too."""
    base = torch.arange(6.0).view(3, 2) * (1 + dist.get_rank())
    named = [("even", base[:, ::2]), ("odd", base[:, 1::2]), ("all", base)]
    assert gradferry.Reducer(named, "exact").all_reduce() is None
    assert base.tolist() == [[0.0, 1.5], [3.0, 4.5], [6.0, 7.5]]


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
        gradferry.Reducer([(name, tensor)], "exact").all_reduce()
    assert real.tolist() == imaginary.imag.tolist() == [2.0, 2.0]
