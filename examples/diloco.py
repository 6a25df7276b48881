"""DiLoCo: ranks train alone for many steps, then average how far they have come (arXiv 2311.08105).

torchrun --standalone --nproc-per-node 3 examples/diloco.py

The outer step is the only communication: the change of all parameters, averaged by a Reducer with
four bits per element and error feedback. `--codec off` averages the change in fp32.
"""

import argparse
import time

import gradferry
import torch
import torch.distributed as dist
from gradferry_lab.workloads.corpus import source_files
from torch import nn
from torch.nn.functional import cross_entropy

CONTEXT = 32  # bytes that predict the next one
VALIDATION = 4096  # predictions, of the end of the text


def count(text: str) -> int:
    """A command-line argument that is 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} must be at least 1")
    return number


def source_code() -> torch.Tensor:
    """The source of sympy, as bytes."""
    return torch.frombuffer(bytearray(b"".join(source_files())), dtype=torch.uint8)


def examples(text: torch.Tensor, begins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    windows = text[begins[:, None] + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codec", default="q4", help="of the outer step (default: q4)")
    parser.add_argument("--outer-steps", type=count, default=12, metavar="N")
    parser.add_argument("--inner-steps", type=count, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(arguments.seed)
    model = nn.Sequential(
        nn.Embedding(256, 64),
        nn.Flatten(),
        nn.Linear(64 * CONTEXT, 512),
        nn.GELU(),
        nn.Linear(512, 256),
    )
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # Where all ranks were after the last outer step, equal on all of them.
    common = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    outer = torch.optim.SGD(common, lr=0.7, momentum=0.9, nesterov=True)
    names = [name for name, _ in model.named_parameters()]
    reducer = gradferry.Reducer(zip(names, common, strict=True), arguments.codec)

    text = source_code()
    held_out = len(text) - VALIDATION - CONTEXT
    validation = examples(text, torch.arange(held_out, held_out + VALIDATION))
    generator = torch.Generator().manual_seed(1000 * arguments.seed + rank)
    for step in range(arguments.outer_steps):
        for _ in range(arguments.inner_steps):
            begins = torch.randint(held_out - CONTEXT, (64,), generator=generator)
            context, following = examples(text, begins)
            inner.zero_grad()
            cross_entropy(model(context), following).backward()
            inner.step()
        with torch.no_grad():
            pairs = list(zip(common, model.parameters(), strict=True))
            changes = [start - now for start, now in pairs]
            dist.barrier()  # only so that the time below is that of the average alone
            begin = time.perf_counter()
            reducer.all_reduce(changes)
            seconds = time.perf_counter() - begin
            for start, change in zip(common, changes, strict=True):
                start.grad = change
            outer.step()
            for start, now in pairs:
                now.copy_(start)
            loss = cross_entropy(model(validation[0]), validation[1]).item()
        if rank == 0:
            print(f"outer step {step}: loss {loss:.4f}, averaged in {1e3 * seconds:.0f} ms")
    if rank == 0 and not reducer.passes_through:
        stats = reducer.stats()
        print(f"{stats['wire_bytes']} bytes sent, {stats['ratio']:.1f} times fewer than fp32")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
