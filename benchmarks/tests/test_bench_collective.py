"""`gradferry bench collective`: its columns, its flags, and that it finds wrong results."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core.nodes import Nodes, flat
from gradferry.diagnosis import TORCH_DTYPES
from gradferry.errors import ConfigError
from gradferry_lab.bench import collective, collective_turns
from gradferry_lab.bench.collective import collective_rows, collective_table, parse_size
from gradferry_lab.bench.collective_turns import (
    ALL_REDUCE,
    REDUCE_SCATTER,
    CollectiveOptions,
    CollectiveOutcome,
    compare_collectives,
)
from gradferry_lab.cli import main
from gradferry_lab.ranks.hosts import Where
from outcomes import Outcome, attempt
from reference import Layout, Parameter, two_level_bytes_per_step, wire_bytes_per_step
from world import World

ROW_KEYS = [
    "op", "size", "count", "type", "codec", "exchange", "chosen", "time", "algbw", "busbw", "wrong",
    "wire", "ratio", "enc", "dec", "net", "rel_err", "speedup", "speedup_low", "speedup_high",
    "iters",
    "interval_coverage", "time_min", "time_max", "wire_measured", "interface_bytes",
    "interface_bytes_formula", "link", "ranks", "hosts", "ranks_per_host", "device",
]  # fmt: skip
WHERE = Where("1gbit", ranks=4, hosts=4, ranks_per_host=1)
CODECS = tuple(_native.canonical_codec(str(codec["name"])) for codec in _native.codecs())


def test_collective_smoke_compares_with_the_backends_own(rows_of, capsys):
    rows = rows_of("bench", "collective", "--smoke", "--wide")
    names = [*TORCH_DTYPES, "q4", _native.canonical_codec("topk")]
    assert [(row["size"], row["codec"]) for row in rows] == [
        (size, name) for size in (1 << 16, 1 << 18) for name in names
    ]
    for row in rows:
        assert list(row) == ROW_KEYS
        assert row["op"] == ALL_REDUCE
        assert row["wrong"] == 0
        assert (row["link"], row["ranks"], row["hosts"]) == ("loopback", 2, 1)
        assert row["ranks_per_host"] == 2
        assert (row["interface_bytes"], row["interface_bytes_formula"]) == (None, 0)
        assert row["count"] == row["size"] // 4
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 ranks
        assert row["ratio"] == pytest.approx(row["size"] / row["wire"])  # of 2 ranks
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        assert (row["iters"], row["interval_coverage"]) == (2, 0.5)
        codec = row["codec"] not in TORCH_DTYPES
        for part in ("enc", "dec", "net"):
            assert (row[part] is not None) == codec
            assert not codec or row[part] > 0
        assert (row["rel_err"] > 0) == codec
    shown = capsys.readouterr().out
    assert "(50 %)" in shown
    assert "interface" not in shown  # nothing leaves the host
    heading = "type codec time algbw busbw #wrong"
    assert " ".join(shown.split("(elements)")[0].split()).count("algbw") == 1
    for word in (*heading.split(), "wire", "ratio", "enc", "dec", "net", "rel.err", "speedup"):
        assert word in shown


def case_compare(hosts: Nodes | None = None, **options: Any) -> list[CollectiveOutcome]:
    """Ranks say that they are on these hosts. None: every rank is on a host of its own."""
    torch.manual_seed(0)
    options = {"iterations": 1, "warmup": 0, "check": True, "exchanges": ("auto",), **options}
    hosts = hosts or flat(dist.get_world_size())
    with mock.patch.object(collective_turns, "found_hosts", return_value=hosts):
        return compare_collectives(lambda text: None, CollectiveOptions(**options))


# Part of a tile; a tile and a bit; more than a chunk of half a megabyte per rank.
SIZES = (4, 4 * 4100, 4 * 600_000)


@pytest.mark.torch_core
@pytest.mark.parametrize(
    ("op", "ranks"),
    [
        (ALL_REDUCE, 3),
        (REDUCE_SCATTER, 2),
        pytest.param(ALL_REDUCE, 2, marks=pytest.mark.slow),
        pytest.param(REDUCE_SCATTER, 3, marks=pytest.mark.slow),
    ],
)
def test_every_codec_gives_what_its_functions_give(worlds, op: str, ranks: int):
    least = 4 if op == ALL_REDUCE else 16 * ranks
    options = {"names": (*TORCH_DTYPES, *CODECS), "sizes": (least, *SIZES[1:]), "op": op}
    for outcomes in worlds(ranks).run(case_compare, **options):
        assert len(outcomes) == len(SIZES) * (len(TORCH_DTYPES) + len(CODECS))
        for outcome in outcomes:
            assert outcome.wrong == 0, outcome
            assert outcome.wire_bytes == outcome.interface_formula > 0
            # Sums are exact; a mean is once rounded, to 2^-24, unless the number of ranks is 2.
            if outcome.name in TORCH_DTYPES or outcome.name == "exact":
                assert outcome.relative_error <= 2.0**-24


@pytest.mark.parametrize(
    "members",
    [((0, 1), (2, 3)), ((0, 2), (1,)), pytest.param((range(5), (5,)), marks=pytest.mark.slow)],
)
def test_both_exchanges_give_and_send_what_their_formulas_say(
    worlds, members: tuple[tuple[int, ...], ...]
) -> None:
    hosts = Nodes(tuple(map(tuple, members)))
    names, exchanges = ("q4",), ("flat", "two-level")
    # The last has several chunks, as a rank sends at most 2 MB of gradient to a sibling at once, or
    # less where siblings are many.
    sizes = (*SIZES, 6 << 20)
    options = {"names": names, "exchanges": exchanges, "sizes": sizes, "hosts": hosts}
    for outcomes in worlds(hosts.world_size).run(case_compare, **options):
        asked = [(outcome.name, outcome.exchange) for outcome in outcomes]
        assert asked == len(sizes) * list(product(names, exchanges))
        for one in outcomes:
            assert one.wrong == 0, one
            layout = Layout(
                [Parameter("gradient", one.num_elements)],
                one.name,
                hosts.world_size,
                rules=(("*", one.name),),  # however short it is
            )
            sent = [
                wire_bytes_per_step(layout, [[0]], rank)
                if one.exchange == "flat"
                else two_level_bytes_per_step(layout, hosts.members, [[0]], rank)[0]
                for rank in range(hosts.world_size)
            ]
            assert one.wire_bytes == max(sent)
            assert one.interface_formula <= sum(sent)


def test_one_rank_keeps_all(worlds) -> None:
    names = ("torch:bf16", "q4")
    (outcomes,) = worlds(1).run(case_compare, names=names, sizes=(4000,), op=REDUCE_SCATTER)
    for outcome in outcomes:
        assert (outcome.wrong, outcome.wire_bytes, outcome.num_elements) == (0, 0, 1000)
        assert outcome.relative_error == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"sizes": (4000,), "exchanges": ("two-level",)},
            "--exchange two-level: every rank is alone on its host.*--ranks-per-host",
        ),
        (
            {"sizes": (28,), "op": REDUCE_SCATTER},
            "28 bytes are too few for --op reduce_scatter: each of 2 ranks gets a part of at least "
            "16 bytes; begin with -b 32 or more$",
        ),
    ],
)
def test_what_these_ranks_cannot_do_is_refused(world_of_2: World, options, said: str) -> None:
    for outcome in world_of_2.run(case_refused, options=options):
        assert outcome.error == "ConfigError"
        assert re.match(said, outcome.text, re.DOTALL)


def case_refused(options: dict[str, Any]) -> Outcome:
    return attempt(lambda: case_compare(names=("q4",), **options))


def case_compare_on_device(**options: Any) -> list[CollectiveOutcome]:
    import fake_device

    place = (fake_device.DEVICE, fake_device.group("streamed"))
    with mock.patch.object(collective_turns, "place_of_rank", return_value=place):
        outcomes = case_compare(device="fake", **options)
    assert fake_device.machine.races() == []
    return outcomes


def test_a_device_gives_what_the_functions_give(device_worlds):
    names = ("torch:fp32", "torch:bf16", "exact", "q4")
    for outcomes in device_worlds(2).run(case_compare_on_device, names=names, sizes=SIZES[:2]):
        assert [outcome.name for outcome in outcomes] == 2 * list(names)
        for outcome in outcomes:
            assert outcome.wrong == 0, outcome
            # On a device the commit of a step is sent with the next one.
            commit = 0 if outcome.name in TORCH_DTYPES else _native.COMMIT_BYTES
            assert outcome.wire_bytes == outcome.interface_formula - commit > 0
            assert not outcome.phase_ms  # the host only enqueues


def case_damaged(name: str, op: str, damaging: list[int]) -> list[CollectiveOutcome]:
    """One bit of one element is wrong, on each of these ranks, in what is its own in any case."""
    original = _native.HostEngine.all_reduce
    own = {each: getattr(dist, each) for each in ("all_reduce", "reduce_scatter_tensor")}

    def damage(gradient: torch.Tensor) -> None:
        if dist.get_rank() in damaging:
            flat = gradient.view(torch.int16 if gradient.itemsize == 2 else torch.int32)
            flat[-7 if dist.get_rank() else 7] ^= 1

    class Engine:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            self.engine = _Original(*arguments, **options)
            self.stats = self.engine.stats

        def all_reduce(self, gradient: torch.Tensor) -> None:
            original(self.engine, gradient)
            damage(gradient)

    def damaged(run: Callable[..., None], tensor: torch.Tensor, *rest: Any, **options: Any) -> None:
        run(tensor, *rest, **options)
        if tensor.is_floating_point() and tensor.numel() in (500, 1000):
            damage(tensor)

    _Original = _native.HostEngine
    try:
        _native.HostEngine = Engine
        for each, run in own.items():
            setattr(dist, each, partial(damaged, run))
        return case_compare(names=(name,), sizes=(4000,), op=op)
    finally:
        _native.HostEngine = _Original
        for each, run in own.items():
            setattr(dist, each, run)


@pytest.mark.parametrize("op", [ALL_REDUCE, REDUCE_SCATTER])
@pytest.mark.parametrize("name", ["torch:fp32", "torch:bf16", "q4", "exact"])
def test_one_wrong_bit_on_one_rank_is_found(world_of_2: World, name: str, op: str):
    for outcomes in world_of_2.run(case_damaged, name=name, op=op, damaging=[1]):
        assert [outcome.wrong for outcome in outcomes] == [1]


@pytest.mark.parametrize(("op", "wrong"), [(ALL_REDUCE, 1), (REDUCE_SCATTER, 2)])
def test_what_is_wrong_in_parts_of_several_ranks_is_added_up(
    world_of_2: World, op: str, wrong: int
):
    for outcomes in world_of_2.run(case_damaged, name="exact", op=op, damaging=[0, 1]):
        assert [outcome.wrong for outcome in outcomes] == [wrong]


def outcome(name: str, seconds: list[float], wrong: int | None = 0) -> CollectiveOutcome:
    return CollectiveOutcome(name, None, 1 << 20, wrong, 0.0, 1000, True, seconds)


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (3, 1), (None, 0)])
def test_exit_code_says_whether_results_were_wrong(monkeypatch, capsys, wrong, code):
    outcomes = [outcome("torch:fp32", [1.0]), outcome("q4", [1.0], wrong)]
    monkeypatch.setattr(collective, "run_everywhere", lambda *a: a[-1](outcomes, WHERE))
    assert main(["bench", "collective", "--smoke"]) == code
    assert ("N/A" if wrong is None else f" {wrong} ") in capsys.readouterr().out


def test_a_reduce_scatter_is_flat_also_where_ranks_share_hosts(monkeypatch):
    asked = []
    monkeypatch.setattr(collective, "run_everywhere", lambda *a: asked.append(a[2]) or 0)
    for exchange in ([], ["--exchange", "flat", "auto"]):
        assert main(["bench", "collective", "--smoke", "--op", REDUCE_SCATTER, *exchange]) == 0
    assert [(options.op, options.exchanges) for (options,) in asked] == 2 * [
        (REDUCE_SCATTER, ("flat",))
    ]


def test_rows_compare_with_the_fastest_of_the_backends_own():
    seconds = {"torch:fp32": [4.0, 8.0, 40.0], "torch:bf16": [2.0, 6.0, 30.0]}
    outcomes = [outcome(*each) for each in (seconds | {"q4": [1.0, 2.0, 10.0]}).items()]
    options = CollectiveOptions(
        ("torch:fp32",), ("auto",), (4,), iterations=3, warmup=0, check=True
    )
    rows = {row["codec"]: row for row in collective_rows(outcomes, options, WHERE)}
    assert rows["q4"]["speedup"] == 3.0
    assert rows["torch:fp32"]["speedup"] == 0.75
    assert rows["q4"]["time"] == 2e6
    assert rows["q4"]["busbw"] == pytest.approx(rows["q4"]["algbw"] * 1.5)
    assert rows["q4"]["ratio"] == pytest.approx((1 << 22) * 1.5 / 1000)


def test_rows_of_a_reduce_scatter_are_those_of_nccl_tests():
    outcomes = [outcome("torch:fp32", [2.0]), outcome("q4", [1.0])]
    options = CollectiveOptions(
        ("torch:fp32",), ("flat",), (4,), iterations=1, warmup=0, check=True, op=REDUCE_SCATTER
    )
    rows = collective_rows(outcomes, options, WHERE)
    row = rows[1]
    assert (row["op"], row["size"], row["count"]) == (REDUCE_SCATTER, 1 << 22, 1 << 18)
    assert row["algbw"] == pytest.approx((1 << 22) / 1e9)
    assert row["busbw"] == pytest.approx(row["algbw"] * 0.75)
    assert row["ratio"] == pytest.approx((1 << 22) * 0.75 / 1000)
    table = collective_table(rows)
    assert table.title.startswith("gradferry bench collective --op reduce_scatter: 4 ranks")
    notes = " ".join(table.notes)
    assert "busbw: size / time * (W-1) / W," in notes
    assert "all-reduce" not in notes


def test_sizes_are_read_as_nccl_tests_reads_them():
    sizes = {"4": 4, "7": 4, "64K": 1 << 16, "2m": 1 << 21, "1G": 1 << 30}
    assert {text: parse_size("-b", text) for text in sizes} == sizes
    for text in ("", "3", "1T", "x", "-4", "1.5M"):
        with pytest.raises(ConfigError, match="-b"):
            parse_size("-b", text)
