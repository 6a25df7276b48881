"""Will it help on a cluster that is not at hand? Predicts a training step there under every hook,
on paper: with the flat exchange and, where GPUs share a node, with two levels, which add up inside
nodes first. Every assumption is printed; `gradferry doctor` measures instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from gradferry import _native
from gradferry.core.nodes import FLAT, TWO_LEVEL
from gradferry.errors import ConfigError
from gradferry.forecast.diagnosis import default_hooks, require_hooks
from gradferry.forecast.hook_names import TORCH_DTYPES
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.speedups import Speedups, draw_speedups, speedup_lines
from gradferry_lab.output.table import Column, Table, print_line, print_table
from gradferry_lab.plan.cluster import Cluster
from gradferry_lab.plan.planned import Plan
from gradferry_lab.ranks.network import parse_rate

# TFLOP/s in bf16 without sparsity, and GB/s of a copy in device memory (85 % of the data sheet's).
_GPUS = {
    "h100": (989.0, 2850.0),
    "h200": (989.0, 4080.0),
    "a100": (312.0, 1730.0),
    "l4": (121.0, 255.0),
}
_GBIT_STEPS = tuple(2.0 ** (half / 2) for half in range(-2, 21))  # what is drawn: 0.5 to 1024 Gb/s
_SMOKE: dict[str, Any] = {"world": 16, "params": 2e7, "hooks": ["torch:fp32", "torch:bf16", "q4"]}

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry plan`."""
    number: dict[str, Any] = {"type": float, "metavar": "N"}
    parser.add_argument("--world", type=int, default=64, help="ranks, one GPU each (default: 64)")
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        default=8,
        metavar="N",
        help="which share its network card (default: %(default)s)",
    )
    parser.add_argument(
        "--link",
        default="25gbit",
        metavar="RATE",
        help="of a node's network card, in each direction (default: %(default)s)",
    )
    parser.add_argument("--params", default=1.3e9, help="of the model (default: 1.3e9)", **number)
    parser.add_argument(
        "--tokens", default=16384.0, help="per rank and step (default: 16384)", **number
    )
    parser.add_argument(
        "--gpu", choices=_GPUS, default="h100", help="sets --tflops and --copy (default: h100)"
    )
    parser.add_argument("--tflops", help="of a GPU at best, in bf16", **number)
    parser.add_argument(
        "--copy", help="GB/s that kernels move in a GPU, read and written", **number
    )
    parser.add_argument(
        "--mfu",
        default=0.4,
        help="share of --tflops that training reaches (default: 0.4)",
        **number,
    )
    parser.add_argument(
        "--intra-link",
        default="3600gbit",
        metavar="RATE",
        help="of a GPU inside its node, in each direction (default: %(default)s)",
    )
    parser.add_argument(
        "--latency-us", default=30.0, help="of a small collective (default: 30)", **number
    )
    parser.add_argument(
        "--bucket-cap", default=25.0, help="DDP's bucket_cap_mb (default: 25)", **number
    )
    flags.add_hooks(
        parser,
        default_hooks(),
        f"of {' '.join(TORCH_DTYPES)} and codecs, as for doctor",
    )
    parser.add_argument(
        "--png",
        type=flags.file_to_write,
        metavar="FILE",
        help="also draw speed-up by link speed",
    )
    flags.add_json(parser)
    parser.add_argument(
        "--smoke", action="store_true", help="a small model and few hooks, to see that all works"
    )


def run(arguments: argparse.Namespace) -> int:
    """Predicts and reports. Raises ConfigError when an option is wrong."""
    flags.apply_smoke(arguments, _SMOKE)
    cluster = _cluster(arguments)
    hooks = require_hooks(arguments.hooks)
    console = Console()
    with console.status("predicting") if console.is_terminal else nullcontext():
        plan = Plan(cluster, hooks, arguments.bucket_cap)
        drawings = plan.speedups(_GBIT_STEPS)
    rows = plan.rows(arguments.link)
    for line in _assumptions(cluster, arguments):
        print_line(console, line)
    console.print()
    print_table(console, plan_table(rows))
    for drawing in drawings:
        console.print()
        for line in speedup_lines(drawing):
            print_line(console, line)
    console.print()
    print_line(console, plan.verdict())
    if arguments.png:
        arguments.png.parent.mkdir(parents=True, exist_ok=True)
        arguments.png.write_bytes(draw_speedups(drawings, cluster.link * 8e-9))
        print_line(console, f"Written: {arguments.png}")
    curves = [row for drawing in drawings for row in _curve_rows(drawing)]
    all_rows = [*rows, *curves, plan.verdict_row()]
    save_rows(console, arguments.json, all_rows, results_of="plan")
    return 0


def _cluster(arguments: argparse.Namespace) -> Cluster:
    link = parse_rate("--link", arguments.link)
    intra_link = parse_rate("--intra-link", arguments.intra_link)
    world, local = arguments.world, arguments.gpus_per_node
    if local < 1 or world < 2 or world % local:
        raise ConfigError(
            f"--world {world} must be at least 2 and a multiple of --gpus-per-node {local}"
        )
    if world == local:
        raise ConfigError(
            f"--world {world} is one node: its GPUs do not share a network card; choose fewer "
            "--gpus-per-node"
        )
    tflops, copy = _GPUS[arguments.gpu]
    tflops = tflops if arguments.tflops is None else arguments.tflops
    copy = copy if arguments.copy is None else arguments.copy
    # Far beyond what there is, and what the simulation has time for.
    limits = {
        "--world": (world, 2, _native.MOST_RANKS),
        "--params": (arguments.params, 1, 1e11),
        "--tokens": (arguments.tokens, 1e-3, 1e9),
        "--tflops": (tflops, 1e-3, 1e6),
        "--copy": (copy, 1e-3, 1e6),
        "--bucket-cap": (arguments.bucket_cap, 1e-3, 1e6),
        "--mfu": (arguments.mfu, 1e-6, 1),
        "--latency-us": (arguments.latency_us, 0, 1e9),
    }
    for flag, (value, least, most) in limits.items():
        flags.require_between(flag, value, least, most)
    return Cluster(
        world=world,
        gpus_per_node=local,
        link=link / 8,
        latency_s=1e-6 * arguments.latency_us,
        intra_link=intra_link / 8,
        parameters=arguments.params,
        tokens=arguments.tokens,
        flops=1e12 * tflops,
        mfu=arguments.mfu,
        copy=1e9 * copy,
    )


def _assumptions(cluster: Cluster, arguments: argparse.Namespace) -> list[str]:
    total = cluster.profile().total_s
    local = cluster.gpus_per_node
    lines = [
        f"gradferry plan: {len(cluster.nodes.members)} nodes of {local} GPU{'s' * (local > 1)}, "
        f"{arguments.link} per node, {cluster.parameters:,.0f} parameters, "
        f"{cluster.tokens:,.0f} tokens per GPU and step. On paper, with these assumptions:",
        f"  a GPU does {1e-12 * cluster.flops:,.0f} TFLOP/s at best and reaches {cluster.mfu:.0%} "
        f"of it; 6 operations per parameter and token, 4 of them in the backward pass: "
        f"{1e3 * total:,.1f} ms per step",
        f"  codec kernels move {1e-9 * cluster.copy:,.0f} GB/s in a GPU, and take nothing from the "
        f"backward pass; gradients are fp32 and come evenly through it",
        f"  a card carries its rate in both directions at once, without loss; a small collective "
        f"takes {1e6 * cluster.latency_s:,.0f} us; a GPU has "
        f"{8e-9 * cluster.intra_link:,.0f} Gb/s to the others of its node",
        "  PyTorch's own all-reduce runs in rings that use each card once",
        f"  in the {FLAT} exchange every GPU talks to every other",
    ]
    if local > 1:
        lines[-1] += f", so {local} times as much goes through a card"
        lines.append(
            f"  with two levels ({TWO_LEVEL}) the GPUs of a node add up their gradients in fp32 "
            "first, and each talks to one GPU of every other node"
        )
    return lines


def plan_table(rows: Sequence[Row]) -> Table:
    """Rows of kind `plan`."""
    columns = (
        Column("exchange", lambda row: str(row["exchange"] or "-"), is_number=False),
        Column("hook", lambda row: f"{row['hook']}{' *' * row['needs_momentum']}", is_number=False),
        Column("ms per step", lambda row: f"{row['ms']:,.1f}"),
        Column("exposed\nms", lambda row: f"{row['exposed_ms']:,.1f}"),
        Column("ratio to\nnone", lambda row: f"{row['ratio_to_none']:.3f}"),
        Column("speed-up", lambda row: f"{row['speedup']:.2f}"),
        Column("MB sent\nper rank", lambda row: f"{1e-6 * row['wire_bytes']:,.1f}"),
    )
    notes = [
        "Speed-up: over the fastest of PyTorch's own hooks; these do not depend on the exchange.",
    ]
    if any(row["needs_momentum"] for row in rows):
        notes.append("* trains well only in momentum mode (momentum=), or with SGD.")
    title = f"Predicted on {rows[0]['world']} GPUs, link {rows[0]['link']}"
    return Table(title, columns, rows, notes)


def _curve_rows(drawing: Speedups) -> list[dict[str, Any]]:
    return [
        {
            "kind": "speedup",
            "exchange": drawing.title,
            "gbit_per_s": gbit,
            "speedup": speedup,
            "crossover_gbit_per_s": drawing.crossover_gbit,
        }
        for gbit, speedup in zip(drawing.gbits, drawing.speedups, strict=True)
    ]
