"""Will it help me? Measures the link between the ranks, the codecs and a model's training step,
predicts that step under every hook, and says in one sentence what to use, or not to compress at
all. On loopback, on a link of a chosen rate (as root), or under torchrun.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from gradferry.core.device import CPU, load_kernels
from gradferry.core.nodes import exchange_between
from gradferry.ddp.attach import attach
from gradferry.errors import ConfigError
from gradferry.forecast.costs import CollectiveCosts, Costs
from gradferry.forecast.diagnosis import (
    Diagnosis,
    Examination,
    default_hooks,
    examine,
    needs_momentum,
    require_hooks,
)
from gradferry.forecast.hook_names import RULERS, SYNC_HOOK, TORCH_DTYPES
from gradferry.forecast.measure_link import Progress
from gradferry.forecast.predict import DOUBT
from rich.console import Console
from torch import nn

from gradferry_lab import flags
from gradferry_lab.bench.device_clock import environment_on
from gradferry_lab.output.json_file import save_rows
from gradferry_lab.output.paired import ratio_columns
from gradferry_lab.output.progress import StatusLine
from gradferry_lab.output.table import Column, Table, print_line, print_table
from gradferry_lab.ranks.everywhere import add_rank_arguments, check_ranks, run_everywhere
from gradferry_lab.ranks.hosts import Where, ranks_text
from gradferry_lab.ranks.place import add_device, on_device, place_of_rank
from gradferry_lab.workloads.models import check_model, load_workload
from gradferry_lab.workloads.optimizers import make_optimizer

_TURNS = 5
_SECONDS = 0.5
_SMOKE: dict[str, Any] = {"model": "small", "hooks": [*TORCH_DTYPES, "q4", "sign1"], "turns": 1}

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `gradferry doctor`."""
    flags.add_model(parser)
    flags.add_hooks(
        parser,
        default_hooks(),
        f"beside {' and '.join(RULERS)}: {' '.join(TORCH_DTYPES)} and codecs; arguments of attach "
        f"may follow a codec, as for bench train",
    )
    add_device(parser)
    add_rank_arguments(parser)
    flags.add_bucket_caps(parser, "predicted at its fastest")
    parser.add_argument(
        "--turns",
        type=int,
        default=_TURNS,
        help="turns of three training steps to measure (default: %(default)s)",
    )
    flags.add_seed(parser)
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="a small model, few hooks and one turn, to see that all works; figures mean nothing",
    )
    flags.add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measures and reports. Raises a GradferryError when an option is wrong or a rank fails."""
    flags.apply_smoke(arguments, _SMOKE)
    asked = _examination(arguments)
    place = environment_on(arguments.device)
    if arguments.device != "cpu":
        load_kernels(arguments.device)
    check_ranks(arguments)
    if arguments.ranks < 2:
        raise ConfigError("doctor needs two ranks at least: a world of one does not communicate")
    console = Console()

    def report(found: Diagnosis, where: Where) -> int:
        show_diagnosis(console, found, arguments.model, where._asdict())
        rows = doctor_rows(found, arguments.model, where._asdict())
        save_rows(console, arguments.json, rows, place, results_of="doctor")
        return 0

    with StatusLine(console) as status:
        body_arguments = (arguments.model, asked, arguments.seed, arguments.device)
        return run_everywhere(
            arguments, examine_workload, body_arguments, status, status.closing(report)
        )


def _examination(arguments: argparse.Namespace) -> Examination:
    hooks = require_hooks(arguments.hooks)
    check_model(arguments.model)
    flags.require_at_least_one(arguments, "turns")
    flags.require_more_than_zero("--bucket-caps", arguments.bucket_caps)
    caps = tuple(dict.fromkeys(arguments.bucket_caps))
    return Examination(hooks, caps, arguments.turns, _SECONDS)


def examine_workload(
    emit: Progress, model: str, asked: Examination, seed: int, device: str
) -> Diagnosis:
    """Runs on every rank of the default group, on a model as `bench train` has it."""
    place, group = place_of_rank(device)
    group = group or dist.group.WORLD
    assert group is not None
    torch.manual_seed(seed)
    workload = load_workload(model)

    def make_step(ddp: nn.Module) -> Callable[[], None]:
        optimizer = make_optimizer("AdamW", workload, ddp.parameters(), None, fused=True)
        generator = torch.Generator().manual_seed(seed)
        batch: Any = on_device(place, workload.draw(generator))

        def step() -> None:
            optimizer.zero_grad()
            workload.loss(ddp, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

        return step

    def build_model() -> nn.Module:
        return workload.build_model().to(place)

    return examine(group, build_model, make_step, attach, asked, emit, place)


def show_diagnosis(console: Console, found: Diagnosis, model: str, where: Row) -> None:
    """Prints tables and verdict. where: as for `doctor_rows`."""
    for table in doctor_tables(doctor_rows(found, model, where)):
        print_table(console, table)
        console.print()
    print_line(console, found.verdict)


def doctor_tables(rows: Sequence[Row]) -> list[Table]:
    """Of the link, of the codecs, and of the steps that they would take."""
    kinds = {kind: [row for row in rows if row["kind"] == kind] for kind in _KINDS}
    (verdict,) = kinds["verdict"]
    return [
        _link_table(kinds["link"], verdict),
        _codec_table(kinds["codec"], kinds["node"], verdict),
        _prediction_table(kinds["prediction"], verdict),
    ]


_KINDS = ("link", "codec", "node", "prediction", "verdict")


def doctor_rows(found: Diagnosis, model: str, where: Row) -> list[dict[str, Any]]:
    """Rows of the JSON file; docs/design/forecast.md defines every key.

    where: keys of `Where`; `link` at least.
    """
    place = {"model": model, "ranks": found.world_size, **where, "device": found.device}
    verdict = {
        "kind": "verdict",
        "text": found.verdict,
        "elements": sum(parameter.num_elements for parameter in found.parameters),
        "parameters": len(found.parameters),
        "waiting_ms": 1e3 * found.profile.waiting_s,
        "spare_cores": found.profile.spare_cores,
    }
    rows = [
        *_link_rows(found.costs),
        *_codec_rows(found),
        *_node_rows(found.costs),
        *_prediction_rows(found),
        verdict,
    ]
    return [{**row, **place} for row in rows]


def _link_rows(costs: Sequence[Costs]) -> list[dict[str, Any]]:
    collectives: list[tuple[str | None, str, CollectiveCosts]] = []
    for cost in costs:
        exchange = exchange_between(cost.nodes)
        pairs = {"all-to-all": cost.link.scatter, "all-gather": cost.link.gather}
        if cost.link.local is not None:
            pairs["local all-to-all"] = cost.link.local.scatter
            pairs["local all-gather"] = cost.link.local.forward
        collectives += [(exchange, name, collective) for name, collective in pairs.items()]
    for dtype, reduce in costs[0].link.all_reduce.items():
        collectives.append((None, f"all-reduce {str(dtype).removeprefix('torch.')}", reduce))
    return [
        {
            "kind": "link",
            "exchange": exchange,
            "collective": name,
            "bytes": int(num_bytes),
            "us": 1e6 * seconds,
            "gbit_per_s": 8e-9 * num_bytes / seconds if seconds else None,
            "latency_us": 1e6 * collective.latency_s,
            "cpu_ns_per_byte": 1e9 * collective.cpu_s_per_byte,
            "beside_backward": collective.beside_backward,
        }
        for exchange, name, collective in collectives
        for num_bytes, seconds in collective.occupied.points
    ]


def _codec_rows(found: Diagnosis) -> list[dict[str, Any]]:
    return [
        {
            "kind": "codec",
            "exchange": exchange_between(costs.nodes),
            "codec": str(codec.codec),
            "bits": codec.codec.bits(),
            "worker_residual": codec.residuals[0],
            "owner_residual": codec.residuals[1],
            "encode_ns": 1e9 * speed.encode_per_element,
            "reduce_ns": 1e9 * speed.reduce_per_element,
            "decode_ns": 1e9 * speed.decode_per_element,
            "check_ns_per_byte": 1e9 * speed.check_per_byte,
            "encode_launch_us": 1e6 * speed.encode_launch,
            "reduce_launch_us": 1e6 * speed.reduce_launch,
            "decode_launch_us": 1e6 * speed.decode_launch,
        }
        for costs in found.costs
        for codec, speed in costs.codecs.items()
    ]


def _node_rows(costs: Sequence[Costs]) -> list[dict[str, Any]]:
    return [
        {
            "kind": "node",
            "exchange": exchange_between(cost.nodes),
            "nodes": len(cost.nodes.members),
            "ranks_per_node": list(cost.nodes.ranks_per_node),
            "shares_memory": cost.link.local.shares_memory,
            "pack_ns": 1e9 * cost.node.pack_per_element,
            "sum_ns": 1e9 * cost.node.sum_per_element,
            "pack_launch_us": 1e6 * cost.node.pack_launch,
            "sum_launch_us": 1e6 * cost.node.sum_launch,
        }
        for cost in costs
        if cost.node is not None and cost.link.local is not None
    ]


def _prediction_rows(found: Diagnosis) -> list[dict[str, Any]]:
    (sync_s,) = (p.seconds for p in found.predictions if p.hook == SYNC_HOOK)
    return [
        {
            "kind": "prediction",
            "hook": prediction.hook,
            "exchange": prediction.exchange,
            "bucket_cap_mb": prediction.bucket_cap_mb,
            "ms": 1e3 * prediction.seconds,
            "doubt_ms": 1e3 * prediction.doubt_s,
            "exposed_ms": 1e3 * prediction.exposed_s,
            "ratio_to_none": prediction.ratio_to_none,
            "ratio_to_sync": prediction.seconds / sync_s,
            "wire_bytes": prediction.wire_bytes,
            "needs_momentum": needs_momentum(prediction.hook),
        }
        for prediction in found.predictions
    ]


def _link_table(rows: Sequence[Row], verdict: Row) -> Table:
    columns = (
        *_exchange_columns(rows),
        Column("collective", lambda row: str(row["collective"]), is_number=False),
        Column("bytes sent", lambda row: f"{row['bytes']:,}"),
        Column("us", lambda row: f"{row['us']:,.1f}"),
        Column("Gb/s", lambda row: f"{row['gbit_per_s'] or 0:.3f}"),
        Column("latency\nus", lambda row: f"{row['latency_us']:,.0f}"),
        Column("CPU\nns per byte", lambda row: f"{row['cpu_ns_per_byte']:.2f}"),
        Column("beside\nbackward", lambda row: f"{row['beside_backward']:.2f}"),
    )
    in_flight = (
        "with two in flight, and all-to-all and all-gather at the same time, as the engine uses "
        "them. Bytes: that a rank sends; of an all-reduce, of its tensor. Latency: of the smallest "
        "collective, alone. CPU: of all threads of a rank. Beside backward: share of its speed "
        "that the link keeps while the ranks compute."
    )
    on_stream = (
        "one after another, through the group of the model. Bytes: that a rank sends; of an "
        "all-reduce, of its tensor. Latency: of the smallest collective. CPU and beside backward "
        "are not measured on a device."
    )
    note = in_flight if _on_host(verdict) else on_stream
    notes = (f"us: from one collective to the next {note}",)
    title = f"gradferry doctor: {ranks_text(verdict)}, link {verdict['link']}"
    return Table(title, columns, rows, notes)


def _exchange_columns(rows: Sequence[Row]) -> list[Column]:
    """Where there are several; older files do not say."""
    if len({row.get("exchange") for row in rows} - {None}) < 2:
        return []
    return [Column("exchange", lambda row: row["exchange"] or "-", is_number=False)]


def _codec_table(rows: Sequence[Row], nodes: Sequence[Row], verdict: Row) -> Table:
    on_host = _on_host(verdict)
    columns = [
        *_exchange_columns(rows),
        Column("codec", lambda row: str(row["codec"]), is_number=False),
        Column("residuals", _residuals, is_number=False),
        Column("bits per\nelement", lambda row: f"{row['bits']:.2f}"),
        Column("encode\nns", lambda row: f"{row['encode_ns']:.3f}"),
        Column("reduce\nns", lambda row: f"{row['reduce_ns']:.3f}"),
        Column("decode\nns", lambda row: f"{row['decode_ns']:.3f}"),
    ]
    if not on_host:
        columns.append(Column("launches\nus", lambda row: f"{_launches(row):.1f}"))
    clock = "on one thread" if on_host else "by events of the device"
    note = f"ns per element, {clock}. reduce: per element that a rank owns, from all ranks."
    if not on_host:
        note += " Launches: of the three for a chunk, however small."
    notes = [note]
    for node in nodes:
        text = (
            f"{node['exchange']}: {node['nodes']} nodes, whose sums are encoded; a rank copies an "
            f"element for a sibling in {node['pack_ns']:.3f} ns, and adds up those of all in "
            f"{node['sum_ns']:.3f} ns."
        )
        if on_host:
            through = "share memory" if node["shares_memory"] else "exchange through sockets"
            text += f" The ranks of a node {through}."
        else:
            launches = node["pack_launch_us"] + node["sum_launch_us"]
            text += f" Launches of both for a chunk: {launches:.1f} us."
        notes.append(text)
    place = "machine" if on_host else "device"
    return Table(f"Codecs on this {place}", columns, rows, notes)


def _on_host(verdict: Row) -> bool:
    return bool(verdict.get("device", CPU.type) == CPU.type)  # older files do not say


def _launches(row: Row) -> float:
    return float(sum(row[f"{part}_launch_us"] for part in ("encode", "reduce", "decode")))


def _residuals(row: Row) -> str:
    kept = [name for name in ("worker", "owner") if row[f"{name}_residual"]]
    return " and ".join(kept) or "none"


def _prediction_table(rows: Sequence[Row], verdict: Row) -> Table:
    columns = (
        Column("hook", lambda row: f"{row['hook']}{' *' * row['needs_momentum']}", is_number=False),
        *_exchange_columns(rows),
        Column("bucket\nMB", lambda row: _cap(row["bucket_cap_mb"])),
        Column("ms per step\npredicted", _predicted),
        Column("exposed\nms", lambda row: f"{row['exposed_ms']:,.1f}"),
        *(column for ruler in RULERS for column in ratio_columns(rows, ruler)),
        Column("bytes sent\nper step", lambda row: f"{row['wire_bytes']:,}"),
    )
    notes = [
        f"{verdict['elements']:,} elements in {verdict['parameters']} parameters. `none` was "
        f"measured, all else is predicted from the tables above; every hook at its fastest bucket "
        f"size. Exposed: more than without communication; a prediction may be off by "
        f"{DOUBT:.0%} of that, which is what ± shows. Ranks wait for each other: "
        f"{verdict['waiting_ms']:.1f} ms, found by measuring q4. `sync`: that, and an all-reduce "
        f"of one element.",
    ]
    if not _on_host(verdict):
        lost = 1 - verdict["spare_cores"]
        notes.append(
            f"While kernels of the engine run, the backward pass loses {lost:.0%} of their time: "
            f"found by that, too."
        )
    if any(row["needs_momentum"] for row in rows):
        notes.append("* trains well only in momentum mode (momentum=), or with SGD.")
    title = f"Predicted step: {verdict['model']}, link {verdict['link']}"
    return Table(title, columns, rows, notes)


def _predicted(row: Row) -> str:
    doubt = f" ± {row['doubt_ms']:,.1f}" if row.get("doubt_ms") else ""  # older files have none
    return f"{row['ms']:,.1f}{doubt}"


def _cap(cap: float | None) -> str:
    return "-" if cap is None else f"{cap:g}"
