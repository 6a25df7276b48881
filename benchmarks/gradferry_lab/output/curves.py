"""Loss curves as PNG: by bytes sent, and by time or step."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_SMOOTHED_SHARE = 0.05  # of the steps: the window of the running mean


@dataclass(frozen=True)
class Curve:
    """One training."""

    label: str
    losses: Sequence[float]  # step by step
    cumulative_bytes: Sequence[int]  # sent by one rank when each loss was seen
    seconds: Sequence[float] = ()  # that each step took; () where they mean nothing


def draw_loss_curves(curves: Sequence[Curve], title: str) -> bytes:
    """Returns a PNG with two panels: the loss by bytes sent, and by seconds of training, or by step
    where no curve has seconds. Opens no window.
    """
    # Imported by whoever draws: it takes a second. Without pyplot, which has global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=144, layout="constrained")
    FigureCanvasAgg(figure)
    by_bytes, by_time = figure.subplots(1, 2, sharey=True)
    window = max([1, *(round(_SMOOTHED_SHARE * len(curve.losses)) for curve in curves)])
    for number, curve in enumerate(curves):
        smooth = running_mean(curve.losses, window)
        # Dashes tell apart curves that lie on each other.
        dashes = (0, (4, 2 * (number % 3)) if number % 3 else ())
        megabytes = [total / 1e6 for total in curve.cumulative_bytes]
        times = list(accumulate(curve.seconds)) or range(1, len(smooth) + 1)
        for panel, places in ((by_time, times), (by_bytes, megabytes)):
            panel.plot(places, smooth, label=curve.label, linewidth=1.6, linestyle=dashes)
    by_time.set_xlabel("seconds of training" if any(c.seconds for c in curves) else "step")
    by_bytes.set_xlabel("MB sent per rank (log scale)")
    by_bytes.set_ylabel(f"{title}\n(mean of the last {window} steps)")
    if any(any(curve.cumulative_bytes) for curve in curves):
        by_bytes.set_xscale("log")
    for panel in (by_bytes, by_time):
        panel.grid(alpha=0.25, linewidth=0.6)
        panel.spines[["top", "right"]].set_visible(False)
    by_time.legend(frameon=False)
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
