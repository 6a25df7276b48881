"""DiLoCo: ranks train alone for many steps, then average how far they have come (arXiv 2311.08105).

torchrun --standalone --nproc-per-node 3 examples/diloco.py

The outer step is the only communication: the change of all parameters, averaged with four bits per
element and error feedback. `--codec off` averages the change in fp32.
"""

import argparse

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


def build_model(seed: int) -> nn.Sequential:
    """Scores for the next byte, equal on all ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(256, 64),
        nn.Flatten(),
        nn.Linear(64 * CONTEXT, 512),
        nn.GELU(),
        nn.Linear(512, 256),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--codec", default="q4", help="of the outer step (default: q4)")
    parser.add_argument("--outer-steps", type=count, default=12, metavar="N")
    parser.add_argument("--inner-steps", type=count, default=50, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = build_model(arguments.seed)
    text = source_code()
    held_out = len(text) - VALIDATION - CONTEXT
    validation = examples(text, torch.arange(held_out, held_out + VALIDATION))
    generator = torch.Generator().manual_seed(1000 * arguments.seed + rank)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    diloco = gradferry.DiLoCo(model, optimizer, arguments.inner_steps, arguments.codec)
    for step in range(1, arguments.outer_steps * arguments.inner_steps + 1):
        begins = torch.randint(held_out - CONTEXT, (64,), generator=generator)
        context, following = examples(text, begins)
        optimizer.zero_grad()
        cross_entropy(model(context), following).backward()
        is_last = step % arguments.inner_steps == 0
        if is_last:
            dist.barrier()  # only so that outer_ms has no time that slower ranks train
        optimizer.step()
        if is_last and rank == 0:
            with diloco.global_parameters(), torch.no_grad():
                loss = cross_entropy(model(validation[0]), validation[1]).item()
            stats = diloco.stats()
            took = f"took {stats['outer_ms']:.0f} ms"
            print(f"outer step {stats['outer_steps'] - 1}: loss {loss:.4f}, {took}")
    diloco.finish()

    sent = diloco.stats()["reducer"]
    if rank == 0 and sent["wire_bytes"]:
        print(f"{sent['wire_bytes']} bytes sent, {sent['ratio']:.1f} times fewer than fp32")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
