"""gradferry in Lightning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import trainings
from torch.nn.functional import mse_loss
from trainings import Job, batch, make_model
from world import World


def make_module(**arguments: Any) -> Any:
    """arguments: of the optimizer."""
    from pytorch_lightning import LightningModule

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_model()
            self.losses: dict[int, float] = {}

        def training_step(self, _: Any) -> torch.Tensor:
            step = self.trainer.global_step  # Lightning begins an epoch's data anew when it resumes
            inputs, targets = batch(step)
            loss = mse_loss(self.net(inputs), targets)
            self.losses[step] = loss.item()
            return loss

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(trainings.STEPS), batch_size=None)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, **arguments)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=trainings.STEPS)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def make_trainer(job: Job, *callbacks: Any, **arguments: Any) -> Any:
    from pytorch_lightning import Trainer
    from pytorch_lightning.callbacks import ModelCheckpoint
    from pytorch_lightning.plugins.environments import TorchElasticEnvironment

    saving = ModelCheckpoint(job.folder, filename="{step}", every_n_train_steps=trainings.SAVE_AT)
    settings = {
        "default_root_dir": job.folder,
        "accelerator": "cpu",
        "devices": 2,
        "strategy": "ddp",
        "plugins": [TorchElasticEnvironment()],
        "max_steps": trainings.STEPS,
        "log_every_n_steps": 2,
        "logger": False,
        "use_distributed_sampler": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        **arguments,
    }
    return Trainer(callbacks=[saving, *callbacks], **settings)


def train(job: Job) -> dict[str, Any]:
    from gradferry.integrations.lightning import GradferryCallback
    from pytorch_lightning import Callback

    class Mortal(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            job.expect_alive(trainer.global_step)

    with trainings.launched():
        callback, module = GradferryCallback(job.codec, **job.options), make_module()
        trainer = make_trainer(job, Mortal(), callback)
        saved = f"{job.folder}/step={trainings.SAVE_AT}.ckpt"
        trainer.fit(module, ckpt_path=saved if job.resume else None)
        return trainings.end(module, trainer.optimizers[0], callback.state, module.losses)


@pytest.mark.parametrize("codec", trainings.CODECS)
def test_killed_training_resumes_to_the_same_bits(
    world_of_2: World, tmp_path: Path, codec: str
) -> None:
    trainings.expect_same_end(world_of_2, train, tmp_path, codec)


def case_trainings(folder: str) -> dict[str, Any]:
    """Two trainings with one callback, numbers in a log, and errors."""
    import gradferry
    from gradferry.integrations.lightning import GradferryCallback
    from outcomes import attempt
    from pytorch_lightning.loggers import TensorBoardLogger
    from pytorch_lightning.strategies import DDPStrategy

    job = Job(folder, "q4", {})

    def with_state() -> DDPStrategy:
        return DDPStrategy(ddp_comm_state=gradferry.HookState("q4"), ddp_comm_hook=gradferry.hook)

    with trainings.launched():
        callback, module = GradferryCallback(), make_module()
        trainer = make_trainer(job, callback, logger=TensorBoardLogger(folder, "logs"))
        trainer.fit(module)
        first = callback.state
        after = f"{folder}/after.ckpt"
        trainer.save_checkpoint(after)
        again = make_trainer(job, callback)
        again.fit(make_module())
        with_momentum = make_trainer(job, GradferryCallback(momentum=0.8))
        with_momentum.fit(make_module())
        plain = make_trainer(job)
        plain.fit(make_module())
        without = f"{folder}/without.ckpt"
        plain.save_checkpoint(without)
        resumed = make_trainer(job, GradferryCallback(), max_steps=trainings.STEPS + 2)
        bound_to_nothing = make_trainer(job, callback, strategy=with_state())
        return {
            "saved": sorted(torch.load(after, weights_only=False)["gradferry"]),
            "new": callback.state is not first,
            "takes momentum": with_momentum.optimizers[0].takes_momentum,
            "refused": [
                attempt(lambda: resumed.fit(make_module(), ckpt_path=without)).text,
                attempt(lambda: bound_to_nothing.fit(make_module())).text,
            ],
        }


def test_trainings_have_a_hook_and_numbers(world_of_2: World, tmp_path: Path) -> None:
    answers = world_of_2.run(case_trainings, seconds=trainings.SECONDS, folder=str(tmp_path))
    for answer in answers:
        assert {"slot_0", "slot_1", "steps"} <= set(answer["saved"])
        assert answer["new"]
        assert answer["takes momentum"]
        without, unbound = answer["refused"]
        assert "resuming: the checkpoint holds nothing of gradferry" in without
        assert "give the GradferryCallback its arguments" in unbound
    ratios = trainings.logged(tmp_path / "logs", "gradferry/ratio")
    assert list(ratios) == [1, 3, 5, 7]  # Lightning counts from 0
    assert min(ratios.values()) > 2


def train_two(job: Job) -> tuple[list[list[float]], list[bool]]:
    """Rates of two optimizers of a module that steps them itself, each with its schedule, and
    whether they take momentum.
    """
    from gradferry.integrations.lightning import GradferryCallback

    class Module(type(make_module())):
        automatic_optimization = False

        def training_step(self, number: int) -> None:
            inputs, targets = batch(number)
            optimizers = self.optimizers()
            for optimizer in optimizers:
                optimizer.zero_grad()
            self.manual_backward(mse_loss(self.net(inputs), targets))
            for optimizer, schedule in zip(optimizers, self.lr_schedulers(), strict=True):
                optimizer.step()
                schedule.step()

        def configure_optimizers(self) -> Any:
            made = [torch.optim.AdamW(layer.parameters(), lr=1e-2) for layer in self.net[::2]]
            return made, [torch.optim.lr_scheduler.StepLR(one, 1000) for one in made]

    with trainings.launched():
        callback, module = GradferryCallback(job.codec, **job.options), Module()
        trainer = make_trainer(job, callback, log_every_n_steps=0)
        trainer.fit(module)
        rates = [[group["lr"] for group in each.param_groups] for each in trainer.optimizers]
        return rates, [each.takes_momentum for each in trainer.optimizers]


def test_each_optimizer_takes_momentum_once(world_of_2: World, tmp_path: Path) -> None:
    job = Job(str(tmp_path), "sign1", {"momentum": 0.8})
    for rates, take in world_of_2.run(train_two, seconds=trainings.SECONDS, job=job):
        assert rates == [[1e-2]] * 2  # as given
        assert take == [True, True]
