"""Tasks, hook names, and the ranks that a command starts for itself."""

from __future__ import annotations

import gzip
import multiprocessing
import os
import shutil
import signal
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradferry.core.config import make_config
from gradferry.ddp.auto import chosen_by
from gradferry.errors import ConfigError, PeerError, StateError
from gradferry.fsdp.model import Shard
from gradferry.fsdp.state import REDUCE_SCATTER, REPLICAS
from gradferry_lab.ranks.launch import run_ranks, run_worlds
from gradferry_lab.workloads import TASKS, corpus, load_task
from gradferry_lab.workloads.convex import (
    NUM_WORKERS,
    gap_batch,
    load_convex,
    lowest_loss,
    make_problem,
    optimum,
    squared_error,
)
from gradferry_lab.workloads.hook_names import TORCH_HOOKS, check_hook
from gradferry_lab.workloads.hooks import (
    _powersgd_elements,
    apply_hook,
    steps_until_steady,
    timed_hooks,
)
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.parallel import FSDP
from gradferry_lab.workloads.sharded_bytes import Exchange
from gradferry_lab.workloads.text import load_text
from gradferry_lab.workloads.training import Training, check_size, train
from gradferry_lab.workloads.vision import load_vision, read_idx
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World

SLOW = ("gpt2_small",)  # half a minute


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in sorted(TASKS)
    ],
)
def task(request):
    if request.param in ("vision", "digits"):
        pytest.importorskip("sklearn")
    if request.param == "vision":
        return load_vision(Path("/nonexistent"))
    return load_task(request.param)


def test_task_draws_the_same_batches_for_the_same_seed(task):
    one, other = (task.draw(torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(one[0]) == len(one[1]) == task.global_batch


SIZES = {
    "text": (500e3, 1e6),
    "tiny_text": (400e3, 500e3),
    "text_10m": (10e6, 11e6),
    "gpt2_small": (124e6, 125e6),
    "digits": (20e3, 30e3),
}


def test_task_model_has_its_size_and_starts_near_a_uniform_guess(task):
    torch.manual_seed(0)
    model = task.build_model()
    least, most = SIZES.get(task.name, (0, 1e6))
    assert least <= sum(p.numel() for p in model.parameters()) <= most
    if task.name == "convex":  # a regression has no guesses
        return
    loss = task.mean_loss(model, task.validation[0])
    classes = model(task.validation[0][0]).shape[-1]
    assert loss.item() == pytest.approx(torch.tensor(classes).log().item(), rel=0.1)


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    task = load_task("tiny_text")
    model = task.build_model()
    optimizer = make_optimizer("Muon", task, model, None)
    hidden, rest = optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken = {names[parameter] for parameter in hidden["params"]}
    assert taken == {n for p, n in names.items() if n.startswith("blocks") and p.dim() == 2}
    assert {names[p] for p in rest["params"]} == set(names.values()) - taken
    task.mean_loss(model, task.validation[0]).backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert sum(moved) > len(moved) // 2  # behind outputs that are 0 at first, gradients are, too
    with pytest.raises(ConfigError, match="Muon is for the tasks text"):
        make_optimizer("Muon", task, nn.Linear(3, 2), None)


def test_text_targets_are_the_bytes_that_follow_and_its_batches_have_limits():
    inputs, targets = load_text().draw(torch.Generator().manual_seed(0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for steps, ranks in ((2, 2), (10, 0), (10, 17)):
        with pytest.raises(ConfigError):
            check_size(load_text(), steps, ranks)


def test_text_validation_files_are_not_trained_on(monkeypatch):
    files = [bytes([i]) * 30_000 for i in range(10)]
    monkeypatch.setattr("gradferry_lab.workloads.text.source_files", lambda: files)
    small = load_text()
    assert {int(target.unique()) for _, target in small.validation} == {9}
    drawn, _ = small.draw(torch.Generator().manual_seed(0))
    assert 9 not in drawn


def test_corpus_is_in_the_order_of_paths_whatever_the_folder_says(monkeypatch):
    files = corpus.source_files()
    assert (len(files), sum(map(len, files))) == (456, 10_234_632)
    glob = Path.glob
    monkeypatch.setattr(Path, "glob", lambda *of: reversed(list(glob(*of))))
    assert corpus.source_files() == files


@pytest.mark.parametrize("change", ["missing", "version", "byte", "file"])
def test_another_text_says_what_was_found_and_what_to_install(tmp_path, monkeypatch, change):
    pip = r"pip install sympy==1\.14\.0"
    if change == "missing":
        monkeypatch.setattr(corpus.util, "find_spec", lambda _: None)
        message = f"no sympy: run `{pip}`"
    else:
        source = Path(corpus.util.find_spec("sympy").origin).parent
        copy = tmp_path / "sympy"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.pyc", "tests", "physics"))
        spec = SimpleNamespace(origin=str(copy / "__init__.py"))
        monkeypatch.setattr(corpus.util, "find_spec", lambda _: spec)
        if change == "version":
            monkeypatch.setattr(corpus.metadata, "version", lambda _: "1.15.0")
            message = rf"sympy 1\.15\.0 in {copy} with \d+ files of SHA-256 .*: run `{pip}`"
        else:
            shutil.copytree(source / "physics", copy / "physics")
            assert len(corpus.source_files()) == 456
            edited = copy / "core" / ("basic.py" if change == "byte" else "more.py")
            with edited.open("a") as file:
                file.write("\n")
            forced = pip.replace("install", "install --force-reinstall")
            message = rf"sympy 1\.14\.0 in {copy} with \d+ files of SHA-256 .*: run `{forced}`"
    with pytest.raises(ConfigError, match=message):
        load_text()


def write_idx(path: Path, shape: tuple[int, ...], content: bytes) -> None:
    head = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    with gzip.open(path, "wb") as file:
        file.write(head + content)


def test_read_idx_takes_the_first_items(tmp_path):
    write_idx(tmp_path / "x.gz", (3, 2), bytes(range(6)))
    assert read_idx(tmp_path / "x.gz", 2).tolist() == [[0, 1], [2, 3]]
    assert read_idx(tmp_path / "x.gz", 9).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_read_idx_refuses_short_and_foreign_files(tmp_path):
    write_idx(tmp_path / "short.gz", (3, 2), bytes(5))
    with pytest.raises(ConfigError, match="cut short at 5 bytes"):
        read_idx(tmp_path / "short.gz", 3)
    (tmp_path / "foreign.gz").write_bytes(b"no gzip")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_idx(tmp_path / "foreign.gz", 3)
    (tmp_path / "half.gz").write_bytes((tmp_path / "short.gz").read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"half\.gz"):
        read_idx(tmp_path / "half.gz", 3)


def test_vision_reads_fashion_mnist_files(tmp_path):
    for part in ("train", "t10k"):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte.gz", (2, 28, 28), bytes(range(256)) * 7)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte.gz", (2,), bytes([3, 4]))
    vision = load_vision(tmp_path)
    images, labels = vision.validation[0]
    assert images.shape == (2, 1, 28, 28)
    assert labels.tolist() == [3, 4]
    assert "Fashion-MNIST" in vision.source
    assert vision.build_model()(images).shape == (2, 10)


def test_a_task_without_data_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="did you mean 'vision'"):
        load_task("vison")
    with pytest.raises(ConfigError, match=r"task digits needs.*pip install scikit-learn"):
        load_task("digits")
    with pytest.raises(ConfigError, match=r"apt install dataset-fashion-mnist.*scikit-learn"):
        load_vision(tmp_path)


def test_check_hook_accepts_hooks_and_refuses_others_with_a_hint():
    for name in (*TORCH_HOOKS, "q4", "exact", "off"):
        check_hook(name)
    hints = {
        "torch:fp23": "did you mean 'torch:fp32'",
        "qq4": "did you mean 'q4'",
        "torch:powersgd:x": "whole number",
        "torch:powersgd:0": "whole number",
        "torch:powersgd": "did you mean 'torch:powersgd:4'",
        "q4:colour=red": "colour",
        "none": "unknown hook 'none'",  # rulers are for timing alone
        "sync": "unknown hook 'sync'",
    }
    for name, hint in hints.items():
        with pytest.raises(ConfigError, match=hint):
            check_hook(name)
    assert timed_hooks(["q4", "sync"]) == ("none", "q4", "sync")


def test_a_hook_that_chooses_is_steady_once_it_has_tried_its_own_candidates():
    assert steps_until_steady("q4+warmup_steps=100") == steps_until_steady("torch:bf16") == 3
    for options in ({}, {"momentum": 0.9}, {"warmup_steps": 2}):
        name = "+".join(["auto", *(f"{key}={value}" for key, value in options.items())])
        assert steps_until_steady(name) == chosen_by(make_config("auto", options)) + 1
    # Seven candidates or more, with two exchanges, beside three of which one has no exchange.
    assert steps_until_steady("auto+momentum=0.9") > steps_until_steady("auto")


def test_powersgd_sends_factors_of_matrices_only_when_that_halves_them():
    assert _powersgd_elements(torch.Size([128, 512]), 4) == 4 * (128 + 512)
    assert _powersgd_elements(torch.Size([8, 8]), 4) == 64
    assert _powersgd_elements(torch.Size([1000]), 4) == 1000


def sum_of_ranks(emit, start):
    total = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(total)
    emit(f"rank {dist.get_rank()}")
    return total.item()


@pytest.fixture
def no_new_children():
    """Ranks of other tests may live on; those of this one have ended."""
    before = set(multiprocessing.active_children())
    yield
    assert set(multiprocessing.active_children()) <= before


def fail_on_last_rank(emit):
    if dist.get_rank() == dist.get_world_size() - 1:
        raise StateError("no more")
    dist.barrier()


@pytest.mark.usefixtures("no_new_children")
def test_run_worlds_keeps_worlds_apart():
    events = []
    assert run_worlds(sum_of_ranks, [(10,), (20,)], 2, events.append) == [21, 41]
    assert events == ["rank 0", "rank 0"]


def die_in_second_world(emit, world):
    if world == 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if world == 0:
        signal.pause()  # until all worlds are ended


@pytest.mark.usefixtures("no_new_children")
def test_run_worlds_ends_all_when_a_rank_dies():
    with pytest.raises(PeerError, match="rank 1 was killed by signal 9"):
        run_worlds(die_in_second_world, [(0,), (1,)], 2, print)


@pytest.mark.usefixtures("no_new_children")
def test_run_ranks_shows_the_error_of_a_rank_as_it_is():
    with pytest.raises(StateError, match="no more"):
        run_ranks(fail_on_last_rank, (), 2, print)


def case_sync() -> dict[str, Any]:
    """Two passes, the second under no_sync(): rank 1 comes late to the first."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = apply_hook(ddp, "sync")
    reduced: list[int] = []
    all_reduce = dist.all_reduce

    def counted(tensor: torch.Tensor, **options: Any) -> Any:
        reduced.append(tensor.numel())
        return all_reduce(tensor, **options)

    batch = torch.full((2, 50), 1.0 + dist.get_rank())
    own = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
    dist.barrier()
    dist.all_reduce = counted
    try:
        loss = ddp(batch).sum()
        time.sleep(0.2 * dist.get_rank())
        begun = time.monotonic()
        loss.backward()
        ended = time.monotonic()
        kept = [torch.equal(p.grad, g) for p, g in zip(model.parameters(), own, strict=True)]
        with ddp.no_sync():
            ddp(batch).sum().backward()
    finally:
        dist.all_reduce = all_reduce
    sent = handle.wire_bytes(1), handle.formula_bytes(), handle.measured
    assert handle.bytes_to_other_hosts([0, 1]) == [4, 4]
    assert handle.bytes_to_other_hosts([0, 0]) == [0, 0]
    return {"begun": begun, "ended": ended, "kept": kept, "reduced": reduced, "sent": sent}


@pytest.mark.torch_core
def test_sync_waits_for_all_ranks_once_per_step_and_leaves_gradients_alone(world_of_2: World):
    answers = world_of_2.run(case_sync)
    # Both ranks have one clock. The pass ends on no rank before it has begun on every other.
    latest = max(answer["begun"] for answer in answers)
    for answer in answers:
        assert answer["ended"] >= latest
        assert all(answer["kept"])
        assert answer["reduced"] == [1]
        assert answer["sent"] == (4, 4, False)


def test_bytes_to_other_hosts_are_those_within_groups():
    weight = Shard("weight", torch.nn.Parameter(torch.empty(10)), torch.Size((10,)), torch.float32)
    hosts, bucket = (0, 0, 1, 1), [(weight, None)]
    between_replicas = Exchange(REPLICAS, None, [(0, 2), (1, 3)], lambda: [bucket])
    assert between_replicas.sent(hosts) == [40, 40, 40, 40]  # 2 * (2 - 1) / 2 of 40 bytes
    within_one = Exchange(REDUCE_SCATTER, None, [range(4)], lambda: [bucket])
    assert within_one.sent(hosts) == [0, 30, 0, 30]  # 3/4, in a ring


def case_train_in_turns() -> None:
    task, hooks = load_task("digits"), ("torch:fp32", "q4", "sign1+momentum=0.8")
    alone = [train(task, hook, steps=3, seed=0) for hook in hooks]
    trainings = [Training(task, hook, steps=3, seed=0) for hook in hooks]
    for _ in range(3):
        for training in trainings:
            training.step()
    for one, training in zip(alone, trainings, strict=True):
        other = training.finish()
        assert (one.losses, one.final_loss) == (other.losses, other.final_loss)
        assert one.cumulative_wire_bytes == other.cumulative_wire_bytes


def test_trainings_that_take_turns_end_as_each_alone(world_of_2: World):
    pytest.importorskip("sklearn")
    world_of_2.run(case_train_in_turns)


def case_train(parallel: str, hooks: list[str]) -> list[Any]:
    task = load_task("tiny_text")
    return [train(task, hook, steps=3, seed=0, parallel=parallel) for hook in hooks]


def test_sharded_training_is_that_of_ddp(worlds: Callable[[int], World]):
    (ddp,), *_ = worlds(4).run(case_train, parallel="ddp", hooks=["torch:fp32"])
    (native, off, q4), *_ = worlds(4).run(
        case_train, parallel="hsdp", hooks=["torch:fp32", "off", "q4"]
    )
    # Two shards are added and two replicas, which has one order, and 2 divides exactly.
    assert native.losses == off.losses
    assert native.final_loss == off.final_loss
    # Gradients differ by roundings, 2^-24, which Adam makes steps of as large as others only where
    # a gradient is nothing but rounding.
    assert native.initial_loss == ddp.initial_loss
    assert native.final_loss == pytest.approx(ddp.final_loss, rel=1e-4)
    # Two replicas of half the parameters each, padded, send a third of what four whole models do.
    assert native.wire_bytes_per_step == pytest.approx(ddp.wire_bytes_per_step / 3, rel=0.01)
    assert q4.measured
    assert q4.wire_bytes_per_step == q4.wire_bytes_formula
    assert 6 < q4.fp32_bytes / q4.wire_bytes_formula < 7.5  # exempt parameters and headers


def case_train_as_gathered() -> list[float]:
    training = Training(load_task("tiny_text"), "off+all_gather=q4", steps=3, seed=0, parallel=FSDP)
    for _ in range(3):
        training.step()
    losses = [training.validate_as_gathered().loss]
    with training.state.exact_gathers():
        losses.append(training.validate_as_gathered().loss)
    run = training.finish()
    predictions = sum(targets.numel() for _, targets in load_task("tiny_text").validation)
    return [2 * loss / predictions for loss in losses] + [run.gathered_loss, run.final_loss]


def test_exact_gathers_give_the_loss_of_what_optimizers_step(world_of_2: World):
    answers = world_of_2.run(case_train_as_gathered)
    as_gathered, exact = (sum(part) / 2 for part in zip(*(a[:2] for a in answers), strict=True))
    for _, _, gathered_loss, final_loss in answers:
        assert as_gathered == pytest.approx(gathered_loss, rel=1e-12)
        assert exact == pytest.approx(final_loss, rel=1e-12)  # the same numbers, in the same order
        assert abs(gathered_loss / final_loss - 1) > 1e-6


# --- the convex task: one optimum, and gaps to it where fp32 cannot subtract ----------------------


@pytest.fixture(scope="module")
def problem():
    return make_problem()


def mean_loss(batch, weights: torch.Tensor) -> float:
    inputs, targets = (part.double() for part in batch)
    return squared_error(inputs @ weights, targets).item() / len(inputs)


def test_optimum_has_no_gradient_but_workers_do(problem):
    inputs, targets = (part.double() for part in problem)
    errors = inputs @ optimum(problem) - targets
    gradients = [
        inputs[worker::NUM_WORKERS].T @ errors[worker::NUM_WORKERS] for worker in range(NUM_WORKERS)
    ]
    # Solved in fp64: condition number of X'X below 10, sums of 512 products.
    assert torch.stack(gradients).sum(0).norm() < 1e-9 * gradients[0].norm()
    at_zero = inputs.T @ targets / NUM_WORKERS
    for gradient in gradients:
        assert 0.01 < gradient.norm() / at_zero.norm() < 0.1


def test_gap_batch_measures_the_loss_above_the_lowest(problem):
    zero = torch.zeros(64, 256, dtype=torch.float64)
    assert mean_loss(gap_batch(problem), zero) == pytest.approx(1, rel=1e-5)
    # Both sides in fp64, from batches rounded to fp32 (2^-24 relative per element).
    generator = torch.Generator().manual_seed(1)
    for size in (1.0, 1e-2, 1e-4):
        direction = torch.randn(64, 256, generator=generator, dtype=torch.float64)
        weights = optimum(problem) + size / 128 * direction
        gap = mean_loss(problem, weights) - lowest_loss(problem)
        assert mean_loss(gap_batch(problem), weights) == pytest.approx(gap, rel=1e-3)


def test_gap_batch_sees_gaps_that_fp32_losses_cannot(problem):
    # A shift of 1e-7 of the weights: the loss changes by 1e-14, fp32 resolves 1e-10 of it.
    weights = (optimum(problem) * (1 + 1e-7)).double()
    assert mean_loss(gap_batch(problem), weights) == pytest.approx(1e-14, rel=0.5)


def test_seed_changes_where_training_starts_and_nothing_else():
    task = load_convex()
    starts = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = task.build_model()
        starts.append(model.linear.weight.detach().clone())
        # Random weights as large as the optimum, independent of it: the gap about doubles.
        assert task.mean_loss(model, task.validation[0]).item() == pytest.approx(2, rel=0.2)
    assert not torch.equal(*starts)
    drawn = [task.draw(torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
