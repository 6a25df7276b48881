"""Mixed precision with a GradScaler, and a checkpoint that survives kill -9 at any moment.

torchrun --nproc-per-node 2 examples/ddp_amp_resume.py --checkpoint /tmp/checkpoint

Stop it however you like and start it again: it goes on from the last epoch, to the same bits as if
it had not been stopped. With another number of ranks it goes on as well: the residuals of the old
ranks are shared out among the new ones.
"""

import argparse

import gradferry
import torch
import torch.distributed as dist
from gradferry import checkpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load(folder: str, parts: dict, state: gradferry.HookState) -> int:
    """Restores everything; returns the epoch to go on with."""
    contents = checkpoint.load_all(folder)
    for name, part in parts.items():
        part.load_state_dict(contents[0][name])  # equal on all ranks
    saved = checkpoint.merge(content["hook"] for content in contents)
    state.load_state_dict(saved, on_resize="mean")
    return contents[0]["epoch"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", required=True, help="a folder that all ranks see")
    parser.add_argument("--epochs", type=int, default=5)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    scaler = torch.amp.GradScaler("cpu", growth_interval=100)
    ddp = DistributedDataParallel(model)
    # The residuals follow the scale.
    state = gradferry.attach(ddp, "q4", grad_scaler=scaler)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    parts = {"model": model, "optimizer": optimizer, "scaler": scaler}
    first = (
        load(arguments.checkpoint, parts, state) if checkpoint.exists(arguments.checkpoint) else 0
    )
    if first >= arguments.epochs and dist.get_rank() == 0:
        print(f"finished: {first} epochs are done in {arguments.checkpoint}; more with --epochs")
    for epoch in range(first, arguments.epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = cross_entropy(ddp(batch), targets)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(
                ddp.parameters(), 1.0
            )  # of the averaged gradient: on all alike
            scaler.step(optimizer)
            scaler.update()
        content = {name: part.state_dict() for name, part in parts.items()}
        content |= {"hook": state.state_dict(), "epoch": epoch + 1}
        checkpoint.save(arguments.checkpoint, content)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.6f}, scale {scaler.get_scale():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
