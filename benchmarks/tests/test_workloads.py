"""Tasks, hook names, and the ranks that a command starts for itself."""

from __future__ import annotations

import dataclasses
import gzip
import math
import os
import shutil
import signal
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from gradferry.errors import ConfigError, PeerError
from gradferry_lab.ranks.launch import run_worlds
from gradferry_lab.workloads import TASKS, corpus, load_task
from gradferry_lab.workloads.convex import (
    gap_batch,
    lowest_loss,
    make_problem,
    optimum,
    squared_error,
)
from gradferry_lab.workloads.hooks import apply_hook
from gradferry_lab.workloads.optimizers import make_optimizer
from gradferry_lab.workloads.text import GPT2_SMALL, TINY, Transformer, load_text
from gradferry_lab.workloads.training import Progress, Stopped, Training, check_size, train
from gradferry_lab.workloads.vision import load_tiny_vision
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from world import World


@pytest.fixture(scope="module", params=sorted(set(TASKS) - {"gpt2_small"}))  # minutes
def task(request):
    if request.param in ("tiny_vision", "digits"):
        pytest.importorskip("sklearn")
    if request.param == "tiny_vision":
        return load_tiny_vision(Path("/nonexistent"))
    return load_task(request.param)


def test_task_draws_alike_for_a_seed_and_its_model_starts_near_a_uniform_guess(task):
    one, other = (task.draw(torch.Generator().manual_seed(7)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert len(one[0]) == len(one[1]) == task.global_batch
    torch.manual_seed(0)
    model = task.build_model()
    if task.name == "convex":  # a regression has no guesses
        return
    loss = task.mean_loss(model, task.validation[0])
    classes = model(task.validation[0][0]).shape[-1]
    assert loss.item() == pytest.approx(math.log(classes), rel=0.1)


def test_muon_takes_hidden_matrices_and_leaves_the_rest_to_adamw():
    task = load_task("tiny_text")
    model = task.build_model()
    optimizer = make_optimizer("Muon", task, model, None)
    hidden, rest = optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    taken = {names[parameter] for parameter in hidden["params"]}
    assert taken == {n for p, n in names.items() if n.startswith("blocks") and p.dim() == 2}
    assert {names[p] for p in rest["params"]} == set(names.values()) - taken
    with pytest.raises(ConfigError, match="Muon is for the tasks text"):
        make_optimizer("Muon", task, nn.Linear(3, 2), None)


def test_gpt2_small_has_the_matrices_of_gpt_2_and_draws_of_its_vocabulary():
    with torch.device("meta"):
        model = Transformer(GPT2_SMALL)
    matrices = Counter(tuple(p.shape) for p in model.parameters() if p.dim() == 2)
    of_blocks = ((2304, 768), (768, 768), (3072, 768), (768, 3072))
    assert matrices == {(50257, 768): 1, (256, 768): 1, **dict.fromkeys(of_blocks, 12)}
    assert sum(p.numel() for p in model.parameters()) == 123_803_904
    size = dataclasses.replace(TINY, vocabulary=50257)
    inputs, _ = load_text(size).draw(torch.Generator().manual_seed(0))
    assert 256 < inputs.max() < 50257


def test_text_targets_are_the_bytes_that_follow_and_its_batches_have_limits():
    inputs, targets = load_text().draw(torch.Generator().manual_seed(0))
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    for steps, ranks in ((2, 2), (10, 0), (10, 17)):
        with pytest.raises(ConfigError):
            check_size(load_text(), steps, ranks)


@pytest.mark.parametrize("change", ["missing", "edited"])
def test_another_text_says_what_was_found_and_what_to_install(tmp_path, monkeypatch, change):
    spec, message = None, r"no sympy: run `pip install sympy==1\.14\.0`"
    if change == "edited":
        source = Path(corpus.util.find_spec("sympy").origin).parent
        copy = tmp_path / "sympy"
        shutil.copytree(source, copy, ignore=shutil.ignore_patterns("*.pyc", "tests"))
        (copy / "core/more.py").write_text("\n")
        spec = SimpleNamespace(origin=str(copy / "__init__.py"))
        message = rf"sympy 1\.14\.0 in {copy} with 457 files of SHA-256 .*--force-reinstall"
    monkeypatch.setattr(corpus.util, "find_spec", lambda _: spec)
    with pytest.raises(ConfigError, match=message):
        load_text()


def test_vision_reads_fashion_mnist_files(tmp_path):
    for part in ("train", "t10k"):
        for name, shape, content in (
            ("images-idx3", (2, 28, 28), bytes(range(256)) * 7),
            ("labels-idx1", (2,), bytes([3, 4])),
        ):
            head = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
            with gzip.open(tmp_path / f"{part}-{name}-ubyte.gz", "wb") as file:
                file.write(head + content)
    vision = load_tiny_vision(tmp_path)
    images, labels = vision.validation[0]
    assert images.shape == (2, 1, 28, 28)
    assert labels.tolist() == [3, 4]
    assert vision.build_model()(images).shape == (2, 10)


def die_in_second_world(emit, world):
    if world == 1 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if world == 0:
        signal.pause()  # until all worlds are ended


def test_run_worlds_ends_all_when_a_rank_dies():
    with pytest.raises(PeerError, match="rank 1 was killed by signal 9"):
        run_worlds(die_in_second_world, [(0,), (1,)], 2, print)


def case_sync() -> tuple[bool, list[int], tuple[int, int, bool]]:
    """Two passes, the second under no_sync()."""
    model = nn.Sequential(*(nn.Linear(50, 50) for _ in range(4)))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    handle = apply_hook(ddp, "sync")
    batch = torch.full((2, 50), 1.0 + dist.get_rank())
    own = torch.autograd.grad(model(batch).sum(), list(model.parameters()))
    with mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce) as all_reduce:
        ddp(batch).sum().backward()
        kept = all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), own, strict=True))
        with ddp.no_sync():
            ddp(batch).sum().backward()
    reduced = [call.args[0].numel() for call in all_reduce.call_args_list]
    return kept, reduced, (handle.wire_bytes(1), handle.formula_bytes(), handle.measured)


@pytest.mark.torch_core
def test_sync_reduces_one_element_per_step_and_leaves_gradients_alone(world_of_2: World):
    assert world_of_2.run(case_sync) == 2 * [(True, [1], (4, 4, False))]


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


def case_interrupted(folder: str, task: str, hook: str, parallel: str, optimizer: str) -> None:
    """Saved and begun anew after 1, 4 and 5 steps."""
    task = load_task(task)
    how = {"steps": 8, "seed": 3, "optimizer": optimizer, "parallel": parallel}
    whole = train(task, hook, **how)
    progress = Progress(Path(folder), "settings")
    steps = []

    def stop(step: int, _: float) -> None:
        steps.append(step)
        progress.deadline = 0.0 if step in (1, 4, 5) and step not in steps[:-1] else math.inf

    for _ in range(3):
        with pytest.raises(Stopped):
            train(task, hook, on_step=stop, progress=progress, **how)
    again = train(task, hook, on_step=stop, progress=progress, **how)
    assert steps == list(range(1, 9))
    timed = {"seconds": [], "ms_per_step": 0.0}
    assert dataclasses.replace(again, **timed) == dataclasses.replace(whole, **timed)


@pytest.mark.parametrize(
    ("task", "hook", "parallel", "optimizer"),
    [
        ("convex", "torch:fp32", "ddp", "AdamW"),
        ("convex", "rht:bits=2+momentum=0.8", "ddp", "AdamW"),
        ("convex", "sign1+momentum=0.9+warmup_steps=2", "ddp", "OneBitAdam"),
        ("tiny_text", "q4", "fsdp", "AdamW"),
    ],
)
def test_a_training_that_is_interrupted_ends_as_one_that_is_not(
    worlds: Callable[[int], World], tmp_path: Path, task: str, hook: str, parallel: str, optimizer
):
    where = {"task": task, "hook": hook, "parallel": parallel, "optimizer": optimizer}
    worlds(4).run(case_interrupted, folder=str(tmp_path), **where)


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


def test_the_gap_of_the_convex_task_is_the_loss_above_the_lowest():
    problem = make_problem()

    def mean_loss(batch, weights: torch.Tensor) -> float:
        inputs, targets = (part.double() for part in batch)
        return squared_error(inputs @ weights, targets).item() / len(inputs)

    # In fp64, from batches rounded to fp32 (2^-24 relative per element).
    generator = torch.Generator().manual_seed(1)
    for size in (1.0, 1e-2, 1e-4):
        direction = torch.randn(64, 256, generator=generator, dtype=torch.float64)
        weights = optimum(problem) + size / 128 * direction
        gap = mean_loss(problem, weights) - lowest_loss(problem)
        assert mean_loss(gap_batch(problem), weights) == pytest.approx(gap, rel=1e-3)
