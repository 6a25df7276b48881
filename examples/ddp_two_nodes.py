"""Training on two machines, with the bytes that each of them sent.

On both machines, NAME being the first one's name or address:

torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint NAME:29400 \\
    examples/ddp_two_nodes.py

gloo takes the network interface that the machine's own name leads to; if that is the wrong one, say
which: GLOO_SOCKET_IFNAME=eth0. gradferry's own connections use the same. With several ranks on a
machine (--nproc-per-node), they first add up their gradients, and only the sums cross the network.
"""

import gradferry
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    truth = torch.randn(64, 10)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    # The last bucket of a backward pass has nothing to hide behind: smaller ones leave less of it.
    ddp = DistributedDataParallel(model, bucket_cap_mb=4)
    state = gradferry.attach(ddp, "q4", check_every=50)
    if dist.get_rank() == 0:
        print(state)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(200):
        batch = torch.randn(64, 64, generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(ddp(batch), (batch @ truth).argmax(dim=1))
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 50 == 49:
            stats = state.stats()
            print(
                f"step {step}: loss {loss.item():.3f}, {stats['wire_bytes']} bytes sent, "
                f"{stats['ratio']:.1f} times fewer than fp32"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
