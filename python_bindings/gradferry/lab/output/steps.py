"""Predicted steps as bars: what computes, what communication adds, and how far that may be off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradferry.lab.output.drawing import Theme, draw
from gradferry.lab.output.table import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_steps(rows: Sequence[Row], theme: Theme = "light") -> bytes:
    """Returns a PNG. rows: of kind `prediction`."""
    return draw((8, 1 + 0.3 * len(rows)), theme, lambda figure: _fill(figure, rows))


def _fill(figure: Figure, rows: Sequence[Row]) -> None:
    axes = figure.subplots()
    names = [" ".join(filter(None, (row["hook"], row.get("exchange")))) for row in rows]
    computing = [row["ms"] - row["exposed_ms"] for row in rows]
    exposed = [row["exposed_ms"] for row in rows]
    doubt = [row.get("doubt_ms") or 0.0 for row in rows]  # older files have none
    axes.barh(names, computing, color="grey", alpha=0.6, label="computes")
    axes.barh(names, exposed, left=computing, xerr=doubt, ecolor="grey", label="exposed")
    axes.invert_yaxis()
    axes.set_xlabel("ms per step, predicted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
