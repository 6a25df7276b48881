"""A training step of several hooks as a timeline, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gradferry.lab.output.drawing import Theme, draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = {
    "forward": "#8da0b3",
    "backward": "#3b7dd8",
    "encode": "#f2a33a",
    "exposed": "#d64550",
    "optimizer": "#5aa469",
    "on its way": "#b48ad6",
}
_BAR = 0.8
_THIN = 0.35
_INCH_PER_UNIT = 0.28


@dataclass(frozen=True)
class Span:
    """A time span, in ms since the step began."""

    kind: str  # a key of _COLORS
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Waterfall:
    """A step of one hook."""

    label: str
    thread: Sequence[Span]  # of the training thread, later ones over earlier ones
    buckets: Sequence[Span]  # on their way, in the order in which they were handed in
    is_ruler: bool = False  # its end is marked on all others


def waterfall_of(
    label: str, step: Mapping[str, Any], backward_ms: float, is_ruler: bool = False
) -> Waterfall:
    """The timeline of a step.

    Args:
        step: `last_step` of a row of `gradferry bench train`.
        backward_ms: duration of a backward pass without communication. For PyTorch's hooks, the
            time beyond it is exposed; codecs record when their last bucket was passed in.
        is_ruler: see Waterfall.
    """
    begin, end = step["backward_ms"], step["backward_end_ms"]
    buckets = [bucket for bucket in step["buckets"] if bucket["complete_ms"] > 0]
    computed = max((b["encoded_ms"] for b in buckets), default=min(begin + backward_ms, end))
    return Waterfall(
        label,
        thread=[
            Span("forward", 0, begin),
            Span("backward", begin, computed),
            *(Span("encode", b["begin_ms"], b["encoded_ms"]) for b in buckets),
            Span("exposed", computed, end),
            Span("optimizer", end, step["end_ms"]),
        ],
        buckets=[Span("on its way", b["encoded_ms"], b["complete_ms"]) for b in buckets],
        is_ruler=is_ruler,
    )


def draw_waterfalls(waterfalls: Sequence[Waterfall], theme: Theme = "light") -> bytes:
    """Returns a PNG with a thick bar per hook, and a thin one per bucket below it."""
    heights = [1 + _THIN * len(waterfall.buckets) for waterfall in waterfalls]
    size = (10, 1.2 + _INCH_PER_UNIT * sum(heights))
    return draw(size, theme, lambda figure: _fill(figure, waterfalls))


def _fill(figure: Figure, waterfalls: Sequence[Waterfall]) -> None:
    axes = figure.subplots()
    y = 0.0
    places = []
    for waterfall in waterfalls:
        places.append(y)
        for span in waterfall.thread:
            _bar(axes, y, _BAR, span)
        if waterfall.is_ruler:
            end = max(span.end_ms for span in waterfall.thread)
            axes.axvline(end, linewidth=1, linestyle=":", color="#8a8a8a")
        y += (_BAR + _THIN) / 2
        for span in waterfall.buckets:
            _bar(axes, y, _THIN, span)
            y += _THIN
        y += (1 + _BAR - _THIN) / 2
    axes.set_yticks(places, [waterfall.label for waterfall in waterfalls])
    axes.tick_params(left=False)
    axes.invert_yaxis()
    axes.set_xlabel("ms since the step began")
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    shown = {span.kind for w in waterfalls for span in (*w.thread, *w.buckets)}
    handles = [
        axes.barh([0], [0], color=color, label=kind)
        for kind, color in _COLORS.items()
        if kind in shown
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False)


def _bar(axes: Axes, y: float, height: float, span: Span) -> None:
    width = span.end_ms - span.begin_ms
    axes.barh(y, width, height, left=span.begin_ms, color=_COLORS[span.kind], linewidth=0)
