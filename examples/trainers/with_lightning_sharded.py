"""Lightning's Trainer with hybrid sharding, compressed: two replicas of two shards.

python examples/trainers/with_lightning_sharded.py
"""

import gradferry
import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def configure_model(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
        fully_shard(self.net, mesh=mesh)

    def on_fit_start(self) -> None:
        self.state = gradferry.fsdp.attach(self.net, "q4")

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = DataLoader(data, batch_size=64, shuffle=True)

    trainer = Trainer(
        accelerator="cpu",
        devices=4,
        strategy=ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1),
        max_epochs=5,
    )
    model = Classifier()
    trainer.fit(model, loader)

    if trainer.is_global_zero:
        loss, ratio = trainer.callback_metrics["loss"], model.state.stats()["ratio"]
        print(f"loss {loss:.3f}, ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
