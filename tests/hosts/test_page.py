"""docs/guide/trainers.md: its snippets train."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from documented import blocks
from trainings import Job, make_model
from world import World

PAGE = "docs/guide/trainers.md"
HOSTS = ("accelerate", "transformers", "lightning")


def names_of_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    model = make_model()
    return {
        "Accelerator": functools.partial(Accelerator, cpu=True),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "loader": torch.utils.data.DataLoader(torch.ones(16, 64), batch_size=2),
        "LinearLR": torch.optim.lr_scheduler.LinearLR,
    }


def end_of_accelerate(names: dict[str, Any]) -> Any:
    for inputs in names["loader"]:
        names["accelerator"].backward(names["model"](inputs).square().mean())
        names["optimizer"].step()
        names["schedule"].step()
    return names["state"]


def names_of_transformers() -> dict[str, Any]:
    from test_transformers import make_trainer
    from transformers import Trainer, TrainingArguments

    ready = make_trainer(Job("unused", "q4", {}))
    return {
        "TrainingArguments": functools.partial(TrainingArguments, use_cpu=True, max_steps=4),
        "Trainer": Trainer,
        "model": ready.model,
        "data": ready.train_dataset,
    }


def end_of_transformers(names: dict[str, Any]) -> Any:
    (callback,) = (
        each
        for each in names["trainer"].callback_handler.callbacks
        if type(each).__module__.startswith("gradferry")
    )
    return callback.state


def names_of_lightning() -> dict[str, Any]:
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment
    from test_lightning import make_module

    settings = {"accelerator": "cpu", "max_steps": 4, "use_distributed_sampler": False}
    plugins = [TorchElasticEnvironment()]
    return {
        "Trainer": functools.partial(Trainer, plugins=plugins, **settings),
        "ModelCheckpoint": ModelCheckpoint,
        "module": make_module(),
    }


def end_of_lightning(names: dict[str, Any]) -> Any:
    return names["callback"].state


def case_snippet(host: str, folder: str) -> tuple[int, float]:
    """Runs the snippet of a trainer. Returns how many steps gradferry saw, and its ratio."""
    import gradferry

    (snippet,) = (each for each in blocks(PAGE, "python") if f"integrations.{host} " in each)
    os.chdir(folder)
    with trainings.launched():
        names = {"gradferry": gradferry, **globals()[f"names_of_{host}"]()}
        exec(compile(snippet, PAGE, "exec"), names)
        stats = globals()[f"end_of_{host}"](names).stats()
    return stats["steps"], stats["ratio"]


@pytest.mark.parametrize("host", HOSTS)
def test_snippet_trains(world_of_2: World, tmp_path: Path, host: str) -> None:
    for steps, ratio in world_of_2.run(
        case_snippet, seconds=trainings.SECONDS, host=host, folder=str(tmp_path)
    ):
        assert steps == 4
        assert ratio > 1
