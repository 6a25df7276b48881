"""Ranks that torch.multiprocessing.spawn starts, on one machine, without torchrun.

python examples/trainers/with_spawn.py
"""

import os

import gradferry
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2


def train(rank: int) -> None:
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "q4")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    for epoch in range(5):
        loader.sampler.set_epoch(epoch)
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(ddp(batch), labels)
            loss.backward()
            optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.3f}, ratio {state.stats()['ratio']:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29500")
    mp.spawn(train, nprocs=RANKS)
