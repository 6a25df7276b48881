"""Pictures as PNG, alike in looks, without a window or global state of matplotlib's."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Theme = Literal["light", "dark"]
THEMES: tuple[Theme, Theme] = ("light", "dark")


def draw(size: tuple[float, float], theme: Theme, fill: Callable[[Figure], None]) -> bytes:
    """Returns the PNG of a figure that `fill` draws. `size`: width and height in inches."""
    # The library behind pyplot, imported by whoever draws: it takes a second.
    from matplotlib import style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with style.context("dark_background" if theme == "dark" else "default"):
        figure = Figure(figsize=size, dpi=144, layout="constrained")
        FigureCanvasAgg(figure)
        fill(figure)
        content = io.BytesIO()
        figure.savefig(content, format="png")
    return content.getvalue()
