"""Writes the measured figures of README, guide and results, from benchmarks/results/*.json.

.venv/bin/python tools/figures.py

Figures stand in a page between `<!-- figures: NAME -->` and `<!-- end -->`, in a line or as a
table. NAME is one of FIGURES, with its arguments: `<!-- figures: ms 1gbit q4 -->`. What stands
there now is replaced. A test compares every page with its figures, refuses measured numbers
elsewhere in README and guide, and demands the occasion (date, machine) of every table beside it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from figure_tables import PLAIN_DDP, TABLES, ms, percent
from result_files import (
    RESULTS,
    ROOT,
    FigureError,
    command,
    faster,
    loss,
    occasion,
    row_of,
    rows_of,
    spread,
    step,
)

PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/guide/*.md")),
    ROOT / "docs/results/convergence.md",
    ROOT / "docs/design/decisions.md",
    ROOT / "docs/design/performance.md",
    ROOT / "docs/results/sharded.md",
    ROOT / "docs/results/when_to_use.md",
]
MARK = re.compile(r"<!-- figures: ([^>]+?) -->.*?<!-- end -->", re.DOTALL)


def plain_above() -> str:
    """How far `sign1` and `topk` end above fp32 without momentum mode, with AdamW and SGD."""
    found = [
        loss(task, codec, optimizer)[0]
        for task in ("tiny_text", "tiny_vision")
        for optimizer in ("AdamW", "SGD")
        for codec in ("sign1", "topk:ratio=0.01")
    ]
    return f"{100 * min(found):.0f} % to {100 * max(found):.0f} %"


def chosen(link: str) -> str:
    """What `auto` chose."""
    return f"`{str(step(link, 'auto')['chosen']).partition(' ')[0]}`"


def step_picture() -> str:
    """The README's picture of a step, with its numbers as text."""
    parts = [
        f"{name} {ms(step('1gbit', hook)['ms_median'])} ms"
        for hook, name in (
            ("none", "without communication"),
            (PLAIN_DDP, "with plain DDP"),
            ("torch:fp16", "with PyTorch's fp16 hook"),
            ("q4", "with gradferry's q4"),
        )
    ]
    return f"![One training step: {', '.join(parts)}](docs/step.svg)"


def _faster_outer_step(codec: str) -> str:
    facts = {"optimizer": "AdamW", "synchronous": False}
    rows = [row_of("diloco", codec=one, **facts) for one in ("off", codec)]
    return f"{rows[0]['outer_step_ms'] / rows[1]['outer_step_ms']:.1f}"


def _error_by_ranks() -> str:
    """The largest quotient of errors of a codec that differ in the number of ranks alone."""
    by_place: dict[tuple[str, ...], list[float]] = {}
    for row in rows_of("aggregate_error"):
        place = tuple(str(row[key]) for key in ("task", "step", "codec"))
        by_place.setdefault(place, []).append(row["vnmse"])
    return f"{max(max(errors) / min(errors) for errors in by_place.values()):.2f}"


def gpu_tests() -> str:
    """How many tests of the engine passed on the H100."""
    rows = json.loads((RESULTS / "gpu_check_h100.json").read_text())["rows"]
    (last_line,) = next(r["output"] for r in rows if r["check"] == "tests of the fake device")
    return last_line.partition(" passed")[0]


FIGURES: dict[str, Callable[..., str]] = {
    **TABLES,
    "step_picture": step_picture,
    "command": command,
    "occasion": occasion,
    # numbers in a sentence
    "chosen": chosen,
    "gpu_tests": gpu_tests,
    "plain_above": plain_above,
    "sharded_deviations": lambda: f"{200 * spread('tiny_text', 'convergence_sharded'):.2f} %",
    "ms": lambda link, hook: ms(step(link, hook)["ms_median"]),
    "faster": lambda link, hook, than=PLAIN_DDP: (
        f"{faster(step(link, hook), step(link, than)).median:.2f}"
    ),
    "over_none": lambda link, hook: f"{step(link, hook)['ratio_to_none']:.2f}",
    "loss": lambda task, hook: percent(loss(task, hook)[0]),
    "fewer": lambda hook: f"{loss('tiny_text', hook)[1]:.1f}",
    "above": lambda task, hook: f"{100 * loss(task, hook)[0]:.2f} %",
    "two_deviations": lambda task: f"{200 * spread(task):.2f} %",
    "aggregate_error_by_ranks": _error_by_ranks,
    "diloco_first_seed": lambda: (
        f"{row_of('diloco', optimizer='AdamW', codec='q4', synchronous=False)['losses'][0]:.4f}"
    ),
    "diloco_faster": lambda: _faster_outer_step("q4"),
    "diloco_faster_rht2": lambda: _faster_outer_step("rht:bits=2"),
}


def figure(call: str) -> str:
    """The text of one figure. Raises FigureError."""
    name, *words = call.split()
    if name not in FIGURES:
        raise FigureError(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
    return FIGURES[name](*words)


def page(text: str) -> str:
    """The text of a page with all its figures renewed. Raises FigureError."""

    def renewed(match: re.Match[str]) -> str:
        content = figure(match[1])
        is_block = "\n" in content or content.startswith(("|", "    ", "!", "```"))
        return (
            f"<!-- figures: {match[1]} -->\n\n{content}\n\n<!-- end -->"
            if is_block
            else f"<!-- figures: {match[1]} -->{content}<!-- end -->"
        )

    return MARK.sub(renewed, text)


def main() -> None:
    """Renews all pages."""
    for path in PAGES:
        text = path.read_text()
        renewed = page(text)
        if renewed != text:
            path.write_text(renewed)
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
