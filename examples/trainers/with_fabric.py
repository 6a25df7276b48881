"""A loop of one's own under Lightning Fabric, compressed.

python examples/trainers/with_fabric.py
"""

import gradferry
import torch
from lightning_fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=64, shuffle=True))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = fabric.setup(model, optimizer)
    state = gradferry.attach(model, "q4")

    for _ in range(5):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), labels)
            fabric.backward(loss)
            optimizer.step()
    fabric.print(f"loss {loss.item():.3f}, ratio {state.stats()['ratio']:.1f}")


if __name__ == "__main__":
    main()
