"""A training has the gradients, residuals and numbers of the reference, whatever meets in it.

A row has a value of every axis. Seeds draw rows until every two values that may meet have met; of
a row that fails, the simplest that still fails is shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import scenario as scenarios
import torch
import torch.distributed as dist
from drawing import Axes, Row
from mixed import COMPLEX, EVERY_DTYPE, MIXED
from reference import DTYPES, ReferenceEngine, narrow, widen
from residual_sums import by_tile
from scenario import (
    Run,
    Scenario,
    Weight,
    assert_same_bits,
    bytes_sent,
    group_of,
    reference_of,
)
from world import WorldsOn

Grads = list[np.ndarray | None]  # by weight

# --- axes -----------------------------------------------------------------------------------------

REAL = EVERY_DTYPE[: -len(COMPLEX)]
EACH = tuple(w for w in MIXED.weights if not w.name.endswith(("fp16", "three")))
DTYPES_OF_SHAPES = (*dict.fromkeys(weight.dtype for weight in EVERY_DTYPE),)
PLAIN = (
    Weight("embedding", (70, 64)),
    Weight("prime", (1031,)),
    Weight("odd", (61, 67)),
    Weight("one", (1,)),
    Weight("just_compressed", (32, 32)),  # the smallest matrix: q4 in place of coarse codecs
    Weight("just_exact", (31, 33)),
    Weight("wide", (3, 12301)),
    Weight("bias", (67,)),
)


@dataclasses.dataclass(frozen=True)
class Strided(Weight):
    """A matrix whose parameter is not contiguous; its gradient lies in a bucket as DDP wants it.

    transposed: columns one after the other.
    sliced: with a gap after every element. DDP then lays out the gradient row by row.
    """

    transposed: bool = False
    sliced: bool = False

    @property
    def bucket_is_transposed(self) -> bool:
        return self.transposed and not self.sliced

    def from_flat(self, flat: np.ndarray) -> torch.Tensor:
        rows, columns = self.shape
        if self.bucket_is_transposed:
            values = Weight(self.name, (columns, rows), self.dtype).from_flat(flat).t()
        else:
            values = super().from_flat(flat)
        gap = 2 if self.sliced else 1
        if self.transposed:
            tensor = torch.zeros(columns, gap * rows, dtype=self.dtype)[:, ::gap].t()
        else:
            tensor = torch.zeros(rows, gap * columns, dtype=self.dtype)[:, ::gap]
        return tensor.copy_(values)

    def to_flat(self, tensor: torch.Tensor) -> np.ndarray:
        tensor = tensor.detach()
        if self.bucket_is_transposed:
            return Weight(self.name, self.shape[::-1], self.dtype).to_flat(tensor.t().contiguous())
        return super().to_flat(tensor.contiguous())


def shapes() -> tuple[Weight, ...]:
    """Scalars, parameters without elements, and every order of elements, of every dtype."""
    found: list[Weight] = []
    for dtype in DTYPES_OF_SHAPES:
        name = str(dtype).removeprefix("torch.")
        found += [
            Weight(f"{name}_scalar", (), dtype),
            Weight(f"{name}_nothing", (3, 0), dtype),
            Weight(f"{name}_channels", (16, 12, 3, 3), dtype, channels_last=True),
            Strided(f"{name}_transposed", (45, 30), dtype, transposed=True),
            Strided(f"{name}_sliced", (45, 30), dtype, sliced=True),
            Strided(f"{name}_both", (45, 30), dtype, transposed=True, sliced=True),
        ]
    return tuple(found)


def resets(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[list[Any]], None]:
    """Does it to every .grad that there is."""

    def reset(parameters: list[torch.nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad = change(parameter.grad)

    return reset


def swapped(gradient: torch.Tensor) -> torch.Tensor:
    """For another tensor; what was there gets other values."""
    other = torch.zeros_like(gradient)
    gradient.fill_(float("nan"))
    return other


def first_to_none(parameters: list[torch.nn.Parameter]) -> None:
    parameters[0].grad = None


def zeros(grads: Grads) -> Grads:
    return [None if grad is None else np.zeros_like(grad) for grad in grads]


# What is done with .grad before a step, and what it leaves.
RESETS: dict[str, tuple[Callable[[list[Any]], None], Callable[[Grads], Grads]]] = {
    "to None": (resets(lambda _: None), lambda grads: [None for _ in grads]),
    "to zero": (resets(torch.Tensor.zero_), zeros),
    "swapped": (resets(swapped), zeros),
    "kept": (lambda _: None, list),
    "put back": (resets(torch.clone), list),
    "first to None": (first_to_none, lambda grads: [None, *grads[1:]]),
}

UNUSED = {"find_unused_parameters": True}
# The changes of a Drawn that a value makes; dictionaries are joined.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "place": {
        "2 ranks": {},
        "1 rank": {"world_size": 1},
        "3 ranks": {"world_size": 3},
        "2 of 3 ranks": {"group_ranks": (0, 2)},
        "nodes": {"world_size": 3, "nodes": ((0, 2), (1,))},
        "one node": {"nodes": ((0, 1),)},
    },
    "device": {each: {"device": each} for each in ("cpu", "streamed", "staged")},
    "hook": {"attach": {}, "python": {"native": False}},
    "codec": {
        each: {"codec": each}
        for each in (
            *("q4", "exact", "bf16", "q8", "sign1", "topk:ratio=0.05", "rht:bits=2"),
            "topk:ratio=0.2,owner_ratio=0.25,values=q4",
        )
    },
    "weights": {
        "plain": {"weights": PLAIN},
        "rules": {
            "weights": PLAIN,
            "rules": (("em*", "exact"), ("b*", "bf16"), ("just_exact", "q4"), ("*e*", "bf16")),
        },
        "dtypes": {"weights": REAL},
        "shapes": {"weights": (*shapes(), *COMPLEX)},
        "a codec each": {"weights": EACH, "rules": MIXED.rules},
    },
    "feedback": {
        each: {"error_feedback": each} for each in ("both", "auto", "none", "worker", "owner")
    },
    "momentum": {"none": {}, "0.9": {"options": {"momentum": 0.9}}},
    "warm-up": {
        "none": {},
        "exact": {"options": {"warmup_steps": 2}},
        "fine": {"options": {"warmup_steps": 2, "warmup": "rht:bits=4"}},
        "coarse": {"options": {"warmup_steps": 3, "warmup": "topk:ratio=0.25"}},
    },
    "values": {each: {"values": each} for each in ("usual", "zeros", "not finite", "huge")},
    "scale": {
        "none": {},
        "powers of 2": {"scales": (8.0, 8.0, 16.0, 2.0, 4.0)},
        "any": {"scales": (4.0, 12.0, 5.0, 5.0, 0.75)},
    },
    "buckets": {
        "many": {"ddp": {"bucket_cap_mb": 0.02}},
        "one": {"ddp": {"bucket_cap_mb": 25}},
        "views": {"ddp": {"bucket_cap_mb": 0.02, "gradient_as_bucket_view": True}},
        "static": {"ddp": {"bucket_cap_mb": 0.02, "static_graph": True}},
    },
    "use": {
        "all": {},
        "others": {"use": "others", "ddp": UNUSED},
        "frozen": {"use": "frozen", "ddp": UNUSED},
    },
    "passes": {
        "one": {},
        "the last is synced": {"passes": 3},
        "several are synced": {"passes": 3, "synced": 2},
    },
    "reset": {each: {"reset": each} for each in RESETS},
    "ends": {"together": {}, "under join()": {"uneven": True}},
    "life": {each: {"life": each} for each in ("straight", "resumed", "attached late")},
    "check": {"never": {}, "every second step": {"options": {"check_every": 2}}},
}
DEVICES = ("streamed", "staged")
LOSSY = ("fine", "coarse")
AXES = Axes(
    CHANGES,
    apart=[
        ("device", DEVICES, "weights", ["shapes"], "the fake device has no complex numbers"),
        ("momentum", ["0.9"], "feedback", ["none", "owner"], "refused: it is in the worker's"),
        ("momentum", ["0.9"], "use", ["others", "frozen"], "refused: DDP drops what is delivered"),
        ("warm-up", LOSSY, "codec", ["exact"], "refused: there is nothing to compress"),
        ("buckets", ["static"], "use", ["others", "frozen"], "a static graph has one use"),
        ("ends", ["under join()"], "device", DEVICES, "DDP's own all-reduces free what they send"),
        ("ends", ["under join()"], "scale", ["powers of 2", "any"], "refused: scales differ"),
        ("ends", ["under join()"], "check", ["every second step"], "parameters differ meanwhile"),
        ("ends", ["under join()"], "passes", ["several are synced"], "DDP forgets the first"),
        ("ends", ["under join()"], "life", ["resumed"], "all ranks resume"),
    ],
)

# --- a training -----------------------------------------------------------------------------------

STEPS = 5
RESUMED_AT = 2
FROZEN = range(2)
DENSE_STEPS = 3  # before a late attach


@dataclasses.dataclass(frozen=True)
class Pass:
    """One backward pass, of which every rank knows all."""

    synced: bool
    used: np.ndarray  # [rank, weight]


@dataclasses.dataclass(frozen=True)
class Drawn(Scenario):
    steps: int = STEPS
    values: str = "usual"
    scales: tuple[float, ...] = ()  # of the loss, by step
    use: str = "all"
    synced: int = 1  # passes of a step
    reset: str = "to None"
    uneven: bool = False
    life: str = "straight"

    def starts(self, step: int) -> bool:
        """Whether it is the first step of a DistributedDataParallel."""
        resumed = self.life == "resumed" and step == RESUMED_AT
        return resumed or (step == 0 and self.life != "attached late")

    def passes_of(self, step: int) -> list[Pass]:
        # DDP takes no other beginning of a static graph.
        alone = self.starts(step) and "static_graph" in self.ddp
        count = 1 if alone else self.passes
        rng = np.random.default_rng([self.seed, step])
        used = np.ones((count, self.world_size, len(self.weights)), bool)
        if self.use == "others":
            used &= rng.random(used.shape) < 0.6
            used &= rng.random((count, 1, len(self.weights))) < 0.7
            used[..., -1] = True  # a pass has a loss
        if self.use == "frozen" and step in FROZEN:
            used[..., 0] = False
        return [Pass(turn >= count - self.synced, used[turn]) for turn in range(count)]

    def rank_steps(self, rank: int) -> int:
        return (3, self.steps, 2)[rank] if self.uneven else self.steps

    def gradient(self, step: int, turn: int, rank: int, index: int) -> np.ndarray:
        """As the scaled loss gives it."""
        weight = self.weights[index]
        dtype, count = weight.real_dtype, weight.num_elements
        flat = super().gradient(step, turn, rank, index)
        rng = np.random.default_rng([self.seed, step, turn, rank, index, 1])
        if self.values == "zeros" and rng.random() < 0.5:
            flat = flat * flat.dtype.type(0)  # of either sign
        # torch's sum of complex numbers spreads what is not finite to the other part of a number.
        is_real = not weight.dtype.is_complex
        poisoned = step in (1, 2) and (index + rank + step) % 3 == 0 < count
        if self.values == "not finite" and is_real and poisoned:
            value = np.float32([[np.nan, np.inf, -np.inf][index % 3]])
            flat[count // 2] = narrow(value, dtype)[0]
        if self.values == "huge" and is_real and dtype != "float64":
            # Sums and residuals overflow, where two bits return the opposite of a large number.
            # Odd steps leave room for what residuals bring.
            power = rng.integers(0, 2, count) + 2 * rank + 4 * (step % 2)
            signs = rng.choice(np.float32([-1, 1]), count)
            wide = (signs * rng.uniform(0.9, 1, count) * np.exp2(-power)).astype(np.float32)
            flat = narrow(wide * np.float32(torch.finfo(weight.dtype).max), dtype)
        if self.scales:
            with np.errstate(over="ignore"):
                flat = narrow(widen(flat, dtype) * np.float32(self.scales[step]), dtype)
        return flat


def drawn(row: Row, seed: int) -> Drawn:
    changes: dict[str, Any] = {"seed": 2**63 + seed}
    for axis, name in row.items():
        for field, value in CHANGES[axis][name].items():
            joined = isinstance(value, dict)
            changes[field] = {**changes.get(field, {}), **value} if joined else value
    if changes["device"] != "cpu" and "use" in changes:
        changes["ddp"] = {**changes["ddp"], "gradient_as_bucket_view": True}  # else refused
    return Drawn(**changes)


class Training:
    """A rank's part of a training."""

    def __init__(self, case: Drawn, group: Any) -> None:
        self.case = case
        self.scaler: Any = None
        options = dict(case.options)
        if case.scales:
            kind = "cpu" if case.device == "cpu" else "fake"
            self.scaler = options["grad_scaler"] = torch.amp.GradScaler(kind, case.scales[0])
        scenario = dataclasses.replace(case, options=options, scales=())
        is_late = case.life == "attached late"
        with mock.patch.object(scenarios, "attach") if is_late else contextlib.nullcontext():
            self.run = Run(scenario, group)
        if is_late:
            self._train_without(scenario)
        self.seen: list[Grads] = []  # .grad after every synced pass
        self.buckets: list[list[list[str]]] = []
        self.counted: Counter[str] = Counter()

    def _train_without(self, scenario: Scenario) -> None:
        """The last pass is not synced: DDP keeps in mind what it used."""
        run = self.run
        for step in range(DENSE_STEPS):
            run.ddp.zero_grad()
            with run.ddp.no_sync() if step == DENSE_STEPS - 1 else contextlib.nullcontext():
                run.ddp(run.targets(step)).backward()
        run.model.zero_grad(set_to_none=False)
        self._freeze(0)
        run.state = scenarios.attach(run.ddp, scenario)

    def _freeze(self, step: int) -> None:
        if self.case.use == "frozen":
            next(self.run.model.parameters()).requires_grad_(step not in FROZEN)

    def train(self) -> dict[str, Any]:
        case, rank = self.case, self.run.rank
        with self.run.ddp.join() if case.uneven else contextlib.nullcontext():
            for step in range(case.rank_steps(rank)):
                if step == RESUMED_AT and case.life == "resumed":
                    self._count()
                    self.run = self.run.saved_and_loaded()
                self._step(step)
        self._count()
        slot = self.run.state.state_dict()[f"slot_{rank}"]
        return {
            "seen": self.seen,
            "buckets": self.buckets,
            "counted": dict(self.counted),
            "slot": {name: each.cpu() for name, each in slot.items()},
            "hash": self.run.parameter_hash(),
        }

    def _count(self) -> None:
        stats = self.run.state.stats()
        counts = ("steps", "buckets", "gradient_bytes", "wire_bytes", "local_bytes")
        self.counted.update({key: stats[key] for key in counts})

    def _step(self, step: int) -> None:
        case, run = self.case, self.run
        parameters = list(run.model.parameters())
        if step or case.life != "attached late":
            RESETS[case.reset][0](parameters)
        self._freeze(step)
        if self.scaler:
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": case.scales[step]})
        for turn, one in enumerate(case.passes_of(step)):
            used = one.used[run.rank]
            left_out = [
                w.name for w, is_used in zip(case.weights, used, strict=True) if not is_used
            ]
            targets = run.scenario.targets(step, run.rank, turn, left_out)
            with contextlib.nullcontext() if one.synced else run.ddp.no_sync():
                loss = run.ddp({name: each.to(run.device) for name, each in targets.items()})
                if one.synced:
                    self.buckets.append(run.bucket_names())
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            if one.synced:
                pairs = zip(case.weights, parameters, strict=True)
                self.seen.append([None if p.grad is None else w.to_flat(p.grad) for w, p in pairs])
        with torch.no_grad():
            for p in parameters:
                if p.grad is not None and case.values == "usual":
                    p -= scenarios.LEARNING_RATE * p.grad


def play(case: Drawn) -> dict[str, Any] | None:
    """Runs on a rank. None where the rank is not in the group."""
    group = group_of(case)
    if case.group_ranks is not None and dist.get_rank() not in case.group_ranks:
        return None
    answer = Training(case, group).train()
    if case.device != "cpu":
        from watching import expect_no_race

        expect_no_race()
    return answer


def expected(case: Drawn) -> tuple[list[list[Grads]], ReferenceEngine]:
    """[rank][synced pass][weight]: as DDP does it, with the reference in place of the mean. And the
    reference at the end.
    """
    engine, ranks, weights = reference_of(case), range(case.world_size), range(len(case.weights))
    grads: list[Grads] = [[None for _ in weights] for _ in ranks]
    seen: list[list[Grads]] = [[] for _ in ranks]
    used = np.zeros((case.world_size, len(case.weights)), bool)
    heard = used[0]  # of a rank within join()
    if case.life == "attached late":
        used[:] = True
        grads = [[np.zeros_like(case.gradient(0, 0, 0, i)) for i in weights] for _ in ranks]
    for step in range(max(map(case.rank_steps, ranks))):
        present = [rank for rank in ranks if step < case.rank_steps(rank)]
        absent = len(present) < len(ranks)
        for rank in present if step or case.life != "attached late" else ():
            grads[rank] = RESETS["to None" if case.starts(step) else case.reset][1](grads[rank])
        for turn, one in enumerate(case.passes_of(step)):
            for rank in present:
                for i in np.flatnonzero(one.used[rank]):
                    new = case.gradient(step, turn, rank, i)
                    grads[rank][i] = added(grads[rank][i], new, case.weights[i].real_dtype)
            used[present] |= one.used[present]
            if not one.synced:
                continue
            # On a device DDP's views make .grad a part of the bucket, whoever used the parameter.
            counts = [
                [
                    used[:, i].any() or (case.device != "cpu" and grads[rank][i] is not None)
                    for i in weights
                ]
                for rank in ranks
            ]
            handed = [
                [
                    np.zeros_like(case.gradient(step, 0, rank, i))
                    if rank not in present or not counts[rank][i] or grads[rank][i] is None
                    else grads[rank][i]
                    for i in weights
                ]
                for rank in ranks
            ]
            averaged = engine.step(handed, case.scales[step] if case.scales else 1.0)
            for rank in present:
                for i in np.flatnonzero(counts[rank]):
                    grads[rank][i] = averaged[rank][i]
                # Ranks within join() tell DDP again what they heard, as if they had used it; then
                # what is unused has a gradient of zeros.
                for i in np.flatnonzero(heard if absent else ()):
                    if grads[rank][i] is None:
                        grads[rank][i] = np.zeros_like(case.gradient(step, 0, rank, i))
                seen[rank].append(list(grads[rank]))
            heard = used.any(axis=0) | (heard if absent else False)
            used[:] = False
    return seen, engine


def added(old: np.ndarray | None, new: np.ndarray, dtype: str) -> np.ndarray:
    """The sum as torch accumulates it: in the gradient's dtype."""
    if old is None:
        return new
    with np.errstate(over="ignore", invalid="ignore"):
        return narrow(widen(old, dtype) + widen(new, dtype), dtype)


# --- what it must leave ---------------------------------------------------------------------------


def compare(case: Drawn, answers: list[dict[str, Any]]) -> None:
    seen, engine = expected(case)
    for rank, answer in enumerate(answers):
        assert len(answer["seen"]) == len(seen[rank])
        for number, (got, want) in enumerate(zip(answer["seen"], seen[rank], strict=True)):
            for weight, one, other in zip(case.weights, got, want, strict=True):
                where = f"rank {rank}, synced pass {number}, {weight.name}"
                if case.world_size == 1 and one is not None:
                    one = narrow(widen(one, weight.real_dtype), weight.real_dtype)  # torch's NaN
                assert_same_bits(one, other, weight.real_dtype, where)
    compare_residuals(case, answers, engine)
    compare_numbers(case, answers, len(max(seen, key=len)))
    assert len({answer["hash"] for answer in answers}) == 1, "parameters differ"


def compare_residuals(case: Drawn, answers: list[dict[str, Any]], engine: ReferenceEngine) -> None:
    node_of = {rank: node for node, ranks in enumerate(engine.nodes) for rank in ranks}
    for kind, kept in (
        ("worker", [each[0] is not None for each in engine.worker_residual]),
        ("owner", [each is not None for each in engine.owner_residual]),
    ):
        numbers = [n for n, tile in enumerate(engine.layout.tiles) if kept[tile.parameter]]
        if case.world_size == 1 and not case.options.get("momentum"):
            numbers = []  # nothing is ever withheld
        held: Counter[int] = Counter()
        for rank, answer in enumerate(answers):
            slot = answer["slot"]
            for tile, got in by_tile(slot[kind], slot[f"{kind}_tiles"].tolist(), engine):
                held[engine.layout.tiles.index(tile)] += 1
                whole = engine.owner_residual[tile.parameter]
                if kind == "worker":
                    whole = engine.worker_residual[tile.parameter][node_of[rank]]
                want = whole[tile.offset : tile.offset + tile.num_elements]
                where = f"rank {rank}, {kind} residual of {case.weights[tile.parameter].name}"
                assert_same_bits(got.astype(np.float32), want, "float32", where)
        copies = len(engine.nodes) if kind == "worker" else 1
        assert held == dict.fromkeys(numbers, copies), f"tiles of {kind} residuals: {held}"


def compare_numbers(case: Drawn, answers: list[dict[str, Any]], num_passes: int) -> None:
    buckets = max((answer["buckets"] for answer in answers), key=len)
    assert len(buckets[-1]) > 1 or case.ddp["bucket_cap_mb"] > 1, buckets
    size = sum(w.num_elements * DTYPES[w.real_dtype].item_bytes for w in case.weights)
    for rank, answer in enumerate(answers):
        counted = answer["counted"]
        assert counted["steps"] == num_passes, counted
        assert counted["buckets"] == (case.world_size > 1) * sum(map(len, buckets)), counted
        assert counted["gradient_bytes"] == num_passes * size, counted
        if case.device != "cpu":
            continue  # whose commits come a step later
        wire, local = bytes_sent(case, buckets, rank)
        if every := case.options.get("check_every"):
            siblings = next((ranks for ranks in case.nodes or () if rank in ranks), (rank,))
            message = (num_passes - 1) // every * (64 + 8 * len(case.weights))
            wire += message * (case.world_size - len(siblings))
            local += message * (len(siblings) - 1)
        assert (counted["wire_bytes"], counted["local_bytes"]) == (wire, local)


# --- the tests ------------------------------------------------------------------------------------


def fault_of(worlds_on: WorldsOn, row: Row, seed: int) -> str:
    """What is wrong with a row; nothing: an empty text."""
    case = drawn(row, seed)
    size = max(case.group_ranks) + 1 if case.group_ranks else case.world_size
    try:
        answers = worlds_on(case.device)(size).run(play, case=case)
        compare(case, [answer for answer in answers if answer is not None])
    except AssertionError as error:
        return str(error)
    return ""


def check(worlds_on: WorldsOn, row: Row, seed: int) -> None:
    if not (fault := fault_of(worlds_on, row, seed)):
        return
    smallest = AXES.shrunk(row, lambda simpler: bool(fault_of(worlds_on, simpler, seed)))
    why = fault_of(worlds_on, smallest, seed)
    pytest.fail(f"{AXES.told(row)}: {fault}\nsmallest, {AXES.told(smallest)}: {why}")


QUICK, *SEEDS = range(1, 8)
ROWS = AXES.drawn(QUICK)


@pytest.mark.torch_core
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_a_drawn_training_equals_the_reference(worlds_on: WorldsOn, number: int) -> None:
    check(worlds_on, ROWS[number], QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_trainings_of_more_seeds_equal_the_reference(worlds_on: WorldsOn, seed: int) -> None:
    for row in AXES.drawn(seed):
        check(worlds_on, row, seed)


def test_scales_that_are_powers_of_two_change_no_bit_of_the_reference() -> None:
    """And so none of a training: block scales, means and sums just shift."""
    row = {**AXES.simplest, "weights": "a codec each", "momentum": "0.9"}
    (plain, *_), _ = expected(drawn(row, QUICK))
    case = drawn({**row, "scale": "powers of 2"}, QUICK)
    (scaled, *_), _ = expected(case)
    for scale, wanted, got in zip(case.scales, plain, scaled, strict=True):
        for weight, one, other in zip(case.weights, wanted, got, strict=True):
            assert (widen(other, weight.real_dtype) == scale * widen(one, weight.real_dtype)).all()
