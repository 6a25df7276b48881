"""accelerate's hybrid sharding, compressed: two replicas of two shards, on four GPUs.

accelerate launch --multi_gpu --num_processes 4 examples/trainers/with_accelerate_sharded.py
"""

import gradferry
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=ParallelismConfig(dp_replicate_size=2, dp_shard_size=2),
    )
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = TensorDataset(inputs, (inputs @ torch.randn(64, 10)).argmax(dim=1))
    loader = DataLoader(data, batch_size=64, shuffle=True)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    state = gradferry.fsdp.attach(model, "q4")

    for _ in range(3):
        for batch, labels in loader:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), labels)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    accelerator.print(f"loss {loss.item():.3f}, ratio {state.stats()['ratio']:.1f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
