"""The tables of tools/figures.py, from result files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean

from gradferry.diagnosis import Diagnosis, Step
from gradferry_lab.output.paired import Interval
from gradferry_lab.ranks.hosts import ranks_text
from result_files import (
    PLAIN_DDP,
    Row,
    command,
    excess_over,
    faster,
    loss,
    rows_of,
    sharded_loss,
    step,
)

LINKS = {"100mbit": "100 Mb/s", "1gbit": "1 Gb/s", "10gbit": "10 Gb/s", "unshaped": "no limit"}
RULERS = ("none", "sync")


def name_of(hook: str) -> str:
    """A hook for people."""
    codec, _, options = hook.partition("+")
    names = {"none": "no communication", PLAIN_DDP: "plain DDP"}
    codec = "topk:ratio=0.01" if codec == "topk" else codec
    in_words = f"`{codec}`, momentum mode" if "momentum=" in options else f"`{hook}`"
    return names.get(hook, in_words)


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


def sharded_losses() -> str:
    """Gathers and reduce-scatters of one replica under FSDP2."""
    all_rows = rows_of("convergence_sharded")

    def line(hook: str) -> list[str]:
        rows = sorted((r for r in all_rows if r["codec"] == hook), key=lambda row: row["seed"])
        gathered = fmean(row["gathered_loss"] / row["final_loss"] - 1 for row in rows)
        return [
            "FSDP2's own, fp32" if hook == PLAIN_DDP else f"`{hook}`",
            ", ".join(f"{row['final_loss']:.4f}" for row in rows),
            percent(sharded_loss(hook)),
            percent(gathered),
            f"{fmean(row['wire_bytes'] / row['steps'] for row in rows):,.0f}",
        ]

    heads = ["hook", "validation loss by seed", "against fp32", "as gathered", "bytes"]
    return table(heads, map(line, dict.fromkeys(row["codec"] for row in all_rows)))


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


def sharded(kind: str) -> str:
    """Steps under FSDP2, with what a rank must send and what its host's interface has counted."""
    rows = rows_of(f"train_1gbit_{kind}")
    by_hook = {row["hook"]: row for row in rows}
    half = by_hook.get("off+all_gather=bf16")

    def times(row: Row, than: Row | None) -> str:
        if than is None or row is than or row["hook"] in RULERS:
            return ""
        return interval(faster(row, than))

    def line(row: Row) -> list[str]:
        return [
            name_of(row["hook"]).replace("plain DDP", "FSDP2's own, fp32"),
            ms(row["ms_median"]),
            times(row, by_hook[PLAIN_DDP]),
            *([times(row, half)] if half else []),
            f"{row['wire_bytes'] / 1e6:.1f}",
            f"{row['interface_bytes'] / 1e6:.1f}",
        ]

    over_half = ["than gathers in bf16"] if half else []
    heads = ["hook", "ms per step", "times faster than FSDP2's own", *over_half]
    return table([*heads, "MB sent by a rank", "MB counted"], map(line, rows))


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


def _what_is_finer(row: Row) -> str:
    """What does not travel with the codec of all, in a row of benchmarks/small_matrices.py."""
    if row["bytes_of"]:
        return f"nothing; larger ratio, bytes as with {row['bytes_of'].partition(', ')[2]}"
    if not row["percent"]:
        return "nothing"
    layer = ", output layer" if row["with_output_layer"] else ""
    return f"smallest, {row['percent']} %{layer}: `{row['small_codec']}`"


def small_matrices() -> str:
    """Losses over fp32's and bytes, by what travels with another codec than most matrices."""
    rows = [row for row in rows_of("small_matrices") if row["codec"] != PLAIN_DDP]
    places = sorted({(row["task"], row["optimizer"]) for row in rows})
    tasks = list(dict.fromkeys(task for task, _ in places))

    def codec_of(row: Row) -> str:
        return f"`{(row['bytes_of'] or row['codec']).partition(', ')[0]}`"

    def cell(mine: Sequence[Row], task: str, optimizer: str) -> str:
        found = [row for row in mine if (row["task"], row["optimizer"]) == (task, optimizer)]
        if not found:
            return ""
        base = rows_of("small_matrices", codec=PLAIN_DDP, task=task, optimizer=optimizer)
        ratios = {row["codec"].removeprefix("topk:ratio=") for row in found if row["bytes_of"]}
        return " ".join([percent(excess_over(base, found)), *(f"({each})" for each in ratios)])

    def line(codec: str, finer: str) -> list[str]:
        mine = [row for row in rows if (codec_of(row), _what_is_finer(row)) == (codec, finer)]
        sent = [[row["wire_bytes"] for row in mine if row["task"] == task] for task in tasks]
        bytes_sent = (f"{fmean(each) / 1e6:.1f}" if each else "" for each in sent)
        return [codec, finer, *(cell(mine, *place) for place in places), *bytes_sent]

    kinds = dict.fromkeys((codec_of(row), _what_is_finer(row)) for row in rows)
    order = list(dict.fromkeys(codec for codec, _ in kinds))
    heads = ["codec", "what is finer", *(f"`{task}`, {optimizer}" for task, optimizer in places)]
    heads += [f"MB sent, `{task}`" for task in tasks]
    return table(heads, (line(*each) for each in sorted(kinds, key=lambda k: order.index(k[0]))), 2)


def ef21_muon() -> str:
    """Losses of Muon over fp32's, by error feedback and codec."""
    base = rows_of("ef21_muon", codec=PLAIN_DDP)
    every = dict.fromkeys(row["codec"] for row in rows_of("ef21_muon"))
    codecs = [codec for codec in every if codec != PLAIN_DDP]
    ways = {
        "residual": "residuals, as behind the hook",
        "gradient": "EF21 of gradients",
        "momentum": "EF21-Muon: of the momentum",
    }

    def cell(way: str, codec: str) -> str:
        found = rows_of("ef21_muon", way=way, codec=codec)
        return percent(excess_over(base, found)) if found else ""

    lines = ([what, *(cell(way, codec) for codec in codecs)] for way, what in ways.items())
    return table(["what a rank keeps", *(f"`{codec}`" for codec in codecs)], lines)


def aggregate_error() -> str:
    """The error of means of eight ranks, by codec and step."""
    rows = rows_of("aggregate_error", ranks=8)
    places = list(dict.fromkeys((row["task"], row["step"]) for row in rows))

    def line(codec: str) -> list[str]:
        own = {(row["task"], row["step"]): row["vnmse"] for row in rows if row["codec"] == codec}
        return [f"`{codec}`", *(f"{own[place]:.2g}" for place in places)]

    heads = ["codec", *(f"`{task}`, step {step:,}" for task, step in places)]
    return table(heads, map(line, dict.fromkeys(row["codec"] for row in rows)))


def _average_and_whose(row: Row) -> tuple[str, str]:
    """A contestant of benchmarks/diloco.py: "`q4`" and ", torchft's DiLoCo" or ""."""
    whose, codec = "", row["codec"]
    if codec.partition(":")[0] == "torchft":
        whose, codec = ", torchft's DiLoCo", codec.partition(":")[2]
    return {"off": "fp32 (`off`)", "": "fp32"}.get(codec, f"`{codec}`"), whose


def diloco() -> str:
    """Trainings of benchmarks/diloco.py."""

    def line(row: Row) -> list[str]:
        codec, whose = _average_and_whose(row)
        every = "step" if row["synchronous"] else "outer step"
        outer = "" if row["outer_step_ms"] is None else ms(row["outer_step_ms"])
        spread = f"{row['spread']:.4f}" if len(row["losses"]) > 1 else ""
        losses = [f"{row['loss']:.4f}", spread]
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.0f}"
        whole = [seconds, f"{row['bytes'] / 1e6:.1f}"]
        return [row["optimizer"], f"{codec}, every {every}{whose}", *losses, outer, *whole]

    heads = ["optimizer", "average", "last loss, mean of seeds", "spread of seeds"]
    heads += ["ms per outer step", "seconds of training", "MB that a host sent"]
    return table(heads, map(line, rows_of("diloco")))


def outer_steps(name: str) -> str:
    """Outer steps of the larger model of benchmarks/diloco.py, from this file."""
    rows = rows_of(name)
    plain = next(row for row in rows if row["codec"] == "off")

    def line(row: Row) -> list[str]:
        faster = plain["outer_step_ms"] / row["outer_step_ms"]
        sent = f"{row['bytes'] / 1e6:.1f}"
        return ["".join(_average_and_whose(row)), ms(row["outer_step_ms"]), f"{faster:.1f}", sent]

    heads = ["average", "ms per outer step", "times as fast as fp32", "MB that a host sent"]
    return table(heads, map(line, rows))


def doctor() -> str:
    """What `gradferry doctor` printed."""
    *steps, verdict = rows_of("doctor")
    found = Diagnosis(
        verdict=verdict["text"],
        steps=tuple(
            Step(
                hook=row["hook"],
                exchange=row["exchange"],
                seconds=row["ms"] / 1e3,
                steps=row["steps"],
                wire_bytes=row["wire_bytes"],
                is_advised=not row["needs_momentum"],
            )
            for row in steps
        ),
        silent_s=verdict["none_ms"] / 1e3,
        world_size=verdict["ranks"],
        parameters=verdict["parameters"],
        elements=verdict["elements"],
        device=verdict["device"],
        waited=verdict["waited_share"],
        on_one_host=verdict["hosts"] == 1,
    )
    title = f"{verdict['model']}, {ranks_text(verdict)}, link {verdict['link']}"
    shown = f"$ {command('doctor').strip()}\ngradferry doctor: {title}\n{found}"
    return f"```\n{shown}\n```"


TABLES: Mapping[str, Callable[..., str]] = {
    each.__name__: each
    for each in (
        readme_hooks,
        steps,
        losses,
        hosts,
        sharded,
        processor_time,
        sharded_losses,
        local_stage,
        codec_cpu,
        codec_peers,
        codec_h100,
        growth,
        demo,
        small_matrices,
        ef21_muon,
        aggregate_error,
        diloco,
        outer_steps,
        doctor,
    )
}
