"""Every step's numbers to TensorBoard. Run it on as many processes as you like:

torchrun --nproc-per-node 2 examples/tensorboard_numbers.py runs/
tensorboard --logdir runs/
"""

import sys

import gradferry
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.tensorboard import SummaryWriter


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "q4")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    writer = SummaryWriter(f"{folder}/rank{dist.get_rank()}")

    def write(row: dict) -> None:
        for key, value in row.items():
            if key != "step":
                writer.add_scalar(f"gradferry/{key}", value, row["step"])

    state.on_step(write)

    for _ in range(20):
        inputs = torch.randn(32, 256)
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(inputs), inputs[:, :10].argmax(1)).backward()
        optimizer.step()

    writer.close()
    if dist.get_rank() == 0:
        print(state.stats())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
