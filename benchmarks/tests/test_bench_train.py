"""`gradferry bench train`: what it reports, on models too small for its figures to mean much."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import own_models
import pytest
from gradferry.errors import ConfigError
from gradferry_lab.bench.train import train_rows
from gradferry_lab.bench.train_turns import TrainOptions, TrainOutcome, run_train
from gradferry_lab.cli import main
from gradferry_lab.ranks.hosts import Where
from gradferry_lab.workloads.models import MODELS
from gradferry_lab.workloads.parallel import SHARDED_HOOKS
from world import World


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.slow
@pytest.mark.parametrize("siblings", [1, 2])
def test_train_counts_what_leaves_each_host_of_a_link(siblings, rows_of, capfd):
    rows = rows_of(
        "bench", "train", "--smoke", "--link", "1gbit", "--ranks-per-host", str(siblings)
    )
    assert [row["hook"] for row in rows] == ["none", "sync", "torch:fp16", "q4"]
    for row in rows:
        assert len(row["round_ms"]) == 2
        assert 0 < row["ms_min"] <= row["ms_median"] <= row["ms_max"]
        for ratio in ("ratio_to_none", "ratio_to_sync"):
            assert row[f"{ratio}_low"] <= row[ratio] <= row[f"{ratio}_high"]
        assert row["wire_bytes"] == row["wire_bytes_formula"]
        assert row["trial_ms"][f"{row['bucket_cap_mb']:g}"] == min(row["trial_ms"].values())
        for phase in ("encode_ms", "network_ms", "reduce_ms", "decode_ms"):
            assert (row[phase] is not None) == (row["hook"] == "q4")
        where = (row["link"], row["ranks"], row["hosts"], row["ranks_per_host"])
        assert where == ("1gbit", 2 * siblings, 2, siblings)
        # Between nodes all that both ranks send with q4 leaves; what one rank sends of a ring.
        share = 2 if siblings == 2 and row["hook"] == "q4" else 1
        formula = row["interface_bytes_formula"]
        assert formula == pytest.approx(share * row["wire_bytes_formula"], rel=0.01)
        # Ethernet, IP and TCP take 66 bytes of 1514 on the wire, less in segments that the kernel
        # leaves whole, and a barrier takes under 4 kB. What the ranks of a host send to each other
        # is not counted: as much as leaves in a ring, more than half of it between siblings.
        most = 1.03 if siblings == 1 else 1.5 if row["hook"] == "q4" else 2
        barriers = 4096 * (1 if siblings == 1 else 3)
        assert formula <= row["interface_bytes"] < most * formula + barriers
    said = "link 1gbit" if siblings == 1 else "4 ranks on 2 hosts, link 1gbit"
    assert said in capfd.readouterr().out


def test_train_shows_a_ranks_own_error(capfd, monkeypatch):
    monkeypatch.chdir(Path(own_models.__file__).parent)
    assert main(["bench", "train", "--hooks", "q4", "--model", "own_models:fails"]) == 1
    error = capfd.readouterr().err
    assert error.startswith("gradferry: rank 1 failed")
    assert "ArithmeticError: not today" in error


def case_contest(model: str, hooks: tuple[str, ...], **options: Any) -> Any:
    chosen = {"bucket_caps_mb": (25.0,), "rounds": 1, "steps": 1, "seed": 0, **options}
    arguments = TrainOptions(model=model, hooks=hooks, **chosen)
    try:
        return run_train(lambda text: None, arguments)
    except ConfigError as error:
        return error


def case_sharded(parallel: str, hooks: tuple[str, ...]) -> Any:
    return case_contest(model="small", hooks=hooks, parallel=parallel, bucket_caps_mb=())


@pytest.mark.slow
def test_gathers_and_the_reduce_scatter_are_compared(worlds):
    hooks = ("none", *SHARDED_HOOKS["fsdp"])
    elements = sum(p.numel() for p in MODELS["small"](2).build_model().parameters())
    for outcomes in worlds(2).run(case_sharded, parallel="fsdp", hooks=hooks):
        sent = {outcome.hook: outcome.wire_bytes for outcome in outcomes}
        assert sent == {outcome.hook: outcome.wire_formula for outcome in outcomes}
        assert sent["none"] == 0
        # Half of the elements to the other rank; what is left beside the blocks is gathered once.
        gathered = 2 * (sent["torch:fp32"] - sent["torch:bf16"])
        scattered = sent["torch:fp32"] - gathered
        assert scattered == pytest.approx(2 * elements, rel=0.01)
        assert 1.8 * scattered < gathered < 2 * scattered
        # Exempt parameters are sent as they are.
        assert sent["q4+all_gather=off"] - gathered == pytest.approx(0.14 * scattered, rel=0.1)
        assert sent["off+all_gather=q8"] - scattered == pytest.approx(0.26 * gathered, rel=0.05)
        measured = [outcome.hook for outcome in outcomes if outcome.wire_measured]
        assert measured == ["q4", "q4+keep_gathered=True"]


def test_a_model_of_the_users_is_trained(world_of_2: World):
    momentum = "sign1+momentum=0.9+warmup_steps=100"
    plain = "sign1+momentum=0.8"  # AdamW behind it, and no warm-up
    hooks = ("none", "torch:powersgd:2", momentum, plain)
    answers = world_of_2.run(case_contest, model="own_models:words", hooks=hooks, rounds=3)
    for outcome in answers[0]:
        assert len(outcome.round_ms) == 3
        assert outcome.wire_bytes == outcome.wire_formula
    assert answers[0] == answers[1]  # times are of the slowest rank


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("scores", r"own_models:scores: the model returned Tensor.*must return its loss"),
        ("bare", r"own_models:bare: a batch is a Tensor.*must be a tuple.*\(x,\)"),
        ("nothing", r"own_models:nothing returned None; it must be \(model, batch_fn\)"),
    ],
)
def test_a_model_that_cannot_be_used_is_a_clear_error(world_of_2: World, model, message):
    for answer in world_of_2.run(case_contest, model=f"own_models:{model}", hooks=("none",)):
        assert isinstance(answer, ConfigError)
        assert re.search(message, str(answer)), answer


def test_rows_compare_within_rounds():
    times = {"none": [100.0, 200.0, 400.0], "sync": [110.0, 200.0, 500.0],
             "torch:fp32": [200.0, 500.0, 800.0], "torch:fp16": [150.0, 300.0, 600.0],
             "q4": [110.0, 220.0, 440.0]}  # fmt: skip
    outcomes = [TrainOutcome(hook, 25, {}, ms) for hook, ms in times.items()]
    options = TrainOptions("m", ("none",), (25.0,), rounds=3, steps=1, seed=0)
    rows = {row["hook"]: row for row in train_rows(outcomes, options, Where("1gbit", 2, 2, 1))}
    assert rows["q4"]["ratio_to_none"] == pytest.approx(1.1)
    assert rows["q4"]["ratio_to_sync"] == pytest.approx(1)  # of 1, 1.1 and 0.88
    assert rows["q4"]["ratio_to_sync_low"] == pytest.approx(0.88)
    assert rows["q4"]["ratio_to_sync_high"] == pytest.approx(1.1)
    assert rows["sync"]["ratio_to_none"] == pytest.approx(1.1)
    assert rows["q4"]["exposed_ms"] == pytest.approx(20)
    assert rows["q4"]["speedup"] == pytest.approx(600 / 440)
    assert rows["torch:fp32"]["ratio_to_none"] == pytest.approx(2)
    assert rows["torch:fp32"]["speedup"] == pytest.approx(0.75)
