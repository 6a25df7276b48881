"""Loss curves as PNG: by bytes sent, and by step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, Theme] = ("light", "dark")
_SMOOTHED_SHARE = 0.05  # of the steps: the window of the running mean


@dataclass(frozen=True)
class Curve:
    """One training, or the mean of several."""

    label: str
    losses: Sequence[float]
    cumulative_bytes: Sequence[int]  # sent by one rank when each loss was seen
    steps: Sequence[int] = ()  # done by then; by default 1, 2, ...
    lowest: Sequence[float] = ()  # of the trainings behind each mean; drawn as a band
    highest: Sequence[float] = ()


@dataclass(frozen=True)
class Axis:
    """How losses are shown."""

    title: str
    smoothed: bool = True  # by a running mean over 5 % of the steps
    is_log: bool = False


def draw_loss_curves(curves: Sequence[Curve], axis: Axis, theme: Theme = "light") -> bytes:
    """Returns a PNG with two panels: the loss by bytes sent and by step. Opens no window."""
    # Imported by whoever draws: it takes a second. Without pyplot, which has global state.
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("dark_background" if theme == "dark" else "default"):
        figure = Figure(figsize=(10, 4), dpi=144, layout="constrained")
        FigureCanvasAgg(figure)
        _fill(figure, curves, axis)
        content = io.BytesIO()
        figure.savefig(content, format="png")
    return content.getvalue()


def _fill(figure: Figure, curves: Sequence[Curve], axis: Axis) -> None:
    by_bytes, by_step = figure.subplots(1, 2, sharey=True)
    window = _window(curves) if axis.smoothed else 1
    for number, curve in enumerate(curves):
        smooth = running_mean(curve.losses, window)
        steps = curve.steps or range(1, len(smooth) + 1)
        megabytes = [total / 1e6 for total in curve.cumulative_bytes]
        # Dashes tell apart curves that lie on each other.
        dashes = (0, (4, 2 * (number % 3)) if number % 3 else ())
        line = {"label": curve.label, "linewidth": 1.6, "linestyle": dashes, "alpha": 0.9}
        for panel, places in ((by_step, steps), (by_bytes, megabytes)):
            (drawn,) = panel.plot(places, smooth, **line)
            if curve.lowest:
                look = {"color": drawn.get_color(), "alpha": 0.25, "linewidth": 0}
                panel.fill_between(places, curve.lowest, curve.highest, **look)
    by_step.set_xlabel("step")
    mean = f"\n(mean of the last {window} steps)" if axis.smoothed else ""
    by_bytes.set_ylabel(f"{axis.title}{mean}")
    by_bytes.set_xlabel("MB sent per rank (log scale)")
    if axis.is_log:
        by_step.set_yscale("log")
    if any(any(curve.cumulative_bytes) for curve in curves):
        by_bytes.set_xscale("log")
    _finish(by_bytes)
    _finish(by_step)
    by_step.legend(frameon=False, fontsize=8 if len(curves) > 4 else None)


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
