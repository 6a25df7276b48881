"""Ray Train, compressed, with checkpoints that hold the residuals of every worker.

python examples/trainers/with_ray.py FOLDER
"""

import sys
import tempfile
from pathlib import Path

import gradferry
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 5


def train() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = prepare_data_loader(DataLoader(data, batch_size=64, shuffle=True))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    ddp = prepare_model(model)
    state = gradferry.attach(ddp, "q4")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    done, mine = 0, f"rank{ray.train.get_context().get_world_rank()}.pt"
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, mine))
        done = saved["done"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state.load_state_dict(saved["hook"])

    for epoch in range(done, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(batch), labels)
            loss.backward()
            optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            content = {
                "done": epoch + 1,
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "hook": state.state_dict(),
            }
            torch.save(content, Path(folder, mine))
            metrics = {"loss": loss.item(), "ratio": state.stats()["ratio"]}
            ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder))


def main(folder: str) -> None:
    trainer = TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="gradferry", storage_path=folder, failure_config=FailureConfig(max_failures=1)
        ),
    )
    metrics = trainer.fit().metrics
    print(f"loss {metrics['loss']:.3f}, ratio {metrics['ratio']:.1f}")


if __name__ == "__main__":
    main(str(Path(sys.argv[1]).resolve()))
