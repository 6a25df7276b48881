"""Writes the measured figures of README, guide and results, from benchmarks/results/*.json.

.venv/bin/python tools/figures.py

Figures stand in a page between `<!-- figures: NAME -->` and `<!-- end -->`, in a line or as a
table. NAME is one of FIGURES, with its arguments: `<!-- figures: ms 1gbit q4 -->`. What stands
there now is replaced. A test compares every page with its figures, and refuses measured numbers
elsewhere in README and guide.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from gradferry_lab.output.paired import Interval, paired_ratio

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"
PAGES = [
    ROOT / "README.md",
    *sorted(ROOT.glob("docs/guide/*.md")),
    ROOT / "docs/design/performance.md",
    ROOT / "docs/results/when_to_use.md",
]
MARK = re.compile(r"<!-- figures: ([^>]+?) -->.*?<!-- end -->", re.DOTALL)
LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s", "unshaped": "no limit"}
PLAIN_DDP = "torch:fp32"
RULERS = ("none", "sync")

Row = dict[str, Any]


class FigureError(Exception):
    """A page asks for a figure that there is not, or whose measurement is missing."""


# --- result files ---------------------------------------------------------------------------------


@functools.cache
def results(name: str) -> dict[str, Any]:
    """The document of benchmarks/results/NAME.json."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise FigureError(f"{path} is missing: python benchmarks/measure_all.py {name}")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def rows_of(name: str, **facts: Any) -> list[Row]:
    """The rows of a file that have these values."""
    rows = results(name)["rows"]
    return [row for row in rows if all(row.get(key) == value for key, value in facts.items())]


def row_of(name: str, **facts: Any) -> Row:
    """The only row of a file that has these values."""
    found = rows_of(name, **facts)
    if len(found) != 1:
        raise FigureError(f"{name}.json has {len(found)} rows with {facts}, not one")
    return found[0]


def step(link: str, hook: str) -> Row:
    """A hook's row of `bench train` on two hosts of one rank."""
    return row_of(f"train_{link}", hook=hook)


def loss(task: str, hook: str, optimizer: str = "AdamW") -> tuple[float, float]:
    """`convergence.json`: loss over fp32's with the same seed, minus 1, mean over seeds; and fp32's
    bytes over the hook's, in whole trainings.
    """
    codec, *options = hook.split("+")
    momentum = float(options[0].removeprefix("momentum=")) if options else None
    modes = ("momentum",) if options else ("dense", "owner", "both")
    base = rows_of("convergence", task=task, optimizer=optimizer, codec=PLAIN_DDP)
    by_seed = {row["seed"]: row for row in base}
    rows = [
        row
        for row in rows_of("convergence", task=task, optimizer=optimizer, codec=codec)
        if row["mode"] in modes and row["momentum"] == momentum and row["warmup"] is None
    ]
    if not rows:
        raise FigureError(f"convergence.json has no rows of {hook} on {task}")
    excess = fmean(row["final_loss"] / by_seed[row["seed"]]["final_loss"] - 1 for row in rows)
    ratio = fmean(row["wire_bytes"] for row in base) / fmean(row["wire_bytes"] for row in rows)
    return excess, ratio


def spread(task: str) -> float:
    """Standard deviation of fp32's loss over seeds, over its mean."""
    base = rows_of("convergence", task=task, optimizer="AdamW", codec=PLAIN_DDP)
    losses = [row["final_loss"] for row in base]
    return stdev(losses) / fmean(losses)


def faster(row: Row, than: Row) -> Interval:
    """Times of `than` over those of `row`, round by round."""
    return paired_ratio(than["round_ms"], row["round_ms"])


def name_of(hook: str) -> str:
    """A hook for people."""
    codec, _, options = hook.partition("+")
    names = {"none": "no communication", PLAIN_DDP: "plain DDP"}
    codec = "topk:ratio=0.01" if codec == "topk" else codec
    return names.get(hook, f"`{codec}`, momentum mode" if options else f"`{codec}`")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """Markdown; the first `names` columns stand left, numbers right."""
    rules = ["---"] * names + ["---:"] * (len(heads) - names)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows))


def interval(value: Interval) -> str:
    return f"{value.median:.2f} ({value.low:.2f}..{value.high:.2f})"


def percent(share: float) -> str:
    return f"{100 * share:+.2f} %"


def ms(value: float) -> str:
    return f"{value:,.0f}"


def timed(rows: Sequence[Row], row: Row | None) -> str:
    """Milliseconds, and how many times faster than plain DDP in the same rows."""
    if row is None:
        return ""
    plain = next((each for each in rows if each["hook"] == PLAIN_DDP), None)
    if plain is None or row["hook"] in (*RULERS, PLAIN_DDP):
        return ms(row["ms_median"])
    return f"{ms(row['ms_median'])} · {interval(faster(row, plain))}"


def command(*names: str) -> str:
    """The commands of these files, a line each, as a block of code."""
    return "\n".join(f"    {_command(name)}" for name in names)


def _command(name: str) -> str:
    words = shlex.split(results(name)["environment"]["command"])
    if "--json" in words:
        at = words.index("--json")
        words = words[:at] + words[at + 2 :]
    if words[0].endswith(".py"):
        words = ["python", f"benchmarks/{Path(words[0]).name}", *words[1:]]
    return shlex.join(words)


def occasion(*names: str) -> str:
    """When and where these files were measured."""
    facts = [results(name)["environment"] for name in names]
    dates = sorted({str(each["date"])[:10] for each in facts})
    places = {f"{e['cpu']}, {e['cores']} cores, torch {e['torch'].split('+')[0]}" for e in facts}
    return f"{dates[0]}{f' to {dates[-1]}' if dates[1:] else ''}, {'; '.join(sorted(places))}"


def readme_hooks() -> str:
    """The hooks that the README compares."""

    def line(hook: str) -> list[str]:
        times = [ms(step(link, hook)["ms_median"]) for link in ("10gbit", "1gbit", "100mbit")]
        if hook in RULERS:
            return [name_of(hook), *times, "", ""]
        if hook.startswith("torch:"):
            fewer = step("1gbit", PLAIN_DDP)["wire_bytes"] / step("1gbit", hook)["wire_bytes"]
            return [name_of(hook), *times, f"{fewer:.1f}", ""]
        excess, ratio = loss("tiny_text", hook)
        return [name_of(hook), *times, f"{ratio:.1f}", percent(excess)]

    heads = ["hook", "10 Gb/s", "1 Gb/s", "100 Mb/s", "times fewer bytes", "final loss"]
    hooks = ["none", PLAIN_DDP, "torch:fp16", "q4", "rht:bits=3", "sign1+momentum=0.8"]
    return table(heads, map(line, hooks))


def steps() -> str:
    """All hooks of two ranks on all links."""
    hooks: dict[str, None] = {}
    for link in ("1gbit", *LINKS):
        hooks |= dict.fromkeys(row["hook"] for row in rows_of(f"train_{link}"))

    def line(hook: str) -> list[str]:
        cells, sent = [], ""
        for link in LINKS:
            rows = rows_of(f"train_{link}")
            row = next((each for each in rows if each["hook"] == hook), None)
            cells.append(timed(rows, row))
            sent = f"{row['wire_bytes'] / 1e6:.1f}" if row and hook != "auto" else sent
        return [name_of(hook), *cells, sent]

    return table(["hook", *LINKS.values(), "MB sent"], map(line, hooks))


def losses() -> str:
    """What the hooks of `steps` do to the loss, and the bytes of whole trainings."""

    def line(hook: str) -> list[str]:
        excess, ratio = loss("tiny_text", hook)
        return [name_of(hook), percent(excess), f"{ratio:.1f}"]

    hooks = ["torch:bf16", "q8", "q4", "rht:bits=3", "rht:bits=2+momentum=0.8"]
    hooks += ["sign1+momentum=0.8", "topk:ratio=0.01+momentum=0.8"]
    heads = ["hook", "loss against fp32", "times fewer bytes, whole training"]
    return table(heads, map(line, hooks))


def sharded_loss(kind: str) -> str:
    """Trainings under FSDP2."""

    def line(codec: str) -> list[str]:
        rows = sorted(rows_of(f"sharded_loss_{kind}", codec=codec), key=lambda row: row["seed"])
        values = [row["final_loss"] for row in rows]
        how = "counted" if rows[0]["wire_bytes_measured"] else "computed"
        return [
            "uncompressed (`off`)" if codec == "off" else f"`{codec}`",
            ", ".join(f"{value:.4f}" for value in values),
            f"{fmean(values):.4f}",
            f"{stdev(values):.4f}",
            f"{rows[0]['wire_bytes_per_step']:,} ({how})",
        ]

    heads = ["averages", "validation loss by seed", "mean", "spread", "bytes per rank and step"]
    return table(heads, map(line, ("off", "q4")))


def sharded_apart(kind: str) -> str:
    """How much higher q4's mean loss is."""
    q4, off = (rows_of(f"sharded_loss_{kind}", codec=codec) for codec in ("q4", "off"))
    return percent(fmean(r["final_loss"] for r in q4) / fmean(r["final_loss"] for r in off) - 1)


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


def hosts() -> str:
    """Hosts with several ranks."""

    def line(shape: str, link: str) -> list[str]:
        rows = rows_of(f"train_{link}_{shape}")
        wanted = [("none", None), (PLAIN_DDP, None), ("torch:fp16", None)]
        wanted += [("q4", "flat"), ("q4", "two-level")]
        by_hook = {(row["hook"], row["exchange"]): row for row in rows}
        found = [by_hook.get(each) for each in wanted]
        return [shape.replace("x", " x "), LINKS[link], *(timed(rows, row) for row in found)]

    heads = ["hosts x ranks", "link", "no communication", "plain DDP", "`torch:fp16`"]
    shapes = [(shape, link) for shape in ("2x2", "2x4") for link in ("100mbit", "1gbit")]
    return table([*heads, "`q4`, flat", "`q4`, two levels"], (line(*each) for each in shapes), 2)


def sharded() -> str:
    """FSDP2."""
    files = ("train_1gbit_hsdp", "train_1gbit_fsdp")

    def line(hook: str) -> list[str]:
        cells = []
        for file in files:
            rows = rows_of(file)
            cells.append(timed(rows, next((r for r in rows if r["hook"] == hook), None)))
        return [name_of(hook).replace("plain DDP", "plain FSDP2"), *cells]

    hooks = dict.fromkeys(row["hook"] for file in files for row in rows_of(file))
    heads = ["hook", "between replicas, 2 hosts x 2 ranks", "reduce-scatter, 2 hosts x 1 rank"]
    return table(heads, map(line, hooks))


def processor_time() -> str:
    """Where the processor time of a step on a host goes."""

    def line(row: Row) -> list[str]:
        times = row["cpu_ms"]
        total = sum(times.values())
        ours, main = times.get("gf-finish", 0.0), times["main"]
        over = [row["ratio_to_sync"], row["ratio_to_sync_low"], row["ratio_to_sync_high"]]
        codec = sum(row[phase] or 0.0 for phase in ("encode_ms", "reduce_ms", "decode_ms"))
        return [
            name_of(row["hook"]),
            interval(Interval(*over)),
            *(f"{each:.1f}" for each in (total, main)),
            *(f"{each:.1f}" if each else "" for each in (ours, total - main - ours, codec)),
        ]

    heads = ["hook", "time over `sync`", "CPU ms per step", "training thread", "`gf-finish`"]
    return table([*heads, "gloo's threads", "codec"], map(line, rows_of("train_1gbit")))


def local_stage() -> str:
    """Sockets against shared memory."""

    def line(row: Row) -> list[str]:
        parts = (row["exchange_ms"], row["pack_ms"] + row["sum_ms"], row["cpu_ms"])
        way = "shared memory" if row["way"] == "memory" else row["way"]
        return [str(row["ranks"]), way, *(f"{part:.1f}" for part in parts)]

    return table(
        ["ranks", "way", "exchange", "pack, sum", "all"], map(line, rows_of("local_stage")), 2
    )


def _codec_name(codec: str) -> str:
    return f"`{codec.removesuffix(',values=bf16')}`"


def codec_cpu() -> str:
    """Roof over codec on one thread."""
    rows = rows_of("codec_cpu", threads=1, dtype="float32")
    columns = [("encode", 1), ("encode_ef", 1), ("decode", 1), ("reduce", 2), ("reduce", 8)]

    def line(codec: str, isa: str) -> list[str]:
        mine = [row for row in rows if (row["codec"], row["isa"]) == (codec, isa)]
        found = {(row["op"], row["world_size"]): row["roof_ratio"] for row in mine}
        return [_codec_name(codec), isa, *(f"{found[column]:.2f}" for column in columns)]

    each = dict.fromkeys((row["codec"], row["isa"]) for row in rows)
    heads = ["codec", "ISA", "encode", "encode with error feedback", "decode"]
    return table([*heads, "reduce, 2 ranks", "8 ranks"], (line(*one) for one in each), 2)


def codec_peers() -> str:
    """Other quantizers on the same buffers."""
    rows = rows_of("codec_peers")

    def line(peer: str) -> list[str]:
        found = {row["op"]: row["speedup"] for row in rows if row["peer"] == peer}
        return [peer.replace(":", ", "), *(f"{found[op]:.3g}" for op in ("encode_ef", "decode"))]

    heads = ["quantizer", "our `encode_ef` over its quantize", "our decode over its dequantize"]
    return table(heads, map(line, dict.fromkeys(row["peer"] for row in rows)))


def codec_h100() -> str:
    """Codecs on a GPU."""
    rows = rows_of("codec_h100", size_mb=100.0, misaligned=False)
    columns = [("encode_ef", 1), ("reduce", 8), ("decode_ef", 1)]
    found = {(row["codec"], row["op"], row["world_size"]): row for row in rows}

    def line(codec: str) -> list[str]:
        mine = [found[(codec, *column)] for column in columns]
        numbers = ((row["us_median"], row["gbps"], row["roof_ratio"]) for row in mine)
        return [
            _codec_name(codec),
            *(f"{us:.0f} · {gb:,.0f} · {roof:.2f}" for us, gb, roof in numbers),
        ]

    heads = ["codec", "encode with residual", "reduce of 8 ranks", "decode with residual"]
    return table(heads, map(line, dict.fromkeys(row["codec"] for row in rows)))


def growth() -> str:
    """How cost grows with the number of ranks."""

    def line(row: Row) -> list[str]:
        numbers = (row["cpu_ms"], row["memory_mib"])
        attach = "" if row["attach_s"] is None else f"{row['attach_s']:.2f}"
        cells = [attach, *(f"{number:.1f}" for number in numbers), str(row["sockets"])]
        return [str(row["way"]), str(row["ranks"]), *cells]

    heads = ["", "ranks", "attach, s", "CPU ms per step", "memory, MiB", "sockets"]
    return table(heads, map(line, rows_of("growth")), 2)


def demo() -> str:
    """What `gradferry demo` printed."""
    rows = rows_of("demo")
    plain = next(row for row in rows if row["hook"] == PLAIN_DDP)

    def line(row: Row) -> list[str]:
        excess = row["final_loss"] / plain["final_loss"] - 1
        how = "" if row["wire_bytes_measured"] else " (computed)"
        sent = f"{row['wire_bytes_per_step']:,}{how}"
        numbers = [f"{row['final_loss']:.4f}", "" if row is plain else percent(excess), sent]
        return [name_of(row["hook"]), *numbers, f"{row['ratio']:.2f}", ms(row["ms_per_step"])]

    heads = ["hook", "final loss", "against plain DDP", "bytes sent per rank and step"]
    return table([*heads, "times fewer", "ms per step"], map(line, rows))


def diloco() -> str:
    """The outer step of examples/diloco.py."""

    def line(row: Row) -> list[str]:
        codec = "fp32 (`--codec off`)" if row["codec"] == "off" else f"`{row['codec']}`"
        return [codec, f"{row['loss']:.4f}", f"{row['spread']:.4f}", ms(row["outer_step_ms"])]

    heads = ["outer step", "last loss, mean of seeds", "spread of seeds", "ms per outer step"]
    return table(heads, map(line, rows_of("diloco")))


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


FIGURES: dict[str, Callable[..., str]] = {
    "readme_hooks": readme_hooks,
    "step_picture": step_picture,
    "steps": steps,
    "hosts": hosts,
    "sharded": sharded,
    "processor_time": processor_time,
    "local_stage": local_stage,
    "codec_cpu": codec_cpu,
    "codec_peers": codec_peers,
    "codec_h100": codec_h100,
    "growth": growth,
    "demo": demo,
    "diloco": diloco,
    "command": command,
    "occasion": occasion,
    "chosen": chosen,
    "losses": losses,
    "plain_above": plain_above,
    "sharded_loss": sharded_loss,
    "sharded_apart": sharded_apart,
    # numbers in a sentence
    "ms": lambda link, hook: ms(step(link, hook)["ms_median"]),
    "faster": lambda link, hook, than=PLAIN_DDP: (
        f"{faster(step(link, hook), step(link, than)).median:.2f}"
    ),
    "over_none": lambda link, hook: f"{step(link, hook)['ratio_to_none']:.2f}",
    "loss": lambda task, hook: percent(loss(task, hook)[0]),
    "fewer": lambda hook: f"{loss('tiny_text', hook)[1]:.1f}",
    "spread": lambda task: f"{200 * spread(task):.2f} %",
    "diloco_faster": lambda: "{:.1f}".format(
        row_of("diloco", codec="off")["outer_step_ms"]
        / row_of("diloco", codec="q4")["outer_step_ms"]
    ),
}


# --- pages ----------------------------------------------------------------------------------------


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
        is_block = "\n" in content or content.startswith(("|", "    ", "!"))
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
