"""How long would a step's messages travel on a cluster that is not at hand? Arithmetic on the bytes
that it sends under every hook: gradients under DDP, with the flat exchange and, where GPUs share a
node, with two levels; of models that FSDP2 shards, parameters, too. Ranks are GPUs: what they send
is cut into the chunks of devices. `gradferry doctor` and `gradferry bench train` measure.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from gradferry import _native
from gradferry.core.codec_spec import AUTO, OFF, parse_codec
from gradferry.core.config import COARSE_BITS
from gradferry.core.device import on_streams
from gradferry.core.engine import planned_bytes
from gradferry.core.nodes import Nodes, exchange_between, flat
from gradferry.core.parameters import SMALL_CODEC, SMALL_PERCENT, describe_parameters
from gradferry.ddp.trial import LOSSES
from gradferry.diagnosis import TORCH_DTYPES
from gradferry.errors import ConfigError
from rich.console import Console

from gradferry_lab import flags
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.table import Column, Row, Table, print_line, print_table
from gradferry_lab.ranks.hosts import busiest_host
from gradferry_lab.ranks.network import parse_rate
from gradferry_lab.workloads.hooks import (
    BACKEND_HOOKS,
    POWERSGD,
    RULERS,
    SHARDED_NATIVE,
    all_reduce_bytes,
    hook_config,
    ring_exchange,
    split_options,
)
from gradferry_lab.workloads.parallel import (
    DDP,
    FSDP,
    HSDP,
    PARALLEL,
    SHARDED_HOOKS,
    check_parallel,
)
from gradferry_lab.workloads.sharded_bytes import (
    ALL_GATHER,
    NO_CODECS,
    MatrixModule,
    choice_of,
    exchanges_of,
)

_FP32 = "torch:fp32"
_PER_NODE = 8  # GPUs, where --world consists of such nodes
_MOST_PLANNED = 4  # buckets; all of a model are alike
_SMALL_MESSAGE = 8192

_EXCHANGES = {
    DDP: "flat: every GPU sends to every other, and the GPUs of a node share its card. two-level: "
    "they add up their gradients first, and each sends to one GPU of every other node. attach "
    "tries both. -: PyTorch's own all-reduce, in a ring that leaves each node once.",
    FSDP: "Parameters are gathered twice, with keep_gathered once, in rings that leave each node "
    "once, as FSDP2's own reduce-scatter does. In a compressed one every GPU sends to every other, "
    "and the GPUs of a node share its card: with many of them leave it to FSDP2 "
    "(reduce_scatter=off).",
    HSDP: "What leaves a node are averages between replicas; gathers and reduce-scatters stay "
    "inside. Every GPU sends its shard's part to those that hold it on other nodes.",
}

# Of a rank: bytes, and messages to other nodes: how many, bytes of the shortest; of a card: bytes.
_OfRank = tuple[int, int | None, int | None]
_Sent = tuple[str, str | None, _OfRank, int]  # hook, exchange


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry plan`."""
    number: dict[str, Any] = {"type": float, "metavar": "N"}
    parser.add_argument(
        "--world", type=int, nargs="+", default=[64], help="ranks, one GPU each (default: 64)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        metavar="N",
        help=f"which share its network card (default: {_PER_NODE}, or 1 where nodes of so many do "
        "not make up --world)",
    )
    links = ["10gbit", "25gbit", "100gbit"]
    parser.add_argument(
        "--link",
        nargs="+",
        default=links,
        metavar="RATE",
        help=f"of a node's network card, in each direction (default: {' '.join(links)})",
    )
    parser.add_argument(
        "--params",
        type=flags.count,
        default=1.3e9,
        metavar="N",
        help="of the model, such as 125M or 7B (default: 1.3B)",
    )
    parser.add_argument(
        "--compute-ms",
        help="of forward and backward on one GPU without communication; gives bounds of a step",
        **number,
    )
    parser.add_argument(
        "--bucket-cap", default=25.0, help="DDP's bucket_cap_mb (default: 25)", **number
    )
    flags.add_hooks(parser, _ddp_hooks(), f"of {' '.join(TORCH_DTYPES)}, {OFF}, and codecs")
    parser.set_defaults(hooks=None)  # they depend on --parallel
    parser.add_argument(
        "--parallel",
        choices=PARALLEL,
        default=DDP,
        help="ddp: gradients; fsdp: gradients and parameters of one replica over all ranks; hsdp: "
        "averages between replicas, of which every node has one. Hooks are then as those of bench "
        "train, and modules are of --bucket-cap (default: %(default)s)",
    )
    flags.add_wide(parser)
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Computes and reports. Raises ConfigError when an option is wrong."""
    clusters = [_cluster(arguments, world) for world in dict.fromkeys(arguments.world)]
    hooks = _checked(arguments)
    rows = [row for cluster in clusters for row in _rows(cluster, hooks, arguments)]
    console = Console()
    for line in _assumptions(clusters, arguments.parallel):
        print_line(console, line)
    console.print()
    print_table(console, plan_table(rows), wide=arguments.wide)
    save_rows(console, arguments.json, rows, results_of="plan")
    return 0


@dataclass(frozen=True)
class _Cluster:
    """Ranks of a node follow each other; the model fills equal buckets of fp32."""

    nodes: Nodes
    params: float
    buckets: int
    bucket_elements: int


def _cluster(arguments: argparse.Namespace, world: int) -> _Cluster:
    local = arguments.gpus_per_node
    if local is None:
        local = _PER_NODE if world > _PER_NODE and world % _PER_NODE == 0 else 1
    flags.require_between("--gpus-per-node", local, 1, _native.MOST_RANKS)
    flags.require_between("--world", world, 2, _native.MOST_RANKS)
    if world % local:
        raise ConfigError(f"--world {world} must be a multiple of --gpus-per-node {local}")
    if local == 1 and arguments.parallel == HSDP:
        raise ConfigError(
            "--parallel hsdp has a replica on every node, and --gpus-per-node 1 leaves nothing to "
            "shard there; use --parallel fsdp"
        )
    if world == local:
        raise ConfigError(
            f"--world {world} is one node: its GPUs do not share a network card; choose fewer "
            "--gpus-per-node"
        )
    flags.require_between("--params", arguments.params, 1, 1e12)
    flags.require_between("--bucket-cap", arguments.bucket_cap, 1e-3, 1e3)
    if arguments.compute_ms is not None:
        flags.require_between("--compute-ms", arguments.compute_ms, 0, 1e9)
    buckets = math.ceil(4 * arguments.params / (arguments.bucket_cap * 2**20))
    members = (tuple(range(first, first + local)) for first in range(0, world, local))
    return _Cluster(
        Nodes(tuple(members)), arguments.params, buckets, math.ceil(arguments.params / buckets)
    )


def _ddp_hooks() -> tuple[str, ...]:
    return (*TORCH_DTYPES, *(str(codec["name"]) for codec in _native.codecs()))


def _checked(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Each hook once, and `torch:fp32` first, which all are compared with."""
    parallel = arguments.parallel
    hooks: Sequence[str] = arguments.hooks or SHARDED_HOOKS.get(parallel, _ddp_hooks())
    for hook in hooks:
        if hook.startswith(POWERSGD):
            raise ConfigError(f"hook {hook!r} sends what shapes demand; use bench train")
        if hook.partition("+")[0] == AUTO:
            raise ConfigError(f"hook {hook!r} chooses among hooks; name those to be compared")
        if hook in RULERS:
            raise ConfigError(f"hook {hook!r} sends nothing to speak of; name others")
        check_parallel(parallel, hook)
    return tuple(dict.fromkeys([_FP32, *hooks]))


def _rows(
    cluster: _Cluster, hooks: Sequence[str], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Rows of the JSON file; docs/guide/numbers.md defines every key."""
    if arguments.parallel == DDP:
        sent = list(_of_ddp(cluster, hooks))
    else:
        sent = [(hook, None, *_of_sharded(cluster, hook, arguments.parallel)) for hook in hooks]
    (uncompressed,) = (card for hook, _, _, card in sent if hook == _FP32)
    compute_ms = arguments.compute_ms
    for hook, exchange, (of_rank, messages, shortest), of_card in sent:
        for link in arguments.link:
            transfer_ms = 8e3 * of_card / parse_rate("--link", link)
            yield {
                "kind": "plan",
                "exchange": exchange,
                "hook": hook,
                "wire_bytes": of_rank,
                "messages": messages,
                "shortest_message": shortest,
                "card_bytes": of_card,
                "ratio_to_fp32": of_card / uncompressed,
                "needs_momentum": _needs_momentum(hook),
                "link": link,
                "transfer_ms": transfer_ms,
                "compute_ms": compute_ms,
                "least_step_ms": None if compute_ms is None else max(compute_ms, transfer_ms),
                "most_step_ms": None if compute_ms is None else compute_ms + transfer_ms,
                "world": cluster.nodes.world_size,
                "gpus_per_node": cluster.nodes.smallest,
                "params": cluster.params,
                "parallel": arguments.parallel,
            }


def _of_ddp(cluster: _Cluster, hooks: Sequence[str]) -> Iterator[_Sent]:
    yield from ((hook, None, *_of_ring(cluster, hook)) for hook in hooks if hook in BACKEND_HOOKS)
    exchanges = [flat(cluster.nodes.world_size)]
    if not cluster.nodes.is_flat:
        exchanges.append(cluster.nodes)
    for nodes in exchanges:
        for hook in hooks:
            if hook not in BACKEND_HOOKS:
                yield hook, exchange_between(nodes), *_of_codec(cluster, hook, nodes)


def _of_sharded(cluster: _Cluster, hook: str, parallel: str) -> tuple[_OfRank, int]:
    """Bytes of a rank and of a card, with equal modules that are all gathered twice, or kept."""
    nodes = cluster.nodes
    mesh = nodes.members if parallel == HSDP else [range(nodes.world_size)]
    count = min(cluster.buckets, _MOST_PLANNED)
    shard = math.ceil(cluster.bucket_elements / len(mesh[0]))
    modules = [MatrixModule(shard, SHARDED_NATIVE.get(hook), len(mesh[0]))] * count
    choice = NO_CODECS
    if hook not in SHARDED_NATIVE:
        choice = choice_of(hook, modules, averages=parallel == HSDP)
    of_rank, of_card = 0, [0] * nodes.world_size
    for exchange in exchanges_of(modules, choice, mesh):
        on_gpus = exchange
        if exchange.config is not None:
            on_gpus = replace(exchange, config=on_streams(exchange.config))
        sent = on_gpus.sent(range(nodes.world_size))
        of_rank += max(sent)
        leaving = on_gpus.sent(nodes.of_rank)
        if exchange.name == ALL_GATHER:  # devices gather in a ring, with a codec, too
            leaving = ring_exchange(max(sent), nodes.of_rank)
        of_card = [a + b for a, b in zip(of_card, leaving, strict=True)]
    scale = cluster.buckets / count
    return (round(of_rank * scale), None, None), round(busiest_host(nodes, of_card)[1] * scale)


def _of_ring(cluster: _Cluster, hook: str) -> tuple[_OfRank, int]:
    elements = cluster.buckets * cluster.bucket_elements
    world = cluster.nodes.world_size
    of_rank = all_reduce_bytes(elements, BACKEND_HOOKS[hook].itemsize, world)
    by_rank = ring_exchange(of_rank, cluster.nodes.of_rank)
    return (of_rank, None, None), busiest_host(cluster.nodes, by_rank)[1]


def _of_codec(cluster: _Cluster, hook: str, nodes: Nodes) -> tuple[_OfRank, int]:
    """nodes: of the exchange. Owners of a few buckets differ by a tile; those of all hardly do."""
    config = on_streams(hook_config(hook))
    count = min(cluster.buckets, _MOST_PLANNED)
    matrix = torch.empty(1, cluster.bucket_elements)  # never touched, so that it takes no memory
    parameters = describe_parameters([("matrix", matrix)] * count, config, exchanges=True)
    buckets = [[number] for number in range(count)]

    def planned(hosts: Nodes) -> list[tuple[int, int, int, int]]:
        return planned_bytes(config, parameters, nodes, buckets, hosts=hosts.of_rank)

    def of_all(numbers: Sequence[int]) -> int:
        usual = max(numbers) if count == cluster.buckets else sum(numbers) / len(numbers)
        return round(usual * cluster.buckets / count)

    num_bytes, _, messages, shortest = zip(*planned(nodes), strict=True)
    leaving = [n for n, *_ in planned(cluster.nodes)]
    of_card = [sum(leaving[rank] for rank in members) for members in cluster.nodes.members]
    return (of_all(num_bytes), of_all(messages), min(shortest)), of_all(of_card)


def _needs_momentum(hook: str) -> bool:
    """Whether a codec trains well only in momentum mode, which the hook does not use."""
    _, options = split_options(hook, sharded=True)
    return not options.get("momentum") and _is_coarse(hook)


def _is_coarse(hook: str) -> bool:
    """Whether its codec has less than 3 bits per element."""
    codec, _ = split_options(hook, sharded=True)
    return codec not in BACKEND_HOOKS and parse_codec(codec).bits() < COARSE_BITS


def _assumptions(clusters: Sequence[_Cluster], parallel: str) -> list[str]:
    parts, measures = "buckets", "doctor"
    if parallel != DDP:
        parts, measures = "modules", f"bench train --parallel {parallel}"
    nodes = ", ".join(
        f"{len(each.members)} nodes of {each.smallest} GPU{'s' * (each.smallest > 1)}"
        for each in (cluster.nodes for cluster in clusters)
    )
    return [
        f"gradferry plan: {nodes}; {clusters[0].params:,.0f} parameters in "
        f"{clusters[0].buckets:,} {parts} of fp32.",
        "This is arithmetic, not a measurement: bytes over the rate of a node's card, without "
        f"latency, encoding, or what stays inside a node. `gradferry {measures}` measures.",
        "On GPUs, tests ran on one H100, with earlier kernels; no training on several was timed.",
    ]


def plan_table(rows: Sequence[Row]) -> Table:
    """Rows of kind `plan`; those that differ in the link alone share a line."""
    links = list(dict.fromkeys(row["link"] for row in rows))
    first = rows[0]
    bounded = first["compute_ms"] is not None
    worlds = list(dict.fromkeys(row["world"] for row in rows))
    by_link = {(row["world"], row["exchange"], row["hook"], row["link"]): row for row in rows}

    def milliseconds(link: str) -> Column:
        def cell(row: Row) -> str:
            at = by_link[row["world"], row["exchange"], row["hook"], link]
            if bounded:
                return f"{_ms(at['least_step_ms'])} .. {_ms(at['most_step_ms'])}"
            return _ms(at["transfer_ms"])

        return Column(f"ms at\n{link}", cell)

    def number(title: str, key: str) -> Column:
        return Column(title, lambda row: f"{row[key]:,}" if row[key] else "-", detail=2)

    counted = any(row["messages"] for row in rows)
    exchange = Column("exchange", lambda row: str(row["exchange"] or "-"), is_number=False)
    columns = [
        *([Column("GPUs", lambda row: f"{row['world']:,}")] if len(worlds) > 1 else []),
        *([exchange] if first["parallel"] == DDP else []),
        Column("hook", lambda row: f"{row['hook']}{' *' * row['needs_momentum']}", is_number=False),
        Column("MB sent\nby a rank", lambda row: f"{1e-6 * row['wire_bytes']:,.1f}", detail=2),
        *([number("messages\nof a rank", "messages")] if counted else []),
        *([number("shortest,\nB", "shortest_message")] if counted else []),
        Column("MB through\na card", lambda row: f"{1e-6 * row['card_bytes']:,.1f}", detail=1),
        Column("of\nfp32", lambda row: f"{row['ratio_to_fp32']:.3f}", detail=1),
        *map(milliseconds, links),
    ]
    notes = [
        _EXCHANGES[first["parallel"]],
        f"ms: a step without its optimizer, from max(compute, transfer) to compute + transfer, "
        f"with {first['compute_ms']:,g} ms of compute."
        if bounded
        else "ms: the transfer alone; with --compute-ms, bounds of the step.",
    ]
    if any(row["needs_momentum"] for row in rows):
        notes.append("* trains well only in momentum mode (momentum=), or with SGD.")
    asked = {row["hook"] for row in rows}
    if any(map(_is_coarse, asked)):
        notes.append(
            f"Below {COARSE_BITS:g} bits the smallest matrices travel with {SMALL_CODEC}: at most "
            f"{SMALL_PERCENT} % of all elements, which are not counted as such here."
        )
    notes += [f"{hook}: {loss}." for hook, loss in LOSSES.items() if hook in asked]
    if counted:
        notes.append("messages: with payloads, to other nodes, in a step.")
    if any(0 < (row["shortest_message"] or 0) < _SMALL_MESSAGE for row in rows):
        notes.append(
            "Messages below 8 KB cost more than their bytes: two levels make fewer, --bucket-cap "
            "longer ones."
        )
    least = min(rows, key=lambda row: row["card_bytes"])
    notes.append(
        "Use q4 unless you need fewer bytes."
        if first["parallel"] == DDP
        else f"Fewest bytes through a card: {least['hook']}."
    )
    under = "" if first["parallel"] == DDP else f" under {first['parallel']}"
    title = f"Bytes and times of a step on {', '.join(map(str, worlds))} GPUs{under}"
    return Table(title, columns, [row for row in rows if row["link"] == links[0]], notes)


def _ms(milliseconds: float) -> str:
    """With a digit behind the point where that says something."""
    return f"{milliseconds:,.{0 if milliseconds >= 1000 else 1}f}"
