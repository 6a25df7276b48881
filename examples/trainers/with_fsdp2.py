"""A loop of one's own with hybrid sharding, two replicas of two shards, in torchtitan's order.

torchrun --nproc-per-node 4 examples/trainers/with_fsdp2.py FOLDER
"""

import sys
from pathlib import Path

import gradferry
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = DataLoader(data, batch_size=64, sampler=DistributedSampler(data))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    with torch.device("meta"):
        blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in "ab"]
        blocks = [torch.compile(checkpoint_wrapper(block)) for block in blocks]
        model = nn.Sequential(*blocks, nn.Linear(64, 10))
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    state = gradferry.fsdp.attach(model, "q4")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def content() -> dict[str, object]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "hook": state}

    done = 0
    if folder.exists():
        saved = {**content(), "done": 0}
        dcp.load(saved, checkpoint_id=folder)
        set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
        )
        done = saved["done"]

    for epoch in range(done, 5):
        loader.sampler.set_epoch(epoch)
        for number, (batch, labels) in enumerate(loader):
            is_last = number % 2 == 1
            model.set_requires_all_reduce(is_last)
            loss = cross_entropy(model(batch), labels)
            (loss / 2).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
        if epoch == 2:
            dcp.save({**content(), "done": epoch + 1}, checkpoint_id=folder)
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.3f}, ratio {state.stats()['ratio']:.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
