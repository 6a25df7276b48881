"""`gradferry bench collective`: its columns, its flags, and that it finds wrong results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry import _native
from gradferry.core.nodes import Nodes, flat
from gradferry.diagnosis import TORCH_DTYPES
from gradferry_lab.bench import collective, collective_turns
from gradferry_lab.bench.collective_turns import (
    CollectiveOptions,
    CollectiveOutcome,
    compare_collectives,
)
from gradferry_lab.cli import main
from gradferry_lab.ranks.hosts import Where
from reference import Layout, Parameter, two_level_bytes_per_step, wire_bytes_per_step
from world import World

WHERE = Where("1gbit", ranks=4, hosts=4, ranks_per_host=1)


def test_collective_smoke_compares_with_the_backends_own(rows_of, capsys):
    rows = rows_of("bench", "collective", "--smoke", "--wide")
    names = [*TORCH_DTYPES, "q4", _native.canonical_codec("topk")]
    assert [(row["size"], row["codec"]) for row in rows] == [
        (size, name) for size in (1 << 16, 1 << 18) for name in names
    ]
    for row in rows:
        assert row["wrong"] == 0
        assert row["algbw"] == pytest.approx(row["size"] / row["time"] / 1e3)
        assert row["busbw"] == pytest.approx(row["algbw"])  # 2 ranks
        assert row["ratio"] == pytest.approx(row["size"] / row["wire"])  # of 2 ranks
        assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
        codec = row["codec"] not in TORCH_DTYPES
        assert [row[part] is not None for part in ("enc", "dec", "net")] == 3 * [codec]
        assert (row["rel_err"] > 0) == codec
    shown = capsys.readouterr().out
    assert "(50 %)" in shown


def case_compare(hosts: Nodes | None = None, **options: Any) -> list[CollectiveOutcome]:
    """Ranks say that they are on these hosts. None: every rank is on a host of its own."""
    torch.manual_seed(0)
    options = {"iterations": 1, "warmup": 0, "check": True, "exchanges": ("auto",), **options}
    hosts = hosts or flat(dist.get_world_size())
    with mock.patch.object(collective_turns, "found_hosts", return_value=hosts):
        return compare_collectives(lambda text: None, CollectiveOptions(**options))


# Part of a tile; a tile and a bit; more than a chunk of half a megabyte per rank.
SIZES = (4, 4 * 4100, 4 * 600_000)


@pytest.mark.parametrize("members", [((0, 1), (2, 3)), ((0, 2), (1,))])
def test_both_exchanges_give_and_send_what_their_formulas_say(
    worlds, members: tuple[tuple[int, ...], ...]
) -> None:
    hosts = Nodes(members)
    names, exchanges = ("q4", "topk:ratio=0.01,values=q4"), ("flat", "two-level")
    # The last has several chunks, as a rank sends at most 2 MB of gradient to a sibling at once, or
    # less where siblings are many.
    sizes = (*SIZES, 6 << 20)
    options = {"names": names, "exchanges": exchanges, "sizes": sizes, "hosts": hosts}
    for outcomes in worlds(hosts.world_size).run(case_compare, **options):
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
            assert outcome.wire_bytes > 0
            assert not outcome.phase_ms  # the host only enqueues


def case_damaged(name: str) -> list[CollectiveOutcome]:
    """One bit of one element is wrong on rank 1, in what is its own in any case."""

    def damaged(run: Callable[..., None]) -> Callable[..., None]:
        def collective(*arguments: Any, **options: Any) -> None:
            run(*arguments, **options)
            tensor = next(each for each in arguments if isinstance(each, torch.Tensor))
            if dist.get_rank() == 1 and tensor.is_floating_point() and tensor.numel() > 400:
                tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int32)[-7] ^= 1

        return collective

    class Engine:
        def __init__(self, *arguments: Any, **options: Any) -> None:
            engine = host_engine(*arguments, **options)
            self.exchange, self.stats = damaged(engine.exchange), engine.stats

    host_engine = _native.HostEngine
    own = mock.patch.object(dist, "all_reduce", damaged(dist.all_reduce))
    with mock.patch.object(_native, "HostEngine", Engine), own:
        return case_compare(names=(name,), sizes=(4000,))


@pytest.mark.parametrize("name", ["torch:bf16", "q4"])
def test_one_wrong_bit_on_one_rank_is_found(world_of_2: World, name: str):
    for outcomes in world_of_2.run(case_damaged, name=name):
        assert [outcome.wrong for outcome in outcomes] == [1]


def outcome(name: str, seconds: list[float], wrong: int | None = 0) -> CollectiveOutcome:
    return CollectiveOutcome(name, None, 1 << 20, wrong, 0.0, 1000, True, seconds)


@pytest.mark.parametrize(("wrong", "code"), [(0, 0), (3, 1), (None, 0)])
def test_exit_code_says_whether_results_were_wrong(monkeypatch, capsys, wrong, code):
    outcomes = [outcome("torch:fp32", [1.0]), outcome("q4", [1.0], wrong)]
    monkeypatch.setattr(collective, "run_everywhere", lambda *a: a[-1](outcomes, WHERE))
    assert main(["bench", "collective", "--smoke"]) == code
    assert ("N/A" if wrong is None else f" {wrong} ") in capsys.readouterr().out
