"""Comparisons within one run: candidates take turns, and are compared round by round.

The speed of a machine drifts by as much as the differences of interest. Two times of one round
share most of the drift, so their ratio varies less than either. A median of ratios is robust
against single bad rounds, and its interval makes no assumption about the distribution of times.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradferry.ddp.trial import WANTED_COVERAGE, Interval, coverage_of, interval_of_median

from gradferry_lab.output.table import Column, Row


def coverage_text(num_rounds: int) -> str:
    """The confidence as text for a heading, rounded down."""
    return f"{int(100 * coverage_of(num_rounds))} %"


def coverage_note(num_rounds: int) -> str:
    """What `coverage_text` in a heading means."""
    rounds = "1 round" if num_rounds == 1 else f"{num_rounds} rounds"
    note = f"{coverage_text(num_rounds)}: how surely the interval holds the median, by {rounds}"
    return note if coverage_of(num_rounds) >= WANTED_COVERAGE else f"{note}; 6 give 95 % and more"


def paired_ratio(times: Sequence[float], baseline: Sequence[float]) -> Interval:
    """`times` over `baseline`, round by round."""
    return interval_of_median([t / b for t, b in zip(times, baseline, strict=True)])


def paired_difference(times: Sequence[float], baseline: Sequence[float]) -> Interval:
    """`times` minus `baseline`, round by round."""
    return interval_of_median([t - b for t, b in zip(times, baseline, strict=True)])


def ratio_columns(rows: Sequence[Row], ruler: str, interval: str) -> list[Column]:
    """The columns of `ratio_to_RULER`, and under `interval` of its `_low` and `_high`; none where
    the ruler did not take part.
    """
    key = f"ratio_to_{ruler}"
    if all(row.get(key) is None for row in rows):
        return []
    return [
        Column(f"ratio to\n{ruler}", lambda row: f"{row[key]:.3f}", detail=3),
        Column(interval, lambda row: interval_text(row, key), detail=6),
    ]


def interval_keys(key: str, interval: Interval | None) -> dict[str, float | None]:
    """`key`, `key_low` and `key_high` of a row."""
    median, low, high = interval or (None, None, None)
    return {key: median, f"{key}_low": low, f"{key}_high": high}


def interval_text(row: Row, key: str) -> str:
    """`key_low` and `key_high`."""
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    return "-" if low is None else f"{low:.2f}..{high:.2f}"
