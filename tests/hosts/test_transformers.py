"""gradferry in the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from trainings import Job
from world import World


def make_trainer(job: Job, *callbacks: Any, **arguments: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    torch.manual_seed(0)
    tokens = torch.randint(64, (4 * trainings.STEPS, 8))
    config = GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=1, n_head=2)
    settings = {
        "output_dir": job.folder,
        "use_cpu": True,
        "max_steps": trainings.STEPS,
        "save_steps": trainings.SAVE_AT,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "ddp_find_unused_parameters": False,
        **arguments,
    }
    return Trainer(
        GPT2LMHeadModel(config),
        TrainingArguments(**settings),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=list(callbacks),
    )


def train(job: Job) -> dict[str, Any]:
    from gradferry.integrations.transformers import attach
    from transformers import TrainerCallback

    class Mortal(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            job.expect_alive(state.global_step)

    with trainings.launched():
        trainer = make_trainer(job, Mortal())
        callback = attach(trainer, job.codec, **job.options)
        trainer.train(resume_from_checkpoint=job.resume)
        rows = [row for row in trainer.state.log_history if "loss" in row]
        losses = {row["step"] - 1: row["loss"] for row in rows}
        if job.resume:  # the Trainer also restores the rows of the steps before
            losses = {step: losses[step] for step in losses if step >= trainings.SAVE_AT}
        return trainings.end(trainer.model, trainer.optimizer, callback.state, losses)


@pytest.mark.parametrize("codec", trainings.CODECS)
def test_killed_training_resumes_to_the_same_bits(
    world_of_2: World, tmp_path: Path, codec: str
) -> None:
    trainings.expect_same_end(world_of_2, train, tmp_path, codec)
