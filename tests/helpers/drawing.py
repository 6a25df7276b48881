"""Rows, which have a value of every axis: drawn from a seed until every two values that may meet
have met, and made simpler as long as a row still fails.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Mapping, Sequence

Row = dict[str, str]  # by axis
Pair = frozenset[tuple[str, str]]  # two of (axis, value)


class Axes:
    """Axes and their values, of which the first is the simplest and meets all others.

    apart: by two axes, the values of each that cannot meet, and why.
    """

    def __init__(
        self,
        values: Mapping[str, Collection[str]],
        apart: Sequence[tuple[str, Collection[str], str, Collection[str], str]],
    ) -> None:
        self.values = {axis: list(names) for axis, names in values.items()}
        self.simplest: Row = {axis: names[0] for axis, names in self.values.items()}
        self.apart: set[Pair] = set()
        for axis, names, other, others, _ in apart:
            for one, two in itertools.product(names, others):
                assert one in values[axis], (axis, one)
                assert two in values[other], (other, two)
                self.apart.add(frozenset(((axis, one), (other, two))))

    def pairs(self) -> set[Pair]:
        """Every two values that may meet."""
        met = set()
        for (axis, names), (other, others) in itertools.combinations(self.values.items(), 2):
            met |= {
                frozenset(((axis, one), (other, two)))
                for one, two in itertools.product(names, others)
            }
        return met - self.apart

    def drawn(self, seed: int) -> list[Row]:
        """Rows in which all of these pairs are."""
        rng, rows, left = random.Random(seed), [], self.pairs()
        while left:
            row = dict(rng.choice(sorted(left, key=sorted)))
            others = [axis for axis in self.values if axis not in row]
            for axis in rng.sample(others, len(others)):
                fitting = [name for name in self.values[axis] if self._fits(row, axis, name)]
                rng.shuffle(fitting)
                row[axis] = max(fitting, key=lambda name: len(left & pairs_with(row, axis, name)))
            left -= pairs_of(row)
            rows.append({axis: row[axis] for axis in self.values})
        return rows

    def _fits(self, row: Row, axis: str, name: str) -> bool:
        return not pairs_with(row, axis, name) & self.apart

    def shrunk(self, row: Row, fails: Callable[[Row], bool]) -> Row:
        """The simplest row found that fails, by taking simplest values one by one."""
        before = None
        while row != before:
            before = row
            for axis, name in self.simplest.items():
                simpler = {**row, axis: name}
                if simpler != row and fails(simpler):
                    row = simpler
        return row

    def told(self, row: Row) -> str:
        """A row by what is not simplest in it."""
        others = [f"{axis}: {name}" for axis, name in row.items() if name != self.simplest[axis]]
        return ", ".join(others) or "all simplest"


def pairs_with(row: Row, axis: str, name: str) -> set[Pair]:
    return {frozenset(((axis, name), each)) for each in row.items()}


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
