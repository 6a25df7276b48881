"""Draws docs/step.svg, the picture in the README, from a file of `gradferry bench train --json`.

python3 tools/draw_step.py

A bar is the median step of a hook. Forward pass, backward pass and optimizer are as long as those
of `none`, which does not communicate; what a step takes longer is communication that the backward
pass does not hide. The thin bars are the buckets of one step, each from when DDP hands it over
until its averages are complete. PyTorch's hooks overlap buckets with the backward pass, too.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks/results/train_1gbit.json"
PICTURE = ROOT / "docs/step.svg"
SHOWN = {
    "none": "no communication",
    "torch:fp32": "plain DDP",
    "torch:fp16": "PyTorch's fp16 hook",
    "q4": "gradferry, q4",
}
WIDTH, LEFT, TOP, ROW, BAR = 760, 170, 40, 46, 20
RIGHT = 70  # for the figure behind a bar
# Colours that can be read on white and on black.
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #6e7781 }
.forward { fill: #9db4c8 } .backward { fill: #4c86b4 } .optimizer { fill: #9db4c8 }
.exposed { fill: #d9822b } .bucket { fill: #2a9d8f }
.grid { stroke: #8b949e; stroke-opacity: .35 }
"""


def draw(results: dict[str, Any]) -> str:
    """The picture of one file's rows."""
    rows = {row["hook"]: row for row in results["rows"]}
    none = rows["none"]
    forward = none["last_step"]["backward_ms"]
    backward = none["last_step"]["backward_end_ms"]
    longest = max(rows[hook]["ms_median"] for hook in SHOWN)
    scale = (WIDTH - LEFT - RIGHT) / longest
    parts = [_legend()]
    for number, (hook, name) in enumerate(SHOWN.items()):
        y = TOP + number * ROW
        total = rows[hook]["ms_median"]
        exposed = total - none["ms_median"]
        parts.append(_text(LEFT - 10, y + 15, name, "end"))
        parts.append(_text(LEFT + total * scale + 8, y + 15, f"{total:.0f} ms"))
        begin = 0.0
        lengths = {
            "forward": forward,
            "backward": backward - forward,
            "exposed": exposed,
            "optimizer": none["ms_median"] - backward,
        }
        for kind, length in lengths.items():
            parts.append(_bar(kind, LEFT + begin * scale, y, length * scale, BAR))
            begin += length
        for bucket in rows[hook]["last_step"]["buckets"]:
            start, end = bucket["begin_ms"], bucket["complete_ms"]
            lane = y + BAR + 3 + 4 * (bucket["bucket"] % 2)
            parts.append(_bar("bucket", LEFT + start * scale, lane, (end - start) * scale, 3))
    end = LEFT + none["ms_median"] * scale
    height = TOP + len(SHOWN) * ROW
    parts.append(
        f'<line class="grid" x1="{end:.1f}" x2="{end:.1f}" y1="{TOP - 6}" y2="{height - 6}"/>'
    )
    title = "One training step with and without gradferry"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _legend() -> str:
    names = {
        "forward": "forward, optimizer",
        "backward": "backward",
        "exposed": "added by communication",
        "bucket": "a bucket under way",
    }
    parts, x = [], 20
    for kind, name in names.items():
        parts += [_bar(kind, x, 10, 12, 12), _text(x + 18, 20, name)]
        x += 40 + 7 * len(name)
    return "\n".join(parts)


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    size = f'x="{x:.1f}" y="{y:g}" width="{max(width, 0):.1f}" height="{height:g}"'
    return f'<rect class="{kind}" {size}/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}">{text}</text>'


if __name__ == "__main__":
    PICTURE.write_text(draw(json.loads(MEASURED.read_text())))
