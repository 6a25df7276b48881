"""`gradferry bench train`: what it reports, on models too small for its figures to mean much."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import own_models
import pytest
import torch
from gradferry.errors import ConfigError
from gradferry_lab.bench.train import train_rows, train_table
from gradferry_lab.bench.train_turns import TrainOptions, TrainOutcome, run_train
from gradferry_lab.cli import main
from gradferry_lab.ranks.hosts import Where
from gradferry_lab.workloads.models import MODELS
from gradferry_lab.workloads.parallel import SHARDED_HOOKS
from world import World

FIRST_KEYS = [
    "hook", "exchange", "chosen", "link", "ranks", "bucket_cap_mb", "ms_median", "ms_min", "ms_max",
    "ratio_to_none", "wire_bytes", "exposed_ms",
]  # fmt: skip
FURTHER_KEYS = {
    "ratio_to_none_low", "ratio_to_none_high", "ratio_to_sync", "ratio_to_sync_low",
    "ratio_to_sync_high", "speedup", "speedup_low", "speedup_high",
    "interval_coverage",
    "wire_bytes_measured", "wire_bytes_formula", "interface_bytes", "interface_bytes_formula",
    "hosts", "ranks_per_host", "until_loss", "steps_to_loss", "seconds_to_loss", "encode_ms",
    "network_ms", "reduce_ms", "decode_ms", "cpu_ms", "model", "device", "seed", "round_ms",
    "trial_ms", "last_step", "parallel",
}  # fmt: skip

SMOKE_HOOKS = ["none", "sync", "torch:fp16", "q4"]


def check_row(row: dict, rounds: int) -> None:
    assert list(row)[: len(FIRST_KEYS)] == FIRST_KEYS
    assert set(row) == {*FIRST_KEYS, *FURTHER_KEYS}
    assert len(row["round_ms"]) == rounds
    assert row["ms_min"] == min(row["round_ms"]) > 0
    assert row["ms_max"] == max(row["round_ms"])
    assert row["ms_min"] <= row["ms_median"] <= row["ms_max"]
    for ratio in ("ratio_to_none", "ratio_to_sync"):
        assert row[f"{ratio}_low"] <= row[ratio] <= row[f"{ratio}_high"]
    assert row["wire_bytes"] == row["wire_bytes_formula"]
    assert row["cpu_ms"]["main"] > 0
    assert row["hook"] != "q4" or row["cpu_ms"]["gf-finish"] > 0
    step = row["last_step"]
    assert 0 < step["backward_ms"] < step["backward_end_ms"] < step["end_ms"]
    assert bool(step["buckets"]) == (row["hook"] in ("torch:fp32", "torch:fp16", "q4"))
    for bucket in step["buckets"]:
        if row["hook"] == "q4":
            assert bucket["begin_ms"] < bucket["encoded_ms"] < step["backward_end_ms"]
        assert step["backward_ms"] < bucket["begin_ms"]
        assert bucket["begin_ms"] < bucket["complete_ms"] < step["backward_end_ms"]


SMOKE = ["bench", "train", "--smoke"]


@pytest.mark.slow
def test_train_smoke_compares_hooks_on_loopback(rows_of, capsys):
    rows = rows_of(*SMOKE)
    assert [row["hook"] for row in rows] == SMOKE_HOOKS
    for row in rows:
        check_row(row, rounds=2)
        assert (row["link"], row["ranks"], row["model"]) == ("loopback", 2, "small")
        assert (row["parallel"], row["hosts"], row["ranks_per_host"]) == ("ddp", 1, 2)
        assert set(row["trial_ms"]) == {"4", "25"}
        assert row["trial_ms"][f"{row['bucket_cap_mb']:g}"] == min(row["trial_ms"].values())
        # Nothing leaves the host.
        assert (row["interface_bytes"], row["interface_bytes_formula"]) == (None, 0)
        assert row["wire_bytes_measured"] is (row["hook"] == "q4")
        for phase in ("encode_ms", "network_ms", "reduce_ms", "decode_ms"):
            assert (row[phase] is not None) == (row["hook"] == "q4")
            assert row[phase] is None or 0 < row[phase] < row["ms_max"]
    none, sync, fp16, q4 = rows
    assert (none["ratio_to_none"], none["exposed_ms"], none["wire_bytes"]) == (1, 0, 0)
    assert (sync["ratio_to_sync"], sync["wire_bytes"]) == (1, 4)  # one fp32 element
    assert fp16["speedup"] == 1  # it is the best of PyTorch's own here
    assert 3.5 < fp16["wire_bytes"] / q4["wire_bytes"] < 3.75  # 16 bits against 4.3 and exempt ones
    assert {row["interval_coverage"] for row in rows} == {0.5}
    shown = capsys.readouterr().out
    assert "gradferry bench train: small, 2 ranks, link loopback, 2 rounds" in shown


@pytest.mark.usefixtures("namespaces_allowed")
@pytest.mark.parametrize("siblings", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_train_counts_what_leaves_each_host_of_a_link(siblings, rows_of, capfd):
    rows = rows_of(*SMOKE, "--link", "1gbit", "--ranks-per-host", str(siblings))
    assert [row["hook"] for row in rows] == SMOKE_HOOKS
    for row in rows:
        check_row(row, rounds=2)
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


@pytest.mark.parametrize("link", [[], pytest.param(["--link", "unshaped"], marks=pytest.mark.slow)])
def test_train_shows_a_ranks_own_error(link, capfd, monkeypatch, request):
    if link:
        request.getfixturevalue("namespaces_allowed")
    monkeypatch.chdir(Path(own_models.__file__).parent)
    command = ["bench", "train", "--hooks", "q4", "--model", "own_models:fails", *link]
    assert main(command) == 1
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


def test_averages_of_replicas_are_compared(worlds):
    hooks = ("none", "torch:bf16", "q4", "q4+reduce_scatter=q4+all_gather=q8")
    for none, native, q4, all_three in worlds(4).run(case_sharded, parallel="hsdp", hooks=hooks):
        for outcome in (none, native, q4, all_three):
            assert (outcome.bucket_cap_mb, outcome.trial_ms) == (None, {})
            assert outcome.wire_bytes == outcome.wire_formula
        assert none.wire_bytes == 0
        assert q4.wire_measured
        assert 6 < native.wire_bytes / q4.wire_bytes < 7.5  # gradients are averaged in fp32
        assert all_three.wire_bytes == q4.wire_bytes  # to other replicas
        # One bucket for every block, and one for what is left.
        assert len(q4.last_step.buckets) == 5
        names = [bucket["exchange"] for bucket in all_three.last_step.buckets]
        assert {name: names.count(name) for name in names} == {
            "replicas": 5, "reduce_scatter": 5, "all_gather": 9,
        }  # fmt: skip


def test_gathers_and_the_reduce_scatter_are_compared(worlds):
    hooks = ("none", *SHARDED_HOOKS["fsdp"])
    elements = sum(p.numel() for p in MODELS["small"](2).build_model().parameters())
    for outcomes in worlds(2).run(case_sharded, parallel="fsdp", hooks=hooks):
        for outcome in outcomes:
            assert outcome.wire_bytes == outcome.wire_formula
        sent = {outcome.hook: outcome.wire_bytes for outcome in outcomes}
        assert sent["none"] == 0
        # Half of the elements to the other rank; what is left beside the blocks is gathered once.
        gathered = 2 * (sent["torch:fp32"] - sent["torch:bf16"])
        scattered = sent["torch:fp32"] - gathered
        assert scattered == pytest.approx(2 * elements, rel=0.01)
        assert 1.8 * scattered < gathered < 2 * scattered
        # Exempt parameters are sent as they are.
        assert sent["q4+all_gather=off"] - gathered == pytest.approx(0.14 * scattered, rel=0.1)
        assert sent["off+all_gather=bf16"] == pytest.approx(sent["torch:bf16"], rel=0.01)
        in_q8 = sent["q4"] - (sent["q4+all_gather=off"] - gathered)
        assert in_q8 == pytest.approx(0.26 * gathered, rel=0.05)
        assert sent["off+all_gather=q8"] == scattered + in_q8
        forward = in_q8 - (sent["q4"] - sent["q4+keep_gathered=True"])
        assert forward == pytest.approx(0.26 * scattered, rel=0.05)
        measured = [outcome.hook for outcome in outcomes if outcome.wire_measured]
        assert measured == ["q4", "q4+keep_gathered=True"]


def case_with_small_matrices() -> Any:
    # The smallest have one size: 9.4 % of all elements.
    with mock.patch("gradferry.core.config.SMALL_PERCENT", 10):
        return case_sharded(parallel="hsdp", hooks=("sign1",))


def test_the_formula_knows_small_matrices(worlds):
    (without,) = worlds(4).run(case_sharded, parallel="hsdp", hooks=("sign1",))[0]
    for (outcome,) in worlds(4).run(case_with_small_matrices):
        assert outcome.wire_bytes == outcome.wire_formula > 1.1 * without.wire_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces_allowed")
def test_what_a_sharded_model_sends_leaves_its_hosts(rows_of):
    rows = rows_of(*SMOKE, "--parallel", "fsdp", "--link", "1Gb/s")
    assert [row["hook"] for row in rows] == ["none", "q4"]
    for row in rows:
        assert row["interface_bytes_formula"] == row["wire_bytes_formula"]
        assert row["interface_bytes"] < 1.05 * row["interface_bytes_formula"] + 16384
        assert row["interface_bytes"] >= row["interface_bytes_formula"]


@pytest.mark.slow
def test_train_smoke_runs_under_hsdp(rows_of, capsys):
    rows = rows_of(*SMOKE, "--parallel", "hsdp", "--ranks", "4")
    assert [(row["hook"], row["parallel"], row["hosts"]) for row in rows] == [
        (hook, "hsdp", 1) for hook in ("none", "q4")
    ]
    assert "small under hsdp, 4 ranks, link loopback" in capsys.readouterr().out


@pytest.mark.parametrize("ranks", [1, 3])
def test_replicas_must_have_equally_many_ranks(worlds, ranks: int):
    options = {"model": "small", "hooks": ("q4",), "parallel": "hsdp", "bucket_caps_mb": ()}
    for answer in worlds(ranks).run(case_contest, **options):
        assert isinstance(answer, ConfigError)
        wanted = "are not replicas of equally many ranks; start as many ranks on every host"
        assert wanted in str(answer)


def test_training_until_a_loss_says_how_long_it_takes(world_of_2: World):
    # A transformer that knows nothing has ln 256 = 5.5; 10 steps take it well below 5.
    answers = world_of_2.run(
        case_contest, model="small", hooks=("none", "sync", "q4"), until_loss=5.0, most_steps=10
    )
    for none, sync, q4 in answers:
        assert none.reached is None
        assert sync.reached is None  # it does not train either
        assert q4.reached.steps == 10
        assert q4.reached.seconds > 0
    assert answers[0][2].reached == answers[1][2].reached
    never = world_of_2.run(case_contest, model="small", hooks=("q4",), until_loss=0.0, most_steps=2)
    assert [outcome.reached for (outcome,) in never] == [None, None]


@pytest.mark.parametrize("name", ["tensors", "words"])
def test_a_model_of_the_users_is_trained(world_of_2: World, name):
    momentum = "sign1+momentum=0.9+warmup_steps=100"
    plain = "sign1+momentum=0.8"  # AdamW behind it, and no warm-up
    hooks = ("none", "torch:powersgd:2", "sign1+error_feedback=none", momentum, plain)
    answers = world_of_2.run(case_contest, model=f"own_models:{name}", hooks=hooks, rounds=3)
    for outcomes in answers:
        assert [outcome.hook for outcome in outcomes] == list(hooks)
        for outcome in outcomes:
            assert len(outcome.round_ms) == 3
            assert outcome.trial_ms == {}  # one bucket size needs no trial
            assert outcome.wire_bytes == outcome.wire_formula
    # Times are of the slowest rank, so the same on all.
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        ("scores", {}, r"own_models:scores: the model returned Tensor.*must return its loss"),
        ("bare", {}, r"own_models:bare: a batch is a Tensor.*must be a tuple.*\(x,\)"),
        ("nothing", {}, r"own_models:nothing returned None; it must be \(model, batch_fn\)"),
        ("tensors", {"until_loss": 1.0}, "own_models:tensors has no validation data"),
    ],
)
def test_a_model_that_cannot_be_used_is_a_clear_error(world_of_2: World, model, options, message):
    for answer in world_of_2.run(
        case_contest, model=f"own_models:{model}", hooks=("none",), **options
    ):
        assert isinstance(answer, ConfigError)
        assert re.search(message, str(answer)), answer


def test_rows_compare_within_rounds():
    outcomes = [
        TrainOutcome("none", 25, {}, [100.0, 200.0, 400.0]),
        TrainOutcome("sync", 25, {}, [110.0, 200.0, 500.0]),
        TrainOutcome("torch:fp32", 25, {}, [200.0, 500.0, 800.0]),
        TrainOutcome("torch:fp16", 25, {}, [150.0, 300.0, 600.0]),
        TrainOutcome("q4", 4, {}, [110.0, 220.0, 440.0]),
    ]
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


@pytest.mark.parametrize(("rounds", "heading"), [(2, "(50 %)"), (20, "(95 %)")])
def test_the_heading_of_an_interval_is_what_its_rounds_give(rounds, heading):
    times = [100.0 + n for n in range(rounds)]
    outcomes = [TrainOutcome("none", 25, {}, times), TrainOutcome("q4", 4, {}, times)]
    options = TrainOptions("m", ("none",), (25.0,), rounds=rounds, steps=1, seed=0)
    table = train_table(train_rows(outcomes, options, Where("1gbit", 2, 2, 1)))
    titles = [column.title for column in table.columns if "%" in column.title]
    assert titles == [heading, heading]  # of the ratio to `none` and of the speed-up
    assert "ratio to\nsync" not in [column.title for column in table.columns]
    assert f"by {rounds} rounds" in table.notes[0]


@pytest.mark.parametrize(
    ("name", "millions"),
    [("transformer", 19.2), ("vgg", 9.8), ("embedding", 12.9), ("small", 0.87)],
)
def test_models_are_as_large_as_they_say(name, millions):
    task = MODELS[name](2)
    model = task.build_model()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(1e6 * millions, rel=0.03)
    inputs, targets = task.draw(torch.Generator().manual_seed(0))
    assert len(inputs) == len(targets) == task.global_batch
    assert torch.equal(inputs, task.draw(torch.Generator().manual_seed(0))[0])


@pytest.mark.parametrize("name", [pytest.param("vgg", marks=pytest.mark.slow), "embedding"])
def test_synthetic_tasks_can_be_learned(name):
    task = MODELS[name](4)
    torch.manual_seed(0)
    model = task.build_model()
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.learning_rate)
    for _ in range(25):
        optimizer.zero_grad()
        task.mean_loss(model, task.draw(generator)).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [task.mean_loss(model, batch) for batch in task.validation]
    loss = sum(losses) / len(losses)
    assert loss < 0.95 * torch.tensor(10.0).log()  # what a uniform guess among 10 classes costs


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces_allowed")
def test_train_on_a_link_ends_on_ctrl_c(tmp_path):
    command = [sys.executable, "-m", "gradferry", "bench", "train", "--smoke", "--link", "unshaped"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert "trying buckets" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130
    assert errors == "gradferry: interrupted\n"
