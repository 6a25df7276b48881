"""How hooks compare on links of different rates, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradferry.lab.output.drawing import Theme, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class LinkCurve:
    """One hook: its speed-up by link. None where it was not measured.

    is_ruler: drawn as what others can come near to.
    """

    label: str
    speedups: Sequence[float | None]
    is_ruler: bool = False


def draw_speedups(links: Sequence[str], curves: Sequence[LinkCurve], theme: Theme) -> bytes:
    """Returns a PNG: speed-up (log scale) by link, slowest link left; above 1 a hook pays."""
    return draw((10, 4.2), theme, lambda figure: _fill(figure, links, curves))


def _fill(figure: Figure, links: Sequence[str], curves: Sequence[LinkCurve]) -> None:
    axes = figure.subplots()
    places = range(len(links))
    for curve in curves:
        known = [(x, y) for x, y in zip(places, curve.speedups, strict=True) if y is not None]
        if curve.is_ruler:
            style: dict[str, Any] = {"linewidth": 1, "linestyle": ":", "color": "#8a8a8a"}
        else:
            style = {"linewidth": 1.6}
        axes.plot(*zip(*known, strict=True), marker="o", label=curve.label, **style)
    axes.axhline(1, linewidth=1, linestyle=(0, (4, 3)), color="#8a8a8a")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xticks(places, links)
    axes.set_xlabel("link")
    axes.set_ylabel("speed-up over the fastest\nof PyTorch's own hooks")
    axes.grid(alpha=0.25, linewidth=0.6, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
