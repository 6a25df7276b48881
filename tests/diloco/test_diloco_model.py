"""Random histories of a DiLoCo end where a model of the protocol does, which knows numbers alone.

Parameters have one value in all their elements, in fp64: whole numbers of 2^-8, of which means over
one, two and four ranks and halves are exact.
"""

from __future__ import annotations

import contextlib
import io
import random
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import gradferry
import pytest
import torch
import torch.distributed as dist
from gradferry import diloco as outer_steps
from on_ranks import on_ranks
from outcomes import attempt
from torch import nn
from training_alone import UNIT, Moving

NAMES = ("weight", "bias")
SYNC_EVERY = 3
EVENTS = 16
POINTS = 10  # of an outer step, at which `interrupting` can stop it
Values = dict[str, float]


class Expected:
    """What the ranks have: the whole protocol, of numbers."""

    def __init__(self, members: list[int], start: float = 0.0) -> None:
        self.members = members
        self.common = {rank: dict.fromkeys(NAMES, start) for rank in members}
        self.momentum = {rank: dict.fromkeys(NAMES, 0.0) for rank in members}
        self.local = {rank: dict(self.common[rank]) for rank in members}
        self.frozen: set[str] = set()
        self.since = self.outer_steps = 0

    def step(self, moves: dict[int, Values]) -> bool:
        """Whether the outer step that was due was taken, or none was."""
        self.begin_period()
        for rank in self.members:
            self.move(rank, moves[rank])
        self.since += 1
        return self.since < SYNC_EVERY or self.outer_step()

    def begin_period(self) -> None:
        """What ranks were given after the last outer step becomes the global parameters."""
        for rank in self.members if not self.since else ():
            if self.local[rank] != self.common[rank]:
                self.common[rank] = dict(self.local[rank])
                self.momentum[rank] = dict.fromkeys(NAMES, 0.0)

    def move(self, rank: int, move: Values) -> None:
        for name in set(NAMES) - self.frozen:
            self.local[rank][name] -= move[name]

    def differ(self) -> bool:
        """Whether ranks were not given the same."""
        return any(self.common[rank] != self.common[self.members[0]] for rank in self.members)

    def outer_step(self) -> bool:
        if self.differ():
            return False
        for name in NAMES:
            gradients = [self.common[r][name] - self.local[r][name] for r in self.members]
            for rank in self.members:
                average = sum(gradients) / len(gradients)
                self.momentum[rank][name] = self.momentum[rank][name] / 2 + average
                self.common[rank][name] -= self.momentum[rank][name]
        self.local = {rank: dict(self.common[rank]) for rank in self.members}
        self.since, self.outer_steps = 0, self.outer_steps + 1
        return True

    def finish(self, moves: dict[int, list[Values]]) -> None:
        """Ranks take so many steps, and wait for each other where a period of one ends."""
        self.begin_period()
        while self.since or any(moves[rank] for rank in self.members):
            end = SYNC_EVERY - self.since
            for rank in self.members:
                for move in moves[rank][:end]:
                    self.move(rank, move)
                del moves[rank][:end]
            assert self.outer_step()

    def give(self, values: dict[int, Values]) -> None:
        for rank, value in values.items():
            self.local[rank] = dict(value)

    def go_on_with(self, members: list[int]) -> None:
        oldest = min(self.members)  # any: all have the same
        for each in (self.common, self.momentum):
            for rank in members:
                each.setdefault(rank, dict(each[oldest]))
        self.local = {rank: self.local.get(rank, dict(self.common[oldest])) for rank in members}
        for each in (self.common, self.momentum):
            for rank in set(each) - set(members):
                del each[rank]
        self.members = members


class Nested(Moving):
    """Moves a part of the way before it calls the step() of its base, which torch hooks, too."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad /= 2
                    parameter.sub_(parameter.grad)
        super().step(closure)


Moving([torch.zeros(1)])  # torch hooks the step() of a class of which there is an optimizer
OPTIMIZERS: list[Callable[[nn.Module], list[torch.optim.Optimizer]]] = [
    lambda model: [Moving(model.parameters())],
    lambda model: [Nested(model.parameters())],
    lambda model: [Moving([each]) for each in model.parameters()],
]


class Real:
    """One rank: a model, and its DiLoCo."""

    def __init__(self, group: Any, kind: int, start: float) -> None:
        self.model = nn.Module()
        self.model.weight = nn.Parameter(torch.full((8, 40), start, dtype=torch.float64))
        self.model.bias = nn.Parameter(torch.full((5,), start, dtype=torch.float64))
        self.optimizers = OPTIMIZERS[kind](self.model)
        self.diloco = gradferry.DiLoCo(
            self.model,
            self.optimizers,
            SYNC_EVERY,
            "exact",
            outer=lambda tensors: torch.optim.SGD(tensors, lr=1.0, momentum=0.5),
            group=group,
        )

    def step(self, moves: Values) -> None:
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, moves[name])
        for optimizer in self.optimizers:
            optimizer.step()

    def load(self, values: Values) -> None:
        """As `load_state_dict`, or, as libraries do, past autograd."""
        new = {name: torch.full_like(p, values[name]) for name, p in self.model.named_parameters()}
        if random.random() < 0.5:  # by this rank alone
            self.model.load_state_dict(new)
        else:
            for name, parameter in self.model.named_parameters():
                parameter.data.copy_(new[name])

    def freeze(self, names: set[str]) -> None:
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in names)
            parameter.grad = None

    def saved(self) -> bytes:
        file = io.BytesIO()
        torch.save([self.model.state_dict(), self.diloco.state_dict()], file)
        return file.getvalue()


@contextlib.contextmanager
def interrupting(diloco: Any, number: int, error: type[BaseException]) -> Iterator[None]:
    """The error is raised at one of the `POINTS` of an outer step."""
    seen = 0

    def count() -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            raise error

    def around(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            count()
            result = function(*arguments, **options)
            count()
            return result

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (outer_steps, "on_all_ranks"),  # twice
            (diloco._reducer, "_saved"),
            (diloco._reducer, "all_reduce"),
            (diloco._global, "apply"),
        ):
            stack.enter_context(mock.patch.object(owner, name, around(getattr(owner, name))))
        yield


def drawn(rng: random.Random) -> Values:
    return {name: UNIT * rng.randint(-64, 64) for name in NAMES}


class History:
    """Every rank draws the same events, and has its part in them."""

    def __init__(self, seed: int) -> None:
        self.rng, self.rank = random.Random(seed), dist.get_rank()
        self.kind = seed % len(OPTIMIZERS)
        self.expected = Expected([0, 1, 2, 3])
        self.real: Real | None = Real(dist.new_group(), self.kind, start=float(self.rank))

    def moves(self) -> dict[int, Values]:
        return {rank: drawn(self.rng) for rank in range(4)}

    def step(self) -> None:
        moves = self.moves()
        taken = self.expected.step(moves)
        if self.real is not None:
            outcome = attempt(lambda: self.real.step(moves[self.rank]))
            assert outcome.error == (None if taken else "DivergedError"), outcome
            assert taken or "rank" in outcome.text
        if not taken:
            self.begin_again()

    def begin_again(self) -> None:
        """Ranks have other global parameters: all make a new DiLoCo."""
        group, start = dist.new_group(self.expected.members), UNIT * self.rng.randint(-64, 64)
        frozen, self.expected = self.expected.frozen, Expected(self.expected.members, start)
        self.expected.frozen = frozen
        if self.real is not None:
            self.real.diloco.close()
            first = self.rank == self.expected.members[0]
            self.real = Real(group, self.kind, start if first else 5.0)
            self.real.freeze(frozen)

    def load(self, ranks: int = 4) -> None:
        """The same on the first ranks, or, if not on all, each its own: within a period a change
        like any other, at its beginning for all ranks or an error.
        """
        given = [drawn(self.rng) for _ in range(4)]
        whose = self.expected.members[:ranks]
        values = {rank: given[0 if ranks == 4 else rank] for rank in whose}
        self.expected.give(values)
        if self.real is not None and self.rank in values:
            self.real.load(values[self.rank])

    def load_on_some(self) -> None:
        self.load(self.rng.randint(1, 3))

    def load_and_resume(self) -> None:
        """A state is saved between a load and the next step, which looks at it."""
        self.load()
        self.resume()

    def swap(self) -> None:
        """Weights of an average are evaluated, and taken back."""
        if self.real is not None:
            kept = {name: float(p.view(-1)[0]) for name, p in self.real.model.named_parameters()}
            self.real.load(dict.fromkeys(NAMES, 77.0))
            self.real.load(kept)
            with self.real.diloco.global_parameters():
                self.expect(self.expected.common[self.rank])
                self.real.load(dict.fromkeys(NAMES, 78.0))

    def freeze(self) -> None:
        self.expected.frozen ^= {"bias"}
        if self.real is not None:
            self.real.freeze(self.expected.frozen)

    def interrupt(self) -> None:
        """A drawn point of the next outer step; then all that are left go on, or with others."""
        victim, number = self.rng.choice(self.expected.members), self.rng.randint(1, POINTS)
        error = self.rng.choice((KeyboardInterrupt, ZeroDivisionError))
        while self.expected.since != SYNC_EVERY - 1:
            self.step()
        if len(self.expected.members) == 1 or self.expected.differ():
            return
        moves = self.moves()
        assert self.expected.step(moves)
        if self.real is not None:
            stopped = interrupting(self.real.diloco, number if self.rank == victim else 0, error)
            with stopped, contextlib.suppress(KeyboardInterrupt):
                outcome = attempt(lambda: self.real.step(moves[self.rank]))
                assert outcome.error in (None, "PeerError", error.__name__, "StateError"), outcome
                # The outer optimizer has failed.
                assert outcome.error != "StateError" or error.__name__ in outcome.text
        self.rejoin(self.expected.members)

    def rejoin(self, members: list[int]) -> None:
        if self.expected.differ():
            self.begin_again()
        self.expected.go_on_with(members)
        group = dist.new_group(members)
        if self.rank not in members:
            if self.real is not None:
                self.real.diloco.close()
            self.real = None
        elif self.real is None:
            self.real = Real(group, self.kind, start=5.0)
            self.real.freeze(self.expected.frozen)
        else:
            self.real.diloco.rejoin(group)

    def change_members(self) -> None:
        """Half of the ranks leave, or come."""
        few = len(self.expected.members) == 4
        self.rejoin(
            sorted(self.rng.sample(range(4), self.rng.choice((1, 2)))) if few else [0, 1, 2, 3]
        )

    def resume(self) -> None:
        group, model_first = dist.new_group(self.expected.members), self.rng.random() < 0.5
        if self.real is None:
            return
        saved = self.real.saved()
        self.real.diloco.close()
        self.real = Real(group, self.kind, start=9.0)
        model, diloco = torch.load(io.BytesIO(saved), weights_only=True)
        if model_first:
            self.real.model.load_state_dict(model)
        self.real.diloco.load_state_dict(diloco)
        self.real.model.load_state_dict(model)
        self.real.freeze(self.expected.frozen)

    def finish(self) -> None:
        """Ranks whose data ends early take part in the outer steps of the others."""
        self.expected.begin_period()
        if self.expected.differ():
            self.begin_again()
        most = self.rng.choice((0, 2 * SYNC_EVERY))
        moves = {
            rank: [drawn(self.rng) for _ in range(self.rng.randint(0, most))] for rank in range(4)
        }
        if self.real is not None:
            for move in moves[self.rank]:
                self.real.step(move)
            self.real.diloco.finish()
        self.expected.finish(moves)

    def compare(self) -> None:
        if self.real is None:
            return
        expected = self.expected
        self.expect(expected.local[self.rank])
        assert self.real.diloco.stats()["outer_steps"] == expected.outer_steps
        for name, value in self.real.diloco.state_dict()["global"].items():
            assert (value == expected.common[self.rank][name]).all(), name

    def expect(self, values: Values) -> None:
        assert self.real is not None
        for name, parameter in self.real.model.named_parameters():
            assert (parameter == values[name]).all(), name


@pytest.mark.filterwarnings("ignore::gradferry.GradferryWarning")  # what an interrupted rank lacks
@pytest.mark.parametrize("seed", range(9))
@on_ranks(4)
def test_histories_end_where_the_model_does(seed: int) -> None:
    history = History(seed)
    often = [history.step] * 5
    loads = [history.load, history.load_on_some, history.load_and_resume]
    seldom = [*loads, history.swap, history.freeze]
    members = [history.interrupt, history.interrupt, history.change_members, history.resume]
    for _ in range(EVENTS):
        history.rng.choice([*often, *seldom, *members])()
        history.compare()
    history.finish()
    history.compare()
