"""Hosts that come and go: torchrun starts all ranks anew, and what was withheld is not lost.

On every host, with a folder that all of them see:

TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:3 --nproc-per-node 1 \
    --rdzv-backend c10d --rdzv-endpoint HOST1:29400 --max-restarts 9 \
    examples/elastic.py --checkpoint FOLDER

When a host joins, torchrun stops all ranks and starts them again, one more. When one is lost, the
others end with an error that names its rank, and start again without it. Each time the training
goes on from its last checkpoint, whose residuals are shared out among the ranks there are now; a
rank that is left alone adds them to its first gradient.
Without that variable torch 2.15 keeps a host that joins later waiting for the address of rank 0.
"""

import argparse
import json
from datetime import timedelta

import gradferry
import torch
import torch.distributed as dist
from gradferry import checkpoint
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

BATCH = 48  # examples per step of all ranks together; 2, 3 and 4 divide it


def withheld(saved: dict) -> float:
    """The sum of what averages still miss: the mean of nodes' worker residuals, plus the owners'.

    `saved`: of all ranks, by checkpoint.merge(). Ranks of a node share its worker residual.
    """
    slots = [part for name, part in saved.items() if name.startswith("slot_")]
    nodes = len(json.loads(saved["nodes"]))
    workers = sum(slot["worker"].double().sum().item() for slot in slots)
    return workers / nodes + sum(slot["owner"].double().sum().item() for slot in slots)


def withheld_now(state: gradferry.HookState) -> float:
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, state.state_dict())
    return withheld(checkpoint.merge(states))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoint", required=True, help="a folder that all hosts see")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--timeout", type=float, default=30, metavar="S", help="until a silent host is given up"
    )
    arguments = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=arguments.timeout))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else lambda *_, **__: None
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    classes = (inputs @ torch.randn(64, 10)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    ddp = DistributedDataParallel(model)
    state = gradferry.attach(ddp, "q4", error_feedback="both")
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)

    first = 0
    if checkpoint.exists(arguments.checkpoint):
        contents = checkpoint.load_all(arguments.checkpoint)
        model.load_state_dict(contents[0]["model"])
        optimizer.load_state_dict(contents[0]["optimizer"])
        first = contents[0]["step"]
        saved = checkpoint.merge(content["hook"] for content in contents)
        state.load_state_dict(saved, on_resize="mean")
        before, now = withheld(saved), withheld_now(state)
        say(f"from {len(contents)} ranks to {world_size}: withheld {before:.9f}, then {now:.9f}")

    for step in range(first, arguments.steps):
        # The same examples whatever the number of ranks.
        generator = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(inputs), (BATCH,), generator=generator)[rank::world_size]
        optimizer.zero_grad()
        loss = cross_entropy(ddp(inputs[chosen]), classes[chosen])
        loss.backward()
        optimizer.step()
        if (step + 1) % arguments.save_every == 0 or step + 1 == arguments.steps:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            content |= {"hook": state.state_dict(), "step": step + 1}
            checkpoint.save(arguments.checkpoint, content)
            say(f"step {step + 1}, {world_size} ranks: loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
