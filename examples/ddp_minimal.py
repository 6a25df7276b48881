"""A complete training with DistributedDataParallel, its gradients compressed by gradferry.

torchrun --nproc-per-node 2 examples/ddp_minimal.py
"""

import gradferry
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


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
    gradferry.attach(ddp, "q4")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(batch), targets)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
