"""gradferry in accelerate."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from trainings import Job, batch, make_model
from world import World


def prepared() -> tuple[Any, Any, Any]:
    """Accelerator, model and optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(job: Job) -> dict[str, Any]:
    import gradferry
    from gradferry.integrations.accelerate import attach

    with trainings.launched():
        accelerator, model, optimizer = prepared()
        state = attach(accelerator, model, job.codec, **job.options)
        if "momentum" in job.options:
            gradferry.optim.momentum_mode(optimizer.optimizer, state)
        folder, losses = f"{job.folder}/checkpoint", {}
        if job.resume:
            accelerator.load_state(folder)
        for step in range(trainings.SAVE_AT if job.resume else 0, trainings.STEPS):
            job.expect_alive(step)
            inputs, targets = batch(step)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses[step] = loss.item()
            if step + 1 == trainings.SAVE_AT:
                accelerator.save_state(folder)
        return trainings.end(model, optimizer, state, losses)


@pytest.mark.parametrize("codec", trainings.CODECS)
def test_killed_training_resumes_to_the_same_bits(
    world_of_2: World, tmp_path: Path, codec: str
) -> None:
    trainings.expect_same_end(world_of_2, train, tmp_path, codec)


def use_two(accelerator: Any, folder: str) -> dict[str, Any]:
    """Attaches to two models, of which one is compiled, trains one, and saves both."""
    from gradferry.integrations.accelerate import attach
    from outcomes import attempt

    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = attach(accelerator, torch.compile(model, backend="eager"), log_every=2)
    accelerator.scaler = None
    second = accelerator.prepare(make_model())
    refused = [
        attempt(lambda: attach(accelerator, second)),
        attempt(lambda: attach(model, accelerator)),
        attempt(lambda: attach(accelerator, second, on_resize="men")),
    ]
    other = attach(accelerator, second, "q8", folder="second")
    for number in range(4):
        inputs, targets = batch(number)
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{folder}/both")
    return {
        "scaled": isinstance(state.config.grad_scaler, torch.amp.GradScaler),
        "codecs": [str(each.parameters[0].codec) for each in (state, other)],
        "refused": [outcome.text for outcome in refused],
    }


def case_attaching(folder: str) -> dict[str, Any]:
    from accelerate import Accelerator
    from gradferry.integrations.accelerate import attach

    with trainings.launched():
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=folder)
        accelerator.init_trackers("logs")
        answer = use_two(accelerator, folder)
        for tracker in accelerator.trackers:
            tracker.finish()
        accelerator.free_memory()
        third = accelerator.prepare(make_model())
        attach(accelerator, third)  # takes the place of what is gone
        accelerator.save_state(f"{folder}/third")
        return answer


def test_attaching_finds_the_model_the_scaler_and_the_log(
    world_of_2: World, tmp_path: Path
) -> None:
    for answer in world_of_2.run(case_attaching, seconds=trainings.SECONDS, folder=str(tmp_path)):
        assert answer["scaled"]
        assert answer["codecs"] == ["q4", "q8"]
        same_folder, no_accelerator, no_way = answer["refused"]
        assert "give this model another folder than 'gradferry'" in same_folder
        assert "must be an accelerate.Accelerator, not DistributedDataParallel" in no_accelerator
        assert "on_resize='men'" in no_way
    assert (tmp_path / "both" / "gradferry" / "latest.json").exists()
    assert (tmp_path / "both" / "second" / "latest.json").exists()
    assert (tmp_path / "third" / "gradferry" / "latest.json").exists()
    assert not (tmp_path / "third" / "second").exists()
    ratios = trainings.logged(tmp_path / "logs", "gradferry/ratio")
    assert list(ratios) == [2, 4]
    assert min(ratios.values()) > 2


def case_warned_under_a_schedule() -> list[str]:
    from gradferry.integrations.accelerate import attach

    with trainings.launched():
        accelerator, model, optimizer = prepared()
        attach(accelerator, model, "sign1", momentum=0.8)
        accelerator.prepare(torch.optim.lr_scheduler.LinearLR(optimizer.optimizer))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", append=True)  # behind the filters that accelerate sets
            inputs, targets = batch(0)
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
        return [str(w.message) for w in caught]


def test_a_schedule_swallows_no_warning(world_of_2: World) -> None:
    for texts in world_of_2.run(case_warned_under_a_schedule, seconds=trainings.SECONDS):
        assert any("take part in it twice" in text for text in texts), texts
