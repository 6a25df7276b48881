"""Lightning's Trainer, compressed.

python examples/trainers/with_lightning.py
"""

import torch
from gradferry.integrations.lightning import GradferryCallback
from pytorch_lightning import LightningModule, Trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        inputs, labels = batch
        loss = cross_entropy(self.net(inputs), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = DataLoader(data, batch_size=64, shuffle=True)

    callback = GradferryCallback("q4")
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=5,
        callbacks=[callback],
    )
    trainer.fit(Classifier(), loader)

    if trainer.is_global_zero:
        loss, ratio = trainer.callback_metrics["loss"], callback.state.stats()["ratio"]
        print(f"loss {loss:.3f}, ratio {ratio:.1f}")


if __name__ == "__main__":
    main()
