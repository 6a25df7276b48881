"""Speed-up against link speed, with the crossover marked: as PNG, and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gradferry_lab.output.drawing import Theme, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BAR = 40  # characters
_EVERY = 2  # of the points has a bar


@dataclass(frozen=True)
class Speedups:
    """Time of the best without compression over time of the best with it, by link speed.

    `title`: the exchange. `crossover_gbit`: the fastest link on which compression still pays; None:
    on all, or none.
    """

    title: str
    gbits: tuple[float, ...]  # rising
    speedups: tuple[float, ...]
    crossover_gbit: float | None


def speedup_lines(drawn: Speedups) -> list[str]:
    """A bar for every other link speed, and a line where the crossover is."""
    most = max(*drawn.speedups, 1.0)
    lines = [f"speed-up by link speed, {drawn.title} exchange (| is 1.00)"]
    one = round(_BAR / most)
    marked = drawn.crossover_gbit is None
    for gbit, speedup in zip(drawn.gbits[::_EVERY], drawn.speedups[::_EVERY], strict=True):
        if not marked and drawn.crossover_gbit is not None and gbit > drawn.crossover_gbit:
            lines.append(f"  ---- crossover at {drawn.crossover_gbit:,.3g} Gb/s ----")
            marked = True
        bar = "#" * round(speedup / most * _BAR)
        bar = bar.ljust(max(one, len(bar)))
        lines.append(f"{gbit:>8,g} Gb/s {speedup:6.2f} {bar[:one]}|{bar[one:]}")
    return lines


def draw_speedups(
    drawings: Sequence[Speedups], asked_gbit: float | None, theme: Theme = "light"
) -> bytes:
    """Returns a PNG: a curve for every drawing. `asked_gbit`: a link speed to point at."""
    return draw((8, 4.5), theme, lambda figure: _fill(figure, drawings, asked_gbit))


def _fill(figure: Figure, drawings: Sequence[Speedups], asked_gbit: float | None) -> None:
    axes = figure.subplots()
    for drawing in drawings:
        (line,) = axes.plot(
            drawing.gbits, drawing.speedups, "-", label=drawing.title, linewidth=1.8
        )
        if drawing.crossover_gbit is not None:
            axes.plot([drawing.crossover_gbit], [1.0], "o", color=line.get_color())
            axes.annotate(
                f"{drawing.crossover_gbit:,.3g} Gb/s",
                (drawing.crossover_gbit, 1.0),
                textcoords="offset points",
                xytext=(6, 8),
                color=line.get_color(),
            )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    if asked_gbit is not None:
        axes.axvline(asked_gbit, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("link of a node (Gb/s, log scale)")
    axes.set_ylabel("speed-up over the best\nwithout compression")
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
