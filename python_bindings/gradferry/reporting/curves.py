"""Loss curves as PNG: by step, and by bytes sent."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Theme = Literal["light", "dark"]

_SMOOTHED_SHARE = 0.05  # of the steps: the window of the running mean


@dataclass(frozen=True)
class Curve:
    """One hook's training."""

    label: str
    losses: Sequence[float]  # per step
    cumulative_bytes: Sequence[int]  # sent by one rank, after each step


def draw_loss_curves(curves: Sequence[Curve], loss_title: str, theme: Theme = "light") -> bytes:
    """Returns a PNG with two panels: the running mean of the loss by step and by bytes sent."""
    # The library behind pyplot, without its windows and global state.
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("dark_background" if theme == "dark" else "default"):
        figure = Figure(figsize=(10, 4), dpi=144, layout="constrained")
        FigureCanvasAgg(figure)
        by_step, by_bytes = figure.subplots(1, 2, sharey=True)
        window = _window(curves)
        for number, curve in enumerate(curves):
            smooth = running_mean(curve.losses, window)
            # Dashes tell apart curves that lie on each other.
            dashes = (0, (4, 2 * (number % 3)) if number % 3 else ())
            line = {"label": curve.label, "linewidth": 1.6, "linestyle": dashes, "alpha": 0.9}
            by_step.plot(range(1, len(smooth) + 1), smooth, **line)
            by_bytes.plot([total / 1e6 for total in curve.cumulative_bytes], smooth, **line)
        by_step.set_xlabel("step")
        by_step.set_ylabel(f"training loss, {loss_title}\n(mean of the last {window} steps)")
        by_bytes.set_xlabel("MB sent per rank (log scale)")
        if any(any(curve.cumulative_bytes) for curve in curves):
            by_bytes.set_xscale("log")
        _finish(by_step)
        _finish(by_bytes)
        by_step.legend(frameon=False)
        content = io.BytesIO()
        figure.savefig(content, format="png")
    return content.getvalue()


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of the last `window` values at each place; of fewer at the start."""
    totals = [0.0, *accumulate(values)]
    starts = (max(0, end - window) for end in range(1, len(totals)))
    return [
        (totals[end] - totals[start]) / (end - start)
        for end, start in zip(range(1, len(totals)), starts, strict=True)
    ]


def _window(curves: Sequence[Curve]) -> int:
    longest = max((len(curve.losses) for curve in curves), default=1)
    return max(1, round(_SMOOTHED_SHARE * longest))


def _finish(axes: Axes) -> None:
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
