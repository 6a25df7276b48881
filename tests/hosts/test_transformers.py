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


def case_trainings(folder: str) -> dict[str, Any]:
    """Two trainings of one Trainer, the rates and rows of a third, and errors."""
    from gradferry.integrations.transformers import attach
    from outcomes import attempt
    from transformers import TrainerCallback

    stepped = []

    class Look(TrainerCallback):
        """At the rates with which the optimizer steps."""

        def on_train_begin(self, *_: Any, optimizer: Any, **kwargs: Any) -> None:
            def look(_: Any, arguments: tuple[Any, ...], __: Any) -> None:
                stepped.append(arguments[0].param_groups[0]["lr"])

            getattr(optimizer, "optimizer", optimizer).register_step_pre_hook(look)

    def trained(name: str, *, momentum: float | None = None, **arguments: Any) -> Any:
        job = Job(f"{folder}/{name}", "q4", {})
        trainer = make_trainer(job, *([Look()] if momentum else []), max_steps=4, **arguments)
        callback = attach(trainer, "q4", momentum=momentum)
        trainer.train()
        return trainer, callback

    with trainings.launched():
        trainer, callback = trained("plain", report_to="tensorboard")
        first = callback.state
        again = attempt(lambda: attach(trainer))
        trainer.train()
        finished = first.state_dict()["steps"]
        averaging, _ = trained("momentum", momentum=0.8)
        stranger = make_trainer(Job(f"{folder}/stranger", "q4", {}), max_steps=2, save_steps=2)
        stranger.train()
        attach(stranger)
        asking = make_trainer(Job(f"{folder}/asking", "q4", {}), ddp_find_unused_parameters=None)
        attach(asking, momentum=0.8)
        rows = [row for row in trainer.state.log_history if "loss" in row]
        return {
            "kept": (callback.state is first, finished),
            "rates": [
                [row["learning_rate"] for row in each.state.log_history if "loss" in row]
                for each in (trainer, averaging)
            ],
            "stepped": stepped,
            "ratios": [row["gradferry/ratio"] for row in rows],
            "refused": [
                again.text,
                attempt(lambda: attach(trainer.model)).text,
                attempt(lambda: stranger.train(resume_from_checkpoint=True)).text,
                attempt(asking.train).text,
            ],
        }


def test_trainings_have_a_hook_numbers_and_rates_for_momentum(
    world_of_2: World, tmp_path: Path
) -> None:
    answers = world_of_2.run(case_trainings, seconds=trainings.SECONDS, folder=str(tmp_path))
    for answer in answers:
        assert answer["kept"] == (True, 8)
        plain, averaging = answer["rates"]
        assert averaging == plain  # those that the Trainer logs
        # Those of its steps: sqrt((1 - 0.8) / (1 + 0.8)), a third
        assert answer["stepped"] == pytest.approx([rate / 3 for rate in plain], rel=1e-14)
        assert min(answer["ratios"]) > 2
        again, model, stranger, asking = answer["refused"]
        assert "has gradferry already" in again
        assert "must be a transformers.Trainer, not GPT2LMHeadModel" in model
        assert "checkpoint-2/gradferry: the checkpoint holds nothing of gradferry" in stranger
        assert "TrainingArguments(ddp_find_unused_parameters=False)" in asking
    assert list(trainings.logged(tmp_path, "train/gradferry/ratio")) == [1, 2, 3, 4]


def case_batch_size(folder: str) -> dict[str, Any]:
    """A first batch size that runs out of memory in the second step."""
    from gradferry.integrations.transformers import attach
    from transformers import TrainerCallback

    states = []

    class Full(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if trainer.accelerator is not None and callback.state not in states:
                states.append(callback.state)
            if len(states) == 1 and state.global_step == 1:
                raise RuntimeError("CUDA out of memory.")

    with trainings.launched():
        job = Job(folder, "q4", {})
        trainer = make_trainer(job, Full(), max_steps=3, auto_find_batch_size=True)
        callback = attach(trainer)
        trainer.train()
        return {"steps": [state.stats()["buckets"] > 0 for state in states]}


def test_every_batch_size_that_is_tried_has_a_hook(world_of_2: World, tmp_path: Path) -> None:
    for answer in world_of_2.run(case_batch_size, seconds=trainings.SECONDS, folder=str(tmp_path)):
        assert answer["steps"] == [True, True]
