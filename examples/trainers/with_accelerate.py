"""accelerate's own training loop, compressed.

On one machine, also without a GPU (without --multi_gpu accelerate starts one process on a CPU):

accelerate launch --multi_gpu --num_processes 2 examples/trainers/with_accelerate.py

On two machines (machine 2 takes accelerate_machine2.yaml):

accelerate launch --config_file examples/trainers/accelerate_machine1.yaml \\
    examples/trainers/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from gradferry.integrations.accelerate import attach
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = attach(accelerator, model, "q4")

    for _ in range(5):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            optimizer.step()
    # With a single process there is no state.
    ratio = "" if state is None else f", ratio {state.stats()['ratio']:.1f}"
    accelerator.print(f"loss {loss.item():.3f}{ratio}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
