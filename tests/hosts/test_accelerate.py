"""gradferry in accelerate."""

from __future__ import annotations

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
