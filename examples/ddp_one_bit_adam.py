"""One bit per element: sign1 with 1-bit Adam, which exchanges the momentum.

torchrun --nproc-per-node 2 examples/ddp_one_bit_adam.py

The first FREEZE steps are dense AdamW, which lets the variance settle; then it stands still, and
a thirtieth of the bytes travels. Use it where the network is slow and the training long.
"""

import gradferry
import torch
import torch.distributed as dist
from gradferry.optim import OneBitAdam
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BETAS = (0.9, 0.999)
FREEZE = 40  # of 160 steps


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    labels = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    data = TensorDataset(inputs, labels)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "sign1", momentum=BETAS[0], warmup_steps=FREEZE)
    optimizer = OneBitAdam(ddp.parameters(), lr=1e-3, betas=BETAS, freeze_step=FREEZE, state=state)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        sent = state.stats()["wire_bytes"]
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(batch), targets)
            loss.backward()  # .grad holds the momentum once the variance is frozen
            optimizer.step()
        if dist.get_rank() == 0:
            sent = (state.stats()["wire_bytes"] - sent) / len(loader)
            print(f"epoch {epoch}: loss {loss.item():.3f}, {sent:.0f} bytes sent per step")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
